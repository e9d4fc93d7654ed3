"""Codec for plain tensors: strided, with a dtype that safetensors supports."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from tierstore.adapters.codecs.memory import has_address
from tierstore.adapters.codecs.wrapper import is_wrapper
from tierstore.system.views import NAMES, set_storage
from tierstore.torch_private import like, swap


class PlainCodec:
    """Codec for plain tensors. The only part of a plain tensor is the tensor itself."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is strided memory with a supported dtype."""
        return (
            has_address(tensor)
            and not tensor.is_quantized
            and not is_wrapper(tensor)
            and tensor.dtype in NAMES
        )

    def flatten(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the detached tensor under an empty name."""
        return {"": tensor.detach()}

    def rebuild(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a tensor of the same class over the memory of the part."""
        return like(tensor, parts[""])

    def assign(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Point the tensor at other memory. See the function `assign`."""
        assign(tensor, value)


def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Point a plain `tensor` at the memory of `value`, on any device. It stays the same object."""
    try:
        tensor.data = value
    except RuntimeError:
        # Some out-of-tree accelerators allow this only between their own tensors.
        swap(tensor, like(tensor, value))


def replace_memory(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Assign a value, and free the tensor's previous storage, even if other tensors show it.

    A storage that torch does not own (of a map or a store) is not freed.
    """
    before = tensor.untyped_storage()
    assign(tensor, value)
    if before.resizable():
        before.resize_(0)


@torch.inference_mode(mode=False)
def make_ordinary(tensor: torch.Tensor) -> None:
    """Turn an inference tensor into an ordinary one over the same memory.

    It stays the same object. It does not require grad: views of inference tensors never do, and
    torch chooses kernels depending on that.
    """
    _swap(tensor, requires_grad=False)


@torch.inference_mode()
def make_inference(tensor: torch.Tensor, *, requires_grad: bool) -> None:
    """Turn a tensor into an inference tensor. Does nothing if torch raises, as for one with views.

    It stays the same object, over the same memory.
    """
    with contextlib.suppress(RuntimeError):
        _swap(tensor, requires_grad=requires_grad)


def _swap(tensor: torch.Tensor, *, requires_grad: bool) -> None:
    """Replace a tensor in place by one of the current inference mode, over the same memory."""
    alike = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    offset, size, stride = int(tensor.storage_offset()), tensor.shape, tensor.stride()
    set_storage(alike, tensor.untyped_storage(), offset, size, stride)
    if isinstance(tensor, torch.nn.Parameter):
        alike = torch.nn.Parameter(alike, requires_grad=requires_grad)
    swap(tensor, alike)
