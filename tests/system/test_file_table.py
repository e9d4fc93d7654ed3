"""The table of open files under pressure: renamed files, and too few descriptors."""

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
from tests.helpers.system_calls import Call, accepting_direct_opens, report_alignment, system_call
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
def test_idle_files_are_closed_when_descriptors_run_out(number: int, paths: list[str]) -> None:
    table = FileTable("/nowhere")
    table.get(paths[0])
    with one_open_fails(number) as failed:
        assert start_of(table.get(paths[1])) == b"second"
    assert failed
    assert start_of(table.get(paths[0])) == b"first"


@pytest.mark.parametrize(
    ("number", "others"), [(errno.EMFILE, False), (errno.EACCES, True), (errno.EIO, True)]
)
def test_open_that_would_fail_again_is_not_retried(
    number: int, others: bool, paths: list[str]
) -> None:
    table = FileTable("/nowhere")
    kept = table.get(paths[0]) if others else None
    with one_open_fails(number), pytest.raises(OSError) as error:
        table.get(paths[1])
    assert error.value.errno == number
    assert kept is None or table.get(paths[0]) is kept, "other files were closed without need"


def test_file_renamed_while_opening_is_not_kept(
    paths: list[str],
) -> None:
    """Earlier requests may have the old one; later ones may not."""
    table = FileTable("/nowhere")

    def replace() -> None:
        os.replace(paths[1], paths[0])
        table.forget(paths[0])

    with system_call("statx", before=replace, at=1):
        assert start_of(table.get(paths[0])) == b"first"
    assert start_of(table.get(paths[0])) == b"second"


def test_concurrent_opens_share_a_file(paths: list[str]) -> None:
    table, others = FileTable("/nowhere"), []
    with system_call("statx", before=lambda: others.append(table.get(paths[0])), at=1):
        assert table.get(paths[0]) is others[0] is table.get(paths[0])


def test_close_reports_whether_anything_was_open(paths: list[str]) -> None:
    table = FileTable("/nowhere")
    assert not table.close()
    table.get(paths[0])
    assert table.close()
    assert not table.close()


def test_advice_refused_loses_no_bytes(paths: list[str]) -> None:
    with report_alignment(0), system_call("posix_fadvise", fails_with=errno.EINVAL) as refused:
        assert start_of(DataFile(paths[0], follow_links=True)) == b"first"
    assert refused


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_file_reports_whether_reads_are_direct(number: int, paths: list[str]) -> None:
    """A read refused as misaligned turns direct reads off; other errors raise."""
    with report_alignment(PAGE), accepting_direct_opens():
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
    with report_alignment(0):
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
def test_changed_file_is_not_read(change: Change, closed: bool, paths: list[str]) -> None:
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
def test_unlinked_file_is_read_on(change: Change, paths: list[str]) -> None:
    table = FileTable("/nowhere")
    held = hold(table, paths[0])
    change(paths[0])
    assert start_of(table.open(held)) == b"first"
    if change in (replaced, removed_and_made_anew):
        assert start_of(table.open(hold(table, paths[0]))) == b"other"
    assert start_of(table.open(held)) == b"first"


@pytest.mark.parametrize("change", [touched, cut_off])
def test_file_changed_after_unlink_is_not_read(change: Change, paths: list[str]) -> None:
    """The change is made through another descriptor of the file."""
    table = FileTable("/nowhere")
    held = hold(table, paths[0])
    other = os.open(paths[0], os.O_RDWR)
    os.unlink(paths[0])
    change(f"/proc/self/fd/{other}")
    os.close(other)
    with pytest.raises(StaleCheckpointError, match="changed"):
        table.open(held)


@pytest.mark.parametrize("change", NAME_ONLY)
def test_file_deleted_and_not_held_raises(change: Change, paths: list[str]) -> None:
    table = FileTable("/nowhere")
    held = hold(table, paths[0])
    table.close()
    change(paths[0])
    there = change in (replaced, removed_and_made_anew, replaced_by_a_directory)
    what = "changed.*register" if there else "is gone.*restore it, or load the model"
    for _ in range(2):
        with pytest.raises(StaleCheckpointError, match=what) as error:
            table.open(held)
        assert error.value.path == paths[0]


def test_holders_of_one_file_share_a_descriptor(paths: list[str], tmp_path: Path) -> None:
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


def test_reopenable_files_are_closed_when_descriptors_run_out(
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


def test_held_files_are_bounded(tmp_path: Path) -> None:
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


def test_file_that_cannot_be_held_raises_in_its_reader(paths: list[str]) -> None:
    table = FileTable("/nowhere")
    stamp = FileStamp.of(os.stat(paths[0]))
    with one_open_fails(errno.EACCES):
        held = table.hold(paths[0], stamp)
    assert start_of(table.open(held)) == b"first"
    with pytest.raises(StaleCheckpointError):
        table.open(table.hold(paths[1], stamp))


def test_header_must_match_the_registered_one(paths: list[str]) -> None:
    table = FileTable("/nowhere")
    stamp = FileStamp.of(os.stat(paths[0]))
    with pytest.raises(StaleCheckpointError):
        table.open(table.hold(paths[0], stamp, "0" * 16))
    digest = table.get(paths[0]).header_digest()
    assert start_of(table.open(table.hold(paths[0], stamp, digest))) == b"first"


def test_store_files_are_not_held(paths: list[str], tmp_path: Path) -> None:
    """They may be many, and no other process removes them."""
    table = FileTable(str(tmp_path))
    held = hold(table, paths[0])
    assert start_of(table.open(held)) == b"first"
    table.forget(paths[0])
    gc.collect()
    assert not open_files(tmp_path)
    assert start_of(table.open(held)) == b"first"
