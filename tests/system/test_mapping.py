"""Maps of files: they hold no descriptor, keep their content, and never exceed the file."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import weakref
from pathlib import Path

import pytest

from tests.helpers.events import before, failing
from tests.helpers.system_calls import system_call
from tierstore.errors import TransferError, TruncatedFileError
from tierstore.model.sizes import PAGE
from tierstore.system.mapping import map_open_file
from tierstore.system.maps import AddressSpace, WriteWatch, map_file
from tierstore.tiers.spill import Spill


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


class Kept:
    """An object that a map keeps alive."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (3 * PAGE // 256))
    return path


def test_hundred_maps_take_no_descriptor(path: Path, tmp_path: Path) -> None:
    spill = Spill(str(tmp_path))
    before = open_descriptors()
    shown = [map_file(str(path), 10, 2 * PAGE) for _ in range(50)]
    shown += [spill.map_extent(spill.take_extent(PAGE)) for _ in range(50)]
    assert open_descriptors() == before
    assert all(len(view) in (PAGE, 2 * PAGE) for view in shown)
    spill.close()


def test_map_goes_with_its_last_viewer(path: Path) -> None:
    kept = Kept()
    alive = weakref.ref(kept)
    descriptor = os.open(path, os.O_RDWR)
    shown = map_open_file(descriptor, PAGE, PAGE, mmap.MAP_SHARED, kept)
    os.close(descriptor)
    del kept
    part = shown[5:9]
    del shown
    gc.collect()
    assert alive() is not None and is_mapped(path)
    assert bytes(part) == bytes([5, 6, 7, 8])
    part[0] = 99
    del part
    gc.collect()
    assert alive() is None and not is_mapped(path)
    assert path.read_bytes()[PAGE + 5] == 99


def test_range_beyond_the_file_is_not_mapped(path: Path) -> None:
    """Reading it would kill the process."""
    map_file(str(path), PAGE, 2 * PAGE)
    with pytest.raises(TruncatedFileError, match="save it again") as error:
        map_file(str(path), PAGE, 2 * PAGE + 1)
    assert error.value.path == str(path)


def test_unwritten_range_without_reservation_is_mapped(
    tmp_path: Path,
) -> None:
    spill = Spill(str(tmp_path))
    with system_call("posix_fallocate", fails_with=errno.EOPNOTSUPP):
        first, second = spill.take_extent(2 * PAGE), spill.take_extent(PAGE)
    spill.map_extent(second)[:2] = b"ab"
    shown = spill.map_extent(first)
    assert bytes(shown) == bytes(2 * PAGE)
    shown[-1:] = b"z"
    assert bytes(spill.map_extent(second)[:2]) == b"ab"
    spill.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_writes_that_cannot_be_checked_are_assumed(number: int) -> None:
    watch = WriteWatch([(0, PAGE)])
    with before("open", failing(number)):
        for act in (watch.written, AddressSpace):
            with pytest.raises(TransferError, match="/proc/self/"):
                act()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EPERM])
def test_system_without_write_tracking_is_supported(number: int) -> None:
    watch = WriteWatch([(0, PAGE)])
    with before("open", failing(number)):
        assert watch.written() == []
