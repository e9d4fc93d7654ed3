"""Event logs of histories or stores in files, to replay a failure any number of times.

    python -m tests.histories.logs FILE

prints each event and the current planner's instructions after it. FILE is a trace of a store, or a
history. A history's name ends with `.jsonl`. Its first line describes the planner, and each other
line is an event, as written by `tierstore.observe.event_log`.
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
    """Yield each event of a history or of a trace, and the current planner's instructions."""
    if Path(file).suffix != HISTORY:
        record = read_trace(file).events
        assert record is not None, f"{file} has no event record"
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
