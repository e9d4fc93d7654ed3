"""Random histories with a persistent tier below the disk: the same promises hold there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.histories import mutants
from tests.histories.machine import REMOTE, play
from tests.lanes import by_lane
from tierstore.model.moves import Copy
from tierstore.model.tiers import Tier

SEEDS = 300
PLAYED = by_lane(120, SEEDS, SEEDS)
FULL = (39, 57, 113, 160)
"""Known limit: a disk between two tiers is full of groups that wait to move up.

Copies above must pass through the disk to leave, and the planner gives up, although all would fit
on the tier below.
"""

LOST_SAVES = (("lru", 4), ("next-use", 285))
"""Known limit: a group is saved to the disk and leaves it in the same step.

Memory has it too; a waiter for the save never sees it done.
"""


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_tier_below_the_disk_keeps_every_promise(policy: str) -> None:
    ways: Counter[tuple[Tier, Tier]] = Counter()
    for seed in set(range(PLAYED)).difference(FULL):
        followed = play(seed, policy, remote=True).books.followed
        ways.update((one.src, one.dst) for one in followed if isinstance(one, Copy))
    assert ways[REMOTE, Tier.DISK] > PLAYED
    assert ways[Tier.DISK, REMOTE] > PLAYED // 20


@pytest.mark.xfail(reason="a full tier in the middle may block groups that must pass through")
@pytest.mark.parametrize(
    ("policy", "seed"),
    [(p, seed) for p in ("next-use", "lru") for seed in FULL if (p, seed) != ("next-use", 39)],
)
def test_full_disk_between_two_tiers_blocks_no_request(
    policy: str, seed: int, tmp_path: Path
) -> None:
    play(seed, policy, remote=True, logs=tmp_path)


@pytest.mark.xfail(reason="the only persistent copy may be evicted if memory has another")
@pytest.mark.parametrize(("policy", "seed"), LOST_SAVES)
def test_saved_group_stays_saved(policy: str, seed: int, tmp_path: Path) -> None:
    play(seed, policy, 60, remote=True, logs=tmp_path)


@pytest.mark.full("the control of four tiers; test_seeded_faults.py has that of three")
@pytest.mark.parametrize(
    ("mutant", "symptom"),
    [
        (mutants.EvictsTheOnlyCopy, "lost its last copy on DISK"),
        (mutants.DropsCopiesBeingRead, "on DISK is dropped while it is read"),
        (mutants.KeepsFlushedCopies, "was put away"),
        (mutants.TrustsAFailedCopy, "is complete on"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_machine_notices_seeded_faults(
    mutant: type[mutants.FaultyPlanner], symptom: str, tmp_path: Path
) -> None:
    """Check faults too that show only on the disk between two tiers."""
    found = set()
    for seed in range(SEEDS):
        try:
            play(seed, "lru", planner=mutant, remote=True, logs=tmp_path)
        except AssertionError as error:
            found.add(str(error))
    assert any(symptom in text for text in found)
