"""The tracer, through the referee's own client: what it makes, what is taken of it, and that nothing of it stays."""

from __future__ import annotations

import hashlib
import os
import time
from time import monotonic

import pytest

from prism_fast.harness.bundle.bundle import load_bundle
from prism_fast.harness.process.die_with_parent import adopt_orphans
from prism_fast.harness.process.environment import engine_environment
from prism_fast.harness.process.isolation import Sandbox, bwrap_fault
from prism_fast.harness.referee.seed_run import ASSETS
from prism_fast.harness.referee.tracing import Tracer
from prism_fast.protocol.errors import BudgetExceeded, BundleFailed, BundleRejected
from prism_fast.protocol.run_spec import RunSpec
from tests.harness.conftest import TINY_ARCHITECTURE, write_bundle
from tests.live_processes import living

KIND = "none" if bwrap_fault() else "bwrap"


def with_the_rest_long(cases):
    """A tracer a case takes seconds: every fourth is run by `make test`, all by `make test-long`."""
    return [
        case
        if index % 4 == 0 or not isinstance(case, tuple) or hasattr(case, "marks")
        else pytest.param(*case, marks=pytest.mark.long)
        for index, case in enumerate(cases)
    ]


sandboxed = pytest.mark.skipif(KIND == "none", reason=f"needs bubblewrap: {bwrap_fault()}")


def spec(**other: object) -> RunSpec:
    return RunSpec.model_validate(
        {
            "engine_version": "0",
            "bundle_digest": "0",
            "seal": "sealed",
            "isolation": KIND,
            "tokenizer": "gpt2",
            "tokenizer_fingerprint": "0",
            "corpus_fingerprint": "0",
            "val_corpus_fingerprint": None,
            "vocab_size": 50304,
            "sequence_length": 32,
            "device": "cpu",
            "torch_threads": 1,
            **other,
        }
    )


@pytest.fixture
def trace(tmp_path):
    """`trace(architecture, **options) -> Traced`; the processes it leaves and the folder it wrote are looked for."""
    tracers: list[Tracer] = []

    def run(
        architecture: str = TINY_ARCHITECTURE,
        *,
        widths=(16, 32),
        dtypes=None,
        seconds: float = 90,
        kind: str = KIND,
        run_spec: RunSpec | None = None,
    ):
        chosen = run_spec or spec(isolation=kind)
        bundle = load_bundle(write_bundle(tmp_path / f"bundle{len(tracers)}", architecture))
        tracer = Tracer(
            chosen,
            bundle,
            Sandbox(kind),
            engine_environment(chosen),
            tmp_path / "tracer.log",
            tokenizer_dir=str(ASSETS),
            widths=widths,
            dtypes=dtypes,
        )
        tracers.append(tracer)
        end = monotonic() + seconds
        try:
            return tracer.finish(lambda: end)
        finally:
            tracer.close()

    yield run
    for tracer in tracers:
        assert tracer.process.poll() is not None
        assert not os.path.exists(tracer._private.name)


def instead(code: str) -> str:
    """An architecture.py that answers for its tracer: `code` runs in the folder that the tracer writes to."""
    return f"import os, sys\n{code}\nos._exit(0)\ndef build_model(ctx):\n    pass\n"


RESULT = """
def result(*widths, **more):
    import json
    told = [{"width": w, "differs": None, "seconds": 0.0} for w in widths]
    open("result.json", "w").write(json.dumps({"programs": told, **more}))
"""


