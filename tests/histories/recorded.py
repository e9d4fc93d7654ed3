"""Digests of the planner's decisions in thousands of random histories, one line per fifty.

    python -m tests.histories.recorded

rewrites `recorded.json`. Run it after an intended change of the planner's decisions, never after a
refactoring: the file exists to check refactorings.

A line is a digest of every instruction in order, in words that do not depend on the types of groups
and tiers in the code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from tests.histories.machine import play
from tierstore.model.moves import Copy, Forget, Instruction, Reserve

FILE = Path(__file__).with_suffix(".json")
POLICIES = ("next-use", "lru")
SEEDS = 2000
"""Histories for each policy."""
AT_ONCE = 50
STEPS = 60


def words_of(instruction: Instruction) -> str:
    """Return an instruction as text: the action, the key and its generation, and the place."""
    group = f"{instruction.group.key} {instruction.group.generation}"
    if isinstance(instruction, Forget):
        return f"forget {group}"
    if isinstance(instruction, Copy):
        hop = f"{instruction.src.name} {instruction.dst.name}"
        return f"copy {group} {instruction.nbytes} {hop} {'now' if instruction.urgent else 'early'}"
    word = "reserve" if isinstance(instruction, Reserve) else "drop"
    return f"{word} {group} {instruction.nbytes} {instruction.tier.name}"


def digest(policy: str, first: int) -> str:
    """Return the digest of the instructions of `AT_ONCE` histories, from seed `first` on."""
    found = hashlib.blake2b(digest_size=8)
    for seed in range(first, first + AT_ONCE):
        for instruction in play(seed, policy, STEPS).books.followed:
            found.update(words_of(instruction).encode() + b"\n")
    return found.hexdigest()


def all_digests() -> Iterator[tuple[str, str]]:
    for policy in POLICIES:
        for first in range(0, SEEDS, AT_ONCE):
            yield f"{policy} {first}", digest(policy, first)


if __name__ == "__main__":
    FILE.write_text(json.dumps(dict(all_digests()), indent=1) + "\n")
