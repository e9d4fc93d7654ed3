"""Looking at object files: what is wrong is told, what is gone is passed over, nothing is lost."""

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
    fetching,
    find_objects,
    intact_object,
    object_name,
    read_marker,
    read_object,
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
def test_any_text_of_a_length_that_fits_is_a_key(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(
    ("key", "error", "why"),
    [
        ("", ValueError, "this one 0"),
        ("x" * (MAX_KEY_BYTES + 1), ValueError, "this one 1025"),
        ("\u00e9" * (MAX_KEY_BYTES // 2 + 1), ValueError, "this one 1026"),
        ("\ud800", ValueError, "cannot be written as UTF-8"),
        (b"bytes", TypeError, "not bytes"),
        (None, TypeError, "not NoneType"),
    ],
)
def test_what_is_no_key_is_refused(key: object, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        check_key(key)


def test_an_intact_object_is_read(store: Path) -> None:
    stored = intact_object(str(object_file(store, KEY)))
    assert (stored.key, stored.single) == (KEY, False)
    assert stored.packing == packing()


def test_the_error_of_an_object_is_raised_where_it_must_be_intact(store: Path) -> None:
    path = object_file(store, KEY)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TransferError) as error:
        intact_object(str(path))
    assert error.value.path == str(path)


def test_a_header_that_ends_while_it_is_read_is_no_header(store: Path) -> None:
    """The file shrinks after its size was taken."""
    path = object_file(store, KEY)
    with (
        system_call("fstat", after=lambda: os.truncate(path, 1000)),
        pytest.raises(InvalidHeaderError, match="ends inside its header"),
    ):
        intact_object(str(path))


def failing(name: str, number: int, part: str) -> AbstractContextManager[list[Call]]:
    """Inside, a system call on a path that ends with `part` fails."""

    def concerns(call: Call) -> bool:
        return not isinstance(call.args[0], int) and str(call.args[0]).endswith(part)

    return system_call(name, fails_with=number, when=concerns)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_an_object_that_cannot_be_opened_is_told_of(number: int, store: Path) -> None:
    with failing("open", number, ".safetensors"):
        [found] = find_objects(store)
    assert found.stored is None
    assert isinstance(found.error, TransferError)
    assert os.strerror(number) in str(found.error)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_who_cannot_look_does_not_say_that_anything_is_wrong_with_an_object(
    number: int, store: Path
) -> None:
    with failing("open", number, ".safetensors"), pytest.raises(TransferError) as error:
        list(find_objects(store))
    assert not isinstance(error.value, CorruptDataError)


def test_an_object_that_vanishes_is_passed_over(store: Path) -> None:
    with failing("open", errno.ENOENT, ".safetensors"):
        assert list(find_objects(store)) == []
        with pytest.raises(FileNotFoundError):
            read_object(str(object_file(store, KEY)))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_an_object_whose_status_is_not_told_is_told_of(number: int, store: Path) -> None:
    path = object_file(store, KEY)
    with system_call("stat", fails_with=number, when=lambda call: call.args[0] == str(path)):
        found = read_object(str(path))
    assert found.stored is None
    assert isinstance(found.error, TransferError)
    assert os.strerror(number) in str(found.error)


class Untyped:
    """A directory entry of a file system that tells what it is only with the status, and fails."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name = entry.name

    def is_file(self, *, follow_symlinks: bool) -> bool:
        raise OSError(errno.EIO, "no status")


def test_an_object_of_a_file_system_without_types_is_found(store: Path) -> None:
    shard = object_file(store, KEY).parent
    descriptor = os.open(shard, os.O_RDONLY)
    try:
        with os.scandir(shard) as entries, fetching() as pool:
            untyped = cast("list[os.DirEntry[str]]", [Untyped(entry) for entry in entries])
            [fetched] = fetch_headers(descriptor, str(shard), untyped, pool)
    finally:
        os.close(descriptor)
    found = fetched.found(HeaderReader())
    assert found.stored is not None and found.stored.key == KEY


def test_one_object_on_disk_is_read_without_threads(store: Path) -> None:
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


def test_what_is_no_regular_file_is_not_opened(store: Path) -> None:
    path = object_file(store, KEY)
    path.unlink()
    os.mkfifo(path)
    [found] = find_objects(store)
    assert "is no regular file" in str(found.error)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_a_shard_that_cannot_be_opened_is_not_taken_for_an_empty_one(
    number: int, store: Path
) -> None:
    shard = "/" + object_name(KEY)[:2]
    with failing("open", number, shard), pytest.raises(TransferError, match="listing"):
        list(find_objects(store))


def test_a_shard_that_cannot_be_listed_is_not_taken_for_an_empty_one(store: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (
        system_call("scandir", fails_with=errno.EIO),
        pytest.raises(TransferError, match=r"listing .* failed"),
    ):
        list(find_objects(store))
    assert len(os.listdir("/proc/self/fd")) == before, "a directory was left open"


def test_where_there_are_no_objects_none_are_found(tmp_path: Path) -> None:
    assert list(find_objects(tmp_path)) == []


def test_a_file_or_a_link_in_the_place_of_a_shard_holds_nothing(store: Path) -> None:
    shard = object_file(store, KEY).parent
    shard.rename(store / "elsewhere")
    shard.symlink_to(store / "elsewhere")
    (store / "objects" / "00").write_text("no directory")
    assert list(find_objects(store)) == []


# The marker --------------------------------------------------------------------------------------


def test_what_was_never_a_store_has_no_marker(tmp_path: Path) -> None:
    assert read_marker(tmp_path) is None


def test_a_marker_is_read(store: Path) -> None:
    marker = read_marker(store)
    assert marker == json.loads((store / "STORE.json").read_text())
    assert marker is not None and marker["format"] == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"format": ', "[" * 10_000, '"format"', "\x00"]
)
def test_a_damaged_marker_is_refused(text: str, store: Path) -> None:
    (store / "STORE.json").write_text(text)
    with pytest.raises(TierStoreError, match="is damaged"):
        read_marker(store)


@pytest.mark.parametrize("version", ["2", '"1"', "true", "1.0", "null", "0"])
def test_another_format_is_refused(version: str, store: Path) -> None:
    (store / "STORE.json").write_text(f'{{"format": {version}}}')
    with pytest.raises(TierStoreError, match="says format"):
        read_marker(store)


def test_what_a_newer_version_requires_is_told(store: Path) -> None:
    (store / "STORE.json").write_text('{"format": 1, "requires": ["packs"]}')
    with pytest.raises(TierStoreError, match=r"and needs \['packs'\]"):
        read_marker(store)


def test_a_replaced_object_is_the_new_one(store: Path) -> None:
    before = intact_object(str(object_file(store, KEY)))
    directory = ObjectDirectory(store)
    directory.write(KEY, packing(), data_of(NEW), single=True)
    directory.close()
    after = intact_object(str(object_file(store, KEY)))
    assert after.single and not before.single
    assert after.digests != before.digests


def test_a_header_with_a_flipped_bit_is_told(store: Path) -> None:
    path = object_file(store, KEY)
    raw = bytearray(path.read_bytes())
    where = raw.index(b'"tierstore.format"')
    raw[where + 2] ^= 1  # still a header, of another name
    path.write_bytes(raw)
    [found] = find_objects(store)
    assert found.stored is None and found.error is not None
    padding = bytearray(raw)
    padding[where + 2] ^= 1
    padding[padding.index(b"   ") + 1] = ord("\t")  # still says the same
    path.write_bytes(padding)
    with pytest.raises(CorruptDataError, match="does not match its checksum") as error:
        intact_object(str(path))
    assert (error.value.key, error.value.path) == (KEY, str(path))
    assert error.value.expected != error.value.found


def test_the_format_is_what_other_versions_look_for(store: Path) -> None:
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
    directory = ObjectDirectory(disk_dir, lasting=False)
    found = sorted(same, key=object_name)
    for key in found:
        directory.write(key, packing(), data_of(OLD), single=False)
    directory.close()
    return found


def test_objects_of_one_directory_come_in_order(crowded: list[str], disk_dir: Path) -> None:
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


def test_object_that_vanishes_meanwhile_is_passed_over(crowded: list[str], disk_dir: Path) -> None:
    objects_found = find_objects(disk_dir)
    first = next(objects_found)
    assert first.stored is not None
    for key in crowded[36:]:
        object_file(disk_dir, key).unlink()
    found = [each.stored.key for each in objects_found if each.stored is not None]
    assert found[:30] == crowded[1:31]
    assert set(found) <= set(crowded)


def cached(call: Call) -> int:
    """A read of the page cache alone, where the page cache has everything."""
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
def test_headers_on_disk_are_read_at_the_same_time(
    number: int, crowded: list[str], disk_dir: Path
) -> None:
    """A disk that is slow to answer is asked for several, and for each header once."""
    several = threading.Barrier(3)  # whoever is alone waits in vain
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


def test_file_that_takes_an_objects_place_is_refused(crowded: list[str], disk_dir: Path) -> None:
    """It was a regular file when the directory was listed."""
    path = object_file(disk_dir, crowded[5])

    def plant() -> None:
        path.unlink()
        os.mkfifo(path)

    with system_call("open", before=plant, when=lambda call: call.args[0] == path.name):
        found = list(find_objects(disk_dir))
    assert [each.path for each in found if each.error is not None] == [str(path)]
    assert "is no regular file" in str(found[5].error)


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
