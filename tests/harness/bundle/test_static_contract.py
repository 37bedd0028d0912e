"""The static distributed contract: what counts, what does not, and where the report says it found it.

Every case is a whole training.py: a compliant script with one thing changed.
"""

import argparse
import asyncio.tasks
import contextlib
import dataclasses
import enum
import sys
import typing
from pathlib import Path

import pytest

from prism_fast.harness.bundle import static_contract
from prism_fast.harness.bundle.bundle import Bundle, load_bundle
from prism_fast.harness.bundle.script import Budget, TooLarge
from prism_fast.harness.bundle.static_contract import REQUIREMENTS, check_single_node, check_static_contract
from prism_fast.protocol.errors import EXIT_BUNDLE_REJECTED, BundleRejected, UsageError
from tests.harness.conftest import ROOT, TINY_ARCHITECTURE, TINY_TRAINING, seed_training

SCRIPT = """
import torch
import torch.distributed as dist
from architecture import build_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

def train(ctx):
    torch.cuda.set_device(ctx.local_rank)
    if ctx.world_size > 1:
        dist.init_process_group("nccl")
    DistributedSampler(range(8), num_replicas=ctx.world_size, rank=ctx.rank)
    model = build_model(ctx)
    wrapped = DistributedDataParallel(model)
    for batch in ctx.iter_train_batches(model):
        wrapped(batch.tokens).sum().backward()
    if ctx.rank == 0:
        torch.save(model.state_dict(), ctx.artifacts_dir + "/state.pt")
    if ctx.world_size > 1:
        dist.destroy_process_group()
"""
LINES = {
    "init_process_group": '    if ctx.world_size > 1:\n        dist.init_process_group("nccl")\n',
    "device_binding": "    torch.cuda.set_device(ctx.local_rank)\n",
    "ddp_or_fsdp": "    wrapped = DistributedDataParallel(model)\n",
    "data_sharding": "    DistributedSampler(range(8), num_replicas=ctx.world_size, rank=ctx.rank)\n",
    "destroy_process_group": "    if ctx.world_size > 1:\n        dist.destroy_process_group()\n",
}
GUARDED = '    if ctx.rank == 0:\n        torch.save(model.state_dict(), ctx.artifacts_dir + "/state.pt")\n'


def check(training: str, architecture: str = TINY_ARCHITECTURE, policy="reject"):
    scripts = {"architecture.py": architecture.encode(), "training.py": training.encode()}
    return check_static_contract(Bundle("bundle", scripts), policy)


def unmet(training: str, architecture: str = TINY_ARCHITECTURE) -> list[str]:
    return [r.name for r in check(training, architecture).unmet]


def with_(name: str, replacement: str, head: str = "") -> str:
    """SCRIPT with one requirement's lines replaced (indented by 4) and something put before `def train`."""
    old = GUARDED if name == "rank0_guard" else LINES[name]
    new = "".join(f"    {line}\n" for line in replacement.splitlines())
    assert SCRIPT.count(old) == 1
    return SCRIPT.replace(old, new).replace("def train", head + "\ndef train" if head else "def train")


# ------------------------------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize("name", ["transformer_tiny", "ssm_tiny", "fused_loss"])
def test_every_example_meets_the_contract(name):
    report = check_static_contract(load_bundle(ROOT / "examples" / name))
    assert report.ok, report.unmet
    assert [r.name for r in report.requirements] == list(REQUIREMENTS)


def test_the_original_engines_example_meets_the_contract_with_its_lines():
    report = check(seed_training())
    assert report.ok, report.unmet
    source = ["", *seed_training().splitlines()]
    words = {
        "init_process_group": "init_process_group",
        "device_binding": "set_device",
        "ddp_or_fsdp": "DistributedDataParallel",
        "data_sharding": "DistributedSampler",
        "destroy_process_group": "destroy_process_group",
        "rank0_guard": "torch.save",
    }
    for requirement in report.requirements:
        for place in requirement.where:
            script, _, line = place.partition(":")
            assert script == "training.py"
            assert words[requirement.name] in source[int(line)]
    assert all(r.where for r in report.requirements if r.name != "single_node")


def test_the_plain_script_is_compliant():
    assert unmet(SCRIPT) == []


