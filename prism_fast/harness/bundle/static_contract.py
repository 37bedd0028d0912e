"""The static distributed contract of training.py, read before anything runs: what docs/cli.md calls `--policy`.

`train(ctx)` is followed as every rank of worlds of 2 and 8 (`script.Walk`). A requirement counts as met when every
one of those ranks may reach it; a write counts as guarded when only rank 0 may. So dead code, helpers nobody calls
and `if True or rank == 0` do not count, and a guard may take any form that the ranks really decide on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from prism_fast.harness.bundle.bundle import Bundle
from prism_fast.harness.bundle.script import Budget, Script, Site, TooLarge, Walk, on_a_fresh_stack
from prism_fast.harness.bundle.script.values import UNKNOWN, External, Known, Made, Value
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleRejected, UsageError

Policy = Literal["reject", "flag", "off"]
POLICIES: tuple[Policy, ...] = ("reject", "flag", "off")
WORLDS = (2, 8)

INIT, DEVICE, WRAP, SHARDING, DESTROY, GUARD, NODE = REQUIREMENTS = (
    "init_process_group",
    "device_binding",
    "ddp_or_fsdp",
    "data_sharding",
    "destroy_process_group",
    "rank0_guard",
    "single_node",
)
PRIMITIVES = (INIT, DEVICE, WRAP, SHARDING, DESTROY)
EXPECTED = {
    INIT: "a call of torch.distributed.init_process_group",
    DEVICE: "torch.cuda.set_device(ctx.local_rank), .cuda(...), a cuda device or torch.accelerator",
    WRAP: "DistributedDataParallel, FullyShardedDataParallel or fully_shard around the model",
    SHARDING: "a DistributedSampler or a stride by rank and world size",
    DESTROY: "a call of torch.distributed.destroy_process_group",
    GUARD: "writes that only rank 0 reaches",
    NODE: f"one node and at most {c.MAX_NPROC} processes",
}
RULES = {
    **dict.fromkeys(PRIMITIVES, c.RULE_DISTRIBUTED_CONTRACT),
    GUARD: c.RULE_RANK0_GUARD,
    NODE: c.RULE_SINGLE_NODE_BOUND,
}

WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "replicate"}
DEVICE_SETTERS = {
    "torch.cuda.set_device",
    "torch.cuda.device",
    "torch.accelerator.set_device_index",
    "torch.accelerator.set_device_idx",
    "torch.accelerator.device_index",
}
CUDA_DEVICE = re.compile(r"cuda(:(?P<index>\d+))?")
LOOPBACK = {"localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0", ""}

# What writes files, by what is called. Making a directory is not a write: every rank may do it, to the same effect.
WRITERS = {
    "torch": {"save"},
    "torch.jit": {"save"},
    "torch.export": {"save"},
    "torch.distributed.checkpoint": {"save", "async_save", "save_state_dict"},
    "torch.utils.tensorboard": {"SummaryWriter"},
    "torch.utils.tensorboard.writer": {"SummaryWriter"},
    "safetensors.torch": {"save_file", "save_model"},
    "safetensors.numpy": {"save_file"},
    "numpy": {"save", "savez", "savez_compressed", "savetxt"},
    "logging": {"FileHandler"},
    "os": {"rename", "replace", "renames", "remove", "unlink", "link", "symlink", "truncate", "mknod", "mkfifo"},
    "shutil": {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "rmtree", "make_archive"},
    "sqlite3": {"connect"},
}
SERIALISERS = {"pickle.dump": 1, "json.dump": 1, "marshal.dump": 1, "yaml.dump": 1, "torch.save": 1, "numpy.save": 0}
OPENERS = {"builtins.open", "io.open", "gzip.open", "bz2.open", "lzma.open", "codecs.open"}
PATH_WRITES = {"write_text", "write_bytes", "touch", "rename", "replace", "unlink", "symlink_to", "hardlink_to"}
METHOD_WRITES = {"write_text", "write_bytes", "tofile", "save_pretrained", "save", "to_csv", "to_parquet", "to_pickle"}
IN_MEMORY = {"io.BytesIO", "io.StringIO", "tempfile.SpooledTemporaryFile"}


@dataclass(frozen=True)
class Requirement:
    """One requirement, met or not. `where`: "training.py:12" lines that meet it, or, where they break it, that do."""

    name: str
    rule: str
    met: bool
    where: tuple[str, ...]
    detail: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rule": self.rule,
            "met": self.met,
            "where": list(self.where),
            "detail": self.detail,
        }


@dataclass(frozen=True)
class StaticReport:
    """Every requirement in order; none when the policy is "off"."""

    policy: Policy
    requirements: tuple[Requirement, ...]

    @property
    def ok(self) -> bool:
        return all(r.met for r in self.requirements)

    @property
    def unmet(self) -> tuple[Requirement, ...]:
        return tuple(r for r in self.requirements if not r.met)

    @property
    def flags(self) -> list[str]:
        """One "rule:requirement" for each requirement that is not met."""
        return [f"{r.rule}:{r.name}" for r in self.unmet]

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": c.STATIC_CONTRACT_SCHEMA,
            "policy": self.policy,
            "ok": self.ok,
            "worlds": list(WORLDS),
            "requirements": [r.as_dict() for r in self.requirements],
        }

    def enforce(self) -> None:
        """Raises BundleRejected, naming everything unmet, when the policy is "reject"; its rule is the first's."""
        if self.policy == "reject" and not self.ok:
            named = "; ".join(f"{r.name}: {r.detail}" for r in self.unmet)
            raise BundleRejected(f"training.py breaks the distributed contract: {named}", rule=self.unmet[0].rule)


