"""An evaluator: runs architecture.py alone, answers tokens with logits. `-m prism_fast.harness.executor.evaluator FD`.

It is not trusted and need not be: it has no targets, no training code and no way to write to the weights it reads.
Its model is built by `build_model` under the forced seed; the trainer's state is adopted by name (ADOPT), after which
every PREDICT is a forward of that state without gradient. Logits travel by shared memory, never through the socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from pathlib import Path
from time import perf_counter
from typing import Any

from prism_fast.harness.process import wire
from prism_fast.harness.process.die_with_parent import die_with_parent
from prism_fast.harness.process.limits import limit_process
from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleRejected

MAX_FILE_BYTES = 1 << 28  # of any one file, its log among them: compiled kernels are the most an evaluator writes


def main() -> int:
    die_with_parent()
    limit_process(MAX_FILE_BYTES)
    channel = wire.Channel(socket.socket(fileno=int(sys.argv[1])))
    frame = channel.receive()
    job = frame.json()
    try:
        serve(channel, job)
        return 0
    except wire.PeerClosed:
        return 0
    except BaseException as e:
        from prism_fast.harness.trainer.runner import explain

        rule, kind, message = explain(e, job)
        channel.send_json(wire.FAULT, {"rule": rule, "kind": kind, "message": message})
        with contextlib.suppress(OSError):  # the log may be what is full
            traceback.print_exc()
        return 1


def serve(channel: wire.Channel, job: dict[str, Any]) -> None:
    """Answers frames until the referee closes the channel."""
    import torch

    from prism_fast.data.tokenizers import reference_tokenizer
    from prism_fast.harness.hosting.context_engine import Engine, import_architecture, make_context
    from prism_fast.harness.process.seeding import seed_everything, set_deterministic
    from prism_fast.harness.process.shared_memory import SharedRegion
    from prism_fast.harness.process.state_layout import Adopter, from_json
    from prism_fast.harness.trainer.head_capture import forward_to_head, is_compiled
    from prism_fast.harness.trainer.predictor import EvalMode, check_parameter_cap, logits_of
    from prism_fast.harness.trainer.runner import resolve_device
    from prism_fast.protocol.run_spec import RunSpec

    spec = RunSpec.model_validate(job["spec"])
    device = resolve_device(spec.device, job["local_rank"])
    set_deterministic(spec.torch_threads, spec.deterministic_algorithms)
    seed_everything(spec.seed)
    channel.send(wire.IMPORTING)
    architecture = import_architecture(Path(job["bundle_dir"]), spec.seed)
    context = make_context(
        spec,
        Engine(architecture, reference_tokenizer(spec.tokenizer)),
        data_dir="",
        artifacts_dir="",
        tokenizer_dir=job["tokenizer_dir"],
        rank=job["rank"],
        local_rank=job["local_rank"],
        world_size=spec.world_size,
        device=str(device),
    )
    model = architecture.build_model(context)
    if not isinstance(model, torch.nn.Module):
        raise BundleRejected(
            f"build_model(ctx) returned a {type(model).__name__}; expected a torch.nn.Module", rule=c.RULE_BUNDLE_SHAPE
        )
    model = model.to(device)
    check_parameter_cap(model, spec.max_parameters, spec.param_ladder_stage)
    channel.send_json(wire.BORN, {"device": str(device)})

    forward = EvalMode(model)
    never_fused = "accelerator" if device.type != "cpu" else "compiled" if is_compiled(model) else None
    head_width = 0
    adopter: Adopter | None = None
    logits_region: SharedRegion | None = None
    while True:
        frame = channel.receive()
        if frame.kind == wire.ADOPT:
            assert frame.fd is not None
            request = frame.json()
            adopter = Adopter(model, from_json(request["layout"]), SharedRegion(frame.fd, writable=False))
            if request["check_init"] and (changed := adopter.differs_from_init()):
                raise BundleRejected(
                    f"the trainer's {changed} was not build_model(ctx)'s under the forced seed when the first batch "
                    "was asked for; a run starts from the forced init",
                    rule=c.RULE_FORCED_INIT,
                )
            adopter.adopt()
            forward = EvalMode(model)
            channel.send_json(wire.ADOPTED, {})
            continue
        if frame.kind != wire.PREDICT:
            raise wire.FrameError(f"frame of kind {frame.kind}")
        rows, width, autocast, fused = wire.PREDICT_RECORD.unpack_from(frame.body)
        began = perf_counter()
        tokens = torch.frombuffer(bytearray(frame.body[wire.PREDICT_RECORD.size :]), dtype=torch.int64)
        tokens = tokens.view(rows, width).to(device)
        if adopter is not None:
            adopter.refresh()
        told: dict[str, Any] = {}
        with torch.autocast(device.type, dtype=_autocast_dtype(autocast), enabled=autocast > 0):
            head = None
            if fused and never_fused is None:
                output, head, told["plain"] = forward_to_head(forward, tokens, head_width)
                names = None if head is None else _names_of_head(model, head)
                if head is not None and names is None:
                    output, head, told["plain"] = forward(tokens), None, "not a parameter"
            else:
                output = forward(tokens)
                told["plain"] = never_fused
        if head is None:
            logits = logits_of(output, rows, width, 1)
            head_width = logits.shape[2]
        else:
            logits, told = head.hidden, {"head": names}
        check_parameter_cap(model, spec.max_parameters, spec.param_ladder_stage)
        described = {"dtype": str(logits.dtype).removeprefix("torch."), "shape": list(logits.shape), **told}
        size = logits.numel() * logits.element_size()
        if logits_region is None or logits_region.size < size:
            channel.send_json(wire.NEED, {**described, "bytes": size})
            answer = channel.receive()
            assert answer.kind == wire.REGION and answer.fd is not None
            logits_region = SharedRegion(answer.fd, writable=True)
        shared = logits_region.tensor(logits.dtype, tuple(logits.shape), _contiguous(logits.shape), 0)
        shared.copy_(logits)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        channel.send_json(wire.LOGITS, {**described, "forward_s": perf_counter() - began})


def _names_of_head(model: Any, head: Any) -> tuple[str, str | None] | None:
    """The names under which the referee has the head's weight and bias; None: it does not have them."""

    def key(tensor: Any) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

    state = model.state_dict(keep_vars=True)  # what the layout was made of
    names = {key(tensor): name for name, tensor in state.items() if tensor.__class__.__name__ == "Parameter"}
    weight = names.get(key(head.own_weight))
    bias = None if head.own_bias is None else names.get(key(head.own_bias))
    missing = weight is None or (head.own_bias is not None and bias is None)
    return None if missing else (weight, bias)  # type: ignore[return-value]


def _autocast_dtype(code: int) -> Any:
    import torch

    return torch.float16 if wire.AUTOCAST[code] == "float16" else torch.bfloat16


def _contiguous(shape: Any) -> tuple[int, ...]:
    _, width, vocabulary = shape
    return width * vocabulary, vocabulary, 1


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
