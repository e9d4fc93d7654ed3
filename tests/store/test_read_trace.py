"""Reading a trace: everything that a store wrote, and nothing incomplete."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.files import with_flipped_bit
from tests.store.helpers import PAGE, open_store, pages, push_out
from tierstore import TierStoreError
from tierstore.errors import InvalidTraceError
from tierstore.observe.trace import KINDS, read_trace
from tierstore.observe.trace_writer import merged, save

Document = dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """Return the trace that a store wrote."""
    directory = tmp_path_factory.mktemp("written")
    with open_store(directory / "store") as store:
        store.put("a", pages(1, 2))
        push_out(store, "a")
        store.get("a")
        store.trace(directory / "trace.json")
    document = json.loads((directory / "trace.json").read_text())
    assert isinstance(document, dict)
    return document


def test_trace_written_is_read_back(written: Document, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    save(written, path)
    assert path.read_bytes().startswith(b"\x1f\x8b")
    recorded = read_trace(path)
    assert recorded.groups == (("a", 2 * PAGE),)
    assert [key for key, _ in recorded.uses] == ["a"]
    assert recorded.budgets == written["tierstore"]["budgets"]
    assert recorded.bandwidth == written["tierstore"]["bandwidth"]
    assert {one.kind for one in recorded.slices} <= set(KINDS.values())
    assert {one.track for one in recorded.slices} >= {"stall", "compute", "disk read", "disk write"}
    assert recorded.counters["HOST used"][-1][1] == recorded.stats["used_bytes"]["HOST"]
    spans = [e for e in written["traceEvents"] if e["ph"] == "X"]
    assert len(recorded.slices) == len(spans)
    assert sum(one.seconds for one in recorded.slices) == pytest.approx(
        sum(event["dur"] for event in spans) / 1e6
    )
    assert min(at for points in recorded.counters.values() for at, _ in points) == 0
    assert recorded.seconds > 0


def _set(*place: Any) -> Callable[[Document], None]:
    """Set the last value at the path that the others lead to."""

    def change(document: Document) -> None:
        at: Any = document
        for step in place[:-2]:
            at = at[step]
        at[place[-2]] = place[-1]

    return change


def _drop(*place: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        at: Any = document
        for step in place[:-1]:
            at = at[step]
        del at[place[-1]]

    return change


def _in_events(phase: str, name: str, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        next(event for event in document["traceEvents"] if event["ph"] == phase)[name] = value

    return change


def _without_names(document: Document) -> None:
    document["traceEvents"] = [e for e in document["traceEvents"] if e["name"] != "thread_name"]


DAMAGE = {
    "no object": _drop("tierstore"),
    "no object but a list": _set("tierstore", []),
    "another version": _set("tierstore", "version", 2),
    "no groups": _drop("tierstore", "groups"),
    "a group without size": _set("tierstore", "groups", 0, ["a"]),
    "a group of half a byte": _set("tierstore", "groups", 0, ["a", 0.5]),
    "a group of true bytes": _set("tierstore", "groups", 0, ["a", True]),
    "a group twice": _set("tierstore", "groups", [["a", 1], ["a", 1]]),
    "a group without a name": _set("tierstore", "groups", 0, [1, 1]),
    "uses are no list": _set("tierstore", "uses", {}),
    "an unknown group": _set("tierstore", "uses", [["b", 1.0]]),
    "a negative time": _set("tierstore", "uses", [["a", -1.0]]),
    "no time": _set("tierstore", "uses", [["a", float("nan")]]),
    "for ever": _set("tierstore", "uses", [["a", float("inf")]]),
    "budgets in a row": _set("tierstore", "budgets", [1]),
    "an unknown tier": _set("tierstore", "budgets", {"TAPE": 1}),
    "a budget in words": _set("tierstore", "budgets", {"HOST": "1GB"}),
    "an unknown way": _set("tierstore", "bandwidth", {"DISK>TAPE": 1.0}),
    "a negative speed": _set("tierstore", "bandwidth", {"DISK>HOST": -1.0}),
    "dropped less than none": _set("tierstore", "dropped", -1),
    "no device": _set("tierstore", "device", None),
    "stats in part": _drop("tierstore", "stats", "overlap"),
    "stats in words": _set("tierstore", "stats", "hits", "many"),
    "stats of another kind": _set("tierstore", "stats", "used_bytes", 1),
    "a count by name": _set("tierstore", "stats", "hits", {"a": 1}),
    "a peak without bytes": _set("tierstore", "stats", "peak_bytes", "HOST", None),
    "busy for no seconds": _set("tierstore", "stats", "busy_seconds", "DISK>HOST", None),
    "no events": _drop("traceEvents"),
    "events of another kind": _set("traceEvents", {}),
    "a slice without a time": _in_events("X", "ts", None),
    "a slice that takes less than no time": _in_events("X", "dur", -1),
    "a slice without a length": _in_events("X", "dur", None),
    "a counter that counts nothing": _in_events("C", "args", {}),
    "a counter without a time": _in_events("C", "ts", "soon"),
    "tracks without names": _without_names,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_trace_raises(damage: str, written: Document, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(written))
    read_trace(path)  # valid before the change
    document = copy.deepcopy(written)
    DAMAGE[damage](document)
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidTraceError) as error:
        read_trace(path)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, TierStoreError)
    assert error.value.path == str(path)
    assert str(path) in str(error.value)
    assert str(error.value).endswith("write it again with store.trace(path)")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"[", b"\xff\xfe", b"1e999999", b"[" * 10**5]
)
def test_trace_that_is_no_json_raises(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(InvalidTraceError):
        read_trace(tmp_path / "trace.json")


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("packed", [False, True])
def test_truncated_trace_raises(
    part: float, packed: bool, written: Document, tmp_path: Path
) -> None:
    raw = json.dumps(written).encode()
    raw = gzip.compress(raw) if packed else raw
    (tmp_path / "trace").write_bytes(raw)
    assert read_trace(tmp_path / "trace").uses
    (tmp_path / "trace").write_bytes(raw[: int(len(raw) * part)])
    with pytest.raises(InvalidTraceError):
        read_trace(tmp_path / "trace")


def test_packed_trace_with_a_flipped_bit_raises(written: Document, tmp_path: Path) -> None:
    raw = gzip.compress(json.dumps(written).encode())
    (tmp_path / "trace.json.gz").write_bytes(with_flipped_bit(raw, len(raw) // 2))
    with pytest.raises(InvalidTraceError):
        read_trace(tmp_path / "trace.json.gz")


def test_missing_trace_raises_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "trace.json")


def test_foreign_events_are_ignored(written: Document, tmp_path: Path) -> None:
    others = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": -5.5},
        {"ph": "C", "name": "HOST used", "pid": 1, "ts": 1},
        "not even an event",
    ]
    profile = {"traceEvents": others, "schemaVersion": 1}
    document = merged(written, profile)
    save(document, tmp_path / "both.json")
    save(written, tmp_path / "alone.json")
    both, alone = read_trace(tmp_path / "both.json"), read_trace(tmp_path / "alone.json")
    assert both == alone
    assert document["schemaVersion"] == 1
    assert others[0] in document["traceEvents"]


def test_merged_times_follow_the_other_traces_clock(written: Document) -> None:
    base = written["baseTimeNanoseconds"]
    profile = {"baseTimeNanoseconds": base - 3_000_000, "traceEvents": []}
    document = merged(written, profile)
    assert document["baseTimeNanoseconds"] == base - 3_000_000
    before = [e["ts"] for e in written["traceEvents"] if "ts" in e]
    assert [e["ts"] for e in document["traceEvents"] if "ts" in e] == [at + 3_000 for at in before]


def test_trace_of_an_older_version_is_readable(written: Document, tmp_path: Path) -> None:
    older = json.loads(json.dumps(written))
    del older["tierstore"]["stats"]["reserved_bytes"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(older))
    assert read_trace(path).stats["reserved_bytes"] == {}
