"""`trace`: the numbers of a recorded run, and its picture."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from tests.cli.conftest import Inspect, start
from tests.helpers.events import before, failing
from tests.store.helpers import PAGE, open_store, pages, push_out, wait_until_idle
from tierstore.cli import picture
from tierstore.observe.stats import Stats
from tierstore.observe.trace import KINDS, TraceSlice, load, read_trace
from tierstore.observe.trace_writer import save


@dataclass(frozen=True)
class Run:
    """A store's trace, and its statistics at that time."""

    path: Path
    stats: Stats


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("run")
    with open_store(directory / "store", 16 * PAGE) as store:
        for i in range(12):
            store.put(f"layer/{i}", pages(i, 2))
        store.flush()
        push_out(store, "layer/0")
        for i in range(24):
            store.get(f"layer/{i % 12}")
        wait_until_idle(store)
        stats = store.stats()
        store.trace(directory / "run.json")
    return Run(directory / "run.json", stats)


def test_trace_table_matches_the_store_statistics(run: Run, inspect: Inspect) -> None:
    result = inspect("trace", run.path)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    stats = run.stats
    printed = [str(stats.hits), "hits,", str(stats.late), "late,", str(stats.misses), "misses"]
    assert ["acquires", *printed] in lines
    assert ["uses", "24", "uses", "of", "12", "groups"] in lines
    assert ["overlap", f"{stats.overlap:.1%}"] in lines
    assert lines[3][:3] == ["stalled", f"{stats.stalled_seconds:.3f}", "s,"]
    assert ["HOST", "64.0", "KiB", "64.0", "KiB"] in lines
    moved = {line[1]: line for line in lines if line[:1] == ["disk"] and len(line) > 3}
    assert moved["read"][2] == f"{stats.bytes_read / 1024:.1f}"
    assert moved["write"][2] == f"{stats.bytes_written / 1024:.1f}"
    waited = next(i for i, line in enumerate(lines) if line[:1] == ["WAITED"])
    assert 1 <= len(lines[waited + 1 :]) <= 5
    assert all(line[0].startswith("layer/") for line in lines[waited + 1 :])


def test_trace_document_has_the_same_raw_numbers(run: Run, inspect: Inspect) -> None:
    document = inspect.json("trace", run.path)
    stats = run.stats
    assert document["trace"] == str(run.path)
    assert (document["hits"], document["late"], document["misses"]) == (
        stats.hits,
        stats.late,
        stats.misses,
    )
    assert document["stalled_seconds"] == stats.stalled_seconds
    assert document["overlap"] == stats.overlap
    assert (document["uses"], document["groups"], document["device"]) == (24, 12, "cpu")
    assert document["seconds"] == read_trace(run.path).seconds
    hops = {hop["kind"]: hop for hop in document["hops"]}
    assert hops.keys() == {"disk read", "disk write"}
    assert hops["disk read"]["nbytes"] == stats.bytes_read
    assert hops["disk read"]["seconds"] == stats.busy_seconds["DISK>HOST"]
    tiers = {tier["tier"]: (tier["peak"], tier["budget"]) for tier in document["tiers"]}
    assert tiers["HOST"] == (stats.peak_bytes["HOST"], 16 * PAGE)
    assert tiers["DISK"] == (stats.peak_bytes["DISK"], None)
    seconds = [stall["seconds"] for stall in document["stalls"]]
    assert seconds == sorted(seconds, reverse=True)
    assert sum(seconds) == pytest.approx(stats.stalled_seconds, abs=1e-6 * 2 * (1 + len(seconds)))


def slices_of(kind: str, *times: tuple[float, float], **args: object) -> list[TraceSlice]:
    """Return slices of a kind with these begins and durations."""
    return [TraceSlice(kind, kind, "key", start, seconds, args) for start, seconds in times]


