"""What processes say to each other, each message a type: checked when it arrives, whoever sent it.

From a bundle's process nothing is believed but its form; what is not of this form is that bundle's fault
(`handling`), whatever was raised in taking it.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import (
    ArtifactsQuotaExceeded,
    BundleFailed,
    BundleRejected,
    EngineFault,
    PrismError,
    one_line,
)
from prism_fast.protocol.manifest import MachineBlock

MAX_BATCH_SIZE = 65535
MAX_MESSAGE = 2000

Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, lt=1 << 62)]
Rank = Annotated[int, Field(ge=0, lt=c.MAX_NPROC)]
Label = Annotated[str, Field(max_length=200)]
Name = Annotated[str, Field(max_length=512)]  # of a tensor of the state
Text = Annotated[str, Field(max_length=100_000)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


# ------------------------------------------------------------------------------------------------ trainer -> referee


class Hello(_Message):
    rank: Rank
    pid: int
    secret: Label
    device: Label
    machine: MachineBlock
    import_s: Seconds
    prepare_s: Seconds


class Started(_Message):
    rank: Rank
    bundle_import_s: Seconds


class ShareRequest(_Message):
    """What `iter_train_batches` was asked for, and the dtypes of the model's state and other buffers, by name."""

    batch_size: int
    seq_len: int
    basis: Literal["tokens", "bytes"]
    dtypes: dict[Name, Label] = Field(max_length=65_536)
    other_dtypes: dict[Name, Label] = Field(max_length=65_536)
    matmul_precision: Literal["highest", "high", "medium"]


class Trained(_Message):
    """`train(ctx)` returned; whatever follows is not its time."""

    rank: Rank
    stopped_reason: Label


class Fault(_Message):
    """How a process ended. `kind`: rejected, failed, quota or engine; it can name a rule, not put the blame on us."""

    kind: Label
    rule: Label | None = None
    message: Text
    traceback: str = Field(default="", max_length=1 << 20)
    rank: Rank | None = None

    def error(self, *, ours_possible: bool, prefix: str = "") -> PrismError:
        """The error to end with. `ours_possible`: no bundle code has run there yet."""
        message = one_line(f"{prefix}{self.message}"[: 2 * MAX_MESSAGE])[:MAX_MESSAGE] or "no reason given"
        if self.kind == "engine" and ours_possible:
            return EngineFault(message)
        known = self.rule if self.rule in c.RULES else c.RULE_RUNTIME_ERROR
        kinds = {"rejected": BundleRejected, "quota": ArtifactsQuotaExceeded}
        return kinds.get(self.kind, BundleFailed)(message, rule=known)


class OutsideState(_Message):
    """How far the live model is from a fresh one that holds the same state, and attributes in which the two differ."""

    differs: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    attributes: list[Annotated[str, Field(max_length=1000)]] = Field(max_length=100)


class Done(_Message):
    rank: Rank
    stopped_reason: Label
    returned: Text | None
    peak_rss_bytes: Bytes
    peak_vram_bytes: Bytes | None
    peak_vram_reserved_bytes: Bytes | None
    forward_flops: Bytes | None
    save_s: Seconds
    heldout: dict[str, Any] | None = None
    outside_state: OutsideState | None = None
    rank_report: dict[str, Any] | None = None


class RankFacts(_Message):
    """What a rank that is watched for the functional contract saw of itself: digests, in the order of its steps."""

    batches: list[Label] = Field(max_length=1 << 20)
    parameters: dict[Name, Label] = Field(max_length=65_536)
    parameters_sha256: Label
    sharded_parameters: int
    all_reduce_calls: int
    all_reduce_sha256: Label
    process_group_left: bool


def digest_of_tokens(tokens: Any) -> str:
    """Of a batch's int64 [B, L] array, shape and values."""
    return hashlib.sha256(repr(tokens.shape).encode() + tokens.astype("<i8").tobytes()).hexdigest()[:16]


class OpenModel(_Message):
    """Open mode: what is being trained, known at the first batch."""

    rank: Rank
    model_params: Bytes
    head_width: Annotated[int, Field(ge=1, lt=1 << 31)]
    batch_size: Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)]
    seq_len: Annotated[int, Field(ge=2, lt=1 << 31)]
    basis: Literal["tokens", "bytes"]
    plan: dict[Label, Any]
    backends: dict[Label, Label]


