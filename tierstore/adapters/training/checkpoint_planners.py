"""Planners of `torch.distributed.checkpoint` for what is in a store: one group at a time.

What is planned needs no data: names, shapes and places of tensors that show where they are. Data
are asked for, or given, one chunk after the other, in the order of the plan. So tensors of one
group follow each other there, and the group is in RAM from the first to the last of them.
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
    """What this rank has of a tensor: all of it, but of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Places:
    """Which tensors of groups of a store are where, by the address at which they are shown.

    One group at a time is in RAM, for as long as its tensors are asked for one after the other.
    """

    def __init__(self, buffers: Iterable[StateBuffer], frozen: Iterable[Weights] = ()) -> None:
        self._of: dict[int, tuple[StateBuffer, str]] = {}
        self._order: dict[StateBuffer, int] = {}
        self._frozen: dict[int, tuple[Weights, str]] = {}
        self._buffer: StateBuffer | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._stack = ExitStack()
        for buffer in buffers:
            buffer.ready()
            self._order[buffer] = len(self._order)
            places = {address_of(t): (buffer, n) for n, t in buffer.tensors.items() if t.numel()}
            self._of.update(places)
        for weights in frozen:
            tensors = weights.buffer.tensors.items()
            self._frozen.update({address_of(t): (weights, n) for n, t in tensors if t.numel()})

    def of(self, tensor: torch.Tensor) -> tuple[StateBuffer, str] | None:
        """The group that a tensor shows, and its name there."""
        local = local_of(tensor)
        found = self._of.get(address_of(local)) if local.numel() else None
        if found is None:
            return None
        there = found[0].tensors[found[1]]
        same = there.shape == local.shape and there.stride() == local.stride()
        return found if same and there.dtype is local.dtype else None

    def frozen(self, tensor: torch.Tensor) -> tuple[Weights, str] | None:
        """The same, of a group that is only read."""
        local = local_of(tensor)
        return self._frozen.get(address_of(local)) if local.numel() else None

    def order_of(self, tensor: torch.Tensor) -> int:
        """Groups are numbered. What is in none comes first."""
        found = self.of(tensor)
        return -1 if found is None else self._order[found[0]]

    def open(self, tensor: torch.Tensor, purpose: HostAccess) -> torch.Tensor:
        """What this rank has of a tensor, in RAM if there is room, until another group is asked
        for. Nobody may keep it."""
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
        """Put the last group away. Raises what a save of it raises."""
        buffer, self._buffer, self._tensors = self._buffer, None, {}
        self._stack.close()
        if buffer is not None:
            buffer.put_away()


class GroupSavePlanner(DefaultSavePlanner):
    """Plans what everybody would of a state, but that each group's tensors follow each other.

    What is no tensor is made to bytes at once: raises TypeError for what cannot be saved.
    """

    def __init__(self, state: dict[str, Any], places: Places) -> None:
        super().__init__()
        self._places = places
        super().set_up_planner(state)
        encoded: dict[int, io.BytesIO] = {}  # groups of parameters say the same of each of them
        for name, value in self.state_dict.items():
            if not isinstance(value, (torch.Tensor, Encoded)):
                if id(value) not in encoded:
                    encoded[id(value)] = Encoded(value, name)
                self.state_dict[name] = encoded[id(value)]

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """The first rank has what is no tensor."""
        self.is_coordinator = is_coordinator
        if not is_coordinator:
            tensors = {n: v for n, v in self.state_dict.items() if isinstance(v, torch.Tensor)}
            self.state_dict = tensors

    def create_local_plan(self) -> SavePlan:
        """What this rank has."""
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=sorted(plan.items, key=self._order))
        return self.plan

    def _order(self, item: WriteItem) -> int:
        value = self.state_dict[item.index.fqn]
        return self._places.order_of(value) if isinstance(value, torch.Tensor) else -1

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of an item, until the next one is asked for."""
        value = self.state_dict[write_item.index.fqn]
        if isinstance(value, torch.Tensor):
            return self._places.open(value, HostAccess.READ).detach()
        assert isinstance(value, Encoded), "every other value was encoded"
        return value


class GroupLoadPlanner(DefaultLoadPlanner):
    """Plans to fill the tensors of a state where they are. `read` does so.

    A frozen parameter is only read, and stays so if it is loaded with the values that it has.
    """

    def __init__(self, places: Places) -> None:
        super().__init__(flatten_state_dict=False)
        self._places = places
        self._whole: set[StateBuffer] = set()

    def create_local_plan(self) -> LoadPlan:
        """Read what this rank has, a group after the other."""
        plan = super().create_local_plan()
        items = sorted(plan.items, key=lambda i: self._places.order_of(self._target(i)))
        filled: dict[StateBuffer, set[str]] = {}
        for place in filter(None, (self._places.of(self._target(item)) for item in items)):
            filled.setdefault(place[0], set()).add(place[1])
        self._whole = {b for b, n in filled.items() if n >= {k for k in b.names if _has(b, k)}}
        return dataclasses.replace(plan, items=items)

    def _target(self, item: ReadItem) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[item.dest_index.fqn]
        return found

    @torch.no_grad()
    def read(self, state: dict[str, torch.Tensor], files: CheckpointFiles) -> None:
        """Fill the tensors of a state, by their names in the files. Afterwards every group is what
        it shows."""
        self.set_up_planner(state, files.metadata)
        plan = self.create_local_plan()
        try:
            for item in bar(plan.items, "Loading", "tensors"):
                self._read_item(item, files)
        finally:
            self._places.close()

    def _read_item(self, item: ReadItem, files: CheckpointFiles) -> None:
        chunk = _part(files.value(item.storage_index), item.storage_offsets, item.lengths)
        target = self._target(item)
        frozen = self._places.frozen(target)
        if frozen is not None:
            weights, name = frozen
            now = _part(weights.buffer.tensors[name], item.dest_offsets, item.lengths)
            if same_bits(now, chunk):
                return
            weights.become_state()
            home = weights.buffer.tensors[name]
        else:
            place = self._places.of(target)
            renewed = place is not None and place[0] in self._whole
            purpose = HostAccess.RENEW if renewed else HostAccess.UPDATE
            home = self._places.open(target, purpose)
        _part(home, item.dest_offsets, item.lengths).copy_(chunk)


def _has(buffer: StateBuffer, name: str) -> bool:
    return buffer.tensors[name].numel() > 0


def _part(tensor: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
