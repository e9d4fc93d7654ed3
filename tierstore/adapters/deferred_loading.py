"""Defer work while a library loads a model, so that little of it is in memory at once.

A `LoadingMode` sees every operation of torch on the thread that loads:

- A cast of a file's bytes is noted, and the tensor stays what it is. Weights are cast later, group
  by group; whatever is computed from such a tensor meanwhile is computed from its cast.
- A stack or concatenation of whole weights of files (experts, which a model stacks) is computed
  when somebody reads it. The result is stored under a name that says what it was made of; at the
  next start it is found by that name, and what it was made of is never read.
- Any other large result lies in a file without a name.

What libraries defer by themselves, such as quantising, is `Library.loading`.
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
from tierstore.engine.adoption import derivation_of
from tierstore.engine.groups import Groups
from tierstore.system.maps import AddressSpace
from tierstore.torch_private import (
    TorchDispatchMode,
    changes_arguments,
    is_conversion,
    is_view,
    may_share_memory,
    tree_map_only,
)

T = TypeVar("T")

LARGE = 1 << 20
"""Bytes: smaller tensors that a library makes stay in ordinary memory."""
LEAST = 64 << 10
"""Bytes: smaller tensors are joined at once."""

_JOINS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.stack.default: torch.stack,
    torch.ops.aten.cat.default: torch.cat,
}


class _AddressMap(Generic[T]):
    """Values by the memory of tensors. No two of these overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._values: dict[int, tuple[int, T]] = {}  # by start: where it ends, and the value

    def add(self, tensor: torch.Tensor, value: T) -> None:
        start = address_of(tensor)
        bisect.insort(self._starts, start)
        self._values[start] = start + tensor_bytes(tensor), value

    def at(self, tensor: torch.Tensor) -> T | None:
        """Return the value of the memory in which a tensor begins."""
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
def intercepted(file_memory: Callable[[int], memoryview]) -> Iterator[LoadingMode]:
    """A context in which libraries load as `LoadingMode` says, on the calling thread alone."""
    with loading() as deferred, LoadingMode(file_memory) as mode:
        mode.deferred = deferred
        yield mode


class LoadingMode(TorchDispatchMode):
    """Defers work on the thread on which it is entered: see above.

    `file_memory` makes memory of so many bytes in a file. `deferred` is what libraries defer.
    """

    def __init__(self, file_memory: Callable[[int], memoryview]) -> None:
        super().__init__()
        self.deferred: list[Deferred] = []
        self._file_memory = file_memory
        self._space: AddressSpace | None = None
        self._casts = _AddressMap[torch.dtype]()
        self.concats = DeferredConcat(file_memory, self._dtype_of)

    def pending(self, model: nn.Module) -> dict[int, torch.dtype]:
        """The dtypes that parameters and buffers (by id) are to be cast to."""
        tensors = tensors_of(model)
        found = {id(tensor): self._dtype_of(tensor) for tensor in tensors}
        return {number: dtype for number, dtype in found.items() if dtype is not None}

    def finish(
        self, groups: Groups, models: Sequence[nn.Module], target: int
    ) -> dict[int, torch.dtype]:
        """Do what was deferred for these models, for up to `target` bytes of weights at a time, but
        for casts. Returns the dtypes that tensors (by id) are to be cast to."""
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
        if may_share_memory(function):  # changed in place
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
        """Note an operation if it only casts a file's bytes. Returns whether it does."""
        if dtype is None or not dtype.is_floating_point or not tensor.is_floating_point():
            return False
        if (device is not None and torch.device(device).type != "cpu") or not _is_plain(tensor):
            return False
        if not tensor.is_contiguous() or any(options.get(n) for n in ("pin_memory", "layout")):
            return False
        if (before := self._dtype_of(tensor)) is not None:
            return before is dtype  # it is asked again, as it does not look like that yet
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
        """Return the dtype that a tensor is to be cast to; None if it has it."""
        dtype = self._casts.at(tensor) if _is_plain(tensor) else None
        return None if dtype is tensor.dtype else dtype

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype_of(tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def _in_file_if_large(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that was just made, in a file if it is large."""
        nbytes = tensor_bytes(tensor) if _is_plain(tensor) else 0
        if nbytes < LARGE or span(tensor) != nbytes:
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
    """A tensor whose bytes are not there until `parts` were joined into it.

    `parts` come with the dtype that each is to be cast to, or None. The `derivation` names what all
    of it is made of. `memory` is that of `result`, for as long as anybody looks at it.
    """

    result: torch.Tensor
    memory: weakref.ref[memoryview]
    join: Callable[..., torch.Tensor]
    dim: int
    derivation: str
    parts: list[tuple[torch.Tensor, torch.dtype | None]] = field(default_factory=list)


class DeferredConcat:
    """The concatenations that were deferred while a model was loaded.

    `file_memory` makes memory of so many bytes in a file; `dtype_of` returns the dtype that a part
    is still to be cast to, or None.
    """

    def __init__(
        self,
        file_memory: Callable[[int], memoryview],
        dtype_of: Callable[[torch.Tensor], torch.dtype | None],
    ) -> None:
        self._file_memory = file_memory
        self._dtype_of = dtype_of
        self._concats = _AddressMap[_Concat]()

    def join(
        self, function: Any, tensors: Any = (), dim: int = 0, *_: Any, **options: Any
    ) -> torch.Tensor | None:
        """Return the future result of an operation that joins whole weights of files. Else None."""
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
        if nbytes < LEAST or (derivation := self._derivation(parts, f"{function} {dim}")) is None:
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
        """Have the bytes be there that an operation looks at."""
        if changes_arguments(function):
            tree_map_only(torch.Tensor, self.change, args[:1])
        tree_map_only(torch.Tensor, self.fill, (args, kwargs))

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, with its bytes."""
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
        """The tensor is going to be changed: it is what it was made of no more."""
        joined = self._concats.at(tensor)
        if joined is not None:
            self._fill(joined)
            self._concats.remove(address_of(joined.result))
        return tensor

    def finish(self, groups: Groups, models: Sequence[nn.Module]) -> None:
        """Have the weights of these models be in files of the store. Whatever else was joined, and
        that somebody still looks at, is there afterwards."""
        tensors = [t for model in models for t in tensors_of(model)]
        for tensor in dict((id(t), t) for t in tensors).values():
            joined = self._concats.at(tensor) if tensor.device.type == "cpu" else None
            if joined is not None and _is_all_of(tensor, joined):
                found = groups.made_before(joined.derivation)
                if found is None:
                    self._fill(joined)
                    found = groups.keep_made(joined.derivation, {"": joined.result})
                assign(tensor, found[""].view(tensor.shape))
        for start, joined in self._concats.newest_first():  # parts were joined before
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
    """Tell whether a tensor is a joined one, and not a part of it."""
    result = joined.result
    return (
        address_of(tensor) == address_of(result)
        and tensor.is_contiguous()
        and tensor.dtype is result.dtype
        and tensor.numel() == result.numel()
    )