def test_programs_and_the_forced_init_come_out_and_are_the_same_again(trace):
    first, second = trace(), trace()
    assert [t.program.width for t in first.programs] == [16, 32]
    assert first.programs[0].differs == 0.0
    assert [slot.name for slot in first.slots] == [
        "embedding.weight",
        "mix.weight",
        "mix.bias",
        "head.weight",
        "head.bias",
    ]
    assert first.parameters == 50304 * 17 + 72
    for one, other in zip(first.programs, second.programs, strict=True):
        assert one.program.digest == other.program.digest and one.constants == other.constants
    digests = [hashlib.sha256(t.initial_state.array().tobytes()).hexdigest() for t in (first, second)]
    assert digests[0] == digests[1]
    other = trace(run_spec=spec(seed=2027))
    assert hashlib.sha256(other.initial_state.array().tobytes()).hexdigest() != digests[0]


def test_a_model_of_another_dtype_is_traced_in_it(trace):
    names = ("embedding.weight", "mix.weight", "mix.bias", "head.weight", "head.bias")
    found = trace(dtypes=dict.fromkeys(names, "bfloat16"))
    assert {slot.dtype for slot in found.slots} == {"bfloat16"}
    with pytest.raises(BundleRejected, match="has a bfloat16 tensor nobody"):
        trace(dtypes={"nobody": "bfloat16"})


STRANGE = [
    ("pass", "ended without a result"),
    ("os.kill(os.getpid(), 9)", "ended without a result"),
    ("open('result.json', 'w').write('[]')", "sent what no bundle sends"),
    ("open('result.json', 'wb').write(b'[' * 100_000)", "sent what no bundle sends"),
    ("open('result.json', 'wb').truncate(1 << 29)", r"has 536,870,912 bytes"),
    ("os.symlink('/etc/passwd', 'result.json')", "left no file result.json"),
    ("os.symlink('job.json', 'result.json')", "left no file result.json"),
    ("os.mkfifo('result.json')", "has 0 bytes"),
    ("os.mkdir('result.json')", "result.json"),
    ("result(16)", "other programs than it was asked for"),
    ("result(32, 16)", "other programs than it was asked for"),
    ("result(16, 32)", "left no file width-16.json"),
    ("result(16, 32)\nos.symlink('job.json', 'width-16.json')", "left no file width-16.json"),
    ("result(16, 32)\nos.mkfifo('width-16.json')", "has 0 bytes"),
    ("result(16, 32)\nopen('width-16.json', 'wb').truncate(1 << 29)", "width-16.json has 536,870,912"),
    ("result(16, 32, import_s=-1.0)", "TraceResult.import_s"),
    ("result(16, 32, import_s=1e400)", "TraceResult.import_s"),
    ("result(16, 32, more=1)", "TraceResult.more"),
    ("result(fault={'kind': 'engine', 'message': 'disk full', 'rule': 'prism:mine'})", "disk full"),
    ("result(fault={'kind': 'engine', 'message': 'x\\x1b[2J\\ny', 'rule': None})", r"x \[2J y"),
]


@pytest.mark.parametrize(("code", "words"), with_the_rest_long(STRANGE))
def test_what_a_tracer_leaves_is_taken_as_a_strangers(trace, code, words):
    with pytest.raises(BundleFailed, match=words):
        trace(RESULT + instead(code))


# Honest files, and then something about them that is not.
AFTERWARDS = """
import atexit, os, threading
def later():
    {code}
real = os._exit
def leave(number):
    later()
    real(number)
if "harness.tracer" in open("/proc/self/cmdline").read().replace("\\0", " "):
    os._exit = leave
"""


CHANGED = [
    ("os.truncate('initial_state.bin', 64)", BundleFailed, "initial_state.bin has 64 bytes"),
    ("os.truncate('initial_state.bin', 1 << 29)", BundleFailed, "initial_state.bin has 536,870,912"),
    ("os.rename('width-16.json', 'width-32.json')", BundleFailed, "left no file width-16.json"),
    ("open('width-16.json', 'ab').write(b' ')", BundleRejected, "canonical form|constants"),
    ("import shutil; shutil.copy('width-16.json', 'width-32.json')", BundleFailed, "not of one model"),
    ("open('width-16.safetensors', 'ab').write(b'more')", BundleRejected, "canonical form|constants"),
    ("os.unlink('width-16.safetensors')", BundleFailed, "left no file width-16.safetensors"),
    (
        "text = open('width-16.json').read(); "
        "open('width-16.json', 'w').write(text.replace('aten.tanh.default', 'aten.rand_like.default'))",
        BundleRejected,
        "aten.rand_like.default is not an operator",
    ),
    (
        "text = open('width-16.json').read(); open('width-16.json', 'w').write(text.replace('50304', '999999999'))",
        BundleFailed,
        "not of one model",
    ),
]


