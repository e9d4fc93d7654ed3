"""Reading and writing files at the disk's own speed.

Files are read and written past the page cache (O_DIRECT), from and to page-aligned memory: no
second copy in RAM, and no cache that a budget does not know of. Where a file system refuses that,
reads go through the cache, and the cached pages are given back. Everything is `pread`: a file that
was truncated is an exception then, where a memory map would kill the process.

One call moves many mebibytes: the kernel cuts it into requests that are on their way together, and
the interpreter's lock, which each call has to take again, costs nothing then.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tierstore.errors import DiskFullError, TransferError, TruncatedFileError
from tierstore.model.groups import Source
from tierstore.model.header import LENGTH_BYTES, MAX_HEADER_BYTES, digest
from tierstore.model.locks import RLock, guarded
from tierstore.model.sizes import PAGE, round_up
from tierstore.system.mapping import libc

READ_BLOCK = 16 << 20
"""Bytes per system call of reads. With `DISK_THREADS`, for every disk: since the kernel cuts one
large direct read into many requests by itself, no other sizes and numbers of threads were faster
than chance wherever it was tried (see decision 5)."""

DISK_THREADS = 6
"""How many threads read and write. Not fewer: some wait for fsync, or for a core to go on."""

CHUNK = 8 << 20
"""Bytes per system call for who reads one file from start to end, with a buffer of its own."""

WRITE_BLOCK = 16 << 20
"""Bytes per system call of writes: while one part is written, the next one is summed."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def transfer_error(error: OSError, doing: str, *, key: str | None, path: str) -> TransferError:
    """The library's error for an error of the system, naming the file and what to do."""
    if error.errno in _FULL:
        kind: type[TransferError] = DiskFullError
        text = (
            f"no room left on disk while {doing} {path} ({error.strerror}): free some space, "
            "lower disk_budget, or move disk_dir to a larger disk"
        )
    else:
        whose = f" for group {key!r}" if key is not None else ""
        kind = TransferError
        text = (
            f"{doing} {path}{whose} failed ({error.strerror or error}): check the disk and its "
            "permissions, then try again"
        )
    failed = kind(text, key=key, path=path)
    failed.__cause__ = error
    return failed


@contextlib.contextmanager
def transfer_errors(doing: str, *, key: str | None = None, path: str) -> Iterator[None]:
    """Raise what is an error of the system inside as the library's, with that as the cause."""
    try:
        yield
    except OSError as error:
        raise transfer_error(error, doing, key=key, path=path) from error


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

    _direct: int | None
    _close: Callable[[int], None]

    def __init__(self, path: str, *, follow_links: bool) -> None:
        flags = _READ if follow_links else _READ | os.O_NOFOLLOW
        self._take(path, os.open(path, flags), None, close_quietly)
        if direct_alignment(self._cached) == 0:
            return
        with contextlib.suppress(OSError):  # the file system may know no direct reads
            self._direct = os.open(path, flags | os.O_DIRECT)
            if not os.path.sameopenfile(self._cached, self._direct):
                close_quietly(self._direct)  # the name leads to another file by now
                self._direct = None

    @classmethod
    def passed(
        cls, path: str, cached: int, direct: int | None, close: Callable[[int], None]
    ) -> DataFile:
        """A file that another process has opened, and calls `path`: its descriptors to read through
        the page cache, and past it. In the end, any thread calls `close` with each of them."""
        file = cls.__new__(cls)
        file._take(path, cached, direct, close)
        return file

    def _take(
        self, path: str, cached: int, direct: int | None, close: Callable[[int], None]
    ) -> None:
        self._close = close
        self.path = path
        self._cached = cached
        self._direct = direct
        self._refused = False
        self._alignment = max(PAGE, direct_alignment(cached) or PAGE)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What another process needs to read it: see `passed`."""
        return (self._cached,) if self._direct is None else (self._cached, self._direct)

    def __del__(self) -> None:
        for descriptor in (getattr(self, "_cached", None), getattr(self, "_direct", None)):
            if descriptor is not None:
                self._close(descriptor)

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._direct is not None and not self._refused

    def stamp(self) -> FileStamp:
        """The stamp of the open file, whatever its name leads to by now."""
        return FileStamp.of(os.fstat(self._cached))

    def is_as(self, stamp: FileStamp) -> bool:
        """Whether it is what it was. To lose its last name changes nothing but the time of that."""
        status = os.fstat(self._cached)
        found = FileStamp.of(status)
        if status.st_nlink == 0:
            found = dataclasses.replace(found, changed_ns=stamp.changed_ns)
        return found == stamp

    def header_digest(self) -> str:
        """The checksum of the safetensors header that the file has now."""
        length = int.from_bytes(read_fully(self._cached, LENGTH_BYTES, 0), "little")
        return digest(read_fully(self._cached, min(length, MAX_HEADER_BYTES), LENGTH_BYTES))

    def read_at_least(self, room: memoryview, offset: int, needed: int) -> int:
        """Read into `room` from `offset`, at least `needed` bytes. Returns the bytes asked of disk.

        Direct where `offset` and `len(room)` are page multiples and the memory is page-aligned.
        Any number of threads may read at once.
        """
        done = 0
        while done < needed:
            got = self._read_once(room[done:], offset + done)
            if got == 0:
                raise TruncatedFileError(
                    f"{self.path} ends at byte {offset + done:,}, {needed - done:,} bytes before "
                    "the end of the tensors it should have: download or save it again",
                    path=self.path,
                )
            done += got
        return done

    def _read_once(self, room: memoryview, offset: int) -> int:
        aligned = offset % self._alignment == len(room) % self._alignment == 0
        if self._direct is not None and not self._refused and aligned:
            try:
                return os.preadv(self._direct, [room], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The memory or the file system wants another alignment: never ask again. It stays
                # open: another thread may be about to read, and must not find another file there.
                self._refused = True
        got = os.preadv(self._cached, [room], offset)
        with contextlib.suppress(OSError):  # it is advice; the bytes are there
            os.posix_fadvise(self._cached, offset, got, os.POSIX_FADV_DONTNEED)
        return got


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """One system call's worth of a segment: `needed` of `nbytes` bytes must come."""

    path: str
    offset: int
    at: int
    nbytes: int
    needed: int


