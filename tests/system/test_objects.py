"""Survey of object files: damage is reported, vanished files are skipped, nothing is lost."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import pytest

from tests.helpers.files import object_file
from tests.helpers.system_calls import Call, system_call
from tests.tiers.dying import KEY, NEW, OLD, data_of, packing
from tierstore.errors import (
    CorruptDataError,
    InvalidHeaderError,
    TierStoreError,
    TransferError,
)
from tierstore.model.groups import Block, TensorSpec, pack
from tierstore.model.header_reader import HeaderReader
from tierstore.system.objects import (
    MAX_KEY_BYTES,
    check_key,
    fetch_headers,
    find_objects,
    header_threads,
    object_name,
    read_marker,
    read_object,
    read_valid_object,
)
from tierstore.tiers.directory import ObjectDirectory


@pytest.fixture
def store(disk_dir: Path) -> Path:
    """A directory that holds one object."""
    directory = ObjectDirectory(disk_dir)
    directory.write(KEY, packing(), data_of(OLD), single=False)
    directory.close()
    return disk_dir


@pytest.mark.parametrize("key", ["k", "\u00e9" * (MAX_KEY_BYTES // 2), "x" * MAX_KEY_BYTES])
def test_key_of_any_valid_length_is_accepted(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(
    ("key", "error", "why"),
    [
        ("", ValueError, "this one has 0"),
        ("x" * (MAX_KEY_BYTES + 1), ValueError, "this one has 1025"),
        ("\u00e9" * (MAX_KEY_BYTES // 2 + 1), ValueError, "this one has 1026"),
        ("\ud800", ValueError, "cannot be written as UTF-8"),
        (b"bytes", TypeError, "not bytes"),
        (None, TypeError, "not NoneType"),
    ],
)
def test_invalid_key_raises(key: object, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        check_key(key)


def test_valid_object_is_read(store: Path) -> None:
    stored = read_valid_object(str(object_file(store, KEY)))
    assert (stored.key, stored.single) == (KEY, False)
    assert stored.packing == packing()


def test_invalid_object_error_is_raised_on_demand(store: Path) -> None:
    path = object_file(store, KEY)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TransferError) as error:
        read_valid_object(str(path))
    assert error.value.path == str(path)


def test_truncated_header_is_invalid(store: Path) -> None:
    """The file shrinks after its size was taken."""
    path = object_file(store, KEY)
    with (
        system_call("fstat", after=lambda: os.truncate(path, 1000)),
        pytest.raises(InvalidHeaderError, match="ends inside its header"),
    ):
        read_valid_object(str(path))


def failing(name: str, number: int, part: str) -> AbstractContextManager[list[Call]]:
    """Make a system call fail on paths that end with `part`."""

    def concerns(call: Call) -> bool:
        return not isinstance(call.args[0], int) and str(call.args[0]).endswith(part)

    return system_call(name, fails_with=number, when=concerns)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_unopenable_object_is_reported(number: int, store: Path) -> None:
    with failing("open", number, ".safetensors"):
        [found] = find_objects(store)
    assert found.stored is None
    assert isinstance(found.error, TransferError)
    assert os.strerror(number) in str(found.error)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_unreadable_object_is_not_called_damaged(number: int, store: Path) -> None:
    with failing("open", number, ".safetensors"), pytest.raises(TransferError) as error:
        list(find_objects(store))
    assert not isinstance(error.value, CorruptDataError)


def test_vanished_object_is_skipped(store: Path) -> None:
    with failing("open", errno.ENOENT, ".safetensors"):
        assert list(find_objects(store)) == []
        with pytest.raises(FileNotFoundError):
            read_object(str(object_file(store, KEY)))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_object_without_status_is_reported(number: int, store: Path) -> None:
    path = object_file(store, KEY)
    with system_call("stat", fails_with=number, when=lambda call: call.args[0] == str(path)):
        found = read_object(str(path))
    assert found.stored is None
    assert isinstance(found.error, TransferError)
    assert os.strerror(number) in str(found.error)


class Untyped:
    """A directory entry without a type, whose status cannot be read."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name = entry.name

    def is_file(self, *, follow_symlinks: bool) -> bool:
        raise OSError(errno.EIO, "no status")


def test_object_on_a_file_system_without_types_is_found(store: Path) -> None:
    shard = object_file(store, KEY).parent
    descriptor = os.open(shard, os.O_RDONLY)
    try:
        with os.scandir(shard) as entries, header_threads() as pool:
            untyped = cast("list[os.DirEntry[str]]", [Untyped(entry) for entry in entries])
            [fetched] = fetch_headers(descriptor, str(shard), untyped, pool)
    finally:
        os.close(descriptor)
    found = fetched.found(HeaderReader())
    assert found.stored is not None and found.stored.key == KEY


