"""Process groups that outlive `destroy_process_group`, so that no rank hangs on its way out, and no state is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_kept: list[Any] = []


def keep_process_groups(before: Callable[[], None]) -> None:
    """Wraps `torch.distributed.destroy_process_group`; call before the bundle is imported.

    `before()` runs ahead of the end of all groups, on every rank: what is sharded over them can still be gathered.

    A gloo group's last reference often goes when train(ctx) returns and its DDP wrapper with it. The group's
    destructor then joins worker threads while this thread holds the GIL, and a worker that is just letting go of a
    Python tensor waits for the GIL: neither ends (torch 2.13, seen in one of three runs of four ranks on a busy
    machine). The process is about to exit in any case, so the group is kept.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    original = dist.destroy_process_group

    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        group = args[0] if args else kwargs.get("group")
        if group is None or group is dist.group.WORLD:
            before()
        _kept.extend(dist.distributed_c10d._world.pg_map)
        original(*args, **kwargs)

    destroy_process_group.__doc__ = original.__doc__
    dist.destroy_process_group = destroy_process_group
    dist.distributed_c10d.destroy_process_group = destroy_process_group
