"""How a tensor looks at its storage: enough to build it anew over another copy of the bytes.

The bytes of a storage are copied, not the elements of a tensor. So views share one copy, expanded
tensors cost what they really hold, and strides come back as they were: a contiguous copy would
take other ways through the math libraries, and change last bits.
"""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef

ALIGNMENT = 64
"""Bytes. A slice starts at a multiple of this, as memory on the CPU does."""

COVERAGE = 4
"""One in so many bytes of a storage must be looked at for all of it to be copied."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where a tensor's elements lie in its storage. `offset` and `stride` count elements."""

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
        return (start, stop) if (stop - start) * COVERAGE < nbytes else (0, nbytes)

    def over(self, storage: torch.UntypedStorage, start: int, watch: Watch) -> torch.Tensor:
        """The tensor, over a storage whose first byte was byte `start` of the original.

        Changes of it count for `watch`: a backward pass may give a saved tensor away as a gradient,
        which is then changed, and it lies in memory that others will look at.
        """
        bare = torch.empty(0, dtype=self.dtype, device=self.device)
        bare.set_(storage, self.offset - start // self.dtype.itemsize, self.size, self.stride)
        tensor = watch.counted(bare)
        if self.conjugated:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.negated else tensor


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


def alive(storage: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage, if anybody still holds it."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    return found


class Watch:
    """Notices whether a tensor is changed in place, without holding its memory.

    Autograd looks after that itself, but not once there are hooks.
    """

    __slots__ = ("_counter", "_root", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.version = tensor._version
        # A tensor that shares the version counter, and nothing else.
        self._counter = tensor.detach()
        self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._root = weakref.ref(_root(tensor))

    def check(self, name: str) -> None:
        """Raise torch's own error if the tensor, called `name`, is not what it was."""
        if self._counter._version != self.version:
            with _probing:  # perhaps somebody was only trying
                refuse_changed(name, self._counter._version, self.version)

    def counted(self, bare: torch.Tensor) -> torch.Tensor:
        """The tensor, with the version counter that is watched."""
        tensor = self._counter.detach()
        tensor.data = bare
        return tensor

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether changes of `tensor`, which has the same memory, are noticed here.

        Views have the version counter of their base; but there are tensors that share memory and
        not its counter, such as `x.data`, or the gates that an LSTM cuts out of one tensor and
        changes one by one. Of two counters that say the same only one moves when it is told to.
        """
        if self._root() is _root(tensor):
            return True
        with _probing:
            before = tensor._version
            if self._counter._version != before:
                return False
            with _unsafe_preserve_version_counter(self._counter):
                torch.autograd.graph.increment_version(self._counter)
                return tensor._version != before


_probing = threading.Lock()


def _root(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def refuse_changed(name: str, now: int, then: int) -> None:
    """Raise torch's own error if a tensor of version `then` has become version `now`."""
    if now != then:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {name} is at version {now}; expected version {then} instead. Hint: enable "
            "anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


def described(tensor: torch.Tensor) -> str:
    """A tensor, in the words of autograd's errors."""
    plain = tensor.layout is torch.strided
    name = f"[{tensor.type() if plain else tensor.layout} {list(tensor.size())}]"
    if tensor.grad_fn is None:
        return name
    function = tensor.grad_fn.name().removesuffix("0").removesuffix("Backward")
    return f"{name}, which is output {tensor.output_nr} of {function},"
