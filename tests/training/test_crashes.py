"""A training is killed at any point, and resumes from its last save as if nothing had happened.

The trainings are those of `crashing.py`. Nothing here is timed: a process kills itself at a chosen
event, more often than not in the middle of a save.
"""

from __future__ import annotations

import json

import pytest

from tests.helpers.processes import output_of, results_in
from tests.lanes import by_lane
from tests.training.crashing import STEPS, Crash

pytestmark = pytest.mark.full("dozens of processes; tests/training/test_saving.py has a save fail")

POINTS = {"save_training": by_lane(50, 50, 500), "torch.save": 6}


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Crash]]:
    """Return the outcomes by the way to save, all from one process."""
    told = json.dumps({"place": str(tmp_path_factory.mktemp("crashes")), "points": POINTS})
    output = output_of("-m", "tests.training.crashing", told)
    found: dict[str, list[Crash]] = {way: [] for way in POINTS}
    for way, crash in results_in(output):
        found[way].append(Crash(**crash))
    assert {way: len(of_it) for way, of_it in found.items()} == POINTS
    return found


def test_killed_training_resumes_bit_exactly_from_last_save(
    crashes: dict[str, list[Crash]],
) -> None:
    found, whole = crashes["save_training"], [".metadata", "__0.distcp"]

    for crash in found:
        assert not crash.error, crash
        # The save in which it was killed may have been complete.
        assert crash.found in (crash.saved, crash.saved + 1), crash
        assert crash.names == whole, crash  # the killed save left nothing
    killed = [crash for crash in found if crash.killed]
    assert len(killed) >= 0.9 * len(found)  # threads differ: a few events fewer than were counted
    # They include crashes in a save, just after one, and with earlier saves present.
    assert any(name.startswith(".saving-") for crash in killed for name in crash.left or ())
    assert any((crash.left or []).count("__0.distcp") == 2 for crash in killed)
    assert any(crash.found == crash.saved + 1 for crash in killed)
    assert len({crash.found for crash in killed}) >= STEPS - 1


def test_kills_corrupt_a_save_that_overwrites_in_place(
    crashes: dict[str, list[Crash]],
) -> None:
    assert any(crash.killed and crash.error for crash in crashes["torch.save"])