def test_a_script_without_any_of_it_is_told_all_that_is_missing():
    report = check(TINY_TRAINING)
    assert [r.name for r in report.unmet] == list(LINES)
    with pytest.raises(BundleRejected, match="init_process_group: not reached by train") as caught:
        report.enforce()
    assert caught.value.rule == "prism:distributed-contract"
    assert caught.value.exit_code == EXIT_BUNDLE_REJECTED


@pytest.mark.parametrize("name", LINES)
def test_each_primitive_is_required(name):
    report = check(with_(name, "pass"))
    assert [(r.name, r.rule) for r in report.unmet] == [(name, "prism:distributed-contract")]


def test_policies_reject_flag_and_off():
    bad = with_("ddp_or_fsdp", "wrapped = model")
    with pytest.raises(BundleRejected, match="ddp_or_fsdp"):
        check(bad).enforce()
    flagged = check(bad, policy="flag")
    flagged.enforce()
    assert flagged.flags == ["prism:distributed-contract:ddp_or_fsdp"] and not flagged.ok
    off = check("def train(ctx): pass", policy="off")
    off.enforce()
    assert off.ok and off.requirements == ()
    with pytest.raises(UsageError, match="unknown policy 'warn'; expected reject, flag or off"):
        check(SCRIPT, policy="warn")


def test_the_report_is_one_json_document():
    document = check(with_("ddp_or_fsdp", "wrapped = model")).as_dict()
    assert document["schema"] == "prism_static_contract.v1"
    assert (document["policy"], document["ok"]) == ("reject", False)
    first = document["requirements"][0]
    assert first == {
        "name": "init_process_group",
        "rule": "prism:distributed-contract",
        "met": True,
        "where": ["training.py:11"],
        "detail": "reached by every rank",
    }


# ------------------------------------------------------------------------------------------------------ names and calls


@pytest.mark.parametrize(
    ("head", "call"),
    [
        ("import torch.distributed", "torch.distributed.init_process_group()"),
        ("import torch.distributed as d", "d.init_process_group()"),
        ("from torch import distributed", "distributed.init_process_group()"),
        ("from torch.distributed import init_process_group as ipg", "ipg()"),
        ("from torch.distributed import *", "init_process_group()"),
        ("start = dist.init_process_group", "start()"),
        ("", "getattr(dist, 'init_process_group')()"),
        ("import importlib", "importlib.import_module('torch.distributed').init_process_group()"),
        ("import functools\nstart = functools.partial(dist.init_process_group, 'gloo')", "start()"),
        (
            "try:\n    from torch.distributed import init_process_group as go\nexcept ImportError:\n    go = None",
            "go()",
        ),
    ],
)
def test_a_primitive_counts_under_any_name(head, call):
    assert unmet(with_("init_process_group", call, head)) == []


@pytest.mark.parametrize(
    ("head", "call"),
    [
        ("def setup(ctx):\n    dist.init_process_group()", "setup(ctx)"),
        ("def inner():\n    dist.init_process_group()\ndef setup():\n    inner()", "setup()"),
        ("setup = lambda: dist.init_process_group()", "setup()"),
        ("class Run:\n    def __init__(self, ctx):\n        dist.init_process_group()", "Run(ctx)"),
        ("class Run:\n    def start(self):\n        dist.init_process_group()", "Run().start()"),
        (
            "class Base:\n    def start(self):\n        dist.init_process_group()\n"
            "class Run(Base):\n    def start(self):\n        super().start()",
            "run = Run()\nrun.start()",
        ),
        (
            "import contextlib\n@contextlib.contextmanager\ndef group():\n    dist.init_process_group()\n    yield",
            "with group():\n    pass",
        ),
        (
            "class Group:\n    def __enter__(self):\n        dist.init_process_group()\n"
            "    def __exit__(self, *e):\n        pass",
            "with Group():\n    pass",
        ),
        ("def steps():\n    dist.init_process_group()\n    yield 1", "for step in steps():\n    pass"),
        (
            "def logged(f):\n    def inner(*a, **k):\n        return f(*a, **k)\n    return inner\n"
            "@logged\ndef setup(ctx):\n    dist.init_process_group()",
            "setup(ctx)",
        ),
        (
            "import functools\ndef logged(f):\n    @functools.wraps(f)\n    def inner(*a):\n        return f(*a)\n"
            "    return inner\n@logged\ndef setup(ctx):\n    dist.init_process_group()",
            "setup(ctx)",
        ),
        ("def a():\n    dist.init_process_group()\ndef b():\n    pass", "for f in (a, b):\n    f()"),
        ("def a():\n    dist.init_process_group()", "{'nccl': a}['nccl']()"),
        ("async def a():\n    dist.init_process_group()", "import asyncio\nasyncio.run(a())"),
        ("@torch.no_grad()\ndef a():\n    dist.init_process_group()", "a()"),
    ],
)
def test_a_primitive_counts_in_a_helper_that_train_calls(head, call):
    assert unmet(with_("init_process_group", call, head)) == []


