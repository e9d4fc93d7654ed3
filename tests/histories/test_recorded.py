"""The planner's decisions stay the same, instruction by instruction, when its code is refactored.

Every promise is also checked in these histories, after every step.
"""

from __future__ import annotations

import json

import pytest

from tests.histories import recorded
from tests.histories.machine import play
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop, Forget, Reserve
from tierstore.model.tiers import Tier

RECORDED = json.loads(recorded.FILE.read_text())
CASES = [
    (policy, first)
    for policy in recorded.POLICIES
    for first in range(0, recorded.SEEDS, recorded.AT_ONCE)
]


@pytest.mark.long(
    "the rest of 4,000 histories",
    keep=[f"{policy}-{first}" for policy, first in CASES if first % (3 * recorded.AT_ONCE) == 0],
)
@pytest.mark.full(
    "thousands of histories, for changes of the planner's structure; a hundred show most of them",
    keep=[f"{policy}-0" for policy in recorded.POLICIES],
)
@pytest.mark.parametrize(("policy", "first"), CASES)
def test_recorded_histories_give_the_same_instructions(policy: str, first: int) -> None:
    assert recorded.digest(policy, first) == RECORDED[f"{policy} {first}"], (
        "the planner decides differently; if intended, run python -m tests.histories.recorded"
    )


def test_every_history_is_recorded() -> None:
    assert list(RECORDED) == [f"{policy} {first}" for policy, first in CASES]
    assert len(set(RECORDED.values())) == len(RECORDED)


def test_instruction_fields_are_in_its_text() -> None:
    """Check that any other instruction, order or history gives another digest."""
    a, b = GroupId("a", 1), GroupId("a", 2)
    words = [
        recorded.words_of(each)
        for key in (a, b)
        for nbytes in (1, 2)
        for each in (
            Copy(key, nbytes, Tier.DISK, Tier.HOST),
            Copy(key, nbytes, Tier.DISK, Tier.HOST, urgent=True),
            Copy(key, nbytes, Tier.HOST, Tier.DISK),
            Copy(key, nbytes, Tier.HOST, Tier.DEVICE),
            Drop(key, nbytes, Tier.HOST),
            Drop(key, nbytes, Tier.DEVICE),
            Reserve(key, nbytes, Tier.HOST),
        )
    ]
    words += [recorded.words_of(Forget(key)) for key in (a, b)]
    assert len(set(words)) == len(words) == 2 * 2 * 7 + 2
    assert words[0] == "copy a 1 1 DISK HOST early"


def test_recorded_histories_cover_every_instruction() -> None:
    kinds = {type(each) for seed in range(20) for each in play(seed, "next-use").books.followed}
    assert kinds == {Copy, Drop, Reserve, Forget}
