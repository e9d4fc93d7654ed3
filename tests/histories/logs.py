"""The events of a history, or of a store, in a file: to look at a failure as often as one likes.

    python -m tests.histories.logs FILE

prints each event, and what a planner of today instructs after it. FILE is a trace of a store, or a
history: then its name ends with `.jsonl`, its first line says for which planner it is, and each
other one is an event, as `tierstore.observe.event_log` writes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tierstore import simulation
from tierstore.model.events import Event
from tierstore.model.moves import Instruction
from tierstore.model.tiers import TIERS, Tier
from tierstore.observe.event_log import from_row, replay_events, to_row
from tierstore.plan.planner import planner_for
from tierstore.trace import read_trace

HISTORY = ".jsonl"


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
    """Each event of a history or of a trace, and what a planner instructs after it."""
    if Path(file).suffix != HISTORY:
        record = read_trace(file).events
        assert record is not None, f"{file} is older than the record of events"
        return simulation.replay(record)
    head, *rows = map(json.loads, Path(file).read_text().splitlines())
    tiers, budgets = dict(TIERS), {}
    for rank, name, persistent, budget in head["tiers"]:
        tier = tiers.setdefault(name, Tier(rank, name, persistent=persistent))
        budgets[tier] = budget
    log = (from_row(row, tiers) for row in rows)
    return replay_events(log, planner_for(budgets, head["policy"], memory=head["memory"]))


if __name__ == "__main__":
    for event, instructions in replay(sys.argv[1]):
        print(event, *instructions, sep="\n    ")