def test_a_helper_may_stand_in_architecture():
    architecture = TINY_ARCHITECTURE + "\ndef start():\n    import torch.distributed as d\n    d.init_process_group()\n"
    training = with_("init_process_group", "start()", "from architecture import start")
    report = check(training, architecture)
    assert report.ok
    assert report.requirements[0].where == (f"architecture.py:{len(architecture.splitlines())}",)


@pytest.mark.parametrize(
    ("head", "call"),
    [
        ("def setup():\n    dist.init_process_group()", "pass"),
        ("def setup():\n    dist.init_process_group()", "setup"),
        ("def setup():\n    dist.init_process_group()", "_ = setup"),
        ("", "def setup():\n    dist.init_process_group()"),
        ("", "lambda: dist.init_process_group()"),
        ("class Run:\n    def start(self):\n        dist.init_process_group()", "Run()"),
        ("def steps():\n    dist.init_process_group()\n    yield 1", "steps()"),
        ("def init_process_group():\n    pass", "init_process_group()"),
        ("class dist2:\n    init_process_group = print", "dist2.init_process_group()"),
        ("", "dist.init_process_group"),
        ("", "print('init_process_group()')"),
        ("", "dist.init_process_group = print\ndist.init_process_group()"),
        ("if __name__ == '__main__':\n    dist.init_process_group()", "pass"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    dist.init_process_group()", "pass"),
    ],
)
def test_what_is_never_called_or_is_no_primitive_does_not_count(head, call):
    assert unmet(with_("init_process_group", call, head)) == ["init_process_group"]


# --------------------------------------------------------------------------------------------------------- dead code


@pytest.mark.parametrize(
    "call",
    [
        "if False:\n    dist.init_process_group()",
        "if 0:\n    dist.init_process_group()",
        "if not True:\n    dist.init_process_group()",
        "if 1 > 2:\n    dist.init_process_group()",
        "if '' or None:\n    dist.init_process_group()",
        "if ctx.device and False:\n    dist.init_process_group()",
        "if True:\n    pass\nelse:\n    dist.init_process_group()",
        "while False:\n    dist.init_process_group()",
        "for _ in ():\n    dist.init_process_group()",
        "for _ in range(0):\n    dist.init_process_group()",
        "for _ in range(3, 1):\n    dist.init_process_group()",
        "for x in batches():\n    pass\n    continue\n    dist.init_process_group()",
        "False and dist.init_process_group()",
        "True or dist.init_process_group()",
        "dist.init_process_group() if 0 else None",
        "[dist.init_process_group() for _ in []]",
        "try:\n    pass\nexcept Exception:\n    dist.init_process_group()",
        "off = False\nif off:\n    dist.init_process_group()",
        "if ctx.world_size == 1:\n    dist.init_process_group()",
        "if ctx.world_size > 8:\n    dist.init_process_group()",
        "if ctx.world_size > 1 and ctx.rank > 8:\n    dist.init_process_group()",
        "match 1:\n    case 2:\n        dist.init_process_group()",
        "if __debug__ is None and False:\n    dist.init_process_group()",
    ],
)
def test_dead_code_does_not_count(call):
    head = "def batches():\n    return [1]\n"
    assert unmet(with_("init_process_group", call, head)) == ["init_process_group"]


@pytest.mark.parametrize(
    "end",
    [
        "return",
        "raise SystemExit",
        "import sys\nsys.exit()",
        "import os\nos._exit(0)",
        "assert False",
        "while True:\n    pass",
        "leave()",
    ],
)
def test_code_after_the_end_does_not_count(end):
    script = with_("destroy_process_group", f"{end}\ndist.destroy_process_group()", "def leave():\n    exit()\n")
    assert unmet(script) == ["destroy_process_group"]


def test_a_module_constant_is_a_constant_unless_a_function_rebinds_it():
    call = "if WANTED:\n    dist.init_process_group()"
    assert unmet(with_("init_process_group", call, "WANTED = False")) == ["init_process_group"]
    rebinds = "WANTED = False\ndef later():\n    global WANTED\n    WANTED = True\n"
    assert unmet(with_("init_process_group", call, rebinds)) == []


def test_a_flag_set_in_a_later_round_counts():
    loop = (
        "state = Flag()\nfor batch in ctx.iter_train_batches(None):\n"
        "    if state.on:\n        dist.init_process_group()\n    state.on = True"
    )
    assert unmet(with_("init_process_group", loop, "class Flag:\n    on = False")) == []


def test_teardown_in_finally_and_at_exit_counts():
    body = SCRIPT.replace(LINES["destroy_process_group"], "")
    head, _, rest = body.partition("def train(ctx):\n")
    indented = "".join(f"    {line}\n" for line in rest.splitlines())
    tried = f"{head}def train(ctx):\n    try:\n{indented}    finally:\n        dist.destroy_process_group()\n"
    assert unmet(tried) == []
    assert unmet(with_("destroy_process_group", "import atexit\natexit.register(dist.destroy_process_group)")) == []
    later = (
        "import atexit\ndef down():\n    if dist.is_initialized():\n        dist.destroy_process_group()\n"
        "atexit.register(down)"
    )
    assert unmet(with_("destroy_process_group", later)) == []


def test_a_primitive_that_only_some_ranks_reach_is_not_met_and_says_which():
    report = check(with_("init_process_group", "if ctx.rank == 0:\n    dist.init_process_group()"))
    (requirement,) = report.unmet
    assert requirement.detail.startswith("rank 1 of 2 does not reach it")
    assert requirement.where == ("training.py:11",)


# --------------------------------------------------------------------------------------------------- each primitive


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ("", "model.cuda(ctx.local_rank)"),
        ("", "build_model(ctx).cuda()"),
        ("", "torch.cuda.set_device(f'cuda:{ctx.local_rank}')"),
        ("", "torch.cuda.set_device(ctx.device)"),
        ("", "torch.cuda.set_device(ctx.rank % torch.cuda.device_count())"),
        ("", "device = torch.device('cuda', ctx.local_rank)"),
        ("", "device = torch.device(f'cuda:{ctx.local_rank}')"),
        ("", "build_model(ctx).to(f'cuda:{ctx.local_rank}')"),
        ("", "torch.accelerator.set_device_index(ctx.local_rank)"),
        ("import os", "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"),
        ("import os", "torch.cuda.set_device(int(os.getenv('LOCAL_RANK', '0')))"),
        ("", "if ctx.device.startswith('cuda'):\n    torch.cuda.set_device(ctx.local_rank)"),
    ],
)
def test_a_device_may_be_bound_in_any_of_these_ways(head, line):
    assert unmet(with_("device_binding", line, head)) == []