def check_static_contract(bundle: Bundle, policy: Policy = "reject") -> StaticReport:
    """Looks at a bundle's scripts. Never raises for what they do: see `StaticReport.enforce`.

    The ranks are followed on one budget of steps; a script that takes more meets no requirement.
    """
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}; expected {', '.join(POLICIES[:-1])} or {POLICIES[-1]}")
    if policy == "off":
        return StaticReport(policy, ())
    try:
        seen = on_a_fresh_stack(lambda: _follow(bundle, Budget()))
    except (TooLarge, RecursionError, SyntaxError):
        detail = "training.py is too large or too deeply nested to follow, so nothing can be said for it"
        return StaticReport(policy, tuple(Requirement(n, RULES[n], False, (), detail) for n in REQUIREMENTS))
    return StaticReport(policy, tuple(_judge(name, seen) for name in REQUIREMENTS))


def _follow(bundle: Bundle, budget: Budget) -> dict[tuple[int, int], _Evidence]:
    """What every rank of every world reaches. Raises TooLarge, RecursionError and SyntaxError."""
    scripts = {name.removesuffix(".py"): Script(source) for name, source in bundle.scripts.items()}
    seen = {(world, rank): _Evidence(rank, world) for world in WORLDS for rank in range(world)}
    for (world, rank), evidence in seen.items():
        Walk(scripts, rank, world, evidence, budget).run()
    return seen


def check_single_node(nproc: int, nnodes: int = 1) -> None:
    """Raises BundleRejected (`prism:single-node-bound`) for a launch that is not 1 to 8 processes on one node."""
    if nnodes != 1 or not 1 <= nproc <= c.MAX_NPROC:
        raise BundleRejected(
            f"{nproc} processes on {nnodes} nodes were asked for; a run is bound to one node with 1 to {c.MAX_NPROC} "
            "processes",
            rule=c.RULE_SINGLE_NODE_BOUND,
        )


# ------------------------------------------------------------------------------------------------------------ judging


def _judge(name: str, seen: dict[tuple[int, int], _Evidence]) -> Requirement:
    if name == GUARD:
        return _judge_writes(seen)
    if name == NODE:
        broken = {at: why for evidence in seen.values() for at, why in evidence.beyond_one_node.items()}
        detail = "; ".join(sorted(set(broken.values()))) or f"nothing asks for more than {EXPECTED[NODE]}"
        return Requirement(name, RULES[name], not broken, _sorted(broken), detail)
    found = {key: set(evidence.met[name]) for key, evidence in seen.items()}
    notes = ""
    if name == DEVICE:
        shared = _shared_devices(seen)
        found = {key: places - shared.keys() for key, places in found.items()}
        notes = "".join(f" ({at} binds every rank to {device})" for at, device in sorted(shared.items()))
    everywhere = set().union(*found.values())
    missing = [key for key, places in found.items() if not places]
    if not missing:
        return Requirement(name, RULES[name], True, _sorted(everywhere), "reached by every rank")
    if everywhere:
        world, rank = missing[0]
        detail = f"rank {rank} of {world} does not reach it; expected on every rank: {EXPECTED[name]}{notes}"
    else:
        detail = f"not reached by train(ctx); expected {EXPECTED[name]}{notes}"
    return Requirement(name, RULES[name], False, _sorted(everywhere), detail)