def pieces(source: Source, block: int = READ_BLOCK) -> Iterator[ReadPiece]:
    """Cut a source into reads whose offsets, lengths and places in memory are page multiples.

    None is longer than `block` bytes. A segment is cut into as few as that allows, of equal
    lengths, so that several threads end together.
    """
    for segment in source.segments:
        extent = segment.extent
        lead = extent.offset % PAGE
        start, at = extent.offset - lead, segment.at - lead
        for offset, length in parts(lead + extent.nbytes, block):
            whole = round_up(length, PAGE)
            yield ReadPiece(extent.path, start + offset, at + offset, whole, length)


def parts(nbytes: int, block: int) -> Iterator[tuple[int, int]]:
    """Cut `nbytes` into as few parts of at most `block` bytes as possible: (offset, length) each.

    All begin at a page multiple, and but for the last they are equally long.

    >>> list(parts(5 * PAGE, 4 * PAGE)) == [(0, 3 * PAGE), (3 * PAGE, 2 * PAGE)]
    True
    """
    if nbytes:
        length = round_up(-(-nbytes // -(-nbytes // block)), PAGE)
        for offset in range(0, nbytes, length):
            yield offset, min(length, nbytes - offset)


def read_fully(descriptor: int, nbytes: int, offset: int) -> bytes:
    """The bytes at `offset`, fewer only where the file ends: one read may give fewer anywhere."""
    parts = []
    while nbytes > 0 and (part := os.pread(descriptor, nbytes, offset)):
        parts.append(part)
        nbytes -= len(part)
        offset += len(part)
    return b"".join(parts)


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write every byte of `data` at `offset`."""
    done = 0
    while done < len(data):
        written = os.pwrite(descriptor, data[done : done + WRITE_BLOCK], offset + done)
        if written == 0:  # else this would never end
            raise OSError(errno.EIO, "the file system writes nothing, and does not say why")
        done += written


def close_quietly(descriptor: int) -> None:
    """Close what was only read. If that fails it is closed as well, and nothing is lost."""
    try:  # noqa: SIM105 - in half the time, and a directory has 100,000 files
        os.close(descriptor)
    except OSError:
        pass


def close_all(descriptors: Iterable[int | None]) -> None:
    """Close every one of them, though some fail. Raises the first error, after that."""
    failed: OSError | None = None
    for descriptor in descriptors:
        try:
            if descriptor is not None:
                os.close(descriptor)
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed


class OpenForWriting:
    """A file that is written past the page cache where that is possible.

    Owns both descriptors: `cached` from the start, and one for direct writes that is opened here
    under the same `name` (below `dir_fd`, if given).
    """

    def __init__(self, cached: int, name: str, dir_fd: int | None = None) -> None:
        self.cached = cached
        self._lock = RLock()
        self._users = 0
        self._closed = False
        self._direct: int | None = None
        self._refused = False
        if direct_alignment(cached) != 0:
            flags = os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT
            with contextlib.suppress(OSError):  # the file system may know no direct writes
                self._direct = os.open(name, flags, dir_fd=dir_fd)

    def write(self, data: memoryview, offset: int) -> None:
        """Write page-aligned memory at a page multiple. Any number of threads may do so at once."""
        with self.in_use():
            if self._direct is not None and not self._refused:
                try:
                    write_all(self._direct, data, offset)
                    return
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._refused = True  # it wants another alignment: never ask again
            write_all(self.cached, data, offset)

    def close(self) -> None:
        """Close both descriptors, or let the last who uses them do so.

        Raises OSError: some file systems tell only then that a write failed.
        """
        if self._is_closed_now():
            close_all((self.cached, self._direct))

    @guarded
    def _is_closed_now(self) -> bool:
        """Use it no more. Returns whether this is the first time, and nobody uses it."""
        self._closed, was = True, self._closed
        return not was and not self._users

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the descriptors stay what they are: a number that was closed is soon another's.

        Raises OSError if the file was closed.
        """
        self._is_used()
        try:
            yield
        finally:
            if self._is_left():
                close_all((self.cached, self._direct))

    @guarded
    def _is_used(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the file was closed")
        self._users += 1

    @guarded
    def _is_left(self) -> bool:
        """One user less. Returns whether it was the last of a closed file."""
        self._users -= 1
        return self._closed and not self._users


# The part of struct statx, and of the request for it, that Python does not offer yet.
_STATX_NBYTES = 256
_STATX_MEMORY = 152  # and what offsets want follows it
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


def direct_alignment(descriptor: int) -> int | None:
    """What multiples direct reads and writes of an open file want: bytes, 0 if it takes none.

    None where the system does not tell: before Linux 6.1, and for many kinds of file systems.
    """
    statx = getattr(libc, "statx", None)
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_NBYTES)
    if statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return None
    if not struct.unpack_from("I", answer)[0] & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("II", answer, _STATX_MEMORY)
    return max(memory, offset) if offset else 0


def sync_names(descriptor: int) -> None:
    """See that the names in an open directory survive a power cut. Raises OSError.

    XFS that has shut down, because its disk failed, syncs a directory without an error and without
    doing it. But it tells no status any more.
    """
    os.fsync(descriptor)
    os.fstat(descriptor)