@pytest.mark.parametrize(
    "line", ["torch.cuda.set_device(0)", "torch.device('cuda:0')", "build_model(ctx).cuda(0)", "x.to('cuda:1')"]
)
def test_binding_every_rank_to_one_device_is_no_binding(line):
    (requirement,) = check(with_("device_binding", line)).unmet
    assert requirement.name == "device_binding"
    assert "training.py:9 binds every rank to device" in requirement.detail


@pytest.mark.parametrize("line", ["build_model(ctx).to('cpu')", "torch.device('cpu')", "torch.cuda.is_available()"])
def test_no_device_of_its_own_is_no_binding(line):
    assert unmet(with_("device_binding", line)) == ["device_binding"]


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ("from torch.nn.parallel import DistributedDataParallel as DDP", "wrapped = DDP(model)"),
        ("", "wrapped = torch.nn.parallel.DistributedDataParallel(model)"),
        ("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP", "wrapped = FSDP(model)"),
        ("from torch.distributed.fsdp import fully_shard", "wrapped = model\nfully_shard(wrapped)"),
        ("from torch.distributed._composable.fsdp import fully_shard", "wrapped = fully_shard(model)"),
        ("class Mine(DistributedDataParallel):\n    pass", "wrapped = Mine(model)"),
        ("def wrap(m, kind=DistributedDataParallel):\n    return kind(m)", "wrapped = wrap(model)"),
    ],
)
def test_the_model_may_be_wrapped_in_any_of_these_ways(head, line):
    assert unmet(with_("ddp_or_fsdp", line, head)) == []


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ("", "wrapped = torch.nn.DataParallel(model)"),
        (
            "class DistributedDataParallel:\n    def __init__(self, m):\n        pass",
            "wrapped = DistributedDataParallel(model)",
        ),
        ("", "isinstance(model, DistributedDataParallel)\nwrapped = model"),
    ],
)
def test_what_is_not_torchs_wrapper_does_not_count(head, line):
    assert unmet(with_("ddp_or_fsdp", line, head)) == ["ddp_or_fsdp"]


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ("", "DistributedSampler([1, 2])"),
        ("", "shard = names[ctx.rank::ctx.world_size]"),
        ("", "shard = names[dist.get_rank()::dist.get_world_size()]"),
        ("", "shard = range(ctx.rank, 100, ctx.world_size)"),
        ("import itertools", "shard = itertools.islice(names, ctx.rank, None, ctx.world_size)"),
        ("", "shard = [n for i, n in enumerate(names) if i % ctx.world_size == ctx.rank]"),
        ("", "for i in range(9):\n    if i % ctx.world_size != ctx.rank:\n        continue"),
        ("", "rank, world = ctx.rank, ctx.world_size\nshard = names[rank::world]"),
        (
            "def place(ctx):\n    return ctx.rank, ctx.world_size",
            "rank, world = place(ctx)\nshard = names[rank::world]",
        ),
        ("", "shard = data.shard(num_shards=ctx.world_size, index=ctx.rank)"),
    ],
)
def test_data_may_be_sharded_in_any_of_these_ways(head, line):
    assert unmet(with_("data_sharding", line, "names = open('x').read()\n" + head)) == []


