"""The table of open files under pressure: names that change meanwhile, too few descriptors."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.helpers.files import open_files
from tests.helpers.system_calls import Call, statx_tells, system_call, taking_direct_opens
from tierstore.errors import StaleCheckpointError
from tierstore.model.sizes import PAGE
from tierstore.system.file_table import MAX_HELD_FILES, FileTable, HeldFile
from tierstore.system.files import DataFile, FileStamp


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    found = [tmp_path / name for name in ("first", "second")]
    for path in found:
        path.write_bytes(path.name.encode().ljust(PAGE, b"."))
    return [str(path) for path in found]


def start_of(file: DataFile) -> bytes:
    room = memoryview(mmap.mmap(-1, PAGE))
    file.read_at_least(room, 0, PAGE)
    return bytes(room).rstrip(b".")


def one_open_fails(number: int) -> AbstractContextManager[list[Call]]:
    return system_call("open", fails_with=number, when=lambda call: not call.direct, at=1)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_a_descriptor_left_files_that_nobody_reads_are_closed(
    number: int, paths: list[str]
) -> None:
    table = FileTable("/nowhere")
    table.get(paths[0])
    with one_open_fails(number) as failed:
        assert start_of(table.get(paths[1])) == b"second"
    assert failed
    assert start_of(table.get(paths[0])) == b"first"


@pytest.mark.parametrize(
    ("number", "others"), [(errno.EMFILE, False), (errno.EACCES, True), (errno.EIO, True)]
)
def test_an_open_that_would_fail_again_is_not_tried_again(
    number: int, others: bool, paths: list[str]
) -> None:
    table = FileTable("/nowhere")
    kept = table.get(paths[0]) if others else None
    with one_open_fails(number), pytest.raises(OSError) as error:
        table.get(paths[1])
    assert error.value.errno == number
    assert kept is None or table.get(paths[0]) is kept, "others were closed for nothing"


def test_a_file_whose_name_leads_elsewhere_while_it_is_opened_is_not_kept(
    paths: list[str],
) -> None:
    """Whoever asked before may have the old one; whoever asks afterwards may not."""
    table = FileTable("/nowhere")

    def replace() -> None:
        os.replace(paths[1], paths[0])
        table.forget(paths[0])

    with system_call("statx", before=replace, at=1):
        assert start_of(table.get(paths[0])) == b"first"
    assert start_of(table.get(paths[0])) == b"second"


def test_two_who_open_a_file_at_once_have_the_same(paths: list[str]) -> None:
    table, others = FileTable("/nowhere"), []
    with system_call("statx", before=lambda: others.append(table.get(paths[0])), at=1):
        assert table.get(paths[0]) is others[0] is table.get(paths[0])


def test_closing_says_whether_there_was_anything_to_close(paths: list[str]) -> None:
    table = FileTable("/nowhere")
    assert not table.close()
    table.get(paths[0])
    assert table.close()
    assert not table.close()


def test_advice_that_is_refused_loses_no_bytes(paths: list[str]) -> None:
    with statx_tells(0), system_call("posix_fadvise", fails_with=errno.EINVAL) as refused:
        assert start_of(DataFile(paths[0], follow_links=True)) == b"first"
    assert refused


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_says_whether_it_is_read_past_the_cache(number: int, paths: list[str]) -> None:
    """Until that was refused once: not for alignment, but for whatever else fails there."""
    with statx_tells(PAGE), taking_direct_opens():
        file = DataFile(paths[0], follow_links=True)
    assert file.direct
    with system_call("preadv", fails_with=number, at=1) as refused:
        if number == errno.EINVAL:
            assert start_of(file) == b"first"
            assert not file.direct
        else:
            with pytest.raises(OSError, match="Input/output"):
                start_of(file)
            assert file.direct
    assert refused
    with statx_tells(0):
        assert not DataFile(paths[0], follow_links=True).direct


# Files that groups are registered in -------------------------------------------------------------


def hold(table: FileTable, path: str) -> HeldFile:
    return table.hold(path, FileStamp.of(os.stat(path)))


def touched(path: str) -> None:
    os.utime(path, ns=(1, 1))


def rewritten(path: str) -> None:
    times = os.stat(path)
    Path(path).write_bytes(b"other".ljust(PAGE, b"."))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def cut_off(path: str) -> None:
    os.truncate(path, 100)


def replaced(path: str) -> None:
    Path(path + ".new").write_bytes(b"other".ljust(PAGE, b"."))
    os.replace(path + ".new", path)


def removed_and_made_anew(path: str) -> None:
    os.unlink(path)
    Path(path).write_bytes(b"other".ljust(PAGE, b"."))


def replaced_by_a_directory(path: str) -> None:
    os.unlink(path)
    os.mkdir(path)


def directory_moved(path: str) -> None:
    folder = Path(path).parent
    folder.rename(folder.with_name(f"{folder.name}-moved"))


IN_PLACE = (touched, rewritten, cut_off)
NAME_ONLY = (os.unlink, replaced, removed_and_made_anew, replaced_by_a_directory, directory_moved)
Change = Callable[[str], None]


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("closed", [False, True])
def test_a_file_that_was_changed_is_not_read(
    change: Change, closed: bool, paths: list[str]
) -> None:
    table = FileTable("/nowhere")
    held = hold(table, paths[0])
    assert start_of(table.open(held)) == b"first"
    if closed:
        table.close()
    change(paths[0])
    for _ in range(2):
        with pytest.raises(StaleCheckpointError, match="changed") as error:
            table.open(held)
        assert error.value.path == paths[0]


@pytest.mark.parametrize("change", NAME_ONLY)
def test_a_file_whose_name_is_gone_is_read_on(change: Change, paths: list[str]) -> None:
    table = FileTable("/nowhere")
    held = hold(table, paths[0])
    change(paths[0])
    assert start_of(table.open(held)) == b"first"
    if change in (replaced, removed_and_made_anew):
        assert start_of(table.open(hold(table, paths[0]))) == b"other"
    assert start_of(table.open(held)) == b"first"


@pytest.mark.parametrize("change", [touched, cut_off])
def test_a_file_that_was_changed_after_its_name_was_gone(change: Change, paths: list[str]) -> None:
    """By who has it open as well."""
    table = FileTable("/nowhere")
    held = hold(table, paths[0])
    other = os.open(paths[0], os.O_RDWR)
    os.unlink(paths[0])
    change(f"/proc/self/fd/{other}")
    os.close(other)
    with pytest.raises(StaleCheckpointError, match="changed"):
        table.open(held)


@pytest.mark.parametrize("change", NAME_ONLY)
def test_a_file_that_is_gone_and_was_not_kept_open(change: Change, paths: list[str]) -> None:
    table = FileTable("/nowhere")
    held = hold(table, paths[0])
    table.close()
    change(paths[0])
    there = change in (replaced, removed_and_made_anew, replaced_by_a_directory)
    what = "changed.*register" if there else "is gone.*put it back, or load the model"
    for _ in range(2):
        with pytest.raises(StaleCheckpointError, match=what) as error:
            table.open(held)
        assert error.value.path == paths[0]


def test_who_holds_the_same_file_has_it_open_once(paths: list[str], tmp_path: Path) -> None:
    table = FileTable("/nowhere")
    both = [hold(table, paths[0]) for _ in range(2)]
    assert both[0] is both[1]
    table.open(both.pop())
    opened = len(open_files(tmp_path))
    assert opened > 0
    both.clear()
    gc.collect()
    assert not open_files(tmp_path)
    table.get(paths[0])
    assert len(open_files(tmp_path)) == opened


def test_without_a_descriptor_left_what_can_be_opened_again_is_closed(
    paths: list[str], tmp_path: Path
) -> None:
    (tmp_path / "third").write_bytes(b"third".ljust(PAGE, b"."))
    table = FileTable("/nowhere")
    gone, there = (hold(table, path) for path in paths)
    os.unlink(paths[0])
    with one_open_fails(errno.EMFILE) as failed:
        assert start_of(table.get(str(tmp_path / "third"))) == b"third"
    assert failed
    assert paths[1] not in open_files(tmp_path).values()
    assert start_of(table.open(gone)) == b"first"
    assert start_of(table.open(there)) == b"second"
    assert paths[1] in open_files(tmp_path).values()


def test_a_bounded_number_of_files_is_held_open(tmp_path: Path) -> None:
    table, held = FileTable("/nowhere"), []
    for number in range(MAX_HELD_FILES + 3):
        path = tmp_path / str(number)
        path.write_bytes(path.name.encode().ljust(PAGE, b"."))
        held.append(hold(table, str(path)))
    assert len(set(open_files(tmp_path).values())) == MAX_HELD_FILES
    for each in held:
        assert start_of(table.open(each)) == Path(each.path).name.encode()
    assert len(set(open_files(tmp_path).values())) == MAX_HELD_FILES
    held.pop(0)
    gc.collect()
    table.open(held[-1])
    assert held[-1].path in open_files(tmp_path).values()


def test_a_file_that_cannot_be_held_is_told_to_who_reads_it(paths: list[str]) -> None:
    table = FileTable("/nowhere")
    stamp = FileStamp.of(os.stat(paths[0]))
    with one_open_fails(errno.EACCES):
        held = table.hold(paths[0], stamp)
    assert start_of(table.open(held)) == b"first"
    with pytest.raises(StaleCheckpointError):
        table.open(table.hold(paths[1], stamp))


def test_the_header_must_be_the_one_that_was_registered(paths: list[str]) -> None:
    table = FileTable("/nowhere")
    stamp = FileStamp.of(os.stat(paths[0]))
    with pytest.raises(StaleCheckpointError):
        table.open(table.hold(paths[0], stamp, "0" * 16))
    digest = table.get(paths[0]).header_digest()
    assert start_of(table.open(table.hold(paths[0], stamp, digest))) == b"first"


def test_the_files_of_the_store_are_not_held(paths: list[str], tmp_path: Path) -> None:
    """There may be many, and nobody else removes them."""
    table = FileTable(str(tmp_path))
    held = hold(table, paths[0])
    assert start_of(table.open(held)) == b"first"
    table.forget(paths[0])
    gc.collect()
    assert not open_files(tmp_path)
    assert start_of(table.open(held)) == b"first"
