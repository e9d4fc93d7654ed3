"""Reading and writing files at the disk's own speed.

Files are read past the page cache (O_DIRECT) into page-aligned memory: no second copy in RAM, and
no cache that a budget does not know of. Where a file system refuses that, reads go through the
cache, and the cached pages are given back. Everything is `pread`: a file that was truncated is an
exception then, where a memory map would kill the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.model.errors import (
    DiskFullError,
    StaleCheckpointError,
    TransferError,
    TruncatedFileError,
)
from tierstore.model.groups import Segment, Source
from tierstore.model.header import LENGTH_BYTES, MAX_HEADER_BYTES, digest
from tierstore.model.sizes import PAGE, round_up

CHUNK = 8 << 20
"""Bytes per system call: large enough that the interpreter's lock costs nothing (see docs)."""

MAX_OPEN_FILES = 64
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def transfer_error(error: OSError, doing: str, *, key: str | None, path: str) -> TransferError:
    """The library's error for an error of the system, naming the file and what to do."""
    if error.errno in _FULL:
        full = DiskFullError(
            f"no room left on disk while {doing} {path} ({error.strerror}): free some space, "
            "lower disk_budget, or move disk_dir to a larger disk",
            key=key,
            path=path,
        )
        full.__cause__ = error
        return full
    failed = TransferError(
        f"{doing} {path} failed ({error.strerror or error}): check the disk and its permissions, "
        "then try again",
        key=key,
        path=path,
    )
    failed.__cause__ = error
    return failed


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells a file from a changed one, without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """The stamp of a stat result."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


class DataFile:
    """A file open for reading. Closed when the last reference goes."""

    def __init__(self, path: str, *, follow_links: bool) -> None:
        flags = _READ if follow_links else _READ | os.O_NOFOLLOW
        self.path = path
        self._cached = os.open(path, flags)
        self._direct: int | None = None
        with contextlib.suppress(OSError):  # the file system may know no direct reads
            self._direct = os.open(path, flags | os.O_DIRECT)

    def __del__(self) -> None:
        for descriptor in (getattr(self, "_cached", None), getattr(self, "_direct", None)):
            if descriptor is not None:
                os.close(descriptor)

    def stamp(self) -> FileStamp:
        """The stamp of the open file, whatever its name leads to by now."""
        return FileStamp.of(os.fstat(self._cached))

    def header_digest(self) -> str:
        """The checksum of the safetensors header that the file has now."""
        length = int.from_bytes(os.pread(self._cached, LENGTH_BYTES, 0), "little")
        return digest(os.pread(self._cached, min(length, MAX_HEADER_BYTES), LENGTH_BYTES))

    def read_at_least(self, room: memoryview, offset: int, needed: int) -> int:
        """Read into `room` from `offset`, at least `needed` bytes. Returns the bytes asked of disk.

        Direct where `offset` and `len(room)` are page multiples and the memory is page-aligned.
        """
        done = 0
        while done < needed:
            got = self._read_once(room[done:], offset + done)
            if got == 0:
                raise TruncatedFileError(
                    f"{self.path} ends at byte {offset + done:,}, {needed - done:,} bytes before "
                    "the end of the tensors it should hold: download or save it again",
                    path=self.path,
                )
            done += got
        return done

    def _read_once(self, room: memoryview, offset: int) -> int:
        if self._direct is not None and offset % PAGE == 0 and len(room) % PAGE == 0:
            try:
                return os.preadv(self._direct, [room], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The memory or the file system wants another alignment: never ask again.
                descriptor, self._direct = self._direct, None
                os.close(descriptor)
        got = os.preadv(self._cached, [room], offset)
        os.posix_fadvise(self._cached, offset, got, os.POSIX_FADV_DONTNEED)
        return got


class FileTable:
    """The files that are being read, a bounded number of them held open.

    `expect` records which header a registered checkpoint has; a file with another one, and one that
    does not have the stamp that `check` is told of, raise StaleCheckpointError. Files in `own` (the
    store's directory) are opened without following links.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._open: OrderedDict[str, DataFile] = OrderedDict()
        self._headers: dict[str, str] = {}  # path -> the checksum that its header must have
        self._lock = threading.Lock()

    def expect(self, path: str, header_digest: str | None = None) -> None:
        """From now on the safetensors header of `path` must have this checksum, or may have any."""
        with self._lock:
            self._open.pop(path, None)  # the name may lead to another file than it did
            self._headers.pop(path, None)
            if header_digest is not None:
                self._headers[path] = header_digest

    def get(self, path: str) -> DataFile:
        """The file, opened if it is not open."""
        with self._lock:
            file = self._open.pop(path, None)
            if file is None:
                file = DataFile(path, follow_links=not path.startswith(self._own + os.sep))
                expected = self._headers.get(path)
                if expected is not None and file.header_digest() != expected:
                    raise stale(path)
            self._open[path] = file
            while len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)
            return file

    def forget(self, path: str) -> None:
        """The name now leads to another file: open it anew next time."""
        with self._lock:
            self._open.pop(path, None)

    def close(self) -> None:
        """Let go of every file."""
        with self._lock:
            self._open.clear()

    def check(self, path: str, expected: FileStamp | None) -> None:
        """Raise StaleCheckpointError if a registered file is not what it was."""
        file = self.get(path)
        if expected is None:
            return
        try:
            found = [file.stamp(), FileStamp.of(os.stat(path))]
        except FileNotFoundError:
            found = []
        if found != [expected, expected]:
            raise stale(path)