def with_slices(run: Run, path: Path, slices: list[TraceSlice]) -> Path:
    """Write the trace of the run with additional slices to a separate file."""
    document = load(run.path)
    events = document["traceEvents"]
    known = next(event for event in events if event["ph"] == "X")
    for number, kind in enumerate(dict.fromkeys(one.kind for one in slices)):
        place = {**known, "cat": f"tierstore,{kind}", "tid": 90_000 + number}
        events.append({**place, "ph": "M", "name": "thread_name", "args": {"name": kind}})
        events += [
            {**place, "ph": "X", "name": one.name, "args": one.args}
            | {"ts": round(one.start * 1e6), "dur": round(one.seconds * 1e6)}
            for one in slices
            if one.kind == kind
        ]
    save(document, path)
    return path


def test_trace_prints_passes_by_model_with_their_stalls(
    run: Run, inspect: Inspect, tmp_path: Path
) -> None:
    document = load(run.path)
    document["traceEvents"] = [e for e in document["traceEvents"] if e["ph"] == "M"]
    save(document, tmp_path / "bare.json")
    slices = [
        *slices_of("pass", (1, 2), (4, 1), (6, 4), model="pipe/vae", does="decode"),
        *slices_of("pass", (20, 1), model="pipe/unet", does="forward"),
        *slices_of("stall", (0.5, 0.25), (2.5, 1), (7, 1), (8.5, 0.5)),
    ]
    known = {"cat": "", "pid": document["tierstore"]["process"], "ph": "X"}
    document["traceEvents"].append({**known, "cat": "tierstore,compute", "ts": 0, "dur": 1})
    track = next(e for e in document["traceEvents"] if e.get("args") == {"name": "compute"})
    document["traceEvents"][-1] |= {"tid": track["tid"], "name": "key", "args": {}}
    save(document, tmp_path / "bare.json")
    path = with_slices(Run(tmp_path / "bare.json", run.stats), tmp_path / "run.json", slices)
    printed = inspect.json("trace", path)["passes"]
    assert printed == [
        {
            "model": "pipe/vae",
            "does": "decode",
            "count": 3,
            "seconds": pytest.approx(7.0),
            "median": pytest.approx(2.0),
            "longest": pytest.approx(4.0),
            "stalled_seconds": pytest.approx(0.5 + 1.0 + 0.5),  # only the part in a pass
        },
        {
            "model": "pipe/unet",
            "does": "forward",
            "count": 1,
            "seconds": pytest.approx(1.0),
            "median": pytest.approx(1.0),
            "longest": pytest.approx(1.0),
            "stalled_seconds": 0.0,
        },
    ]
    lines = [line.split() for line in inspect("trace", path).stdout.splitlines()]
    assert ["pipe/vae", "decode", "3", "2.000", "s", "4.000", "s", "2.000", "s"] in lines


def test_trace_with_dropped_events_is_reported(run: Run, inspect: Inspect, tmp_path: Path) -> None:
    document = load(run.path)
    document["tierstore"]["dropped"] = 3
    save(document, tmp_path / "run.json")
    result = inspect("trace", tmp_path / "run.json")
    assert result.exit_code == 0
    assert "3 older events were dropped" in result.stderr
    assert "dropped" not in inspect("trace", run.path).output


def test_trace_tier_without_a_recorded_peak_shows_none(
    run: Run, inspect: Inspect, tmp_path: Path
) -> None:
    """This happens in a trace whose budgets were edited for a replay."""
    document = load(run.path)
    document["tierstore"]["budgets"]["DEVICE"] = 8 * PAGE
    path = tmp_path / "run.json"
    save(document, path)
    tiers = {tier["tier"]: tier for tier in inspect.json("trace", path)["tiers"]}
    assert tiers["DEVICE"] == {"tier": "DEVICE", "peak": None, "budget": 8 * PAGE}
    lines = [line.split() for line in inspect("trace", path).stdout.splitlines()]
    assert ["DEVICE", "?", "32.0", "KiB"] in lines
    assert inspect("trace", path, "--png", tmp_path / "run.png").exit_code == 0