def test_single_object_is_read_without_threads(store: Path) -> None:
    readers = []

    def read(call: Call) -> object:
        readers.append(threading.current_thread())
        return call.go_on()

    with (
        system_call("preadv", fails_with=errno.EAGAIN),
        system_call("pread", answer=read),
    ):
        [found] = find_objects(store)
    assert found.stored is not None and found.stored.key == KEY
    assert set(readers) == {threading.current_thread()}


def test_special_file_is_not_opened(store: Path) -> None:
    path = object_file(store, KEY)
    path.unlink()
    os.mkfifo(path)
    [found] = find_objects(store)
    assert "is not a regular file" in str(found.error)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_unopenable_shard_is_not_taken_for_empty(number: int, store: Path) -> None:
    shard = "/" + object_name(KEY)[:2]
    with failing("open", number, shard), pytest.raises(TransferError, match="listing"):
        list(find_objects(store))


def test_unlistable_shard_is_not_taken_for_empty(store: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (
        system_call("scandir", fails_with=errno.EIO),
        pytest.raises(TransferError, match=r"listing .* failed"),
    ):
        list(find_objects(store))
    assert len(os.listdir("/proc/self/fd")) == before, "a directory was left open"


def test_missing_objects_directory_has_no_objects(tmp_path: Path) -> None:
    assert list(find_objects(tmp_path)) == []


def test_file_or_link_in_place_of_a_shard_is_empty(store: Path) -> None:
    shard = object_file(store, KEY).parent
    shard.rename(store / "elsewhere")
    shard.symlink_to(store / "elsewhere")
    (store / "objects" / "00").write_text("no directory")
    assert list(find_objects(store)) == []


# The marker --------------------------------------------------------------------------------------


def test_directory_that_was_no_store_has_no_marker(tmp_path: Path) -> None:
    assert read_marker(tmp_path) is None


def test_marker_is_read(store: Path) -> None:
    marker = read_marker(store)
    assert marker == json.loads((store / "STORE.json").read_text())
    assert marker is not None and marker["format"] == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"format": ', "[" * 10_000, '"format"', "\x00"]
)
def test_damaged_marker_raises(text: str, store: Path) -> None:
    (store / "STORE.json").write_text(text)
    with pytest.raises(TierStoreError, match="is damaged"):
        read_marker(store)


@pytest.mark.parametrize("version", ["2", '"1"', "true", "1.0", "null", "0"])
def test_other_format_raises(version: str, store: Path) -> None:
    (store / "STORE.json").write_text(f'{{"format": {version}}}')
    with pytest.raises(TierStoreError, match="has format"):
        read_marker(store)


def test_newer_versions_requirements_are_named(store: Path) -> None:
    (store / "STORE.json").write_text('{"format": 1, "requires": ["packs"]}')
    with pytest.raises(TierStoreError, match=r"and needs \['packs'\]"):
        read_marker(store)


def test_replaced_object_is_the_new_one(store: Path) -> None:
    before = read_valid_object(str(object_file(store, KEY)))
    directory = ObjectDirectory(store)
    directory.write(KEY, packing(), data_of(NEW), single=True)
    directory.close()
    after = read_valid_object(str(object_file(store, KEY)))
    assert after.single and not before.single
    assert after.digests != before.digests


def test_header_with_a_flipped_bit_is_reported(store: Path) -> None:
    path = object_file(store, KEY)
    raw = bytearray(path.read_bytes())
    where = raw.index(b'"tierstore.format"')
    raw[where + 2] ^= 1  # still a valid header, with another name
    path.write_bytes(raw)
    [found] = find_objects(store)
    assert found.stored is None and found.error is not None
    padding = bytearray(raw)
    padding[where + 2] ^= 1
    padding[padding.index(b"   ") + 1] = ord("\t")  # still has the same meaning
    path.write_bytes(padding)
    with pytest.raises(CorruptDataError, match="does not match its checksum") as error:
        read_valid_object(str(path))
    assert (error.value.key, error.value.path) == (KEY, str(path))
    assert error.value.expected != error.value.found


def test_format_matches_other_versions(store: Path) -> None:
    raw = object_file(store, KEY).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"]["tierstore.format"] == "1"
    assert header["__metadata__"]["tierstore.key"] == KEY


# Many objects -------------------------------------------------------------------------------------