@pytest.mark.parametrize(
    "line",
    [
        "DistributedSampler([1], num_replicas=ctx.world_size, rank=0)",
        "DistributedSampler([1], num_replicas=1, rank=0)",
        "shard = names[0::2]",
        "shard = names[::ctx.world_size]",
        "shard = names[ctx.rank:]",
        "shard = [n for i, n in enumerate(names) if i % 2 == 0]",
    ],
)
def test_the_same_shard_for_every_rank_is_no_sharding(line):
    assert unmet(with_("data_sharding", line, "names = open('x').read()\n")) == ["data_sharding"]


# -------------------------------------------------------------------------------------------------------- rank-0 guard

SAVE = "torch.save(model.state_dict(), ctx.artifacts_dir + '/state.pt')"


@pytest.mark.parametrize(
    ("head", "lines"),
    [
        ("", f"if ctx.rank == 0 and ctx.artifacts_dir:\n    {SAVE}"),
        ("", f"if ctx.artifacts_dir and not ctx.rank:\n    {SAVE}"),
        ("", f"if 0 == ctx.rank:\n    {SAVE}"),
        ("", f"if ctx.rank < 1:\n    {SAVE}"),
        ("", f"if ctx.rank in (0,):\n    {SAVE}"),
        ("", f"if ctx.rank != 0:\n    pass\nelse:\n    {SAVE}"),
        ("", f"if ctx.local_rank == 0:\n    {SAVE}"),
        ("", f"if dist.get_rank() == 0:\n    {SAVE}"),
        ("", f"if not dist.is_initialized() or dist.get_rank() == 0:\n    {SAVE}"),
        ("", f"main = ctx.rank == 0\nif main:\n    {SAVE}"),
        ("", f"ctx.rank == 0 and {SAVE}"),
        ("", f"{SAVE} if ctx.rank == 0 else None"),
        ("import os", f"if os.environ.get('RANK', '0') == '0':\n    {SAVE}"),
        ("import os\nMAIN = int(os.environ['RANK']) == 0", f"if MAIN:\n    {SAVE}"),
        ("def is_main(ctx):\n    return ctx.rank == 0", f"if is_main(ctx):\n    {SAVE}"),
        (
            "def save(ctx, model):\n    if ctx.rank != 0:\n        return\n    torch.save(model, 'x')",
            "save(ctx, model)",
        ),
        ("def save(model, rank):\n    if rank:\n        return\n    torch.save(model, 'x')", "save(model, ctx.rank)"),
        (
            "def only_main(f):\n    def inner(*a):\n        if dist.get_rank() == 0:\n            return f(*a)\n"
            "    return inner\n@only_main\ndef save(model):\n    torch.save(model, 'x')",
            "save(model)",
        ),
        (
            "class Saver:\n    def __init__(self, ctx):\n        self.main = ctx.rank == 0\n"
            "    def save(self, model):\n        if self.main:\n            torch.save(model, 'x')",
            "Saver(ctx).save(model)",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Place:\n    rank: int\n    world: int\n"
            "    @property\n    def main(self):\n        return self.rank == 0",
            f"place = Place(ctx.rank, world=ctx.world_size)\nif place.main:\n    {SAVE}",
        ),
        ("", f"match ctx.rank:\n    case 0:\n        {SAVE}\n    case _:\n        pass"),
        ("", f"config = {{'main': ctx.rank == 0}}\nif config['main']:\n    {SAVE}"),
        ("", f"if ctx.rank == 0:\n    if True or ctx.rank == 1:\n        {SAVE}"),
        ("", f"if ctx.rank == 0 and (True or ctx.seed):\n    {SAVE}"),
    ],
)
def test_a_guard_may_take_any_form_that_lets_only_rank_0_pass(head, lines):
    report = check(with_("rank0_guard", lines, head))
    assert report.ok, report.unmet
    guard = next(r for r in report.requirements if r.name == "rank0_guard")
    assert guard.where and guard.detail == "only rank 0 reaches the writes"


