"""FairScale's `OffloadModel` on a CPU, which it is not made for.

It refuses to be made where there is no CUDA. So what it asks CUDA for is patched here, in the
process that imports this, and only there: `is_available` says yes, streams and devices are objects
that do nothing, and `cuda()` and `pin_memory()` return what they are called on. Nothing of
FairScale itself is changed.

What is left computes what FairScale computes, in its order, slice by slice, with its own autograd
functions; but **it moves nothing**: the device and the place for what is not in use are the same
memory. Its time is that of its bookkeeping (and of computing again, with checkpoints), and its
memory that of a model which is all in RAM.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import nn


class _Nothing:
    """Takes anything and does nothing: a stream, or a device that was made the current one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _itself(this: Any, *args: Any, **kwargs: Any) -> Any:
    return this


def pretend_there_is_cuda() -> None:
    """Patch torch, for good."""
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda *args: None
    torch.cuda.Stream = torch.cuda.device = _Nothing  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.Tensor.cuda = torch.Tensor.pin_memory = _itself  # type: ignore[assignment, method-assign]
    nn.Module.cuda = _itself  # type: ignore[assignment, method-assign]


def offloaded(model: nn.Sequential, slices: int, checkpoint_activation: bool) -> nn.Module:
    """The model in FairScale's. Raises ImportError if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses names of torch that are going to go
        from fairscale.experimental.nn.offload import OffloadModel
    pretend_there_is_cuda()
    cpu = torch.device("cpu")
    made: nn.Module = OffloadModel(
        model,
        device=cpu,
        offload_device=cpu,
        num_slices=slices,
        checkpoint_activation=checkpoint_activation,
    )
    return made
