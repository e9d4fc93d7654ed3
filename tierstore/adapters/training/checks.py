"""Argument checks of OffloadModel, and detection of other parallel wrappers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tierstore.adapters.contents import modules_of, named_parameters_of
from tierstore.adapters.other_offloading import check_no_part_offloaded
from tierstore.adapters.training.sharded import sharded_modules
from tierstore.store import TierStore

# DistributedDataParallel and FSDP1 own the parameters and gradients of a model, and so does an
# OffloadModel. Combined, each would silently move tensors that the other one uses. FSDP2 has hooks
# for the tensors that it gathers: see `tierstore.adapters.training.sharded`.
ADVICE = (
    "which owns the parameters and gradients itself: to train on stores in several processes, "
    "apply torch.distributed.fsdp.fully_shard to the module before OffloadModel(module, store); "
    "its mesh decides whether each process holds a shard or, as with DistributedDataParallel, "
    "a full replica"
)
_SPREADING = ("torch.nn.parallel.", "torch.distributed.fsdp.")


def check_training_arguments(
    module: nn.Module,
    store: TierStore,
    device: torch.device | str | None,
    num_slices: int | None,
    num_microbatches: int,
) -> None:
    """Raise ValueError for invalid arguments of OffloadModel."""
    if device is not None and _with_index(torch.device(device)) != _with_index(store.device):
        raise ValueError(
            f"device={device!s}, but the store serves {store.device}: open the store with "
            f"TierStore(..., device={str(device)!r})"
        )
    for name, value in (("num_slices", num_slices), ("num_microbatches", num_microbatches)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} is not a positive integer: pass 1 or more")
    check_no_part_offloaded(type(module).__name__, module)
    if (library := _parallel_wrapper_of(module)) is not None:
        raise ValueError(f"{type(module).__name__} is in {library}, {ADVICE}")
    for name, parameter in named_parameters_of(module):
        if parameter.device.type == "meta":
            raise ValueError(
                f"{name} is on meta and has no values: load them first, or build the module on "
                "the CPU"
            )


def _parallel_wrapper_of(module: nn.Module) -> str | None:
    """Return the name of a data-parallel wrapper class around a part of the model, or None.

    Classes are recognized by the name of their module, so torch.distributed is not imported.
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


def check_not_spread_later(module: nn.Module, before: Iterable[nn.Module]) -> None:
    """Raise RuntimeError if an OffloadModel was sharded or wrapped after its construction.

    `before` lists the modules to which `fully_shard` had been applied by then.
    """
    later = set(sharded_modules(module)).difference(before)
    if later:
        raise RuntimeError(
            f"fully_shard was applied to a part of an OffloadModel "
            f"({type(later.pop()).__name__}): apply it before OffloadModel(module, store)"
        )
    if (library := _parallel_wrapper_of(module)) is not None:
        raise RuntimeError(f"an OffloadModel was wrapped in {library}, {ADVICE}")