def test_an_early_return_for_the_other_ranks_guards_what_follows():
    script = SCRIPT.replace(GUARDED, "").replace(LINES["destroy_process_group"], "")
    script += "    dist.destroy_process_group()\n    if ctx.rank != 0:\n        return\n    torch.save(model, 'x')\n"
    assert unmet(script) == []


@pytest.mark.parametrize(
    ("head", "lines"),
    [
        ("", SAVE),
        ("", f"if True or ctx.rank == 0:\n    {SAVE}"),
        ("", f"if ctx.rank == 0 or True:\n    {SAVE}"),
        ("", f"if ctx.rank == 0 or ctx.seed:\n    {SAVE}"),
        ("", f"if ctx.rank >= 0:\n    {SAVE}"),
        ("", f"if ctx.rank == 1:\n    {SAVE}"),
        ("", f"if ctx.rank == 7:\n    {SAVE}"),
        ("", f"if ctx.rank == 0:\n    pass\n{SAVE}"),
        ("", f"if ctx.rank == 0:\n    pass\nelse:\n    {SAVE}"),
        ("", f"rank = 0\nif rank == 0:\n    {SAVE}"),
        ("", f"rank = ctx.seed\nif rank == 0:\n    {SAVE}"),
        ("", f"if ctx.rank == 0:\n    print('saving')\n{SAVE}"),
        ("def save(model, rank=0):\n    if rank == 0:\n        torch.save(model, 'x')", "save(model)"),
        ("def save(model):\n    torch.save(model, 'x')", "save(model)"),
        ("", f"try:\n    assert ctx.rank == 0\nexcept AssertionError:\n    pass\n{SAVE}"),
    ],
)
def test_a_guard_that_lets_another_rank_pass_is_none(head, lines):
    report = check(with_("rank0_guard", lines, head))
    assert [(r.name, r.rule) for r in report.unmet] == [("rank0_guard", "prism:distributed-rank0-guard")]
    with pytest.raises(BundleRejected, match=r"torch\.save is reached by rank") as caught:
        report.enforce()
    assert caught.value.rule == "prism:distributed-rank0-guard"


@pytest.mark.parametrize(
    "line",
    [
        "open(ctx.artifacts_dir + '/log', 'w').write('x')",
        "with open('log', mode='a') as f:\n    f.write('x')",
        "open('log', 'rb+')",
        "open('log', mode)",
        "import pathlib\npathlib.Path(ctx.artifacts_dir).joinpath('x').write_text('x')",
        "from pathlib import Path\n(Path(ctx.artifacts_dir) / 'x').write_bytes(b'x')",
        "from pathlib import Path\n(Path(ctx.artifacts_dir) / 'x').open('w')",
        "import numpy as np\nnp.save('x.npy', model)",
        "import numpy as np\nnp.savez_compressed('x', model)",
        "from safetensors.torch import save_file\nsave_file({}, 'x')",
        "import json\njson.dump({}, sink)",
        "import pickle\npickle.dump({}, sink)",
        "import shutil\nshutil.copy('a', 'b')",
        "import os\nos.replace('a', 'b')",
        "import os\nos.open('a', os.O_WRONLY)",
        "from torch.utils.tensorboard import SummaryWriter\nSummaryWriter('logs')",
        "torch.jit.save(model, 'x')",
        "model.save_pretrained('x')",
        "t.numpy().tofile('x')",
    ],
)
def test_every_way_to_write_a_file_needs_the_guard(line):
    head = "sink = mode = t = __import__('x')\n"
    assert unmet(with_("rank0_guard", line, head)) == ["rank0_guard"]
    guarded = "if ctx.rank == 0:\n" + "".join(f"    {part}\n" for part in line.splitlines())
    assert unmet(with_("rank0_guard", guarded, head)) == []