def _judge_writes(seen: dict[tuple[int, int], _Evidence]) -> Requirement:
    guarded = {at: what for (_, rank), e in seen.items() if rank == 0 for at, what in e.writes.items()}
    loose: dict[str, tuple[str, int]] = {}
    for (_, rank), evidence in seen.items():
        for at, what in evidence.writes.items() if rank else ():
            loose.setdefault(at, (what, rank))
    if loose:
        named = "; ".join(f"{at}: {what} is reached by rank {rank}" for at, (what, rank) in sorted(loose.items()))
        return Requirement(GUARD, RULES[GUARD], False, _sorted(loose), f"{named}; expected {EXPECTED[GUARD]}")
    detail = "only rank 0 reaches the writes" if guarded else "the scripts write nothing"
    return Requirement(GUARD, RULES[GUARD], True, _sorted(guarded), detail)


def _shared_devices(seen: dict[tuple[int, int], _Evidence]) -> dict[str, str]:
    """Lines that bind every rank of a world to one and the same device, and that device."""
    by_line: dict[tuple[str, int], list[Value | None]] = defaultdict(list)
    for (world, _), evidence in seen.items():
        for at, device in evidence.devices.items():
            by_line[at, world].append(device)
    return {
        at: f"device {devices[0].value}"
        for (at, _), devices in by_line.items()
        if isinstance(devices[0], Known) and len(devices) > 1 and all(d == devices[0] for d in devices)
    }


def _sorted(places: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(places, key=lambda at: (at.partition(":")[0], int(at.rpartition(":")[2]))))


# ----------------------------------------------------------------------------------------------------------- watching


