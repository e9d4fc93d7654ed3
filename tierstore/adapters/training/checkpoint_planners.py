"""Planners of `torch.distributed.checkpoint` that move a store's tensors one group at a time.

Planning uses names, shapes and addresses, but no data. Tensors are sorted by group, so each group
is leased in RAM once, from its first tensor to its last.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from tierstore.adapters.codecs.memory import address_of, same_bits
from tierstore.adapters.training.checkpoint_files import CheckpointFiles, Encoded
from tierstore.adapters.training.state_buffers import StateBuffer
from tierstore.adapters.training.weights import Weights
from tierstore.model.tiers import HostAccess
from tierstore.progress import bar


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class StorageIndex:
    """Maps tensors to groups of a store by address, and leases one group at a time in RAM."""

    def __init__(self, buffers: Iterable[StateBuffer], frozen: Iterable[Weights] = ()) -> None:
        self._of: dict[int, tuple[StateBuffer, str]] = {}
        self._frozen: dict[int, tuple[Weights, str]] = {}
        self._order = {buffer: number for number, buffer in enumerate(buffers)}
        self._buffer: StateBuffer | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._stack = ExitStack()
        for buffer in self._order:
            buffer.ready()
            tensors = buffer.tensors.items()
            self._of |= {address_of(t): (buffer, name) for name, t in tensors if t.numel()}
        for each in frozen:
            tensors = each.buffer.tensors.items()
            self._frozen |= {address_of(t): (each, name) for name, t in tensors if t.numel()}

    def of(self, tensor: torch.Tensor) -> tuple[StateBuffer, str] | None:
        """Return the group that a tensor is a view of, and its name in the group."""
        local = local_of(tensor)
        found = self._of.get(address_of(local)) if local.numel() else None
        if found is None:
            return None
        there = found[0].tensors[found[1]]
        same = there.shape == local.shape and there.stride() == local.stride()
        return found if same and there.dtype is local.dtype else None

    def frozen(self, tensor: torch.Tensor) -> tuple[Weights, str] | None:
        """Return the frozen group that a tensor is a view of, and its name in the group."""
        local = local_of(tensor)
        return self._frozen.get(address_of(local)) if local.numel() else None

    def group_number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's group, or -1 if it is in none."""
        found = self.of(tensor)
        return -1 if found is None else self._order[found[0]]

    def open(self, tensor: torch.Tensor, purpose: HostAccess) -> torch.Tensor:
        """Return this rank's part of a tensor, in RAM if the budget allows it.

        It is valid until a tensor of another group is opened.
        """
        found = self.of(tensor)
        if found is None:
            return local_of(tensor)
        buffer, name = found
        if buffer is not self._buffer:
            self.close()
            self._buffer = buffer
            self._tensors = buffer.enter(self._stack, purpose)
        return self._tensors[name]

    def close(self) -> None:
        """Write the open group back, and raise its error, if any."""
        buffer, self._buffer, self._tensors = self._buffer, None, {}
        self._stack.close()
        if buffer is not None:
            buffer.flush()


class GroupSavePlanner(DefaultSavePlanner):
    """Plans to save a state group by group. Raises TypeError for values that cannot be saved."""

    def __init__(self, state: dict[str, Any], index: StorageIndex) -> None:
        super().__init__()
        self._index = index
        super().set_up_planner(state)
        encoded: dict[int, Encoded] = {}  # parameters of a group share their options
        for name, value in self.state_dict.items():
            if not isinstance(value, (torch.Tensor, Encoded)):
                found = encoded.get(id(value)) or Encoded(value, name)
                self.state_dict[name] = encoded[id(value)] = found

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Keep values that are not tensors on the first rank only."""
        self.is_coordinator = is_coordinator
        if not is_coordinator:
            items = self.state_dict.items()
            self.state_dict = {n: v for n, v in items if isinstance(v, torch.Tensor)}

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's part."""
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=sorted(plan.items, key=self._order))
        return self.plan

    def _order(self, item: WriteItem) -> int:
        value = self.state_dict[item.index.fqn]
        return self._index.group_number(value) if isinstance(value, torch.Tensor) else -1

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of an item, valid until the next call."""
        value = self.state_dict[write_item.index.fqn]
        if isinstance(value, torch.Tensor):
            return self._index.open(value, HostAccess.READ).detach()
        assert isinstance(value, Encoded), "every other value was encoded"
        return value


class GroupLoadPlanner(DefaultLoadPlanner):
    """Fills the tensors of a state in place, group by group.

    torch's own loop reads file by file, so it would lease each group once per saved rank.
    """

    def __init__(self, index: StorageIndex) -> None:
        super().__init__(flatten_state_dict=False)
        self._index = index
        self._whole: set[StateBuffer] = set()

    def create_local_plan(self) -> LoadPlan:
        """Plan to read this rank's part."""
        plan = super().create_local_plan()
        items = sorted(plan.items, key=lambda i: self._index.group_number(self._target(i)))
        filled: dict[StateBuffer, set[str]] = {}
        for found in filter(None, (self._index.of(self._target(item)) for item in items)):
            filled.setdefault(found[0], set()).add(found[1])
        for buffer, names in filled.items():
            if names >= {name for name, tensor in buffer.tensors.items() if tensor.numel()}:
                self._whole.add(buffer)
        return dataclasses.replace(plan, items=items)

    def _target(self, item: ReadItem) -> Any:
        return self.state_dict[item.dest_index.fqn]

    @torch.no_grad()
    def read(self, state: dict[str, torch.Tensor], files: CheckpointFiles) -> None:
        """Fill the tensors of a state from the items of the same names."""
        self.set_up_planner(state, files.metadata)
        plan = self.create_local_plan()
        try:
            for item in bar(plan.items, "Loading", "tensors"):
                self._read_item(item, files)
        finally:
            self._index.close()

    def _read_item(self, item: ReadItem, files: CheckpointFiles) -> None:
        chunk = _part(files.value(item.storage_index), item.storage_offsets, item.lengths)
        target = self._target(item)
        frozen = self._index.frozen(target)
        if frozen is not None:
            weights, name = frozen
            current = _part(weights.buffer.tensors[name], item.dest_offsets, item.lengths)
            if same_bits(current, chunk):
                return  # the group stays read-only
            weights.become_state()
            local = weights.buffer.tensors[name]
        else:
            found = self._index.of(target)
            renewed = found is not None and found[0] in self._whole
            purpose = HostAccess.RENEW if renewed else HostAccess.UPDATE
            local = self._index.open(target, purpose)
        _part(local, item.dest_offsets, item.lengths).copy_(chunk)


def _part(tensor: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
