"""Checks that hold for every trace file, event by event."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tierstore.observe.stats import Stats

PHASES = {"X", "C", "M", "i"}
MOVED = ("read", "written", "onloaded", "offloaded")


def load(path: Path) -> dict[str, Any]:
    """Return the JSON of a trace file."""
    raw = path.read_bytes()
    document = json.loads(gzip.decompress(raw) if path.name.endswith(".gz") else raw)
    assert isinstance(document, dict)
    return document


def check(path: Path, stats: Stats) -> dict[str, Any]:
    """Check that a trace is valid and ends with the store's counters. Returns its JSON."""
    document = load(path)
    ours = [e for e in document["traceEvents"] if str(e.get("cat", "")).startswith("tierstore,")]
    assert {event["ph"] for event in ours} <= PHASES
    assert len({event["pid"] for event in ours}) == 1
    assert all(isinstance(event["ts"], int) for event in ours if event["ph"] != "M")
    check_slices(ours)
    check_counters(ours, stats)
    assert document["tierstore"]["stats"] == json.loads(json.dumps(stats.as_dict()))
    return document


def check_slices(events: list[dict[str, Any]]) -> None:
    """Check that every track has a name, and no two slices on it overlap."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(names.values())) == len(names), "two tracks have one name"
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(tracks) <= set(names), "a track has no name"
    for tid, slices in tracks.items():
        for before, after in zip(sorted(slices), sorted(slices)[1:], strict=False):
            assert before[1] <= after[0], f"{names[tid]}: {before} and {after} overlap"


def check_counters(events: list[dict[str, Any]], stats: Stats) -> None:
    """Check that counters are ordered, within budgets, monotonic if they count, and end right."""
    counters: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            ((what, value),) = event["args"].items()
            counters[f"{event['name']} {what}"].append((event["ts"], value))
    for name, points in counters.items():
        times = [at for at, _ in points]
        assert times == sorted(times), f"{name} goes back in time"
    for name in MOVED:
        values = [value for _, value in counters[f"bytes {name}"]]
        assert values == sorted(values), f"bytes {name} falls"
        assert values[-1] == getattr(stats, f"bytes_{name}")
    for tier, used in stats.used_bytes.items():
        values = [value for _, value in counters[f"{tier} used"]]
        assert values[-1] == used
        budget = stats.budget_bytes[tier]
        assert budget is None or max(values) <= budget
        assert [value for _, value in counters[f"{tier} budget"]] == [budget] * 2 * (
            budget is not None
        )


def slices(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the slices of one kind, by time."""
    found = [e for e in document["traceEvents"] if e.get("cat") == f"tierstore,{kind}"]
    return sorted(found, key=lambda event: event["ts"])
