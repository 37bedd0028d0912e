"""torchrun itself, bound to its referee's life and to the run's limits: `python -m prism_fast.harness.torchrun ...`."""

import os

from prism_fast.harness.die_with_parent import die_with_parent
from prism_fast.harness.limits import limit_process

if __name__ == "__main__":
    die_with_parent()
    # No file above the artifacts quota, the log of what the bundle prints included.
    limit_process(int(os.environ["PRISM_ARTIFACTS_QUOTA_BYTES"]) + 1)
    from torch.distributed.run import main

    main()