# ------------------------------------------------------------------------------------------------ tracer -> referee


class TraceJob(_Message):
    """What a tracer is to make programs of. `dtypes`: state tensors and buffers to cast, by name."""

    spec: dict[str, Any]
    bundle_dir: str
    tokenizer_dir: str
    out_dir: str
    widths: list[int]
    rows: int
    dtypes: dict[str, str] = {}
    compare: bool = True


class TracedProgram(_Message):
    width: int
    differs: float | None
    seconds: Seconds
    notes: list[Annotated[str, Field(max_length=1000)]] = Field(default=[], max_length=100)


class TraceResult(_Message):
    """Beside the files of a tracer that came to its end. `fault`: why there are none."""

    programs: list[TracedProgram] = Field(default=[], max_length=64)
    fault: Fault | None = None
    import_s: Seconds = 0.0
    build_s: Seconds = 0.0


# ----------------------------------------------------------------------------------------------- executor <-> referee


class LoadedProgram(_Message):
    """Where a program lies in the region that comes with it."""

    width: int
    program: tuple[int, int]
    constants: tuple[int, int]


class LoadJob(_Message):
    device: str
    local_rank: int
    torch_threads: int
    deterministic_algorithms: bool
    matmul_precision: str
    memory_bytes: int | None
    programs: list[LoadedProgram]
    token_bytes: tuple[int, int]  # int32 [n_vocab] in the region
    probe_share: float
    watch_buffers: bool = False  # whether buffers, once trained, could break the parameter cap: looked at in each batch
    may_tell: bool = False  # answers DETAIL: for audits


class Loaded(_Message):
    device: Label


class PredictRecord(NamedTuple):
    """Before tokens and targets, int64 [rows, width] each. `state`: of STATES; `autocast`: of wire.AUTOCAST."""

    rows: int
    width: int
    autocast: int
    state: int
    fresh: int  # whether the weights are to be copied first
    probe: int  # whether the answer may be probed


class ResultRecord(NamedTuple):
    """What comes out of an executor: sums in the order of marking.BatchSums, and what the probes found."""

    nats: float
    special_nats: float
    bytes: int
    scored_tokens: int
    special_tokens: int
    faults: int
    head_width: int
    trained_numbers: int  # numbers of buffers that are not the initial state's; 0 where it was not looked at
    probed_rows: int
    verdict: int  # of VERDICTS
    probe_mode: int  # of PROBE_MODES
    head: int  # of HEADS
    predict_s: float
    scoring_s: float
    probe_s: float


PREDICT = struct.Struct("<IIBBBB")
RESULT = struct.Struct("<ddQIIIIQIBBBfff")  # then, of held-out rows, float64 [rows]
STATES = ("live", "initial", "trained")
VERDICTS = (None, c.RULE_NONCAUSAL, c.RULE_NONDETERMINISTIC)
PROBE_MODES = ("none", "rows", "batches")
HEADS = ("logits", "hidden")


# ---------------------------------------------------------------------------------------------------------- handling

T = TypeVar("T", bound=_Message)


def read(kind: type[T], body: bytes) -> T:
    """A message of this type. Raises BundleFailed naming the field that is not as it must be."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise garbage(f"{kind.__name__}.{where}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise garbage(f"{kind.__name__}: {type(error).__name__}") from None


def garbage(what: str) -> BundleFailed:
    return BundleFailed(f"the bundle's process sent what no bundle sends: {what}"[:500], rule=c.RULE_RUNTIME_ERROR)


@contextlib.contextmanager
def handling(whose: str) -> Iterator[None]:
    """The outer rule: whatever is raised while a bundle's input is handled is that bundle's fault, by name.

    But for what is ours to say: a PrismError already names who is to blame, and an OSError is the machine's.
    """
    try:
        yield
    except (PrismError, OSError):
        raise
    except MemoryError:
        raise BundleFailed(f"{whose} asked for more memory than there is", rule=c.RULE_RESOURCE_OOM) from None
    except Exception as error:
        raise garbage(f"{whose}: {type(error).__name__}: {error}") from None
