"""What a model cannot be trained on a store with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tierstore.adapters.contents import modules_of, named_parameters_of
from tierstore.adapters.other_offloading import check_not_offloaded
from tierstore.adapters.training.sharded import sharded_modules
from tierstore.store import TierStore

# DistributedDataParallel and FSDP1 own the parameters and gradients of a model, and so does an
# OffloadModel. Whoever comes second would find tensors that the other one moves, without any error.
# FSDP2 asks for what it moves: see `tierstore.adapters.training.sharded`.
ADVICE = (
    "which keeps parameters and gradients of its own: to train on stores in several processes, "
    "apply torch.distributed.fsdp.fully_shard to the module before OffloadModel(module, store); "
    "its mesh says whether each process has a shard, or, as with DistributedDataParallel, all"
)
_SPREADING = ("torch.nn.parallel.", "torch.distributed.fsdp.")


def refuse_arguments(
    module: nn.Module,
    store: TierStore,
    device: torch.device | str | None,
    num_slices: int | None,
    num_microbatches: int,
) -> None:
    """Raise ValueError for arguments of an OffloadModel that cannot be."""
    if device is not None and _with_index(torch.device(device)) != _with_index(store.device):
        raise ValueError(
            f"device={device!s}, but the store serves {store.device}: open the store with "
            f"TierStore(..., device={str(device)!r})"
        )
    for name, value in (("num_slices", num_slices), ("num_microbatches", num_microbatches)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} is no positive whole number")
    check_not_offloaded(type(module).__name__, module)
    if (library := _spread_by(module)) is not None:
        raise ValueError(f"{type(module).__name__} is in {library}, {ADVICE}")
    for name, parameter in named_parameters_of(module):
        if parameter.device.type == "meta":
            raise ValueError(
                f"{name} is on meta and has no values: load them first, or build the module on "
                "the CPU"
            )


def _spread_by(module: nn.Module) -> str | None:
    """What a part of a model is wrapped in that spreads it over devices or processes: a class.

    It is known by where it is defined, so that nothing is imported for that.
    """
    sharded = set(sharded_modules(module))
    kinds = dict.fromkeys(type(part) for part in modules_of(module) if part not in sharded)
    bases = (base for kind in kinds for base in kind.__mro__)
    return next((base.__name__ for base in bases if base.__module__.startswith(_SPREADING)), None)


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    if ":" in str(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def refuse_spread_later(module: nn.Module, before: Iterable[nn.Module]) -> None:
    """Raise RuntimeError if a model in training on a store was spread over processes since. To
    these parts of it, `fully_shard` had been applied `before` it was."""
    later = set(sharded_modules(module)).difference(before)
    if later:
        raise RuntimeError(
            f"fully_shard was applied to a part of a model in training on a store "
            f"({type(later.pop()).__name__}): apply it before OffloadModel(module, store)"
        )
    if (library := _spread_by(module)) is not None:
        raise RuntimeError(f"a model in training on a store was given to {library} later, {ADVICE}")