@pytest.mark.parametrize(("code", "kind", "words"), with_the_rest_long(CHANGED))
def test_files_changed_once_they_are_written_are_refused(trace, code, kind, words):
    with pytest.raises(kind, match=words):
        trace(AFTERWARDS.format(code=code) + TINY_ARCHITECTURE)


def test_a_state_beyond_what_is_shared_is_refused(trace):
    wide = TINY_ARCHITECTURE.replace(
        "nn.init.normal_", "self.register_buffer('wide', torch.zeros(1).expand(1 << 42)); nn.init.normal_"
    )
    with pytest.raises((BundleRejected, BundleFailed)) as failure:
        trace(wide)
    assert failure.value.rule in (
        "prism:param-cap",
        "prism:resource-oom",
        "prism:artifacts-quota",
        "prism:runtime-error",
    )


def test_build_model_without_an_end_is_over_the_budget(trace):
    with pytest.raises(BudgetExceeded, match="still running"):
        trace("import time; time.sleep(600)\n" + TINY_ARCHITECTURE, seconds=5)


def test_what_build_model_raises_is_named_with_its_line(trace):
    with pytest.raises(BundleFailed, match=r"architecture\.py line \d+: ZeroDivisionError"):
        trace(TINY_ARCHITECTURE.replace("    return Tiny(ctx.vocab_size)", "    return 1 / 0"))
    with pytest.raises(BundleRejected, match=r"architecture.py:\d+") as failure:
        trace(TINY_ARCHITECTURE.replace("return self.head(", "tokens.sum().item() or 1\n        return self.head("))
    assert failure.value.rule == "prism:not-exportable"


FORKS = """
import os, time
if "harness.tracer" in open("/proc/self/cmdline").read().replace("\\0", " "):
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.execv("/bin/sleep", ["sleep", "7654.25"])
    time.sleep(0.3)
"""


def daemons() -> list[int]:
    return [process.pid for process in living() if "7654.25" in process.words]


@sandboxed
@pytest.mark.parametrize("ending", ["", "os._exit(0)\n", "time.sleep(600)\n"], ids=["honest", "exits", "hangs"])
def test_children_that_a_tracer_leaves_behind_are_gone_before_anything_is_read(trace, ending):
    adopt_orphans()
    try:
        trace(FORKS + ending + TINY_ARCHITECTURE, seconds=20 if "sleep" not in ending else 8)
    except BundleFailed as error:
        assert ending, error
    end = monotonic() + 10
    while daemons() and monotonic() < end:  # the kernel takes a moment for the rest of a PID space
        time.sleep(0.05)
    assert not daemons()


@sandboxed
def test_a_tracer_sees_its_script_and_no_more(trace):
    looking = """
import os
if "harness.tracer" in open("/proc/self/cmdline").read().replace("\\0", " "):
    here = os.path.dirname(__file__)
    assert os.listdir(here) == ["architecture.py"], os.listdir(here)
    assert sorted(os.listdir(".")) == ["job.json"], os.listdir(".")
    assert not [k for k in os.environ if k.startswith("PRISM_")], os.environ
    import stat
    for fd in range(3, 64):
        try:
            assert not stat.S_ISSOCK(os.fstat(fd).st_mode), fd
        except OSError:
            pass
"""
    assert trace(looking + TINY_ARCHITECTURE, widths=(16,)).programs
