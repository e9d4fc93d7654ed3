"""Addresses, sizes and geometry of tensors in their storages."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tierstore.model import shares
from tierstore.system.views import set_storage
from tierstore.torch_private import negative_view, storage_at, storage_id

ALIGNMENT = 64
"""Alignment in bytes of a slice's start, as for torch's CPU memory."""


def has_address(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements at an address, unlike sparse and nested tensors."""
    return tensor.layout is torch.strided and not tensor.is_nested


METADATA_METHODS = frozenset(
    ("data_ptr", "dim", "element_size", "is_contiguous", "is_floating_point", "numel", "stride")
)
"""Methods of a tensor that do not read its elements."""


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element; 0 if it has none."""
    return tensor.data_ptr()


def storage_address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper tensor
        return 0


def storage_id_of(tensor: torch.Tensor) -> int:
    """Return a number that is unique to a tensor's storage while the storage exists."""
    return storage_id(tensor.untyped_storage())


def storage_reference(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
    """Return a weak reference to a tensor's storage, which lives as long as any tensor on it."""
    return weakref.ref(tensor.untyped_storage())


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of the same dtype and shape are bit-equal.

    `torch.equal` does not support all dtypes, and treats -0 and 0 as equal.
    """
    rows = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*rows)


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of bytes of tensors, each address counted once."""
    return sum({t.data_ptr(): tensor_bytes(t) for t in tensors if has_address(t)}.values())


def span(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last one."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def owns_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers all of its storage, each element once."""
    return tensor.untyped_storage().nbytes() == tensor_bytes(tensor) == span(tensor)


def over(tensor: torch.Tensor, holder: object = None) -> torch.Tensor:
    """Return a tensor over the same memory with a separate storage, which keeps `holder` alive.

    Saving a tensor saves its whole storage, and a view of a part keeps the whole storage alive; a
    separate storage covers only this tensor. Without a holder, the original storage is kept alive.
    """
    if not tensor.numel():
        return tensor
    storage = storage_at(tensor.data_ptr(), tensor.device, span(tensor))
    vars(storage)["holder"] = tensor.untyped_storage() if holder is None else holder
    alone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alone.set_(storage, 0, tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layout of a tensor in its storage. `offset` and `stride` are in elements.

    Sufficient to rebuild the tensor over another copy of the bytes. Strides are preserved, as a
    contiguous copy could select other kernels in math libraries and change the last bits.
    """

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @property
    def distinct_bytes(self) -> int:
        """Bytes of the elements; those repeated by a stride of 0 are counted once."""
        rows = zip(self.size, self.stride, strict=True)
        return self.dtype.itemsize * math.prod(size if stride else 1 for size, stride in rows)

    def span(self, nbytes: int) -> tuple[int, int]:
        """Return the byte range (start, stop) to save, of a storage of `nbytes` bytes.

        This is the whole storage, unless the tensor is a narrow slice of it.
        """
        if 0 in self.size:
            return 0, 0
        rows = zip(self.size, self.stride, strict=True)
        last = self.offset + sum((size - 1) * stride for size, stride in rows)
        start = self.offset * self.dtype.itemsize // ALIGNMENT * ALIGNMENT
        stop = (last + 1) * self.dtype.itemsize
        return (start, stop) if (stop - start) * shares.COVERAGE < nbytes else (0, nbytes)

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor with the same shape and strides."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def over(
        self,
        storage: torch.UntypedStorage,
        start: int = 0,
        counted: Callable[[torch.Tensor], torch.Tensor] = lambda bare: bare,
    ) -> torch.Tensor:
        """Rebuild the tensor over a storage whose first byte was byte `start` of the original.

        `counted` may replace the tensor by one with the same memory, before the conjugate and
        negative bits are set.
        """
        bare = torch.empty(0, dtype=self.dtype, device=self.device)
        offset = self.offset - start // self.dtype.itemsize
        set_storage(bare, storage, offset, self.size, self.stride)
        tensor = counted(bare)
        if self.conjugated:
            tensor = tensor.conj()
        return negative_view(tensor) if self.negated else tensor

    def within(self, tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Rebuild the tensor over the storage of another one. See `over`."""
        return self.over(tensor.untyped_storage(), start)


def geometry_at(tensor: torch.Tensor) -> tuple[int, Geometry]:
    """Return the storage address and geometry of a plain tensor."""
    return storage_address_of(tensor), geometry_of(tensor)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return the geometry of a plain strided tensor."""
    return Geometry(
        tensor.dtype,
        tensor.device,
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )
