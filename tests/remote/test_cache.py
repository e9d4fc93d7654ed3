"""Fetched groups stay on disk for the next program, and are never wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.remote.conftest import Uploaded, assert_holds, uploaded, values_of
from tests.remote.servers import Proxy, error_500, upload
from tierstore import TierStore
from tierstore.store import engine_of
from tierstore.tiers.directory import ObjectDirectory
from tierstore.tiers.pages import fresh_memory


@pytest.fixture
def checkpoint(s3: str, proxy: Proxy) -> Uploaded:
    return uploaded(s3, 12, 32)


def opened(directory: Path, disk: str = "2MB", **options: str) -> TierStore:
    return TierStore("100KB", directory, device="cpu", disk_budget=disk, **options)


def warmed(checkpoint: Uploaded, directory: Path, disk: str = "2MB", passes: int = 1) -> None:
    with opened(directory, disk) as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        for _ in range(passes):
            for key in checkpoint.groups:
                assert_holds(store, checkpoint, key)


def files(directory: Path) -> list[Path]:
    return sorted((directory / "remote" / "objects").rglob("*.safetensors"))


@pytest.mark.full("as a step that was cut short")
def test_second_run_fetches_nothing(checkpoint: Uploaded, proxy: Proxy, tmp_path: Path) -> None:
    warmed(checkpoint, tmp_path)
    with opened(tmp_path) as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        proxy.every = error_500  # no request succeeds from now on
        before = len(proxy.requests)
        for key in checkpoint.groups:
            assert_holds(store, checkpoint, key)
        assert store.stats().bytes_fetched == 0
        assert store.stats().bytes_read >= checkpoint.nbytes
        assert len(proxy.requests) == before


@pytest.mark.full("as a step that was cut short")
@pytest.mark.parametrize("passes", [1, 3])
def test_second_run_with_half_the_cache_fetches_the_rest(
    passes: int, checkpoint: Uploaded, tmp_path: Path
) -> None:
    """It fetches at most one more group.

    Where the disk is full of needed groups, the first that arrives takes the space of one.
    """
    warmed(checkpoint, tmp_path, "220KB", passes)
    there = len(files(tmp_path))
    assert 4 <= there <= 6
    with opened(tmp_path, "220KB") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        had = [g.key for g in store.snapshot().groups if "DISK" in g.tiers]
        assert len(had) == there
        for key in checkpoint.groups:
            assert_holds(store, checkpoint, key)
        count = len(checkpoint.groups)
        fetched = store.stats().bytes_fetched / checkpoint.nbytes * count
        assert count - there - 0.1 <= fetched <= count - there + 1.1


def test_smaller_budget_at_the_next_run_is_enforced(checkpoint: Uploaded, tmp_path: Path) -> None:
    warmed(checkpoint, tmp_path)
    assert len(files(tmp_path)) == 12
    with opened(tmp_path, "150KB") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        assert store.stats().used_bytes["DISK"] <= 150_000
        for key in checkpoint.groups:
            assert_holds(store, checkpoint, key)
        engine_of(store).core.planner.check()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 170_000


def test_fetched_groups_yield_to_put_groups(checkpoint: Uploaded, tmp_path: Path) -> None:
    """Also in a program that uses no object store."""
    warmed(checkpoint, tmp_path, "500KB")
    with opened(tmp_path, "500KB") as store:
        assert store.keys() == []
        mine = {f"{i}": torch.randn(32, 256) for i in range(12)}
        for key, value in mine.items():
            store.put(key, value)
        store.flush()
        assert store.stats().peak_bytes["DISK"] <= 500_000
        assert all(torch.equal(store.get(key), value) for key, value in mine.items())
    assert len(files(tmp_path)) <= 3


def test_other_object_at_the_same_url_is_fetched(
    checkpoint: Uploaded, s3: str, tmp_path: Path
) -> None:
    warmed(checkpoint, tmp_path)
    other = values_of(12, 32, seed=1)
    upload(s3, checkpoint.name, save(other))
    changed = Uploaded(checkpoint.name, checkpoint.url, other, checkpoint.groups, checkpoint.nbytes)
    with opened(tmp_path) as store:
        store.register_checkpoint(changed.url, groups=changed.groups)
        for key in changed.groups:
            assert_holds(store, changed, key)
        assert store.stats().bytes_fetched >= changed.nbytes


def test_other_groups_of_one_object_are_other_files(checkpoint: Uploaded, tmp_path: Path) -> None:
    warmed(checkpoint, tmp_path)
    with opened(tmp_path) as store:
        keys = store.register_checkpoint(checkpoint.url, "single/")
        for key in keys:
            found = store.get(key)
            assert torch.equal(found, checkpoint.values[key.removeprefix("single/")])


def flip(path: Path) -> None:
    """Change one byte in the middle of the data."""
    data = bytearray(path.read_bytes())
    data[4096 + (len(data) - 4096) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def remove(path: Path) -> None:
    path.unlink()


def spoil(path: Path) -> None:
    """The header is unreadable, too."""
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.full("each damage at each `verify`", keep="values")
@pytest.mark.parametrize("verify", ["first", "always", "never"])
@pytest.mark.parametrize("damage", [flip, cut, remove, spoil])
def test_damaged_cache_file_is_fetched_again(
    damage: Callable[[Path], None], verify: str, checkpoint: Uploaded, tmp_path: Path
) -> None:
    warmed(checkpoint, tmp_path)
    if damage in (flip, remove):  # otherwise opening the store detects the damage
        with opened(tmp_path, verify=verify) as store:
            store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
            for path in files(tmp_path):
                damage(path)
            for key in checkpoint.groups:
                assert_holds(store, checkpoint, key)
    else:
        for path in files(tmp_path):
            damage(path)
        warmed(checkpoint, tmp_path)
    with opened(tmp_path) as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        for key in checkpoint.groups:
            assert_holds(store, checkpoint, key)
        assert store.stats().bytes_fetched == 0, "the cache was repaired"


def test_wrong_bytes_with_right_checksums_are_accepted(
    checkpoint: Uploaded, tmp_path: Path
) -> None:
    """The control: only the checksums detect wrong bytes."""
    warmed(checkpoint, tmp_path)
    directory = ObjectDirectory(tmp_path / "remote")
    for stored in directory.objects():
        wrong = fresh_memory(stored.spec().nbytes)
        directory.write(stored.key, stored.packing, wrong.numpy().data, single=False)
    directory.close()
    with opened(tmp_path) as store, pytest.raises(AssertionError):
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        for key in checkpoint.groups:
            assert_holds(store, checkpoint, key)


def test_interrupted_step_keeps_every_group(checkpoint: Uploaded, tmp_path: Path) -> None:
    with opened(tmp_path, "220KB") as store:
        store.register_checkpoint(checkpoint.url, groups=checkpoint.groups)
        for key in list(checkpoint.groups)[:5]:
            assert_holds(store, checkpoint, key)
        core = engine_of(store).core
        with core.lock:
            core.dirty = True  # as after an interrupt: the next transaction rebuilds the state
        for _ in range(2):
            for key in checkpoint.groups:
                assert_holds(store, checkpoint, key)
        core.planner.check()
        assert store.stats().used_bytes["DISK"] <= 220_000
