"""A tracer: `python -m prism_fast.harness.tracer.main OUT_DIR`. Reads OUT_DIR/job.json; not for people.

The only process that runs architecture.py besides the trainer's: it builds the model under the forced seed, keeps its
initial state, and writes its eval forward as one program a width. It is given no text, no network and no artifacts, and
ends when the files are there; so what its code knows of the world is the scripts, the seed and the shapes.

    initial_state.bin          the state, as `shared_state.slots_of` lays the programs' state out
    width-<w>.json, .safetensors   the programs and their constants
    result.json                TraceResult, written last
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from time import perf_counter
from typing import Any

PROCESS_STARTED = perf_counter()

import orjson  # noqa: E402

from prism_fast.harness.process.die_with_parent import die_with_parent  # noqa: E402
from prism_fast.harness.process.jobs import TracedProgram, TraceJob, TraceResult  # noqa: E402
from prism_fast.harness.process.limits import limit_process  # noqa: E402
from prism_fast.protocol import constants as c  # noqa: E402
from prism_fast.protocol.errors import BundleRejected  # noqa: E402

MAX_STATE_FACTOR = 16  # bytes of state a parameter of the cap may take
MIN_FILE_BYTES = 1 << 30


def main() -> int:
    die_with_parent()
    out = Path(sys.argv[1])
    job = TraceJob.model_validate_json((out / "job.json").read_bytes())
    limit_process(max(MIN_FILE_BYTES, MAX_STATE_FACTOR * job.spec["max_parameters"]))
    try:
        result = trace(job)
        code = 0
    except BaseException as error:
        from prism_fast.harness.hosting.blame import fault_of

        with contextlib.suppress(OSError):
            traceback.print_exc()
        result = TraceResult(fault=fault_of(error, job.bundle_dir))
        code = 1
    (out / "result.json").write_bytes(orjson.dumps(result.model_dump(mode="json")))
    return code


def trace(job: TraceJob) -> TraceResult:
    import torch

    from prism_fast.data.tokenizers import reference_tokenizer
    from prism_fast.harness.hosting.context_engine import Engine, import_architecture, make_context
    from prism_fast.harness.process.devices import resolve_device
    from prism_fast.harness.process.seeding import seed_everything, set_deterministic
    from prism_fast.program.capture import capture, state_table, unwrapped
    from prism_fast.protocol.run_spec import RunSpec

    imported = perf_counter()
    spec = RunSpec.model_validate(job.spec)
    device = resolve_device(spec.device, 0)
    set_deterministic(spec.torch_threads, spec.deterministic_algorithms)
    seed_everything(spec.seed)
    architecture = import_architecture(Path(job.bundle_dir), spec.seed)
    context = make_context(
        spec,
        Engine(architecture, reference_tokenizer(spec.tokenizer)),
        data_dir="",
        artifacts_dir="",
        tokenizer_dir=job.tokenizer_dir,
        rank=0,
        local_rank=0,
        world_size=spec.world_size,
        device=str(device),
    )
    model = architecture.build_model(context)
    if not isinstance(model, torch.nn.Module):
        raise BundleRejected(
            f"build_model(ctx) returned a {type(model).__name__}; expected a torch.nn.Module", rule=c.RULE_BUNDLE_SHAPE
        )
    model = unwrapped(model).to(device)
    cast(model, job.dtypes)
    built = perf_counter()
    out = Path(job.out_dir)
    programs = []
    write_state(model, state_table(model), out / "initial_state.bin")
    for width in job.widths:
        began = perf_counter()
        captured = capture(
            model, width=width, rows=job.rows, device=device.type, bundle_dir=job.bundle_dir, compare=job.compare
        )
        (out / f"width-{width}.json").write_bytes(captured.program.to_bytes())
        (out / f"width-{width}.safetensors").write_bytes(captured.constants)
        programs.append(
            TracedProgram(
                width=width,
                differs=captured.differs,
                seconds=perf_counter() - began,
                notes=[note[:1000] for note in captured.notes[:100]],
            )
        )
    return TraceResult(programs=programs, import_s=imported - PROCESS_STARTED, build_s=built - imported)


def cast(model: Any, dtypes: dict[str, str]) -> None:
    """Gives parameters and buffers the dtypes that the trainer's model has, where they are not `build_model`'s."""
    import torch

    found = tensors_of(model)
    for name, dtype in dtypes.items():
        tensor, wanted = found.get(name), getattr(torch, dtype, None)
        if tensor is None or not isinstance(wanted, torch.dtype):
            raise BundleRejected(
                f"the model that is trained has a {dtype} tensor {name}, which build_model(ctx)'s has not",
                rule=c.RULE_MODEL_MISMATCH,
            )
        tensor.data = tensor.data.to(wanted)


def tensors_of(model: Any) -> dict[str, Any]:
    """Parameters and buffers by name, those outside the state dict too."""
    return {**dict(model.named_buffers(remove_duplicate=False)), **model.state_dict(keep_vars=True)}


def write_state(model: Any, state: Any, path: Path) -> None:
    """The state's bytes in the layout that the referee will compute from the same table."""
    import torch

    from prism_fast.harness.process.shared_state import region_bytes, slots_of

    slots, found = slots_of(state), tensors_of(model)
    with open(path, "wb") as file:
        file.truncate(region_bytes(slots))
        for slot in slots:
            if not slot.tied:
                tensor = found[slot.name].detach().to("cpu").contiguous().reshape(-1)
                file.seek(slot.offset)
                file.write(memoryview(tensor.view(torch.uint8).numpy() if tensor.numel() else b""))


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
