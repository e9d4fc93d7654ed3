"""A training is killed wherever it is, and goes on from what it had saved as if nothing had been.

The trainings are those of `crashing.py`. Nothing here waits for a moment: a process kills itself at
a chosen event, in the middle of saves more often than not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.crashing import STEPS, Crash

pytestmark = pytest.mark.slow


def crashes(place: Path, way: str, points: int) -> list[Crash]:
    told = json.dumps({"place": str(place), "way": way, "points": points})
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.crashing", told],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found = [Crash(**json.loads(line.removeprefix("RESULT "))) for line in lines]
    assert len(found) == points
    return found


def hidden(names: list[str] | None) -> list[str]:
    return [name for name in names or () if name.startswith(".")]


@pytest.mark.parametrize(("way", "points"), [("exchange", 50), ("two renames", 20)])
def test_a_killed_training_goes_on_bit_for_bit_from_its_last_save(
    way: str, points: int, tmp_path: Path
) -> None:
    found = crashes(tmp_path, way, points)

    for crash in found:
        assert not crash.error, crash
        # The save that it was killed in may have been through already.
        assert crash.found in (crash.saved, crash.saved + 1), crash
        assert crash.names == ["run", "store"], crash  # nothing is left of the killed one's save
    killed = [crash for crash in found if crash.killed]
    assert len(killed) >= points * 0.9  # threads differ: a few events fewer than were counted
    # Crashes of all sorts were among them: in a save, just after it, and with others saved before.
    assert any(hidden(crash.left) for crash in killed)
    assert any(crash.found == crash.saved + 1 for crash in killed)
    assert len({crash.found for crash in killed}) >= STEPS - 1
    if way == "two renames":
        assert any(".run.previous" in hidden(crash.left) for crash in killed)


def test_the_same_crashes_damage_what_is_saved_over_the_last_save(tmp_path: Path) -> None:
    found = crashes(tmp_path, "torch.save", 6)

    assert any(crash.killed and crash.error for crash in found)