@pytest.mark.parametrize(
    "line",
    [
        "open('config').read()",
        "open('config', 'rb')",
        "print('step')",
        "import sys\nsys.stderr.write('x')",
        "import io\ntorch.save(model, io.BytesIO())",
        "import io\nbuffer = io.BytesIO()\ntorch.save(model, buffer)\nbuffer.write(b'')",
        "import os\nos.makedirs(ctx.artifacts_dir, exist_ok=True)",
        "import os\nos.open('a', os.O_RDONLY)",
        "from pathlib import Path\nPath('x').read_text()",
        "'a-b'.replace('-', '_')",
        "import json\njson.dumps({})",
        "torch.load('x')",
    ],
)
def test_what_writes_no_file_needs_no_guard(line):
    report = check(with_("rank0_guard", line))
    assert report.ok, report.unmet
    assert next(r for r in report.requirements if r.name == "rank0_guard").detail == "the scripts write nothing"


# --------------------------------------------------------------------------------------------------------- single node


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("dist.init_process_group('gloo', world_size=16, rank=ctx.rank)", "world_size=16 is above 8"),
        ("dist.init_process_group('gloo', 'tcp://10.0.0.7:29500')", "the rendezvous is at 10.0.0.7"),
        ("dist.init_process_group(init_method='tcp://head:1')", "the rendezvous is at head"),
        ("import os\nos.environ['MASTER_ADDR'] = 'node-0'\ndist.init_process_group()", "the rendezvous is at node-0"),
        ("torch.multiprocessing.spawn(print, nprocs=9)\ndist.init_process_group()", "nprocs=9 is above 8"),
    ],
)
def test_more_than_one_node_is_named(line, why):
    (requirement,) = check(with_("init_process_group", line)).unmet
    assert (requirement.name, requirement.rule) == ("single_node", "prism:single-node-bound")
    assert why in requirement.detail


def test_a_loopback_rendezvous_is_this_node():
    assert unmet(with_("init_process_group", "dist.init_process_group('gloo', 'tcp://127.0.0.1:29500')")) == []


def test_a_launch_beyond_one_node_or_eight_processes_is_rejected():
    check_single_node(1)
    check_single_node(8)
    for nproc, nnodes in ((9, 1), (0, 1), (1, 2), (8, 0)):
        with pytest.raises(BundleRejected, match="one node with 1 to 8 processes") as caught:
            check_single_node(nproc, nnodes)
        assert caught.value.rule == "prism:single-node-bound"


# -------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("terms", [900, 20_000], ids=["to follow", "to parse from here"])
def test_a_script_too_deep_is_not_accepted_unseen(terms):
    report = check(SCRIPT + "x = " + "+".join(["1"] * terms) + "\n")
    assert [r.name for r in report.unmet] == list(REQUIREMENTS)
    assert "too large or too deeply nested" in report.unmet[0].detail


def test_a_script_that_takes_forever_to_follow_is_not_accepted_unseen():
    """Each function calls the one before it twice: 2^40 calls."""
    head = "def f0():\n    pass\n" + "".join(f"def f{i}():\n    f{i - 1}()\n    f{i - 1}()\n" for i in range(1, 41))
    report = check(with_("ddp_or_fsdp", "f40()\nwrapped = model", head))
    assert len(report.unmet) == len(REQUIREMENTS)


def test_recursion_ends():
    head = "def f(n):\n    if n:\n        f(n - 1)\n    dist.init_process_group()\n"
    assert unmet(with_("init_process_group", "f(ctx.seed)", head)) == []


