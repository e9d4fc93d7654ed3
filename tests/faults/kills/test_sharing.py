"""Several processes want one directory: exactly one has it, and nobody is kept out for ever.

The scenes are in `sharing.py` and `racing.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kills.racing import Round
from tests.helpers.processes import output_of, results_in
from tests.lanes import by_lane

pytestmark = [
    pytest.mark.full("dozens of processes; tests/store/test_bad_input.py has two on one directory"),
    pytest.mark.timeout(3600),
]

ROOT = Path(__file__).resolve().parents[3]
TURNS = by_lane(5, 5, 300)
RACES = by_lane(8, 8, 1000)
RACERS = 8
AT_ONCE = 10.0
"""Seconds within which an opening is refused, however busy the machine. Alone, it is 0.1."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each scene has found."""
    root = tmp_path_factory.mktemp("sharing")
    output = output_of("-m", "tests.faults.kills.sharing", root, TURNS)
    return dict(results_in(output, "SCENE"))


def whose(told: str) -> int:
    """The process that has the directory, according to a message."""
    return int(told.partition("(process ")[2].partition(" ")[0])


# A second opener ----------------------------------------------------------------------------------


def test_who_comes_second_is_told_at_once_whose_directory_it_is(
    scenes: dict[str, dict[str, Any]],
) -> None:
    scene = scenes["second"]

    assert whose(scene["refused"]["told"]) == scene["owner"]
    assert "choose another disk_dir" in scene["refused"]["told"]
    assert scene["refused"]["seconds"] < AT_ONCE
    assert scene["unchanged"]
    assert scene["then"]["found"] == {"group": [1]}  # once the owner has closed it


def races(root: Path, rounds: int, *mutant: str) -> list[Round]:
    words = ["-m", "tests.faults.kills.racing", root / "raced", RACERS, rounds, *mutant]
    return [Round(**json.loads(line)) for line in output_of(*words).splitlines()]


def test_of_those_who_race_for_a_directory_exactly_one_wins(tmp_path: Path) -> None:
    found = races(tmp_path, RACES)

    assert len(found) == RACES
    for each in found:
        assert len(each.winners) == 1
        assert [whose(told) for told in each.told] == each.winners * RACERS
        assert each.wrong == []
    assert len({each.winners[0] for each in found}) > 1


def test_without_the_lock_several_win(tmp_path: Path) -> None:
    """The control."""
    found = races(tmp_path, 3, "no lock")

    assert any(len(each.winners) > 1 for each in found)
    assert all(each.wrong for each in found)


def test_processes_that_take_turns_lose_nothing(scenes: dict[str, dict[str, Any]]) -> None:
    scene = scenes["counting"]

    assert scene["done"] == [TURNS] * 2
    assert scene["then"]["found"] == {"count": [2 * TURNS]}


# Owners that die, and children that do not --------------------------------------------------------


def test_a_killed_owner_keeps_nobody_out(scenes: dict[str, dict[str, Any]]) -> None:
    assert scenes["killed owner"]["then"]["found"] == {"group": [1]}


@pytest.mark.parametrize("scene", ["killed, child", "closed, child", "closed, raw child"])
def test_a_child_that_was_forked_keeps_nobody_out(
    scene: str, scenes: dict[str, dict[str, Any]]
) -> None:
    assert scenes[scene]["meanwhile"]["found"] == {"group": [1]}
    assert scenes[scene]["then"]["found"] == {"group": [1]}


def test_of_a_child_that_was_forked_past_python_the_error_says_that_it_must_end(
    scenes: dict[str, dict[str, Any]],
) -> None:
    """Also the control of the others: where no fork handler runs, the child has the lock."""
    scene = scenes["killed, raw child"]

    told = scene["meanwhile"]["told"]
    assert whose(told) == scene["owner"]
    assert "has ended: a process that it forked lives on, and must end too" in told
    assert scene["meanwhile"]["seconds"] < AT_ONCE
    assert scene["then"]["found"] == {"group": [1]}


# Stores in forked children ------------------------------------------------------------------------

# What need not fail in a child: giving back what it does not have, and looking at its copy.
HARMLESS = {"release", "close", "count", "contains"}


def test_in_a_forked_child_every_call_ends_at_once(scenes: dict[str, dict[str, Any]]) -> None:
    found = scenes["forked"]["told"]["found"]

    assert len(found) > 20
    for name, ways in found.items():
        allowed = {"ClosedError", "returns"} if name in HARMLESS else {"ClosedError"}
        assert ways.keys() <= allowed, (name, ways)
        assert max(ways.values()) < AT_ONCE, (name, ways)


def test_the_parent_of_forked_children_goes_on(scenes: dict[str, dict[str, Any]]) -> None:
    told = scenes["forked"]["told"]

    assert told["failed"] == []
    assert told["still locked"]
    assert scenes["forked"]["then"]["found"]["group"] == [1]


def test_workers_of_a_data_loader_are_refused_and_disturb_nobody(
    scenes: dict[str, dict[str, Any]],
) -> None:
    scene = scenes["workers"]

    assert scene["refused"] == 8
    assert scene["still locked"]
    assert scene["then"]["found"] == {"group": [2]}  # opened while they live
