"""`replay`: a recorded run with other budgets and policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Inspect, start
from tierstore import Stats, TierStore
from tierstore.model.tiers import Tier
from tierstore.simulation import Use, simulate
from tierstore.trace import read_trace

GROUPS = 16
PASSES = 6
GROUP = 1 << 16  # bytes; a checkpoint's group takes a page more
WHOLE = GROUPS * (GROUP + 4096)
HALF = WHOLE // 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Stats]:
    """Record a loop over groups of which half fit; return the trace and the store's counters."""
    place = tmp_path_factory.mktemp("recorded")
    weights = {f"block.{n:02}": torch.zeros(GROUP // 4) for n in range(GROUPS)}
    save_file(weights, place / "model.safetensors")
    with TierStore(HALF, place / "store", device="cpu") as store:
        keys = store.register_checkpoint(place / "model.safetensors")
        for _ in range(PASSES):
            for key in keys:
                with store.acquire(key) as lease:
                    lease.tensor.sum()
        stats = None
        while stats != store.stats():  # early fetches are still arriving
            stats = store.stats()
            store.trace(place / "run.json")
        return place / "run.json", stats


@pytest.fixture
def trace(recorded: tuple[Path, Stats]) -> Path:
    return recorded[0]


def edited(trace: Path, place: Path, **fields: Any) -> Path:
    """Return a copy of a trace in which the store's object has other fields."""
    document = json.loads(trace.read_text())
    document["tierstore"].update(fields)
    place.write_text(json.dumps(document))
    return place


def record_in(trace: Path) -> dict[str, Any]:
    """Return the record of events of a trace, to be edited."""
    record: dict[str, Any] = json.loads(trace.read_text())["tierstore"]["events"]
    return record


def test_replay_prints_the_recorded_run_first(
    inspect: Inspect, recorded: tuple[Path, Stats]
) -> None:
    trace, stats = recorded
    first, *others = inspect.json("replay", trace)["runs"]
    assert first["name"] == "recorded"
    assert first["ram"] == stats.budget_bytes["HOST"] == HALF
    assert first["read"] == stats.bytes_read > WHOLE
    assert first["stalled_seconds"] == pytest.approx(stats.stalled_seconds)
    assert [first[count] for count in ("hits", "late", "misses")] == [
        stats.hits,
        stats.late,
        stats.misses,
    ]
    assert first["seconds"] == first["computed_seconds"] + first["stalled_seconds"]
    assert [run["name"] for run in others] == ["next-use"]
    assert others[0]["ram"] == HALF


def test_replay_equals_the_planner_on_the_recorded_uses(inspect: Inspect, trace: Path) -> None:
    run = inspect.json("replay", trace, "--ram", "600KB")["runs"][1]
    recorded = read_trace(trace)
    outcome = simulate(
        dict(recorded.groups),
        [Use(key, seconds) for key, seconds in recorded.uses],
        {Tier.HOST: 598_016, Tier.DISK: None},
        bandwidth={(Tier.DISK, Tier.HOST): recorded.bandwidth["DISK>HOST"]},
    )
    assert run["ram"] == 598_016
    assert run["read"] == outcome.bytes_moved[Tier.DISK, Tier.HOST]
    assert run["stalled_seconds"] == outcome.stalled_seconds
    assert run["seconds"] == pytest.approx(outcome.seconds)
    assert run["late"] == outcome.late


def test_replay_compares_policies(inspect: Inspect, trace: Path) -> None:
    options = "--policy", "next-use", "--policy", "lru", "--ram", f"{HALF}B", "--ram", f"{WHOLE}B"
    runs = inspect.json("replay", trace, *options)["runs"][1:]
    assert [(run["name"], run["ram"]) for run in runs] == [
        ("next-use", HALF),
        ("lru", HALF),
        ("next-use", WHOLE),
        ("lru", WHOLE),
    ]
    assert runs[1]["read"] >= PASSES * WHOLE, "a loop that does not fit has no hits"
    assert runs[0]["read"] < 0.8 * runs[1]["read"]
    assert runs[2]["read"] == runs[3]["read"] == WHOLE


def test_replay_with_a_device_counts_onloads(inspect: Inspect, trace: Path) -> None:
    run = inspect.json("replay", trace, "--ram", "10MB", "--device", f"{HALF}B")["runs"][1]
    assert run["device"] == HALF
    assert run["read"] == WHOLE
    assert run["onloaded"] >= WHOLE + (PASSES - 1) * HALF
    table = inspect("replay", trace, "--ram", "10MB", "--device", f"{HALF}B")
    assert "ONLOADED" in table.stdout
    assert "ONLOADED" not in inspect("replay", trace).stdout


def test_replay_prints_a_table(inspect: Inspect, trace: Path) -> None:
    result = inspect("replay", trace, "--ram", "600KB", "--policy", "lru")
    assert result.exit_code == 0
    head, first, second, _, checked = (line.split() for line in result.stdout.splitlines())
    assert head == ["RUN", "RAM", "READ", "STALLED", "SECONDS", "HITS", "LATE", "MISSES"]
    assert (first[0], second[0]) == ("recorded", "lru")
    assert second[1] == "600KB", "as it was typed"
    assert second[3] == "MB"
    assert checked[:3] == ["same", "decisions", "at"]
    assert checked[3] == checked[5] != "0"
    assert result.stderr == ""


def test_replay_compares_the_planner_with_the_recorded_run(
    inspect: Inspect, trace: Path, tmp_path: Path
) -> None:
    count = len(record_in(trace)["handled"])
    assert count > 2 * PASSES * GROUPS
    same = {"count": count, "agreed": count, "problem": None}
    assert inspect.json("replay", trace)["events"] == same
    record = record_in(trace)
    number, followed = next((n, rows) for n, rows in enumerate(record["handled"]) if len(rows) > 1)
    del followed[1:]
    path = edited(trace, tmp_path / "edited.json", events=record)
    printed = inspect.json("replay", path)["events"]
    assert (printed["count"], printed["agreed"]) == (count, number)
    assert f"From event {number + 1} on" in printed["problem"]
    assert "it instructed nothing; now: Copy(" in printed["problem"]
    result = inspect("replay", path)
    assert result.exit_code == 0
    assert f"same decisions at {number:,} of {count:,} events" in result.stdout
    assert f"From event {number + 1} on" in result.stderr


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"dropped": 3}, "the record lacks its 3 oldest events"),
        ({"policy": "fifo"}, "unknown policy 'fifo'"),
        ({"tiers": []}, "memory above a persistent tier"),
    ],
)
def test_replay_incomparable_events_are_reported(
    inspect: Inspect, trace: Path, tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    record = {**record_in(trace), "handled": [], **fields}
    path = edited(trace, tmp_path / "edited.json", events=record)
    result = inspect("replay", path)
    assert result.exit_code == 0
    assert "same decisions at 0 of 0 events" in result.stdout
    assert problem in result.stderr
    assert problem in inspect.json("replay", path)["events"]["problem"]


def test_replay_inconsistent_events_are_reported(
    inspect: Inspect, trace: Path, tmp_path: Path
) -> None:
    record = record_in(trace)
    record["handled"][0] = [[0.0, "Released", ["x" * 10_000, 1], "read", False]]
    result = inspect("replay", edited(trace, tmp_path / "edited.json", events=record))
    assert result.exit_code == 0
    assert "From event 1 on" in result.stderr and "KeyError" in result.stderr
    assert len(result.stderr) < 2000


@pytest.mark.parametrize("events", [None, "left out"])
def test_replay_trace_without_events_works(
    inspect: Inspect, trace: Path, tmp_path: Path, events: str | None
) -> None:
    document = json.loads(trace.read_text())
    document["tierstore"]["events"] = None
    if events is not None:
        del document["tierstore"]["events"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(document))
    printed = inspect.json("replay", path)
    assert printed["events"] is None
    assert printed["runs"] == inspect.json("replay", trace)["runs"]
    result = inspect("replay", path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "decisions" not in result.stdout


def test_replay_budget_below_a_group_is_reported(inspect: Inspect, trace: Path) -> None:
    result = inspect("replay", trace, "--ram", "8KB", "--ram", "10MB")
    assert result.exit_code == 0
    assert "ram_budget" in result.stderr
    assert result.stdout.splitlines()[2].split().count("-") == 6
    _, small, large = inspect.json("replay", trace, "--ram", "8KB", "--ram", "10MB")["runs"]
    assert (small["read"], small["seconds"]) == (None, None)
    assert "ram_budget" in small["problem"]
    assert (large["read"], large["problem"]) == (WHOLE, None)


def test_replay_trace_with_dropped_events_is_reported(
    inspect: Inspect, trace: Path, tmp_path: Path
) -> None:
    assert "not whole" not in inspect("replay", trace).stderr
    path = edited(trace, tmp_path / "cut.json", dropped=5)
    assert "5 oldest events" in inspect("replay", path).stderr


def test_replay_trace_without_uses_is_usage_error(
    inspect: Inspect, trace: Path, tmp_path: Path
) -> None:
    result = inspect("replay", edited(trace, tmp_path / "empty.json", uses=[]))
    assert result.exit_code == 2
    assert "no uses of groups to replay" in result.stderr


def test_replay_infinite_times_are_usage_error(
    inspect: Inspect, trace: Path, tmp_path: Path
) -> None:
    path = edited(trace, tmp_path / "slow.json", bandwidth={"DISK>HOST": 5e-324})
    result = inspect("replay", path, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "infinite" in result.stderr


def test_replay_loads_no_torch(trace: Path) -> None:
    tell = "print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    run = start("replay", trace, "--ram", "600KB", "--json", after=tell)
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines()[-1] == "False True"