@pytest.mark.parametrize("module", [argparse, asyncio.tasks, contextlib, dataclasses, enum, typing])
def test_whatever_syntax_surrounds_it_is_followed_without_a_fault(module):
    """Modules of the standard library stand in for what bundles may hold."""
    assert unmet(Path(module.__file__).read_text() + "\n" + SCRIPT) == []


# Shapes whose following takes more than their length: copies of names, lists of lists, classes of classes, calls.
SLOW = {
    "branches": "".join(f"    if u{i}:\n        a{i} = 1\n    else:\n        a{i} = 2\n" for i in range(3000)),
    "handlers": "".join(f"    try:\n        a{i} = f()\n    except E:\n        b{i} = 2\n" for i in range(2500)),
    "loops": "".join(" " * i + f" for i{i} in x:\n" for i in range(90)) + " " * 91 + "y = x\n",
    "lists": "    a = [print]\n" + "    a = [a, a]\n" * 60 + "    g(a)\n",
    "unpacked": "    a = [1, 2]\n" + "    a = [*a, *a]\n" * 60,
    "text": "    a = 'ab'\n" + "    a = f'{a}{a}'\n" * 60,
    "table": "    d = {" + ",".join(f"{i}: {i}" for i in range(5000)) + "}\n" + "    d[x] = 1\n" * 5000,
    "parameters": f"    f = lambda {','.join(f'p{i}=1' for i in range(5000))}: 0\n" + "    f()\n" * 5000,
    "names": "    while x:\n        global " + ",".join(f"g{i}" for i in range(9000)) + "\n" + "        y = 1\n" * 9000,
}
SLOW_CLASSES = "class A0: pass\n" + "".join(f"class A{i}(A{i - 1}, A{i - 1}): pass\n" for i in range(1, 60))
SLOW_CALLS = "def f0(): pass\n" + "".join(f"def f{i}():\n    f{i - 1}(); f{i - 1}()\n" for i in range(1, 50))


@pytest.mark.parametrize(
    "training",
    [
        *(pytest.param(f"def train(ctx):\n{body}", id=name) for name, body in SLOW.items()),
        pytest.param(f"{SLOW_CLASSES}def train(ctx):\n    A59().lost()\n", id="classes"),
        pytest.param(f"{SLOW_CALLS}def train(ctx):\n    f49()\n", id="calls"),
    ],
)
def test_following_a_script_takes_no_more_than_its_budget(training):
    """Counted in calls of Python functions, of which a step makes some, and in what is left of the budget."""
    steps, calls = 20_000, 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call" and "bundle/script" in frame.f_code.co_filename

    budget = Budget(steps)
    bundle = Bundle("slow", {"architecture.py": b"def build_model(ctx): pass", "training.py": training.encode()})
    parsing = len(bundle.scripts["training.py"])
    sys.setprofile(count)
    try:
        static_contract._follow(bundle, budget)
    except (TooLarge, RecursionError):
        pass
    finally:
        sys.setprofile(None)
    assert calls < 20 * steps + parsing


def test_a_script_over_the_budget_meets_nothing_and_says_why():
    report = check_static_contract(
        Bundle("slow", {"architecture.py": b"", "training.py": f"def train(ctx):\n{SLOW['branches']}".encode()})
    )
    assert not report.ok and len(report.unmet) == len(REQUIREMENTS)
    assert all("too large or too deeply nested to follow" in r.detail for r in report.requirements)


def test_a_long_script_is_followed_to_its_end():
    honest = (ROOT / "examples" / "transformer_tiny" / "training.py").read_text()
    long = honest + "".join(f"    a{i} = ctx.rank + {i}\n" for i in range(1000))
    architecture = (ROOT / "examples" / "transformer_tiny" / "architecture.py").read_bytes()
    assert check_static_contract(Bundle("long", {"architecture.py": architecture, "training.py": long.encode()})).ok


def test_the_verdict_does_not_depend_on_the_caller_s_stack():
    """A script near the parser's and the walk's limits, asked for from a shallow and from a deep stack."""
    nested = "def train(ctx):\n    x = " + "-" * 300 + "1\n"
    bundle = Bundle("deep", {"architecture.py": b"def build_model(ctx): pass", "training.py": nested.encode()})

    def deep(levels):
        return check_static_contract(bundle) if levels == 0 else deep(levels - 1)

    assert deep(0) == deep(sys.getrecursionlimit() - 300)
