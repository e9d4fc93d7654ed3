"""Processes killed at any moment lose no acknowledged group and leave no torn one.

`working.py` has their work, `killer.py` and `killing.py` kill them, `promised.py` has the allowed
states afterwards, and `mutants.py` the negative controls.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kills.killing import COMMITTING, DOINGS, Outcome
from tests.faults.kills.mutants import MUTANTS
from tests.helpers.processes import output_of, results_in
from tests.lanes import LONG, by_lane, lane

pytestmark = [
    pytest.mark.full(
        "hundreds of processes; tests/tiers/test_directory.py has one die at each call"
    ),
    pytest.mark.timeout(4 * 3600),
]

ROOT = Path(__file__).resolve().parents[3]
IN_MEMORY = Path("/dev/shm")

# The fault that each mutant must show, and the calls at which to look for it.
SIGNS = {
    "write in place": ("damaged: ", "pwrite"),
    "remove before the rename": ("lost: .* is None", "unlink"),
    "never clean up": ("left behind: ", ""),
    "flush nothing": ("lost: ", ""),
    "remove nothing": (r"lost: .* is \(.* not any of \[.*None", ""),
    "write elsewhere": ("outside: ", ""),
}
KILLS = by_lane(30, 30, 5000)
AIMED = sorted(set(COMMITTING))
"""Calls that a commit depends on: `AIMED_KILLS` more processes are killed at each of them."""
AIMED_KILLS = 6
ENOUGH = 500
"""Kills within which a mutant shows its fault; the first few usually suffice."""


def all_outcomes(runs: list[dict[str, Any]]) -> list[list[Outcome]]:
    output = output_of("-m", "tests.faults.kills.killing", json.dumps(runs))
    found: list[list[Outcome]] = [[] for _ in runs]
    for number, outcome in results_in(output, "OUTCOME"):
        found[number].append(Outcome(**outcome))
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Outcome]]]:
    """Return the outcomes of all killed processes, by mutant ("" for the correct store)."""
    disk = str(tmp_path_factory.mktemp("kills"))
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as memory:
        runs: list[dict[str, Any]] = [
            {"places": {"memory": memory, "disk": disk}, "kills": KILLS, "seed": "kills"}
        ]
        runs += [
            {"places": {"memory": memory}, "kills": AIMED_KILLS, "seed": only, "only": only}
            for only in AIMED
        ]
        for mutant, (_, only) in SIGNS.items():
            runs.append(
                {
                    "places": {"memory": memory},
                    "kills": ENOUGH,
                    "seed": mutant,
                    "mutant": mutant,
                    "only": only,
                    "until_wrong": True,
                }
            )
        store, *others = all_outcomes(runs)
        aimed, mutants = others[: len(AIMED)], others[len(AIMED) :]
        yield {"": sum(aimed, start=store), **dict(zip(SIGNS, mutants, strict=True))}


def test_kill_at_any_moment_loses_and_tears_nothing(
    outcomes: dict[str, list[Outcome]],
) -> None:
    found = outcomes[""]

    assert [outcome for outcome in found if outcome.wrong] == []
    killed = [outcome for outcome in found if outcome.killed]
    assert len(killed) == KILLS + len(AIMED) * AIMED_KILLS


def test_kills_come_during_every_operation(outcomes: dict[str, list[Outcome]]) -> None:
    killed = [outcome for outcome in outcomes[""] if outcome.killed]

    assert {outcome.place for outcome in killed} == {"memory", "disk"}
    assert {outcome.how for outcome in killed} == {"call", "time"}
    assert sum(outcome.left > 0 for outcome in killed) > len(killed) / 10  # half-written files
    died_at = {outcome.at for outcome in killed}
    assert "half of pwrite" in died_at
    for call in ("fsync", "rename", "unlink"):
        assert died_at & {f"before {call}", f"after {call}"}
    during = {doing for outcome in killed for doing in outcome.during}
    assert {"open", "flush", "register", "close"} <= during
    if lane() == LONG:
        assert {"open", *DOINGS} <= during
        calls = ("open", "rename", "unlink", "fsync", "pwrite", "mkdir", "ftruncate", "flock")
        assert {f"{when} {call}" for when in ("before", "after") for call in calls} <= died_at


@pytest.mark.parametrize("mutant", MUTANTS)
def test_kills_of_weaker_protocols_find_their_faults(
    mutant: str, outcomes: dict[str, list[Outcome]]
) -> None:
    sign, _ = SIGNS[mutant]

    wrong = [text for outcome in outcomes[mutant] for text in outcome.wrong]

    assert [text for text in wrong if re.search(sign, text)], wrong