@pytest.mark.parametrize("content", ["", "{}", '{"traceEvents": []}', "[1, 2]"])
def test_trace_file_not_a_trace_is_usage_error(
    content: str, inspect: Inspect, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(content)
    result = inspect("trace", tmp_path / "run.json")
    assert result.exit_code == 2
    assert str(tmp_path / "run.json") in result.stderr
    assert "store.trace(path)" in result.stderr
    assert result.stdout == ""


# Pictures --------------------------------------------------------------------------------------


def colours(path: Path) -> set[str]:
    """Return every colour in a picture, as `#rrggbb`."""
    assert path.read_bytes().startswith(b"\x89PNG")
    picture = np.rint(imread(path)[..., :3] * 255).astype(np.uint8)
    return {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in np.unique(picture.reshape(-1, 3), axis=0)}


STALL, COMPUTE, READ, WRITE, ONLOAD = "#d55e00", "#999999", "#009e73", "#cc79a7", "#0072b2"
USED, BUDGET = "#0072b2", "#222222"
OF_KIND = {
    "plan": "#f0e442",
    "stall": STALL,
    "compute": COMPUTE,
    "host to device": ONLOAD,
    "device to host": "#56b4e9",
    "disk read": READ,
    "disk write": WRITE,
    "download": "#e69f00",
}


@pytest.mark.full("draws; the same content is tested as text")
def test_picture_shows_every_kind_of_event(run: Run, inspect: Inspect, tmp_path: Path) -> None:
    result = inspect("trace", run.path, "--png", tmp_path / "run.png")
    assert result.exit_code == 0, result.output
    assert "overlap" in result.stdout
    assert colours(tmp_path / "run.png") >= {STALL, COMPUTE, READ, WRITE, USED, BUDGET}


def test_picture_shows_no_event_that_did_not_happen(
    run: Run, inspect: Inspect, tmp_path: Path
) -> None:
    document = load(run.path)
    document["traceEvents"] = [
        event
        for event in document["traceEvents"]
        if event["cat"] not in ("tierstore,disk write", "tierstore,stall")
    ]
    save(document, tmp_path / "run.json")
    assert inspect("trace", tmp_path / "run.json", "--png", tmp_path / "run.png").exit_code == 0
    shown = colours(tmp_path / "run.png")
    assert shown >= {COMPUTE, READ}
    assert not shown & {WRITE, STALL}


def test_picture_of_an_empty_trace_is_drawn(inspect: Inspect, tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.trace(tmp_path / "run.json")
    result = inspect("trace", tmp_path / "run.json", "--png", tmp_path / "run.png")
    assert result.exit_code == 0, result.output
    assert "overlap   100.0%" in result.stdout
    assert "WAITED" not in result.stdout
    assert len(colours(tmp_path / "run.png")) > 1, "it is blank"


@pytest.mark.parametrize("kind", KINDS.values())
def test_picture_shows_a_slice_of_each_kind(
    kind: str, run: Run, inspect: Inspect, tmp_path: Path
) -> None:
    """One slice is wide, and one is so short that it is widened."""
    others = load(run.path)
    others["traceEvents"] = [
        event
        for event in others["traceEvents"]
        if event["ph"] != "C" and event["cat"] != f"tierstore,{kind}"
    ]
    save(others, tmp_path / "others.json")
    first = min(event["ts"] for event in others["traceEvents"] if event["ph"] == "X") / 1e6
    slices = slices_of(kind, (first + 0.1, 0.1), (first + 0.3, 1e-6))
    path = with_slices(Run(tmp_path / "others.json", run.stats), tmp_path / "run.json", slices)
    result = inspect("trace", path, "--png", tmp_path / "run.png")
    assert result.exit_code == 0, result.output
    expected = MODEL if kind == "pass" else OF_KIND[kind]
    assert expected in colours(tmp_path / "run.png")


PALE, MODEL = picture.pale(STALL), "#c6d4ee"


def coloured(path: Path, colour: str) -> int:
    """Return how many pixels of a picture have this colour."""
    picture = np.rint(imread(path)[..., :3] * 255).astype(np.uint8)
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((picture == wanted).all(axis=-1).sum())


@pytest.mark.full("draws a long run")
def test_picture_shows_a_short_stall_in_a_long_run(
    run: Run, inspect: Inspect, tmp_path: Path
) -> None:
    """20 ms of half a minute, drawn to scale, would be less than a pixel wide."""
    quiet = load(run.path)
    quiet["traceEvents"] = [e for e in quiet["traceEvents"] if e["cat"] != "tierstore,stall"]
    save(quiet, tmp_path / "quiet.json")
    base = Run(tmp_path / "quiet.json", run.stats)
    first = min(e["ts"] for e in quiet["traceEvents"] if e["ph"] in ("X", "C")) / 1e6
    long = slices_of("compute", (first + 1, 29))
    for name, stalls in {
        "none": [],
        "short": [(first + 10, 0.02)],
        "long": [(first + 10, 5)],
    }.items():
        path = with_slices(base, tmp_path / "run.json", [*long, *slices_of("stall", *stalls)])
        png = tmp_path / f"{name}.png"
        assert inspect("trace", path, "--png", png).exit_code == 0
    assert coloured(tmp_path / "none.png", PALE) == coloured(tmp_path / "none.png", STALL) == 0
    assert coloured(tmp_path / "short.png", PALE) > 20, "it cannot be seen"
    assert coloured(tmp_path / "long.png", PALE) == 0, "it is long enough to be seen"
    assert coloured(tmp_path / "long.png", STALL) > 50 * coloured(tmp_path / "short.png", STALL)


def test_picture_stall_shares_add_up_without_double_counting() -> None:
    waits = slices_of("stall", (0.5, 1.0), (0.75, 0.5), (1.25, 0.5), (3.5, 9.0))
    assert picture.shares_of(waits, 4.0, 4) == pytest.approx([0.5, 0.75, 0.0, 0.5])
    many = slices_of("stall", *((i / 7, 0.02) for i in range(60)))
    shares = picture.shares_of(many, 9.0, 13)
    assert sum(shares) * 9.0 / 13 == pytest.approx(60 * 0.02)
    assert picture.shares_of(waits, 0.0, 4) == [0.0] * 4


def test_picture_path_not_writable_exits_1(run: Run, inspect: Inspect, tmp_path: Path) -> None:
    png = tmp_path / "missing" / "run.png"
    result = inspect("trace", run.path, "--png", png)
    assert result.exit_code == 1
    problem = f"Error: {png} cannot be written: there is no directory {png.parent}"
    assert result.stderr.splitlines()[0] == problem
    assert result.stdout == ""
    directory = inspect("trace", run.path, "--png", tmp_path)
    assert directory.exit_code == 1
    assert directory.stderr.startswith(f"Error: {tmp_path} is a directory\n")


def test_picture_failure_keeps_the_existing_file(
    run: Run, inspect: Inspect, tmp_path: Path
) -> None:
    picture = tmp_path / "run.png"
    picture.write_bytes(b"the one of yesterday")
    with before("os.rename", failing(errno.ENOSPC)):
        assert inspect("trace", run.path, "--png", picture).exit_code == 1
    assert picture.read_bytes() == b"the one of yesterday"
    assert os.listdir(tmp_path) == ["run.png"]
    assert inspect("trace", run.path, "--png", picture).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_picture_without_matplotlib_names_the_extra(run: Run, tmp_path: Path) -> None:
    without = "sys.modules['matplotlib'] = None"
    drawn = start("trace", run.path, "--png", tmp_path / "run.png", before=without)
    assert drawn.returncode == 1
    assert "pip install 'tierstore[plot]'" in drawn.stderr
    printed = start("trace", run.path, "--json", before=without)
    assert printed.returncode == 0
    assert json.loads(printed.stdout)["overlap"] == run.stats.overlap