def stale(path: str) -> StaleCheckpointError:
    """The error for a registered file that is not what it was."""
    return StaleCheckpointError(
        f"{path} was changed after it was registered: the tensors that were promised may be gone; "
        "register the checkpoint (or load the pipeline) again",
        path=path,
    )


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """One system call's worth of a segment: `needed` of `nbytes` bytes must come."""

    path: str
    offset: int
    at: int
    nbytes: int
    needed: int


def pieces(source: Source, chunk: int = CHUNK) -> Iterator[ReadPiece]:
    """Cut a source into reads whose offsets, lengths and places in memory are page multiples."""
    for segment in source.segments:
        yield from _segment_pieces(segment, chunk)


def _segment_pieces(segment: Segment, chunk: int) -> Iterator[ReadPiece]:
    extent = segment.extent
    lead = extent.offset % PAGE
    start, stop = extent.offset - lead, extent.offset + extent.nbytes
    for offset in range(start, stop, chunk):
        end = min(offset + chunk, stop)
        nbytes = round_up(end - offset, PAGE)
        yield ReadPiece(
            extent.path, offset, segment.at - lead + offset - start, nbytes, end - offset
        )


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write every byte of `data` at `offset`."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + CHUNK], offset + done)


class Spill:
    """Room on disk for what need not survive: one file without a name.

    Nothing is left behind when the process is killed, and nobody else can open it. Space that was
    given back is used again first: overwriting is about twice as fast as growing. Offsets are page
    multiples, found first-fit.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._descriptor = _anonymous_file(directory)
        self._free: list[tuple[int, int]] = []  # (offset, nbytes), by offset
        self._end = 0
        self._lock = threading.Lock()
        # Readers open it by this name; it has no other.
        self.path = f"/proc/self/fd/{self._descriptor}"
        try:
            self._direct: int | None = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            self._direct = None  # the file system knows no direct writes

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` bytes of room (rounded up to pages)."""
        nbytes = round_up(nbytes, PAGE)
        with self._lock:
            for i, (offset, room) in enumerate(self._free):
                if room >= nbytes:
                    self._free[i : i + 1] = [(offset + nbytes, room - nbytes)] * (room > nbytes)
                    return offset
            offset, self._end = self._end, self._end + nbytes
            return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """The room is free again; its blocks go back to the file system."""
        nbytes = round_up(nbytes, PAGE)
        with self._lock:
            self._free.append((offset, nbytes))
            self._free.sort()
            merged: list[tuple[int, int]] = []
            for start, room in self._free:
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + room)
                else:
                    merged.append((start, room))
            if merged and sum(merged[-1]) == self._end:
                self._end = merged.pop()[0]
                os.ftruncate(self._descriptor, min(self._end, os.fstat(self._descriptor).st_size))
            self._free = merged

    def write(self, data: memoryview, offset: int) -> None:
        """Write a group's packed bytes at an offset that `take` gave.

        Raises DiskFullError or TransferError.
        """
        try:
            try:
                write_all(self._direct or self._descriptor, data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or self._direct is None:
                    raise
                write_all(self._descriptor, data, offset)
        except OSError as error:
            raise transfer_error(error, "spilling to", key=None, path=self._directory) from error

    def close(self) -> None:
        """Give everything back."""
        for descriptor in (self._descriptor, self._direct):
            if descriptor is not None:
                os.close(descriptor)


def _anonymous_file(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    path = os.path.join(directory, f".spill-{os.getpid()}-{os.urandom(8).hex()}")
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return descriptor