@pytest.fixture
def crowded(disk_dir: Path) -> list[str]:
    """Keys of 40 objects, all in one of a store's directories, by the names of the files."""
    keys = (f"k{i}" for i in itertools.count())
    same = itertools.islice((key for key in keys if object_name(key).startswith("00/")), 40)
    directory = ObjectDirectory(disk_dir, durable=False)
    found = sorted(same, key=object_name)
    for key in found:
        directory.write(key, packing(), data_of(OLD), single=False)
    directory.close()
    return found


def test_objects_of_a_directory_come_in_order(crowded: list[str], disk_dir: Path) -> None:
    damaged, gone, link = (object_file(disk_dir, crowded[i]) for i in (3, 17, 39))
    damaged.write_bytes(damaged.read_bytes()[:4000])
    gone.unlink()
    link.unlink()
    link.symlink_to(damaged)
    found = list(find_objects(disk_dir))
    assert [each.path for each in found] == [
        str(object_file(disk_dir, key)) for key in crowded if key != crowded[17]
    ]
    errors = {
        crowded.index(key)
        for key, each in zip([k for k in crowded if k != crowded[17]], found, strict=True)
        if each.error is not None
    }
    assert errors == {3, 39}
    assert found[0].stored is not None and found[0].stored.key == crowded[0]


def test_object_vanishing_during_a_read_is_skipped(crowded: list[str], disk_dir: Path) -> None:
    objects_found = find_objects(disk_dir)
    first = next(objects_found)
    assert first.stored is not None
    for key in crowded[36:]:
        object_file(disk_dir, key).unlink()
    found = [each.stored.key for each in objects_found if each.stored is not None]
    assert found[:30] == crowded[1:31]
    assert set(found) <= set(crowded)


def cached(call: Call) -> int:
    """Read as from a page cache that holds everything."""
    descriptor, (room,), offset, _ = call.args
    data = os.pread(descriptor, len(room), offset)
    room[: len(data)] = data
    return len(data)


def test_cached_headers_take_four_system_calls_each(crowded: list[str], disk_dir: Path) -> None:
    """Beside those for the directory they are in."""
    with (
        system_call("preadv", answer=cached) as reads,
        system_call("open") as opened,
        system_call("fstat") as looked_at,
        system_call("close") as closed,
        system_call("stat") as others,
    ):
        found = list(find_objects(disk_dir))
    assert len(found) == len(crowded) == len(reads)
    of_files = [call for call in opened if str(call.args[0]).endswith(".safetensors")]
    assert len(of_files) == len(looked_at) == len(crowded)
    assert len(closed) <= len(crowded) + 2 and others == []


def test_cached_headers_are_read_by_the_caller(crowded: list[str], disk_dir: Path) -> None:
    readers = []

    def read(call: Call) -> int:
        readers.append(threading.current_thread())
        return cached(call)

    with system_call("preadv", answer=read):
        assert len(list(find_objects(disk_dir))) == len(crowded)
    assert set(readers) == {threading.current_thread()}


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP, errno.EIO])
def test_disk_headers_are_read_in_parallel(number: int, crowded: list[str], disk_dir: Path) -> None:
    """From a slow disk, several headers are read at a time, each of them once."""
    several = threading.Barrier(3)  # a single thread would wait until the timeout
    first = {object_file(disk_dir, crowded[i]).name for i in (0, 16, 32)}

    def meet(call: Call) -> int:
        if os.path.basename(str(call.path)) in first:
            several.wait(30)
        return call.go_on()

    with (
        system_call("preadv", fails_with=number) as asked,
        system_call("pread", answer=meet) as reads,
    ):
        assert len(list(find_objects(disk_dir))) == len(crowded)
    assert len(asked) == 1 and len(reads) == len(crowded)


def test_file_replacing_an_object_is_reported(crowded: list[str], disk_dir: Path) -> None:
    """It was a regular file when the directory was listed."""
    path = object_file(disk_dir, crowded[5])

    def plant() -> None:
        path.unlink()
        os.mkfifo(path)

    with system_call("open", before=plant, when=lambda call: call.args[0] == path.name):
        found = list(find_objects(disk_dir))
    assert [each.path for each in found if each.error is not None] == [str(path)]
    assert "is not a regular file" in str(found[5].error)


def test_long_header_is_read_to_its_end(disk_dir: Path) -> None:
    names = [f"{'x' * 200}{i}" for i in range(40)]
    blocks = [Block(n, "F32", (2,), 8, (TensorSpec(n, "F32", (2,), (1,), 0),)) for n in names]
    long = pack(blocks)
    directory = ObjectDirectory(disk_dir)
    data = memoryview(bytearray(long.nbytes))
    stored = directory.write("long", long, data, single=False)
    directory.close()
    assert stored.data_start > 4 * 4096
    [found] = find_objects(disk_dir)
    assert found.stored == stored
