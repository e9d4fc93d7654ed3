"""Reads and writes files at the disk's own speed.

Files are read and written past the page cache (O_DIRECT), from and to page-aligned memory. This
avoids a second copy in RAM, and a cache outside the budget. Where a file system refuses direct
access, reads go through the page cache, and the cached pages are dropped. All reads use `pread`: a
truncated file raises an exception, where a memory map would kill the process.

One call moves many mebibytes: the kernel splits it into requests that are in flight together, and
the cost of taking the interpreter's lock once per call is negligible.
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
"""Bytes per system call of reads.

With `DISK_THREADS`, good for every disk: the kernel splits one large direct read into many requests
by itself, and no other sizes or thread counts were measurably faster on any disk tried (see
decision 5).
"""

DISK_THREADS = 6
"""Number of threads that read and write.

Fewer are not enough, because some wait for fsync or for a free core.
"""

CHUNK = 8 << 20
"""Bytes per system call for code that reads one file sequentially into its own buffer."""

WRITE_BLOCK = 16 << 20
"""Bytes per system call of writes: one part is written while the next is checksummed."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def transfer_error(error: OSError, doing: str, *, key: str | None, path: str) -> TransferError:
    """Return the library's error for a system error, naming the file and the remedy."""
    if error.errno in _FULL:
        kind: type[TransferError] = DiskFullError
        text = (
            f"no space left on disk while {doing} {path} ({error.strerror}): free some space, "
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
    """Raise system errors inside the block as the library's errors, with the cause attached."""
    try:
        yield
    except OSError as error:
        raise transfer_error(error, doing, key=key, path=path) from error


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Identifies a version of a file without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """Return the stamp of a stat result."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


class DataFile:
    """A file open for reading. It is closed with its last reference."""

    _direct: int | None
    _close: Callable[[int], None]

    def __init__(self, path: str, *, follow_links: bool) -> None:
        flags = _READ if follow_links else _READ | os.O_NOFOLLOW
        self._set_up(path, os.open(path, flags), None, close_quietly)
        if direct_alignment(self._cached) == 0:
            return
        with contextlib.suppress(OSError):  # the file system may not support direct reads
            self._direct = os.open(path, flags | os.O_DIRECT)
            if not os.path.sameopenfile(self._cached, self._direct):
                close_quietly(self._direct)  # the name was replaced between the two opens
                self._direct = None

    @classmethod
    def passed(
        cls, path: str, cached: int, direct: int | None, close: Callable[[int], None]
    ) -> DataFile:
        """Wrap the descriptors of a file that another process has opened and calls `path`.

        `cached` reads through the page cache, `direct` past it. At the end, any thread calls
        `close` with each of them.
        """
        file = cls.__new__(cls)
        file._set_up(path, cached, direct, close)
        return file

    def _set_up(
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
        """The descriptors that another process needs to read it: see `passed`."""
        return (self._cached,) if self._direct is None else (self._cached, self._direct)

    def __del__(self) -> None:
        for descriptor in (getattr(self, "_cached", None), getattr(self, "_direct", None)):
            if descriptor is not None:
                self._close(descriptor)

    @property
    def direct(self) -> bool:
        """True if reads bypass the page cache."""
        return self._direct is not None and not self._refused

    def stamp(self) -> FileStamp:
        """Return the stamp of the open file, even if its name now leads to another one."""
        return FileStamp.of(os.fstat(self._cached))

    def matches(self, stamp: FileStamp) -> bool:
        """Return whether the file still has this stamp.

        Removing a file's last name changes only its ctime, so the ctime is ignored in that case.
        """
        status = os.fstat(self._cached)
        found = FileStamp.of(status)
        if status.st_nlink == 0:
            found = dataclasses.replace(found, changed_ns=stamp.changed_ns)
        return found == stamp

    def header_digest(self) -> str:
        """Return the checksum of the file's current safetensors header."""
        length = int.from_bytes(read_fully(self._cached, LENGTH_BYTES, 0), "little")
        return digest(read_fully(self._cached, min(length, MAX_HEADER_BYTES), LENGTH_BYTES))

    def read_at_least(self, buffer: memoryview, offset: int, needed: int) -> int:
        """Read at least `needed` bytes at `offset` into `buffer`. Returns the bytes requested.

        The read is direct where `offset` and `len(buffer)` are page multiples and the memory is
        page-aligned. Any number of threads may read at once. Raises TruncatedFileError if the file
        ends too early.
        """
        done = 0
        while done < needed:
            got = self._read_once(buffer[done:], offset + done)
            if got == 0:
                raise TruncatedFileError(
                    f"{self.path} ends at byte {offset + done:,}, {needed - done:,} bytes before "
                    "the end of its tensors: download or save it again",
                    path=self.path,
                )
            done += got
        return done

    def _read_once(self, buffer: memoryview, offset: int) -> int:
        aligned = offset % self._alignment == len(buffer) % self._alignment == 0
        if self._direct is not None and not self._refused and aligned:
            try:
                return os.preadv(self._direct, [buffer], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The memory or the file system needs another alignment: use the cache from now
                # on. The descriptor stays open, as another thread may be about to use its number.
                self._refused = True
        got = os.preadv(self._cached, [buffer], offset)
        with contextlib.suppress(OSError):  # only advice: the bytes have been read
            os.posix_fadvise(self._cached, offset, got, os.POSIX_FADV_DONTNEED)
        return got


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """One system call's worth of a segment: at least `needed` of `nbytes` bytes must arrive."""

    path: str
    offset: int
    at: int
    nbytes: int
    needed: int


def pieces(source: Source, block: int = READ_BLOCK) -> Iterator[ReadPiece]:
    """Split a source into reads whose offsets, lengths and places in memory are page multiples.

    No read is longer than `block` bytes. A segment is split into as few reads of equal length as
    that allows, which lets several threads finish together.
    """
    for segment in source.segments:
        extent = segment.extent
        lead = extent.offset % PAGE
        start, at = extent.offset - lead, segment.at - lead
        for offset, length in parts(lead + extent.nbytes, block):
            whole = round_up(length, PAGE)
            yield ReadPiece(extent.path, start + offset, at + offset, whole, length)


def parts(nbytes: int, block: int) -> Iterator[tuple[int, int]]:
    """Split `nbytes` into as few parts of at most `block` bytes as possible, as (offset, length).

    All parts begin at a page multiple, and all but the last have the same length.

    >>> list(parts(5 * PAGE, 4 * PAGE)) == [(0, 3 * PAGE), (3 * PAGE, 2 * PAGE)]
    True
    """
    if nbytes:
        length = round_up(-(-nbytes // -(-nbytes // block)), PAGE)
        for offset in range(0, nbytes, length):
            yield offset, min(length, nbytes - offset)


def read_fully(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Read the bytes at `offset`; fewer only at the end of the file.

    A single `pread` may return fewer bytes anywhere.
    """
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
        if written == 0:  # avoid an endless loop
            raise OSError(errno.EIO, "the file system wrote 0 bytes without reporting an error")
        done += written


def close_quietly(descriptor: int) -> None:
    """Close a descriptor that was only read from, ignoring errors.

    A failed close still closes the descriptor, and no data is lost.
    """
    try:  # noqa: SIM105 - half the time of `suppress`, and a directory has 100,000 files
        os.close(descriptor)
    except OSError:
        pass


def close_all(descriptors: Iterable[int | None]) -> None:
    """Close every descriptor, even if some fail. Raises the first error afterwards."""
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
    """A file that is written past the page cache where possible.

    Owns both descriptors: `cached` from the start, and one for direct writes, which is opened here
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
            with contextlib.suppress(OSError):  # the file system may not support direct writes
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
                    self._refused = True  # it needs another alignment: use the cache from now on
            write_all(self.cached, data, offset)

    def close(self) -> None:
        """Close both descriptors, now or when their last user leaves.

        Raises OSError: some file systems report a failed write only on close.
        """
        if self._mark_closed():
            close_all((self.cached, self._direct))

    @guarded
    def _mark_closed(self) -> bool:
        """Mark the file closed. Returns whether this is the first time and it has no users."""
        self._closed, was = True, self._closed
        return not was and not self._users

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the descriptors open inside the block.

        The system reuses the number of a closed descriptor for another file. Raises OSError if the
        file was closed.
        """
        self._add_user()
        try:
            yield
        finally:
            if self._remove_user():
                close_all((self.cached, self._direct))

    @guarded
    def _add_user(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the file was closed")
        self._users += 1

    @guarded
    def _remove_user(self) -> bool:
        """Remove one user. Returns whether it was the last one of a closed file."""
        self._users -= 1
        return self._closed and not self._users


# The part of struct statx, and of the request for it, that Python does not expose yet.
_STATX_NBYTES = 256
_STATX_MEMORY = 152  # offset of the memory alignment; the offset alignment follows it
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


def direct_alignment(descriptor: int) -> int | None:
    """Return the alignment in bytes for direct I/O on an open file; 0 if it allows none.

    None if the system does not report it: before Linux 6.1, and for many kinds of file systems.
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
    """Sync the names in an open directory against a power cut. Raises OSError.

    An XFS that has shut down because its disk failed reports success for a directory sync that it
    did not do. It fails `fstat`, however.
    """
    os.fsync(descriptor)
    os.fstat(descriptor)
