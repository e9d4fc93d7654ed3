"""Mirrors stay in their store's directory, whatever was planted there, and are private."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from tests.store.helpers import open_store
from tierstore import TransferError
from tierstore.engine.mirrors import LIST, MIRRORS, mirror
from tierstore.tiers.object_store import memory_store

pytest.importorskip("obstore")

FILES = {"config.json": b"{}", "unet/config.json": b"{1}", "unet/model.safetensors": b"x" * 9000}


@pytest.fixture
def url() -> str:
    place = f"memory://{uuid4()}/p"
    for name, data in FILES.items():
        memory_store(place).put(f"p/{name}", data)
    return place


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Make a directory of the user's that does not belong to the store."""
    (tmp_path / "mine" / "unet").mkdir(parents=True)
    for name in ("thesis.txt", "config.json", "unet/thesis.txt", LIST):
        (tmp_path / "mine" / name).write_text("years")
    return tmp_path / "mine"


def tree(place: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.name != LIST
    }


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_mirror_is_private_to_its_owner(mask: int, url: str, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        place = Path(mirror(url, str(tmp_path / "a" / "store")))
    finally:
        os.umask(before)
    assert tree(place) == FILES
    found = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert len(found) >= 9
    for path in found:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path}: {mode:o}"


def _move(place: Path, mine: Path) -> None:
    os.rename(place, place.with_name("moved"))
    os.symlink(mine, place)


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "mirrors": lambda place, mine: _move(place.parent, mine),
    "the mirror": _move,
}
INSIDE: dict[str, Callable[[Path, Path], None]] = {
    "a directory in it": lambda place, mine: _move(place / "unet", mine),
    "a file in it": lambda place, mine: _move(place / "config.json", mine / "config.json"),
    "its list": lambda place, mine: _move(place / LIST, mine / LIST),
    "a draft": lambda place, mine: os.symlink(mine / "thesis.txt", place / "config.json.tmp"),
    "another directory": lambda place, mine: os.symlink(mine, place / "more"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_mirror_link_to_elsewhere_raises(what: str, url: str, mine: Path, tmp_path: Path) -> None:
    place = Path(mirror(url, str(tmp_path / "store")))
    before = tree(mine)
    PLANTED[what](place, mine)
    with pytest.raises(TransferError, match="is a link or a file") as error:
        mirror(url, str(tmp_path / "store"))
    assert str(tmp_path / "store") in str(error.value)
    assert tree(mine) == before and (mine / LIST).read_text() == "years"


@pytest.mark.parametrize("what", INSIDE)
def test_mirror_link_is_replaced_and_not_followed(
    what: str, url: str, mine: Path, tmp_path: Path
) -> None:
    place = Path(mirror(url, str(tmp_path / "store")))
    before = tree(mine)
    INSIDE[what](place, mine)
    if what != "its list":
        memory_store(url).put("p/config.json", b"{ }")  # so that there is something to write
    assert mirror(url, str(tmp_path / "store")) == str(place)
    assert tree(mine) == before and (mine / LIST).read_text() == "years"
    assert not [path for path in place.rglob("*") if path.is_symlink()]
    assert set(tree(place)) == set(FILES)


def test_mirror_files_present_are_not_downloaded_again(url: str, tmp_path: Path) -> None:
    place = Path(mirror(url, str(tmp_path / "store")))
    before = (place / "config.json").stat().st_ino
    (place / "left.json").write_text("of before")
    assert mirror(url, str(tmp_path / "store")) == str(place)
    assert (place / "config.json").stat().st_ino == before
    assert tree(place) == FILES, "removed objects would be loaded, too"


def test_mirror_with_damaged_list_downloads_again(url: str, tmp_path: Path) -> None:
    place = Path(mirror(url, str(tmp_path / "store")))
    for damaged in (b"", b"[" * 100_000, b'{"config.json": [1, 2]}', b'{"a": "b"', b"\xff"):
        (place / LIST).write_bytes(damaged)
        assert mirror(url, str(tmp_path / "store")) == str(place)
        assert tree(place) == FILES


def test_object_named_like_the_list_raises(url: str, tmp_path: Path) -> None:
    memory_store(url).put(f"p/{LIST}", b"{}")
    with pytest.raises(TransferError, match="is not a valid file name"):
        mirror(url, str(tmp_path / "store"))


def test_cache_that_is_a_link_is_not_followed(url: str, mine: Path, tmp_path: Path) -> None:
    from safetensors.torch import save
    from torch import ones

    memory_store(url).put("p/w.safetensors", save({"w": ones(3)}))
    before = tree(mine)
    with open_store(tmp_path / "store", 1 << 16, disk_budget="1MB") as store:
        os.symlink(mine, tmp_path / "store" / "remote")
        with pytest.raises(TransferError, match="is a link"):
            store.register_checkpoint(f"{url}/w.safetensors")
        os.unlink(tmp_path / "store" / "remote")
        store.register_checkpoint(f"{url}/w.safetensors")
        assert store.get("w").sum() == 3
    assert tree(mine) == before
    assert MIRRORS not in os.listdir(tmp_path / "store")
