"""The store's files and directories are writable only by their owner, under any umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.store.helpers import open_store
from tierstore import export_safetensors, load_training, save_training
from tierstore.adapters.training import checkpoint_files
from tierstore.tiers.disk_speed import remember

MASKS = [0o000, 0o002, 0o022, 0o077]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(place: Path) -> dict[str, int]:
    found = {str(p.relative_to(place)): stat.S_IMODE(p.stat().st_mode) for p in place.rglob("*")}
    assert found
    return found


@pytest.mark.parametrize("mask", MASKS)
def test_parent_directories_are_created_private(mask: int, tmp_path: Path) -> None:
    with umask(mask), open_store(tmp_path / "a" / "b" / "store") as store:
        store.put("k", torch.ones(3))
        store.flush()
    for name, mode in modes(tmp_path).items():
        assert mode == (0o700 if (tmp_path / name).is_dir() else 0o600), f"{name}: {mode:o}"


def test_existing_directories_keep_their_modes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o750)
    open_store(tmp_path / "a" / "store").close()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o750


def _others_write(found: dict[str, int]) -> list[str]:
    return [name for name, mode in found.items() if mode & 0o022]


@pytest.mark.parametrize("mask", MASKS)
def test_saved_training_is_writable_by_its_owner_only(
    mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: dict[str, int] = {}
    deny = checkpoint_files.deny_others_writing

    def denying(path: str) -> None:  # once everything is written
        under_way.update(modes(tmp_path))
        deny(path)

    monkeypatch.setattr(checkpoint_files, "deny_others_writing", denying)
    model = nn.Linear(2, 3)
    with umask(mask):
        save_training(tmp_path / "a" / "run", model)
        save_training(tmp_path / "a" / "run", model)
    found = modes(tmp_path)
    assert set(found) == {"a", "a/run", *(f"a/run/{n}" for n in PARTS)}
    for name, mode in found.items():
        readable = 0o755 if (tmp_path / name).is_dir() else 0o644
        assert mode == readable & ~mask, f"{name}: {mode:o}"
    drafts = [mode for name, mode in under_way.items() if Path(name).name.startswith(".saving-")]
    assert drafts and set(drafts) == {0o700}, "others could open it before its mode is restricted"
    load_training(tmp_path / "a" / "run", model)


PARTS = (".metadata", "__0_1.distcp")


@pytest.mark.parametrize("mask", MASKS)
def test_export_is_writable_by_its_owner_only(mask: int, tmp_path: Path) -> None:
    with umask(mask):
        export_safetensors(tmp_path / "a" / "model", nn.Linear(2, 3))
    found = modes(tmp_path)
    assert not _others_write(found) and len(found) >= 3
    assert all(mode & 0o400 for mode in found.values())


def test_careless_modes_are_noticed(tmp_path: Path) -> None:
    with umask(0):
        os.makedirs(tmp_path / "a" / "b", mode=0o700)
    assert _others_write(modes(tmp_path)) == ["a"]


def test_command_notes_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    with umask(0):
        assert remember(tmp_path, 1e9).is_relative_to(tmp_path)
    assert not _others_write(modes(tmp_path))
