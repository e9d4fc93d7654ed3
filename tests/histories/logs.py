"""The events of a history in a file: to look at a failure as often as one likes.

    python -m tests.histories.logs FILE

prints each event, and what a planner of today instructs after it. The first line of a file says for
which planner it is, each other one is an event, as `tierstore.observe.event_log` writes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tierstore.model.events import Event
from tierstore.model.moves import Instruction
from tierstore.model.tiers import TIERS, Tier
from tierstore.observe.event_log import from_row, replayed, to_row
from tierstore.plan.planner import Planner
from tierstore.plan.policy import policy_named
from tierstore.plan.schedule import LearnedOrder


def write_log(
    file: Path,
    log: Iterable[tuple[float, Event]],
    budgets: Mapping[Tier, int | None],
    policy: str,
    memory: int,
) -> None:
    """Write the events of a planner whose schedule remembers `memory` uses."""
    tiers = [[int(tier), tier.name, tier.persistent, budgets[tier]] for tier in budgets]
    head = {"tiers": tiers, "policy": policy, "memory": memory}
    rows = [head, *(to_row(now, event) for now, event in log)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def replay(file: str | Path) -> Iterator[tuple[Event, list[Instruction]]]:
    """Each event of a file, and what a planner instructs after it."""
    head, *rows = map(json.loads, Path(file).read_text().splitlines())
    tiers, budgets = dict(TIERS), {}
    for rank, name, persistent, budget in head["tiers"]:
        tier = tiers.setdefault(name, Tier(rank, name, persistent=persistent))
        budgets[tier] = budget
    log = (from_row(row, tiers) for row in rows)
    schedule = LearnedOrder(head["memory"])
    policy = policy_named(head["policy"], schedule, budgets)
    return replayed(log, Planner(budgets, policy, schedule))


if __name__ == "__main__":
    for event, instructions in replay(sys.argv[1]):
        print(event, *instructions, sep="\n    ")
