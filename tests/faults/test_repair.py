"""Repairs on failing disks, by users without read access to all files, and during power cuts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT, environment, put
from tests.faults.facilities import cut_power, loop_mounted, make_image, mounted, program, run
from tests.helpers.files import flip_bit, object_file
from tests.lanes import by_lane
from tierstore.tiers.directory import ObjectDirectory

NOBODY = 65534
COMMAND = "from tierstore.cli import main; main()"
WITHOUT_SYNCS = "import os; os.fsync = lambda descriptor: None\n"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Create a directory on a disk, at a path that any user can enter."""
    with tempfile.TemporaryDirectory(prefix="tierstore-", dir="/var/tmp") as path:
        os.chmod(path, 0o755)
        yield Path(path)


def make_store(directory: Path) -> Path:
    """Create a store of the groups a, b and layers/0."""
    store = ObjectDirectory(directory)
    for key in ("a", "b", "layers/0"):
        put(store, key)
    store.close()
    return directory


def verify(*args: object, under: tuple[object, ...] = (), code: str = COMMAND) -> tuple[int, Any]:
    """Run the command, perhaps under another program. Returns its exit code and its document."""
    command = [*under, sys.executable, "-c", code, "verify", *args, "--json"]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment(PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def injecting(path: Path, calls: str, error: str) -> tuple[object, ...]:
    """Return an strace command under which these system calls on a file fail."""
    inject = f"inject={calls}:error={error}"
    # A file opened below an open directory appears in the call by its bare name.
    names = ("-P", path, "-P", path.name)
    return (program("strace"), "-f", "-qq", "-o", os.devnull, *names, "-e", inject)


# Disks that fail ----------------------------------------------------------------------------------


@pytest.mark.needs("strace")
@pytest.mark.parametrize("calls", ["pread64,preadv,preadv2", "preadv,preadv2", "openat"])
def test_repair_quarantines_unreadable_objects(scratch: Path, calls: str) -> None:
    store = make_store(scratch / "store")
    path = object_file(store, "b")
    content = path.read_bytes()
    under = injecting(path, calls, "EIO")
    exit_code, document = verify(store, "--data", under=under)
    assert exit_code == 3
    (problem,) = document["problems"]
    assert problem["state"] == "unreadable"
    assert "Input/output error" in problem["reason"]
    assert path.read_bytes() == content
    exit_code, document = verify(store, "--data", "--repair", under=under)
    assert exit_code == 0
    (problem,) = document["problems"]
    assert Path(problem["put_away"]).read_bytes() == content
    assert not path.exists()
    assert verify(store, "--data")[0] == 0


@pytest.mark.needs("strace")
def test_repair_short_of_memory_quarantines_nothing(scratch: Path) -> None:
    store = make_store(scratch / "store")
    path = object_file(store, "b")
    exit_code, document = verify(
        store, "--data", "--repair", under=injecting(path, "preadv,preadv2", "ENOMEM")
    )
    assert exit_code == 3
    (problem,) = document["problems"]
    assert problem["state"] == "unreadable"
    assert problem["put_away"] is None
    assert problem["left"] == "the error may be transient: verify again"
    assert path.exists()
    assert verify(store, "--data")[0] == 0


@pytest.mark.needs("other-users")
def test_repair_quarantines_objects_without_permission(scratch: Path) -> None:
    store = make_store(scratch / "store")
    for path in [store, *store.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    secret = object_file(store, "b")
    os.chown(secret, 0, 0)
    content = secret.read_bytes()
    ids = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    exit_code, document = verify(store, "--repair", under=(program("setpriv"), *ids))
    assert exit_code == 0
    (problem,) = document["problems"]
    assert problem["state"] == "unreadable"
    moved = Path(problem["put_away"])
    assert moved.read_bytes() == content
    assert moved.stat().st_uid == 0
    assert verify(store, under=(program("setpriv"), *ids))[0] == 0


@pytest.mark.needs("read-only-mounts")
def test_repair_on_a_read_only_disk_only_reports(scratch: Path) -> None:
    store = make_store(scratch / "store")
    flip_bit(object_file(store, "b"), 50)
    with mounted("--bind", store, at=scratch / "mounted") as directory:
        run(program("mount"), "-o", "remount,ro,bind", directory)
        assert verify(directory)[0] == 3
        with pytest.raises(AssertionError, match="Read-only file system"):
            verify(directory, "--repair")
    assert object_file(store, "b").exists()
    assert verify(store, "--repair")[0] == 0


# Power cuts ---------------------------------------------------------------------------------------


def repaired(scratch: Path, kind: str, code: str) -> tuple[bool, list[str]]:
    """Repair, and cut the power. Returns whether the object is in place, and the quarantine."""
    image = scratch / f"{kind}.image"
    make_image(image, kind)
    with loop_mounted(image, scratch / "mounted") as disk:
        store = make_store(disk / "store")
        flip_bit(object_file(store, "b"), 50)
        os.sync()
        assert verify(store, "--repair", code=code)[0] == 0
        cut_power(disk)
    with loop_mounted(image, scratch / "mounted") as disk:
        store = disk / "store"
        away = store / "quarantine"
        names = sorted(path.name for path in away.iterdir()) if away.exists() else []
        for name in names:
            if name.endswith(".note.json"):
                assert json.loads((away / name).read_text())["was"]
        return object_file(store, "b").exists(), names


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.needs(kind)) for kind in ("ext4", "xfs")]
)
def test_repair_survives_a_power_cut(scratch: Path, kind: str) -> None:
    for _ in range(by_lane(1, 1, 20)):
        in_place, away = repaired(scratch, kind, COMMAND)
        assert not in_place
        assert len(away) == 2
    in_place, away = repaired(scratch, kind, WITHOUT_SYNCS + COMMAND)
    assert in_place, "the power cut did not undo the unsynced repair"
    assert away == []
