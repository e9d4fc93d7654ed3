"""Models that torch spreads over processes: none of them can be trained on a store as well.

DistributedDataParallel and FSDP own the parameters and gradients of a model, and so does an
OffloadModel. Whoever comes second would find tensors that the other one moves, without any error.
"""

from __future__ import annotations

from torch import nn

ADVICE = (
    "which keeps parameters and gradients of its own: train on a store in one process, or without "
    "a store in several"
)
_HOMES = ("torch.nn.parallel.", "torch.distributed.fsdp.")


def spread_by(module: nn.Module) -> str | None:
    """What a part of a model is wrapped in that spreads it over devices or processes: a class.

    It is known by where it is defined, so that nothing is imported for that.
    """
    kinds = dict.fromkeys(type(part) for part in module.modules())
    bases = (base for kind in kinds for base in kind.__mro__)
    return next((base.__name__ for base in bases if base.__module__.startswith(_HOMES)), None)