class _Evidence:
    """What one rank reaches. Implements `script.Observer`."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.met: dict[str, set[str]] = defaultdict(set)
        self.devices: dict[str, Value | None] = {}
        self.writes: dict[str, str] = {}
        self.beyond_one_node: dict[str, str] = {}

    def called(self, site: Site) -> None:
        at = f"{site.script}.py:{site.line}"
        if site.path is not None and site.path.startswith("torch."):
            self._torch(site, at)
        if site.name == "cuda":
            self._bind_device(at, site.argument(0, "device"))
        if site.name == "to":
            for value in (*site.args, *site.kwargs.values()):
                self._device_text(at, value, None)
        if site.path in ("builtins.range", "itertools.islice"):
            skip = site.path == "itertools.islice"
            start, step = site.argument(0 + skip, ""), site.argument(2 + skip, "")
            self.sliced(site.script, site.line, start, step)
        if site.name == "shard" and self._is_shard(site.argument(0, "num_shards"), site.argument(1, "index")):
            self.met[SHARDING].add(at)
        if (what := _written_by(site)) is not None:
            self.writes[at] = what
        self._look_for_nodes(site, at)

    def sliced(self, script: str, line: int, start: Value | None, step: Value | None) -> None:
        if self._is_shard(step, start):
            self.met[SHARDING].add(f"{script}.py:{line}")

    def residue_compared(self, script: str, line: int, modulus: int, other: Value) -> None:
        if self._is_shard(Known(modulus), other):
            self.met[SHARDING].add(f"{script}.py:{line}")

    def stored(self, script: str, line: int, path: str, key: Value, value: Value) -> None:
        if path == "os.environ" and key == Known("MASTER_ADDR"):
            self._check_host(f"{script}.py:{line}", value)

    def _is_shard(self, of: Value | None, mine: Value | None) -> bool:
        return of == Known(self.world) and mine == Known(self.rank)

    def _torch(self, site: Site, at: str) -> None:
        path, name = site.path or "", site.name
        if path.startswith("torch.distributed.") and name in (INIT, DESTROY):
            self.met[name].add(at)
        elif name in WRAPPERS and not path.startswith("torch.distributed.tensor"):
            self.met[WRAP].add(at)
        elif name == "DistributedSampler":
            replicas, rank = site.argument(1, "num_replicas"), site.argument(2, "rank")
            if _may_be(replicas, self.world) and _may_be(rank, self.rank):
                self.met[SHARDING].add(at)
        elif path in DEVICE_SETTERS:
            self._bind_device(at, site.argument(0, "device"))
        elif path == "torch.device":
            self._device_text(at, site.argument(0, "type"), site.argument(1, "index"))

    def _device_text(self, at: str, text: Value | None, index: Value | None) -> None:
        """`"cuda"`, `"cuda:1"`, or `"cuda"` with an index of its own."""
        if isinstance(text, Known) and isinstance(text.value, str) and (m := CUDA_DEVICE.fullmatch(text.value)):
            self._bind_device(at, Known(int(m["index"])) if m["index"] else index)

    def _bind_device(self, at: str, device: Value | None) -> None:
        """`device` None: whatever is current, which the launcher has bound to the local rank."""
        if isinstance(device, Known) and isinstance(device.value, str):
            m = CUDA_DEVICE.fullmatch(device.value)
            device = Known(int(m["index"])) if m and m["index"] else None
        self.met[DEVICE].add(at)
        self.devices[at] = device if at not in self.devices or self.devices[at] == device else UNKNOWN

    def _look_for_nodes(self, site: Site, at: str) -> None:
        for name in ("world_size", "num_replicas", "nprocs", "nproc_per_node"):
            value = site.kwargs.get(name)
            if isinstance(value, Known) and isinstance(value.value, int) and value.value > c.MAX_NPROC:
                self.beyond_one_node[at] = f"{name}={value.value} is above {c.MAX_NPROC}"
        nodes = site.kwargs.get("nnodes")
        if isinstance(nodes, Known) and nodes.value not in (1, "1", "1:1"):
            self.beyond_one_node[at] = f"nnodes={nodes.value} is above 1"
        if site.name == INIT and site.path is not None:
            method = site.argument(1, "init_method")
            if isinstance(method, Known) and isinstance(method.value, str) and method.value.startswith("tcp://"):
                self._check_host(at, Known(method.value.removeprefix("tcp://").rpartition(":")[0]))

    def _check_host(self, at: str, host: Value) -> None:
        if isinstance(host, Known) and isinstance(host.value, str) and host.value not in LOOPBACK:
            self.beyond_one_node[at] = f"the rendezvous is at {host.value}, which is not this node"


def _may_be(value: Value | None, wanted: int) -> bool:
    return value is None or not isinstance(value, Known) or value.value is None or value.value == wanted


def _written_by(site: Site) -> str | None:
    """What a call writes with, or None when it writes no file."""
    path, name = site.path, site.name
    if path is None:
        if name in METHOD_WRITES and site.args:
            return f".{name}(...)"
        if name == "open" and any(_writes_by_mode(v) for v in site.args[:1] if isinstance(v, Known)):
            return ".open(...)"
        return f".{name}(...)" if name in ("write", "writelines") else None
    if path in SERIALISERS:
        target = site.argument(SERIALISERS[path], "f" if path == "torch.save" else "fp")
        if isinstance(target, Made) and (target.path in IN_MEMORY or target.path in OPENERS):
            return None  # a buffer, or a file whose opening was already looked at
        return path
    owner = path.rpartition(".")[0]
    if name in WRITERS.get(owner, ()):
        return path
    if path in OPENERS:
        return f"{name}(...)" if _writes_by_mode(site.argument(1, "mode")) else None
    if path == "os.open":
        return None if site.argument(1, "flags") == External("os.O_RDONLY") else path
    if owner.startswith("pathlib.") and "()" in owner:
        if name == "open":
            return "Path.open(...)" if _writes_by_mode(site.argument(0, "mode")) else None
        return f"Path.{name}" if name in PATH_WRITES else None
    if "()" in owner and name in METHOD_WRITES and site.args and owner.partition("()")[0] not in IN_MEMORY:
        return f".{name}(...)"
    return None


def _writes_by_mode(mode: Value | None) -> bool:
    if mode is None:
        return False
    return not isinstance(mode, Known) or not isinstance(mode.value, str) or bool(set(mode.value) & set("wax+"))
