"""Plain tensors: strided, of a dtype that safetensors knows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from tierstore.adapters.codecs.memory import has_address
from tierstore.adapters.codecs.wrapper import is_wrapper
from tierstore.system.views import NAMES, set_over
from tierstore.torch_private import like, swap


class PlainCodec:
    """A plain tensor is the only part of itself."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Whether it is strided memory of a dtype that has a name."""
        return (
            has_address(tensor)
            and not tensor.is_quantized
            and not is_wrapper(tensor)
            and tensor.dtype in NAMES
        )

    def flatten(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensor, outside of any graph, with an empty name."""
        return {"": tensor.detach()}

    def rebuild(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A tensor of the same class over the memory of the part."""
        return like(tensor, parts[""])

    def show(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """See `assign`."""
        assign(tensor, value)


def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let a plain `tensor` show the memory of `value`, on whatever device.

    It stays the same object.
    """
    try:
        tensor.data = value
    except RuntimeError:
        # Some accelerators outside of torch allow this only between tensors of their own.
        swap(tensor, like(tensor, value))


def replace_memory(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """As `assign`, and give back the memory that the tensor showed before, whoever else shows it.

    That of a storage which is somebody else's (of a map, of a store) stays.
    """
    before = tensor.untyped_storage()
    assign(tensor, value)
    if before.resizable():
        before.resize_(0)


@torch.inference_mode(mode=False)
def make_ordinary(tensor: torch.Tensor) -> None:
    """Let a tensor that was made in inference mode be one as any other, of the same memory.

    It stays the same object. It requires no gradient, so that torch computes as with the tensor
    that it was, whose views never do: whether they do decides which kernels torch chooses.
    """
    _swap(tensor, requires_grad=False)


@torch.inference_mode()
def make_inference(tensor: torch.Tensor, *, requires_grad: bool) -> None:
    """Let a tensor be as if made in inference mode, unless torch refuses that, as it does where a
    view has it."""
    with contextlib.suppress(RuntimeError):
        _swap(tensor, requires_grad=requires_grad)


def _swap(tensor: torch.Tensor, *, requires_grad: bool) -> None:
    """Let it be a tensor of the mode that is on, over the memory that it has."""
    alike = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    offset, size, stride = int(tensor.storage_offset()), tensor.shape, tensor.stride()
    set_over(alike, tensor.untyped_storage(), offset, size, stride)
    if isinstance(tensor, torch.nn.Parameter):
        alike = torch.nn.Parameter(alike, requires_grad=requires_grad)
    swap(tensor, alike)
