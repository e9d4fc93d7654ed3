"""In the steady state of a loop, slots are reused for one group after another.

Counted for the models that the store is made for, partitioned as usual, with the sizes of their
groups. The planner decides on a virtual clock, and arenas keep the slots that it would fill.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.real_models import MODELS
from tierstore.model.groups import Extent, FileTensor, GroupId
from tierstore.model.module_tree import groups_of
from tierstore.model.moves import Copy, Drop, Instruction
from tierstore.model.outline import target_bytes
from tierstore.model.tiers import Tier
from tierstore.plan import eviction
from tierstore.plan.planner import Planner
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.schedule import LearnedOrder
from tierstore.simulation import Clock, SimulatedRun, Use, planner_with_groups
from tierstore.tiers.arena import Arena, Slot

BANDWIDTH = {(Tier.DISK, Tier.HOST): 5e9, (Tier.HOST, Tier.DEVICE): 25e9}
COMPUTING = 25e9
"""Bytes of weights that are computed with in a second."""

Budgets = dict[Tier, int | None]


class Slots:
    """A simulated run whose moves take slots in arenas, as a carrier's do."""

    def __init__(self, planner: Planner, clock: Clock, budgets: Budgets) -> None:
        self.run = SimulatedRun(planner, clock, BANDWIDTH, self._follow)
        self.arenas = {
            tier: Arena(budget, lambda nbytes: torch.empty(0))
            for tier, budget in budgets.items()
            if tier is not Tier.DISK
        }
        self._slots: dict[tuple[GroupId, Tier], Slot] = {}

    def _follow(self, one: Instruction) -> None:
        if isinstance(one, Copy):
            slot = self.arenas[one.dst].take(one.nbytes)
            self.arenas[one.dst].fill(slot)
            self._slots[one.group, one.dst] = slot
        elif isinstance(one, Drop):
            self.arenas[one.tier].release(self._slots.pop((one.group, one.tier)))

    def made(self) -> int:
        return self.arenas[Tier.HOST].allocations


def made_in_each_pass(groups: Mapping[str, int], budgets: Budgets, passes: int) -> list[int]:
    """Return the slots of host memory allocated in each pass over the groups, in order."""
    clock = Clock()
    slots = Slots(planner_with_groups(groups, budgets, clock), clock, budgets)
    made = [0]
    for _ in range(passes):
        for key, nbytes in groups.items():
            slots.run.use(Use(key, nbytes / COMPUTING))
        made.append(slots.made())
    for tier, arena in slots.arenas.items():
        assert arena.peak_held <= (budgets[tier] or 0), "the budget counts whole slots"
    return np.diff(made).tolist()


@contextmanager
def any_size_goes() -> Iterator[None]:
    """Show the control: eviction looks for no slot of the needed size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "SAME_SIZE_AMONG", 0)
        yield


def budgets_of(groups: Mapping[str, int], device: float, host: float) -> Budgets:
    total = sum(groups.values())
    return {Tier.DEVICE: int(total * device), Tier.HOST: int(total * host), Tier.DISK: None}


def test_loop_reuses_slots_of_several_sizes() -> None:
    sizes = [70, 40, 100] * 12 + [30, 90] * 14
    groups = {f"{i}": nbytes << 20 for i, nbytes in enumerate(sizes)}
    budgets = budgets_of(groups, 0.25, 0.4)
    steady = made_in_each_pass(groups, budgets, 14)[-4:]
    with any_size_goes():
        control = made_in_each_pass(groups, budgets, 14)[-4:]
    assert sum(steady) <= 4
    assert min(control) >= 5, "the control allocates slots"


def file_tensors(model: torch.nn.Module) -> list[FileTensor]:
    """Return a model's tensors as in bfloat16 files of up to 10 GB."""
    shards: list[list[tuple[str, torch.Tensor]]] = [[]]
    size = 0
    for name, tensor in model.state_dict().items():
        if size + 2 * tensor.numel() > 10e9:
            shards.append([])
            size = 0
        shards[-1].append((name, tensor))
        size += 2 * tensor.numel()
    found = []
    for number, shard in enumerate(shards):
        at = 8 + 120 * len(shard)
        for name, tensor in sorted(shard, key=lambda item: item[0]):
            extent = Extent(f"{number}", at, 2 * tensor.numel())
            found.append(FileTensor(name, "BF16", tuple(tensor.shape), extent))
            at += extent.nbytes
    return found


@functools.cache
def tensors_of(name: str) -> list[FileTensor]:
    with torch.device("meta"):
        return file_tensors(MODELS[name]())


def cut(name: str, device: float, host: float) -> dict[str, int]:
    tensors = tensors_of(name)
    total = sum(tensor.extent.nbytes for tensor in tensors)
    target = target_bytes("block_level", int(total * min(device, host)), total)
    return {group.key: group.nbytes for group, _ in groups_of(tensors, "block_level", target)}


@pytest.mark.full("real models, 14 passes each, twice: a minute; another test has a similar loop")
@pytest.mark.parametrize("shares", [(0.1, 0.3), (0.25, 0.4), (0.5, 0.3)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_real_models_reuse_slots_in_steady_state(name: str, shares: tuple[float, float]) -> None:
    groups = cut(name, *shares)
    budgets = budgets_of(groups, *shares)
    steady = made_in_each_pass(groups, budgets, 14)[-4:]
    with any_size_goes():
        control = made_in_each_pass(groups, budgets, 8)[-4:]
    print(name, shares, len(groups), "groups", steady, control)
    assert sum(steady) / 4 <= 0.05 * len(groups)
    assert 4 * sum(steady) <= sum(control)


def test_equal_blocks_have_equal_slots_at_any_offset() -> None:
    """Begin each elsewhere in a page of its file, so that it takes a page more or less."""
    tensors, at = [], 8
    for block in range(60):
        for part, nbytes in (("a", 18_874_368), ("b", 6146)):
            extent = Extent("model.safetensors", at, nbytes)
            tensors.append(FileTensor(f"blocks.{block}.{part}", "U8", (nbytes,), extent))
            at += nbytes
    groups = [group for group, _ in groups_of(tensors, "block_level", 32 << 20)]
    assert len(groups) == 60
    assert len({group.tensors[0].offset for group in groups}) > 20, "at any offset"
    assert len({group.nbytes for group in groups}) == 1


@pytest.mark.parametrize(("number", "farthest"), [(-1, 0), (0, -1), (0, 1)])
def test_unexpected_group_has_no_distance(number: int, farthest: int) -> None:
    schedule = LearnedOrder()
    for key in "ab":
        schedule.known.number(key)
    prefetcher = Prefetcher(schedule, {Tier.HOST: 10, Tier.DISK: None})
    assert not prefetcher.about_as_far(number, farthest)
