"""torchrun itself, bound to its referee's life: `python -m prism_fast.harness.torchrun ...`."""

import os
import resource

from prism_fast.harness.die_with_parent import die_with_parent


def limit_resources() -> None:
    """No file above the artifacts quota (the log of what the bundle prints included), no core dumps."""
    quota = int(os.environ["PRISM_ARTIFACTS_QUOTA_BYTES"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (quota + 1, quota + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    die_with_parent()
    limit_resources()
    from torch.distributed.run import main

    main()
