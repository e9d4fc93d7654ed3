"""Where a tensor's elements lie, and how it looks at its storage."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tierstore.model import shares
from tierstore.system.views import set_over
from tierstore.torch_private import negative_view, storage_at, storage_id

ALIGNMENT = 64
"""Bytes. A slice starts at a multiple of this, as memory on the CPU does."""


def has_address(tensor: torch.Tensor) -> bool:
    """Whether its elements lie somewhere: those of sparse or nested tensors lie in others."""
    return tensor.layout is torch.strided and not tensor.is_nested


OF_THE_FORM = frozenset(
    ("data_ptr", "dim", "element_size", "is_contiguous", "is_floating_point", "numel", "stride")
)
"""Methods by which a tensor tells of itself without its bytes being looked at."""


def address_of(tensor: torch.Tensor) -> int:
    """The address of its first element; 0 if it has none."""
    return tensor.data_ptr()


def storage_address_of(tensor: torch.Tensor) -> int:
    """The address of the storage that a tensor shows; 0 if it has none that can be told."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper around others
        return 0


def storage_id_of(tensor: torch.Tensor) -> int:
    """A number that no other storage has as long as this one is there."""
    return storage_id(tensor.untyped_storage())


def storage_reference(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
    """Return a weak reference to a tensor's storage, which lives as long as anything shows it."""
    return weakref.ref(tensor.untyped_storage())


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits. (`torch.equal` does not know
    all dtypes, and takes -0 for 0.)"""
    rows = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*rows)


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors, each address counted once."""
    return sum({t.data_ptr(): tensor_bytes(t) for t in tensors if has_address(t)}.values())


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def has_storage_of_its_own(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows all of its storage, each element once."""
    return tensor.untyped_storage().nbytes() == tensor_bytes(tensor) == span(tensor)


def over(tensor: torch.Tensor, holder: object = None) -> torch.Tensor:
    """A tensor over the same memory, as a storage of its own that keeps `holder`.

    Who saves a tensor saves its whole storage, and who looks at a part of it keeps all of it.
    Without a holder, it is the memory itself that is kept.
    """
    if not tensor.numel():
        return tensor
    storage = storage_at(tensor.data_ptr(), tensor.device, span(tensor))
    vars(storage)["holder"] = tensor.untyped_storage() if holder is None else holder
    alone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alone.set_(storage, 0, tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where a tensor's elements lie in its storage. `offset` and `stride` count elements.

    It is enough to build the tensor anew over another copy of the bytes. Strides come back as they
    were: a contiguous copy would take other ways through the math libraries, and change last bits.
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
        """Bytes of the elements, those that are repeated by a stride of 0 counted once."""
        rows = zip(self.size, self.stride, strict=True)
        return self.dtype.itemsize * math.prod(size if stride else 1 for size, stride in rows)

    def span(self, nbytes: int) -> tuple[int, int]:
        """The bytes to keep, of a storage of `nbytes` bytes: (start, stop). All of them, unless
        the tensor is a narrow slice."""
        if 0 in self.size:
            return 0, 0
        rows = zip(self.size, self.stride, strict=True)
        last = self.offset + sum((size - 1) * stride for size, stride in rows)
        start = self.offset * self.dtype.itemsize // ALIGNMENT * ALIGNMENT
        stop = (last + 1) * self.dtype.itemsize
        return (start, stop) if (stop - start) * shares.COVERAGE < nbytes else (0, nbytes)

    def empty(self) -> torch.Tensor:
        """A tensor with the same strides in memory of its own, of unknown values."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def over(
        self,
        storage: torch.UntypedStorage,
        start: int = 0,
        counted: Callable[[torch.Tensor], torch.Tensor] = lambda bare: bare,
    ) -> torch.Tensor:
        """The tensor, over a storage whose first byte was byte `start` of the original.

        `counted` may put another tensor of the same memory in its place, before it is seen as
        conjugated or negated.
        """
        bare = torch.empty(0, dtype=self.dtype, device=self.device)
        offset = self.offset - start // self.dtype.itemsize
        set_over(bare, storage, offset, self.size, self.stride)
        tensor = counted(bare)
        if self.conjugated:
            tensor = tensor.conj()
        return negative_view(tensor) if self.negated else tensor

    def within(self, tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The tensor, over the storage of another one. See `over`."""
        return self.over(tensor.untyped_storage(), start)


def geometry_at(tensor: torch.Tensor) -> tuple[int, Geometry]:
    """Where a plain tensor lies, and how it looks at its storage there."""
    return storage_address_of(tensor), geometry_of(tensor)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """How a plain strided tensor looks at its storage."""
    return Geometry(
        tensor.dtype,
        tensor.device,
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )
