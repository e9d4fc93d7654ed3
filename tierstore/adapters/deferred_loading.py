"""Defer work while a library loads a model, to keep little of the model in memory at once.

A `LoadingMode` intercepts every torch operation on the loading thread:

- A cast of a mapped weight is recorded, and the tensor stays unchanged. Weights are cast later,
  group by group; an operation that reads such a tensor before then uses its cast.
- A stack or concatenation of whole mapped weights (as for stacked experts) is computed when it is
  first read. The result is stored under a name derived from its inputs; on the next start it is
  found by that name, and the inputs are never read.
- Any other large result is placed in an anonymous file.

Work that libraries themselves defer, such as quantisation, is in `Library.loading`.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from tierstore.adapters.codecs.memory import address_of, has_address, span, tensor_bytes
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.codecs.wrapper import is_wrapper
from tierstore.adapters.compat import Deferred, loading
from tierstore.adapters.contents import tensors_of
from tierstore.engine.groups import Groups
from tierstore.engine.in_place_groups import derivation_of
from tierstore.system.maps import AddressSpace
from tierstore.torch_private import (
    TorchDispatchMode,
    is_conversion,
    is_view,
    may_share_memory,
    mutates_arguments,
    tree_map_only,
)

T = TypeVar("T")

MIN_FILE_BYTES = 1 << 20
"""Minimum bytes of a tensor to place it in a file."""
MIN_DEFERRED_BYTES = 64 << 10
"""Minimum bytes of a concatenation to defer it."""

_JOINS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.stack.default: torch.stack,
    torch.ops.aten.cat.default: torch.cat,
}


class _AddressMap(Generic[T]):
    """Values by tensor memory; ranges do not overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._values: dict[int, tuple[int, T]] = {}  # start address: end address, value

    def add(self, tensor: torch.Tensor, value: T) -> None:
        start = address_of(tensor)
        bisect.insort(self._starts, start)
        self._values[start] = start + tensor_bytes(tensor), value

    def at(self, tensor: torch.Tensor) -> T | None:
        """Return the value of the range in which a tensor begins; None if there is none."""
        if not self._starts:
            return None
        address = address_of(tensor)
        at = bisect.bisect_right(self._starts, address) - 1
        end, value = self._values[self._starts[at]] if at >= 0 else (0, None)
        return value if address < end else None

    def remove(self, start: int) -> None:
        del self._values[start]
        self._starts.remove(start)

    def newest_first(self) -> list[tuple[int, T]]:
        return [(start, value) for start, (_, value) in reversed(self._values.items())]


@contextmanager
def intercepted(allocate_file_memory: Callable[[int], memoryview]) -> Iterator[LoadingMode]:
    """Intercept model loading on the calling thread only, and yield the `LoadingMode`."""
    with loading() as deferred, LoadingMode(allocate_file_memory) as mode:
        mode.deferred = deferred
        yield mode


