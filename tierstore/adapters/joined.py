"""Weights that a library joins from several of a checkpoint: once, and only if they are looked at.

Checkpoints have each expert of a layer by itself; transformers stacks them when it loads a model.
So the bytes of the model are in no file. They are put into one of the store's, under the name of
what they were made of. At the next start they are found by that name: what was stacked then is
never read.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tierstore.adapters.codecs.memory import address_of, tensor_bytes
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.contents import tensors_of
from tierstore.engine.adoption import derivation_of
from tierstore.engine.groups import Groups
from tierstore.torch_private import changes_arguments, tree_map_only

_JOINS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.stack.default: torch.stack,
    torch.ops.aten.cat.default: torch.cat,
}


LEAST = 64 << 10
"""Bytes: what is smaller is joined as always."""


@dataclass(eq=False)
class _Joined:
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

    @property
    def stop(self) -> int:
        return address_of(self.result) + tensor_bytes(self.result)


class JoinedWeights:
    """What was joined while a model was loaded.

    `file_memory` makes memory of so many bytes in a file; `dtype_of` tells to what a tensor is
    still to be cast, if it is.
    """

    def __init__(
        self,
        file_memory: Callable[[int], memoryview],
        dtype_of: Callable[[torch.Tensor], torch.dtype | None],
    ) -> None:
        self._file_memory = file_memory
        self._dtype_of = dtype_of
        self._starts: list[int] = []  # addresses of results
        self._joined: dict[int, _Joined] = {}  # by start

    def join(
        self, function: Any, tensors: Any = (), dim: int = 0, *_: Any, **options: Any
    ) -> torch.Tensor | None:
        """What an operation will return, if it joins whole weights of files. Else None."""
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
        start = address_of(result)
        bisect.insort(self._starts, start)
        ref = weakref.ref(memory)
        self._joined[start] = _Joined(result, ref, join, dim, derivation, parts)
        return result.detach()

    def _derivation(
        self, parts: list[tuple[torch.Tensor, torch.dtype | None]], made: str
    ) -> str | None:
        of_files: dict[str, torch.Tensor] = {}
        casts: dict[str, torch.dtype] = {}
        inner: list[str] = []
        for number, (tensor, dtype) in enumerate(parts):
            joined = self._of(tensor)
            if joined is None:
                of_files[str(number)] = tensor
                casts |= {} if dtype is None else {str(number): dtype}
            elif _is_all_of(tensor, joined):
                inner.append(f"{number} {joined.derivation}")
            else:
                return None
        return derivation_of(of_files, casts, f"{made} {inner}")

    def _of(self, tensor: torch.Tensor) -> _Joined | None:
        """What a tensor is, or is a part of."""
        if not self._starts:
            return None
        address = address_of(tensor)
        at = bisect.bisect_right(self._starts, address) - 1
        found = self._joined[self._starts[at]] if at >= 0 else None
        return found if found is not None and address < found.stop else None

    def fill_for(self, function: Any, args: Any, kwargs: Any) -> None:
        """Have the bytes be there that an operation looks at."""
        if changes_arguments(function):
            tree_map_only(torch.Tensor, self.change, args[:1])
        tree_map_only(torch.Tensor, self.fill, (args, kwargs))

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, with its bytes."""
        joined = self._of(tensor)
        if joined is not None:
            self._fill(joined)
        return tensor

    def _fill(self, joined: _Joined) -> None:
        if joined.parts:
            values = [self.fill(t) if dtype is None else t.to(dtype) for t, dtype in joined.parts]
            joined.join(values, joined.dim, out=joined.result)
            joined.parts = []

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor is going to be changed: it is what it was made of no more."""
        joined = self._of(tensor)
        if joined is not None:
            self._fill(joined)
            del self._joined[address_of(joined.result)]
            self._starts.remove(address_of(joined.result))
        return tensor

    def finish(self, groups: Groups, models: Sequence[nn.Module]) -> None:
        """Have the weights of these models be in files of the store. Whatever else was joined, and
        that somebody still looks at, is there afterwards."""
        tensors = [t for model in models for t in tensors_of(model)]
        for tensor in dict((id(t), t) for t in tensors).values():
            joined = self._of(tensor) if tensor.device.type == "cpu" else None
            if joined is not None and _is_all_of(tensor, joined):
                found = groups.made_before(joined.derivation)
                if found is None:
                    self._fill(joined)
                    found = groups.keep_made(joined.derivation, {"": joined.result})
                assign(tensor, found[""].view(tensor.shape))
        for start, joined in reversed(list(self._joined.items())):  # parts were joined before
            shape, dtype = joined.result.shape, joined.result.dtype
            del joined.result
            memory = joined.memory()
            if memory is not None:
                joined.result = torch.frombuffer(memory, dtype=dtype).view(shape)
                self._fill(joined)
            joined.parts = []
            del memory, self._joined[start]
            self._starts.remove(start)


def _is_all_of(tensor: torch.Tensor, joined: _Joined) -> bool:
    """Whether a tensor is a joined one, and not a part of it."""
    result = joined.result
    return (
        address_of(tensor) == address_of(result)
        and tensor.is_contiguous()
        and tensor.dtype is result.dtype
        and tensor.numel() == result.numel()
    )
