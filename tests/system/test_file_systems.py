"""The file system of a directory, and the store's warning where it matters."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest
import torch

from tests.store.helpers import open_store
from tierstore.engine.directories import warn_about_file_system
from tierstore.system.file_systems import file_system_of

MEMORY = Path("/dev/shm")


@pytest.mark.skipif(file_system_of(str(MEMORY)) != "tmpfs", reason="there is no tmpfs")
def test_store_on_tmpfs_works_and_warns(caplog: pytest.LogCaptureFixture) -> None:

    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        with open_store(Path(directory) / "store") as store:
            store.put("a", torch.ones(3))
            store.flush()
            assert torch.equal(store.get("a"), torch.ones(3))
        assert any((Path(directory) / "store" / "objects").rglob("*.safetensors"))
    (told,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert f"{directory}/store is on tmpfs: its files take memory" in told.message


def test_store_on_a_disk_does_not_warn(disk_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    if file_system_of(str(disk_dir.parent)) in ("tmpfs", None):
        pytest.skip("tests run in memory")
    open_store(disk_dir).close()
    assert not caplog.records


def test_directory_shared_between_machines_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fake mount table simulates a network file system."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        f"2 1 0:44 / {tmp_path}/far rw - nfs4 server:/export rw\n"
    )
    warn_about_file_system(str(tmp_path / "near"), str(mounts))
    assert not caplog.records
    warn_about_file_system(str(tmp_path / "far" / "store"), str(mounts))
    (told,) = caplog.records
    assert "is on nfs4, which other machines may mount" in told.message