class LoadingMode(TorchDispatchMode):
    """Defers work on the thread that enters it, as described above.

    `allocate_file_memory(nbytes)` allocates memory in a file. `deferred` is the work that
    libraries defer.
    """

    def __init__(self, allocate_file_memory: Callable[[int], memoryview]) -> None:
        super().__init__()
        self.deferred: list[Deferred] = []
        self._file_memory = allocate_file_memory
        self._space: AddressSpace | None = None
        self._casts = _AddressMap[torch.dtype]()
        self.concats = DeferredConcat(allocate_file_memory, self._dtype_of)

    def pending(self, model: nn.Module) -> dict[int, torch.dtype]:
        """Return the dtypes that parameters and buffers (by id) are still to be cast to."""
        tensors = tensors_of(model)
        found = {id(tensor): self._dtype_of(tensor) for tensor in tensors}
        return {number: dtype for number, dtype in found.items() if dtype is not None}

    def finish(
        self, groups: Groups, models: Sequence[nn.Module], target: int
    ) -> dict[int, torch.dtype]:
        """Do the deferred work for these models, with up to `target` bytes of weights at a time.

        Casts are left to the caller. Returns the dtypes to cast tensors (by id) to.
        """
        self.concats.finish(groups, models)
        casts = {number: dtype for each in models for number, dtype in self.pending(each).items()}
        for deferred in self.deferred:
            deferred.finish(groups, casts, target)
        return casts

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if is_conversion(function) and self._defer_cast(*args, **kwargs):
            return args[0].detach()
        if (joined := self.concats.join(function, *args, **kwargs)) is not None:
            return joined
        if is_view(function):
            return function(*args, **kwargs)
        self.concats.fill_for(function, args, kwargs)
        if may_share_memory(function):  # an operation in place
            return function(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        return tree_map_only(torch.Tensor, self._in_file_if_large, function(*args, **kwargs))

    def _defer_cast(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **options: Any,
    ) -> bool:
        """Record an operation if it only casts a mapped tensor. Return whether it was recorded."""
        if dtype is None or not dtype.is_floating_point or not tensor.is_floating_point():
            return False
        if (device is not None and torch.device(device).type != "cpu") or not _is_plain(tensor):
            return False
        if not tensor.is_contiguous() or any(options.get(n) for n in ("pin_memory", "layout")):
            return False
        if (before := self._dtype_of(tensor)) is not None:
            return before is dtype  # requested again, as the tensor's dtype has not changed yet
        if not self._is_in_file(tensor):
            return False
        self._casts.add(tensor, dtype)
        return True

    def _is_in_file(self, tensor: torch.Tensor) -> bool:
        where = address_of(tensor), tensor_bytes(tensor)
        if self._space is not None and self._space.extent_at(*where) is not None:
            return True
        self._space = AddressSpace()  # files may have been mapped since
        return self._space.extent_at(*where) is not None

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype | None:
        """Return the dtype that a tensor is still to be cast to; None if there is none."""
        dtype = self._casts.at(tensor) if _is_plain(tensor) else None
        return None if dtype is tensor.dtype else dtype

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype_of(tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def _in_file_if_large(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor, moved into a file if it is large."""
        nbytes = tensor_bytes(tensor) if _is_plain(tensor) else 0
        if nbytes < MIN_FILE_BYTES or span(tensor) != nbytes:
            return tensor
        memory = torch.frombuffer(self._file_memory(nbytes), dtype=torch.uint8)
        return memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride()).copy_(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and has_address(tensor)
        and not is_wrapper(tensor)
        and tensor.numel() > 0
    )


@dataclass(eq=False)
class _Concat:
    """A concatenation whose bytes are missing until `parts` are joined into `result`.

    Each part has the dtype to cast it to, or None. `derivation` identifies the inputs. `memory` is
    a weak reference to the memory of `result`, which lives as long as any view of it.
    """

    result: torch.Tensor
    memory: weakref.ref[memoryview]
    join: Callable[..., torch.Tensor]
    dim: int
    derivation: str
    parts: list[tuple[torch.Tensor, torch.dtype | None]] = field(default_factory=list)


class DeferredConcat:
    """The concatenations deferred while a model is loaded.

    `allocate_file_memory(nbytes)` allocates memory in a file; `dtype_of` returns the dtype that a
    part is still to be cast to, or None.
    """

    def __init__(
        self,
        allocate_file_memory: Callable[[int], memoryview],
        dtype_of: Callable[[torch.Tensor], torch.dtype | None],
    ) -> None:
        self._file_memory = allocate_file_memory
        self._dtype_of = dtype_of
        self._concats = _AddressMap[_Concat]()

    def join(
        self, function: Any, tensors: Any = (), dim: int = 0, *_: Any, **options: Any
    ) -> torch.Tensor | None:
        """Defer an operation that joins whole mapped weights and return its result; else None."""
        join = _JOINS.get(function)
        if (
            join is None
            or options
            or not all(t.device.type == "cpu" and t.numel() for t in tensors)
        ):
            return None
        parts = [(tensor, self._dtype_of(tensor)) for tensor in tensors]
        dtypes = {dtype or tensor.dtype for tensor, dtype in parts}
        if len(dtypes) > 1:
            return None
        shape = join([torch.empty_like(t, device="meta") for t in tensors], dim).shape
        dtype = dtypes.pop()
        nbytes = shape.numel() * dtype.itemsize
        if (
            nbytes < MIN_DEFERRED_BYTES
            or (derivation := self._derivation(parts, f"{function} {dim}")) is None
        ):
            return None
        memory = self._file_memory(nbytes)
        result = torch.frombuffer(memory, dtype=dtype).view(shape)
        ref = weakref.ref(memory)
        self._concats.add(result, _Concat(result, ref, join, dim, derivation, parts))
        return result.detach()

    def _derivation(
        self, parts: list[tuple[torch.Tensor, torch.dtype | None]], made: str
    ) -> str | None:
        of_files: dict[str, torch.Tensor] = {}
        casts: dict[str, torch.dtype] = {}
        inner: list[str] = []
        for number, (tensor, dtype) in enumerate(parts):
            joined = self._concats.at(tensor)
            if joined is None:
                of_files[str(number)] = tensor
                casts |= {} if dtype is None else {str(number): dtype}
            elif _is_all_of(tensor, joined):
                inner.append(f"{number} {joined.derivation}")
            else:
                return None
        return derivation_of(of_files, casts, f"{made} {inner}")

    def fill_for(self, function: Any, args: Any, kwargs: Any) -> None:
        """Fill in the concatenations that an operation reads or changes."""
        if mutates_arguments(function):
            tree_map_only(torch.Tensor, self.change, args[:1])
        tree_map_only(torch.Tensor, self.fill, (args, kwargs))

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, after filling in its bytes."""
        joined = self._concats.at(tensor)
        if joined is not None:
            self._fill(joined)
        return tensor

    def _fill(self, joined: _Concat) -> None:
        if joined.parts:
            values = [self.fill(t) if dtype is None else t.to(dtype) for t, dtype in joined.parts]
            joined.join(values, joined.dim, out=joined.result)
            joined.parts = []

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill in a tensor that is about to be changed, stop tracking it, and return it."""
        joined = self._concats.at(tensor)
        if joined is not None:
            self._fill(joined)
            self._concats.remove(address_of(joined.result))
        return tensor

    def finish(self, groups: Groups, models: Sequence[nn.Module]) -> None:
        """Put the concatenated weights of these models into files of the store.

        Other concatenations are filled in if any view of them still exists.
        """
        tensors = [t for model in models for t in tensors_of(model)]
        for tensor in dict((id(t), t) for t in tensors).values():
            joined = self._concats.at(tensor) if tensor.device.type == "cpu" else None
            if joined is not None and _is_all_of(tensor, joined):
                found = groups.get_derived(joined.derivation)
                if found is None:
                    self._fill(joined)
                    found = groups.put_derived(joined.derivation, {"": joined.result})
                assign(tensor, found[""].view(tensor.shape))
        for start, joined in self._concats.newest_first():  # before its own parts
            shape, dtype = joined.result.shape, joined.result.dtype
            del joined.result
            memory = joined.memory()
            if memory is not None:
                joined.result = torch.frombuffer(memory, dtype=dtype).view(shape)
                self._fill(joined)
            joined.parts = []
            del memory
            self._concats.remove(start)


def _is_all_of(tensor: torch.Tensor, joined: _Concat) -> bool:
    """Return whether a tensor is a whole concatenation, not a part of one."""
    result = joined.result
    return (
        address_of(tensor) == address_of(result)
        and tensor.is_contiguous()
        and tensor.dtype is result.dtype
        and tensor.numel() == result.numel()
    )
