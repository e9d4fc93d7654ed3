"""The path of a store's directory, as people write it: with `~`, and behind links."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.system_calls import system_call
from tierstore import TierStore
from tierstore.errors import DiskFullError, TransferError

BUDGET = "1MB"


def test_directory_that_cannot_be_created_raises() -> None:
    match = r"^cannot create /proc/x/y \(.*\): choose another disk_dir"
    with pytest.raises(TransferError, match=match):
        TierStore(BUDGET, "/proc/x/y", device="cpu")


def test_directory_on_a_full_disk_raises_disk_full(tmp_path: Path) -> None:
    with system_call("mkdir", fails_with=errno.ENOSPC), pytest.raises(DiskFullError):
        TierStore(BUDGET, tmp_path / "store", device="cpu")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home directory that links to another disk, in a separate working directory."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "cwd").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TIERSTORE_DIR", raising=False)
    monkeypatch.chdir(tmp_path / "cwd")
    yield tmp_path / "disk"
    assert not os.listdir(tmp_path / "cwd"), "a directory named ~ was made"


def store_in(path: str | os.PathLike[str] | None) -> None:
    """Keep a group in a store there, and find it in the next one."""
    with TierStore(BUDGET, path, device="cpu") as store:
        store.put("k", torch.arange(3.0), durable=True)
    with TierStore(BUDGET, path, device="cpu") as store:
        assert torch.equal(store.get("k"), torch.arange(3.0))


def test_default_directory_behind_linked_home_opens(home: Path) -> None:
    store_in(None)
    assert (home / ".cache/tierstore/store").is_dir()


def test_default_directory_behind_linked_cache_opens(home: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (home / ".cache").symlink_to(tmp_path / "cache")
    store_in(None)
    assert (tmp_path / "cache/tierstore/store").is_dir()


def test_disk_dir_tilde_is_home(home: Path) -> None:
    store_in("~/x")
    assert (home / "x").is_dir()


def test_variable_tilde_is_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_DIR", "~/y")
    store_in(None)
    assert (home / "y").is_dir()


@pytest.mark.parametrize("below", ["", "store", "a/b"])
def test_disk_dir_link_is_followed(below: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    store_in(tmp_path / "link" / below)
    assert (tmp_path / "disk" / below / "objects").is_dir()


@pytest.mark.parametrize("below", ["", "store"])
def test_disk_dir_dangling_link_raises(below: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("unmounted")
    with pytest.raises(
        TransferError, match=r"link is a link to \S*unmounted, which does not exist"
    ):
        TierStore(BUDGET, tmp_path / "link" / below, device="cpu")
    assert os.listdir(tmp_path) == ["link"]


@pytest.mark.parametrize("name", ["objects", "tmp"])
def test_link_inside_store_raises(name: str, tmp_path: Path) -> None:
    """The control: files inside a store are never reached through a link."""
    (tmp_path / "others").mkdir()
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "store" / name).symlink_to("../others")
    with pytest.raises(TransferError):
        TierStore(BUDGET, tmp_path / "store", device="cpu")
    assert not os.listdir(tmp_path / "others")
