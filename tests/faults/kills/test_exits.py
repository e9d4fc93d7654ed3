"""A process that ends while its store is busy ends soon and leaves nothing torn.

The ways to end are in `endings.py`; `exiting.py` runs a process for each.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.faults.kills.exiting import Ending
from tests.helpers.processes import output_of, results_in
from tests.lanes import by_lane

pytestmark = [
    pytest.mark.full("fifteen processes; tests/tiers/test_directory.py checks the remains of one"),
    pytest.mark.timeout(3600),
]

ROOT = Path(__file__).resolve().parents[3]
SOON = 30.0
"""Seconds in which a process must end, however busy the machine. On an idle one it takes one."""

CODES = {
    "come to the end": 0,
    "exit with a code": 5,
    "raise an error": 1,
    "be terminated": -signal.SIGTERM,
    "leave at once": 5,
    "close": 0,
    "fail in a with block": 1,
    "leave a daemon thread": 0,
    "leave a waiting thread": 0,
    "leave a working thread": 0,
    "use it at exit": 0,
    "close it at exit": 0,
    "use it too late": 0,
    "fork a child that ends": 0,
}
FLUSHED = {f"flushed {number}": number for number in range(3)}
FRESH = {f"fresh {number}": 100 + number for number in range(12)}
CLOSED = {"close", "fail in a with block", "close it at exit", "fork a child that ends"}
"""Endings that close the store: all durable groups must be there afterwards."""
LATE = {"leave a working thread", "use it at exit", "fork a child that ends"}
"""Endings that use the store, and flush a group, after the end of the main program."""
OUTLIVED = {"leave a daemon thread", "leave a waiting thread"}
"""Endings with threads that the interpreter does not wait for, which go on using the store."""
DEAD_DISK = "have a dead disk"  # for ten seconds
SOME = [
    *("come to the end", "raise an error", "be terminated", "leave at once"),
    *("use it at exit", "use it too late", "fork a child that ends"),
]
WAYS = by_lane(SOME, SOME, [*CODES, DEAD_DISK])


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ending]:
    ways = ["use no store", *WAYS]
    root = tmp_path_factory.mktemp("exits")
    output = output_of("-m", "tests.faults.kills.exiting", root, json.dumps(ways))
    found = {}
    for told in results_in(output, "ENDING"):
        ending = Ending(**told)
        found[ending.way] = ending
        print(f"{ending.way}: {ending.seconds:.2f} s")
    return found


@pytest.mark.long("the other ways to end", keep=SOME)
@pytest.mark.parametrize("way", CODES)
def test_busy_process_exits_soon_and_leaves_the_store_whole(
    way: str, endings: dict[str, Ending]
) -> None:
    ending = endings[way]
    assert ending.code == CODES[way], ending
    assert 0 <= ending.seconds < SOON
    # Only its own error is printed: no thread of the library fails, no lease is lost, no exception
    # is ignored. A user's thread that outlives the store gets an error that it is closed.
    told = ending.errors.count("ClosedError: the store is closed") if way in OUTLIVED else 0
    assert ending.errors.count("Traceback") == (ending.code == 1) + told
    assert ("RuntimeError: expected" in ending.errors) == (ending.code == 1)
    assert "Exception ignored" not in ending.errors
    if way in LATE:  # the store works until the exit handlers are done
        assert ending.told["worked"] == 100

    groups = ending.found["groups"]
    flushed = FLUSHED | ({"flushed late": 7} if way in LATE else {})
    assert flushed.items() <= groups.items()
    assert groups.items() <= (flushed | FRESH).items()
    if way in CLOSED:
        assert groups == flushed | FRESH
    assert ending.found["damaged"] == []
    assert ending.found["left behind"] == []


def test_some_exits_happen_during_writes(endings: dict[str, Ending]) -> None:
    """Check the control: some files are half-written, and some groups are not on disk."""
    abrupt = [endings["be terminated"], endings["leave at once"]]

    assert any(ending.found["left"] for ending in abrupt)
    assert all(len(ending.found["groups"]) < len(FLUSHED | FRESH) for ending in abrupt)


def test_calls_after_the_exit_handler_raise_at_once(
    endings: dict[str, Ending],
) -> None:
    told = dict(endings["use it too late"].told)

    del told["ends"]
    assert told.pop("close") == "returns"
    assert set(told.values()) == {"ClosedError"}, told
    assert len(told) == 5


def test_forked_childs_exit_leaves_the_parents_lock(endings: dict[str, Ending]) -> None:
    assert endings["fork a child that ends"].told["locked"]


@pytest.mark.long(
    "takes ten seconds",
    sentinel="tests/faults/kills/test_exits.py"
    "::test_busy_process_exits_soon_and_leaves_the_store_whole",
)
def test_dead_disk_does_not_keep_the_process_alive(endings: dict[str, Ending]) -> None:
    ending = endings[DEAD_DISK]
    assert ending.code == 0
    assert ending.seconds < SOON
    assert FLUSHED.items() <= ending.found["groups"].items()
