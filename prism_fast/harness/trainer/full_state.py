"""The state of a model however it is wrapped or sharded: every tensor of `state_dict()`, whole, by its own name.

Names are those of the module that `build_model` returned: what torch.compile, DDP, FSDP and checkpoint wrappers put
before them is left out. A plain model's tensors are the live ones. A sharded model's (FSDP, `fully_shard`) are gathered
from all ranks, which must ask for them together; its groups may go before its state is asked for the last time, so it
is kept when they do (`hold_all`).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prism_fast.protocol import constants as c
from prism_fast.protocol.errors import BundleFailed, BundleRejected, PrismError

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_made: list[weakref.ref[FullState]] = []  # in an order that is the same on every rank


class Holder(NamedTuple):
    """Where a state tensor hangs: `place[leaf]` is it, whoever has replaced it."""

    name: str
    place: dict[str, Any]
    leaf: str


class FullState:
    """The complete state of `model`, in state_dict order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sharded = is_sharded(model)
        self._holders: list[Holder] = []
        self._held: list[tuple[str, Tensor]] | None = None
        self._parameters = 0  # of a sharded model, once gathered
        self._views: Mapping[str, Tensor] = {}
        self._slots: list[tuple[dict[str, Any], str, Tensor, bool]] = []
        _made.append(weakref.ref(self))

    def tensors(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of every parameter and persistent buffer, tied ones under each of their names.

        Plain: the live tensors. Sharded: copies, gathered by all ranks together; once held, those kept.
        Raises BundleRejected for a tensor that has no shape yet, BundleFailed where the ranks cannot gather.
        """
        if self._held is not None:
            return self._held
        if self.sharded:
            return self._gather()
        try:
            return [(name, place[leaf]) for name, place, leaf in self._places()]
        except KeyError:  # a parametrization has taken its place since
            self._holders = []
            return [(name, place[leaf]) for name, place, leaf in self._places()]

    def hold(self) -> None:
        """Keeps a sharded model's state as it is now: it cannot be gathered any more once its groups are gone."""
        if self.sharded and self._held is None:
            self._held = self._gather()

    def parameter_count(self) -> int:
        """Elements of all distinct parameters, whole; gathers a sharded model's."""
        if self.sharded:
            if not self._parameters:
                self._gather()
            return self._parameters
        return sum(p.numel() for p in self.model.parameters() if not isinstance(p, nn.parameter.UninitializedParameter))

    # ------------------------------------------------------------------------------------------------ in shared memory

    def share(self, views: Mapping[str, Tensor]) -> None:
        """Lets the state live in `views`, by name: plain CPU parameters in place, so that a step writes there; whatever
        else is copied at each refresh. Raises BundleRejected unless they are the state's names and shapes."""
        require_declared(
            {name: tensor.shape for name, tensor in self.tensors()}, {name: view.shape for name, view in views.items()}
        )
        self._views = views
        if not self.sharded:
            self._slots = [
                (place, leaf, views[name], _stays(place[leaf], views[name])) for name, place, leaf in self._places()
            ]
        self.refresh()

    def refresh(self) -> None:
        """Brings the views up to date. A parameter whose storage was replaced is copied and shared again."""
        with torch.no_grad():
            if self.sharded:
                for name, tensor in self.tensors():
                    self._views[name].copy_(tensor)
                return
            for place, leaf, view, in_place in self._slots:
                tensor = place[leaf]
                if not in_place:
                    view.copy_(tensor)
                elif tensor.data_ptr() != view.data_ptr():
                    view.copy_(tensor)
                    tensor.data = view

    # ------------------------------------------------------------------------------------------------------- gathering

    def _places(self) -> list[Holder]:
        if not self._holders:
            self._holders = list(holders(self.model))
            for name, place, leaf in self._holders:
                refuse_lazy(name, place[leaf])
        return self._holders

    def _gather(self) -> list[tuple[str, Tensor]]:
        try:
            with torch.no_grad(), _unsharded(self.model) as copied:
                whole: dict[int, Tensor] = {}
                found, count = [], 0
                for name, place, leaf in holders(self.model):
                    tensor = place[leaf]
                    if id(tensor) not in whole:
                        full = full_tensor(tensor).detach()
                        full = full.clone() if copied and full.data_ptr() == tensor.data_ptr() else full
                        if isinstance(tensor, nn.Parameter):
                            count += full.numel()
                            full = nn.Parameter(full, requires_grad=False)
                        whole[id(tensor)] = full
                    found.append((name, whole[id(tensor)]))
        except (PrismError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise BundleFailed(
                f"the sharded model's state could not be gathered from all ranks: {type(error).__name__}: "
                + " ".join(str(error).split())[:300],
                rule=c.RULE_RUNTIME_ERROR,
            ) from error
        self._parameters = count
        return found


def hold_all() -> None:
    """Every sharded state there is, before the process groups that would gather it go."""
    for made in _made:
        state = made()
        if state is not None:
            state.hold()


def holders(module: nn.Module, prefix: str = "") -> Iterator[Holder]:
    """Parameters and persistent buffers in state_dict order, wrappers left out of their names."""
    inner = wrapped_module(module)
    if inner is not None:
        yield from holders(inner, prefix)
        return
    for leaf, tensor in module._parameters.items():
        if tensor is not None:
            yield Holder(prefix + leaf, module._parameters, leaf)
    for leaf, buffer in module._buffers.items():
        if buffer is not None and leaf not in module._non_persistent_buffers_set:
            yield Holder(prefix + leaf, module._buffers, leaf)
    for name, child in module._modules.items():
        if child is not None:
            yield from holders(child, f"{prefix}{name}.")


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """The module that `module` wraps; None where it wraps nothing."""
    children = module.__dict__.get("_modules", {})
    for name in _WRAPPED:
        if isinstance(children.get(name), nn.Module):
            return children[name]  # type: ignore[no-any-return]
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return children["module"]  # type: ignore[no-any-return]
    return None


def plain_model(model: nn.Module) -> nn.Module:
    """The module under torch.compile, DDP and FSDP wrappers: the one `build_model` declared."""
    while (inner := wrapped_module(model)) is not None:
        model = inner
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP or `fully_shard` has spread the model's state over ranks."""
    kinds = _fsdp_kinds()
    return any(isinstance(m, kinds) for m in model.modules()) or any(_is_dtensor(p) for p in model.parameters())


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor whole: a DTensor is gathered, by all ranks together."""
    return tensor.full_tensor() if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def refuse_lazy(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
        raise BundleRejected(
            f"the model's {name} is lazy, of no shape yet; expected build_model(ctx) to return it materialised",
            rule=c.RULE_MODEL_MISMATCH,
        )


def require_declared(found: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
    """Raises BundleRejected (`prism:model-mismatch`) unless both name the same tensors, of the same shapes.

    `found`, `declared`: shapes by name, of the state that was trained and of `build_model`'s own.
    """
    for problem, names in (
        ("the trained state is missing", declared.keys() - found.keys()),
        ("build_model(ctx) does not know", found.keys() - declared.keys()),
        (
            "build_model(ctx) has in another shape",
            {n for n in declared.keys() & found.keys() if tuple(declared[n]) != tuple(found[n])},
        ),
    ):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (" ..." if len(names) > 3 else "")
            raise BundleRejected(
                f"the trained model is not the one build_model(ctx) declares: {problem} {shown}",
                rule=c.RULE_MODEL_MISMATCH,
            )


def _stays(tensor: Tensor, view: Tensor) -> bool:
    """Whether a parameter can be made a view of the place it is shown in."""
    return type(tensor) is nn.Parameter and tensor.device.type == "cpu" and tensor.dtype == view.dtype


def _fsdp_kinds() -> tuple[type, ...]:
    module = sys.modules.get("torch.distributed.fsdp")  # what is not loaded wraps nothing
    names = ("FullyShardedDataParallel", "FSDPModule")
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@contextlib.contextmanager
def _unsharded(model: nn.Module) -> Iterator[bool]:
    """The block sees FSDP's whole parameters, and must copy what it keeps (True); those of `fully_shard` as DTensors,
    whatever an earlier forward has left gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        yield False
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
    if any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        with fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            yield True
    else:
        yield False
