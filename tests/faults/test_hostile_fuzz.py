"""Random hostile input takes neither much more memory than its size nor long.

A separate process reads headers and indexes of checkpoints, and messages, and measures the memory
and time of each. Half are valid ones with changes; the others are composed of the parts of such
files.
"""

from __future__ import annotations

import pytest

from tests.helpers.processes import output_of
from tests.lanes import by_lane

MOST_MEMORY = 64 << 20
MOST_SECONDS = 2.0
"""Seconds of the process's own CPU time."""


@pytest.mark.full("a process that is measured; test_hostile_headers.py has large files")
@pytest.mark.timeout(20_000)
def test_hostile_files_cost_no_more_than_their_size() -> None:
    count = by_lane(200, 3_000, 100_000)
    output = output_of(
        "-m", "tests.faults.strangers", count, 37, MOST_MEMORY, MOST_SECONDS, timeout=20_000
    )
    print(output)
    assert "WRONG" not in output, output
    rows = [line.split("|") for line in output.splitlines() if "|" in line]
    assert sum(int(times) for *_, times in rows) == count
    assert {name for name, outcome, _ in rows if outcome == "refused"} == {
        *("index", "header", "message")
    }
    accepted = {name for name, outcome, _ in rows if outcome == "accepted"}
    assert {"index", "header", "message"} <= accepted
