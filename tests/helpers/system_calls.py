"""System calls that fail, are cut short, or are only recorded, whatever code makes them.

    with system_call("preadv", fails_with=errno.EIO, at=3):  # the third one
    with system_call("pwrite", short=1000):  # at most this many bytes at once
    with system_call("fsync") as calls:  # unchanged; afterwards, `calls` lists the calls made

This is the only place where a function of `os`, `fcntl` or of the C library is replaced. Where a
real fault is as easy to make (a limit, a file system that is full, a directory in the way), it
shows more. To act before a call, or to prevent it by its path, see `events.py`.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import functools
import io
import mmap
import os
import stat
import struct
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from tests.helpers.threads import Gate
from tierstore.system.mapping import FAILED, libc

T = TypeVar("T")

SYNCING = frozenset({"fsync", "fdatasync"})
IN_PARTS = frozenset({"read", "pread", "preadv", "write", "pwrite", "pwritev"})
LIBC_FAILURES = {
    **{"mmap of libc": FAILED, "munmap": -1, "mremap": FAILED},
    **{"madvise": -1, "statx": -1, "renameat2": -1},
}
"""Functions that Python does not offer, with the value that each returns on failure."""
BY_TWO_NAMES = ("rename", "replace", "link")
UNCHANGED = object()

# These are used while the functions are replaced.
_readlink, _fstat, _ftruncate, _open_file = os.readlink, os.fstat, os.ftruncate, io.open


@dataclass
class Call:
    """An intercepted call: the name of the function, and its arguments."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    plain: Callable[..., Any] = field(default=lambda *_: None, repr=False)

    def go_on(self) -> Any:
        """Make the call; return or raise its result."""
        return self.plain(*self.args, **self.options)

    @property
    def path(self) -> str | None:
        """Return the path of the call, from a name or a descriptor, or None."""
        position = 4 if self.name == "mmap of libc" else 0
        target = self.args[position] if len(self.args) > position else "."
        folder = "src_dir_fd" if self.name in BY_TWO_NAMES else "dir_fd"
        return place_of(target, self.options.get(folder))

    @property
    def flags(self) -> int:
        """Return the flags of `os.open`, or those with which the call's descriptor was opened."""
        if self.name == "open":
            return int(self.args[1])
        return fcntl.fcntl(self.args[0], fcntl.F_GETFL)

    @property
    def direct(self) -> bool:
        """True if the call bypasses the page cache."""
        return bool(self.flags & os.O_DIRECT)

    def fail(self, number: int) -> Any:
        """Fail as the system does: a close has closed, a failed sync loses the data.

        Raises the error, except for functions of the C library, which set errno.
        """
        if self.name in LIBC_FAILURES:
            ctypes.set_errno(number)
            return LIBC_FAILURES[self.name]
        if self.name == "close":
            self.go_on()
        elif self.name in SYNCING:
            _lose(self.args[0])
        target = self.args[0] if self.args else None
        raise OSError(
            number, os.strerror(number), target if isinstance(target, str | bytes) else None
        )

    def in_part(self, most: int | None = None) -> Any:
        """Read or write at most this many bytes; by default, a third of the request."""
        descriptor, what, *rest = self.args
        if self.name in ("pread", "read"):
            return self.plain(descriptor, _fewer(what, most), *rest)
        many = self.name in ("preadv", "pwritev")
        part = memoryview(what[0] if many else what).cast("B")
        part = part[: _fewer(len(part), most)]
        return self.plain(descriptor, [part] if many else part, *rest)


def _fewer(nbytes: int, most: int | None) -> int:
    return -(-nbytes // 3) if most is None else min(nbytes, most)


def place_of(path: Any, folder: int | None = None) -> str | None:
    """Return the path of a name or of a descriptor."""
    if isinstance(path, int):
        try:
            return _readlink(f"/proc/self/fd/{path}")
        except OSError:
            return None
    name = os.fsdecode(path)
    if name.startswith("/proc/self/fd/"):
        return place_of(int(name.rpartition("/")[2]))
    if folder is not None and not name.startswith("/"):
        return f"{place_of(folder)}/{name}"
    return os.path.abspath(name)


def _lose(descriptor: int) -> None:
    """Drop the written data after a failed sync, though the file still looks complete."""
    status = _fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        _ftruncate(descriptor, 0)
        _ftruncate(descriptor, status.st_size)


@contextmanager
def system_call(
    *names: str,
    fails_with: int | None = None,
    short: int | None = None,
    returns: Any = UNCHANGED,
    answer: Callable[[Call], Any] | None = None,
    before: Callable[[], object] = bool,
    after: Callable[[], object] = bool,
    when: Callable[[Call], bool] = lambda call: True,
    at: int | Container[int] | None = None,
) -> Iterator[list[Call]]:
    """Context that intercepts calls of these functions; yields the list of those that were made.

    They fail with an error of this number, read or write at most `short` bytes, return a value
    without being made, or do what `answer` does; by default, they run as usual. `before` is called
    before that, `after` when it has succeeded.

    This applies, of the calls that `when` chooses, to those whose number is in `at`, counted from
    1; by default, to all of them. Only these are listed.
    """
    made: list[Call] = []
    count, lock = 0, threading.Lock()
    wanted: Container[int] | None = (at,) if isinstance(at, int) else at
    do = answer or _answer(fails_with, short, returns)

    def ask(call: Call) -> Any:
        nonlocal count
        if not when(call):
            return call.go_on()
        with lock:
            count += 1
            chosen = wanted is None or count in wanted
            if chosen:
                made.append(call)
        if not chosen:
            return call.go_on()
        before()
        found = do(call)
        after()
        return found

    with answered(names, ask):
        yield made


def _answer(fails_with: int | None, short: int | None, returns: Any) -> Callable[[Call], Any]:
    if fails_with is not None:
        return lambda call: call.fail(fails_with)
    if short is not None:
        return lambda call: call.in_part(short)
    return Call.go_on if returns is UNCHANGED else lambda call: returns


@contextmanager
def answered(names: Iterable[str], answer: Callable[[Call], Any]) -> Iterator[None]:
    """Replace these functions by `answer` inside the context.

    They are functions of `os` and `fcntl`, `mmap` of Python, and those of `LIBC_FAILURES`.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            owner = libc if name in LIBC_FAILURES else fcntl if hasattr(fcntl, name) else os
            if name == "mmap":
                patch.setattr(mmap, name, _answered_maps(answer))
            else:
                own = name.partition(" ")[0]
                patch.setattr(owner, own, _answered(name, getattr(owner, own), answer))
        yield


def _answered(
    name: str, plain: Callable[..., Any], answer: Callable[[Call], Any]
) -> Callable[..., Any]:
    @functools.wraps(plain, assigned=("__name__", "__doc__"))
    def call(*args: Any, **options: Any) -> Any:
        return answer(Call(name, args, options, plain))

    return call


def _answered_maps(answer: Callable[[Call], Any]) -> type[mmap.mmap]:
    class Answered(mmap.mmap):
        def __new__(cls, descriptor: int, *args: Any, **options: Any) -> Answered:
            plain = functools.partial(super().__new__, cls)
            if descriptor < 0:
                return plain(descriptor, *args, **options)
            found: Answered = answer(Call("mmap", (descriptor, *args), options, plain))
            return found

    return Answered


_until_the_end = ExitStack()


def until_the_end(fault: AbstractContextManager[T]) -> T:
    """Enter a context for the life of this process, or of its fork."""
    return _until_the_end.enter_context(fault)


def rejecting_opens(
    flag: int, number: int = errno.EOPNOTSUPP
) -> AbstractContextManager[list[Call]]:
    """Simulate a file system that rejects a flag of `os.open`."""
    return system_call("open", fails_with=number, when=lambda call: call.flags & flag == flag)


def report_alignment(alignment: int, *, mask: int = 0x2000) -> AbstractContextManager[list[Call]]:
    """Make every file system report this alignment for direct reads and writes.

    0 means that direct I/O is not supported. With a `mask` of 0 it reports nothing.
    """

    def tell(call: Call) -> int:
        raw = bytearray(256)
        struct.pack_into("=I", raw, 0, mask)
        struct.pack_into("=II", raw, 152, min(alignment, 512), alignment)
        call.args[4].raw = bytes(raw)
        return 0

    return system_call("statx", answer=tell)


def accepting_direct_opens() -> AbstractContextManager[list[Call]]:
    """Make every file system accept, and ignore, the flag for direct reads and writes."""

    def open_cached(call: Call) -> Any:
        path, flags, *rest = call.args
        return call.plain(path, flags & ~os.O_DIRECT, *rest, **call.options)

    return system_call("open", answer=open_cached)


@contextmanager
def held_calls(name: str) -> Iterator[Gate]:
    """Hold calls of this function until the gate is open."""
    gate = Gate()
    with system_call(name, before=gate.hold):
        yield gate


def random_bytes_zero() -> AbstractContextManager[list[Call]]:
    """Make the system's random bytes all zero, so that drawn names can be guessed."""
    return system_call("urandom", answer=lambda call: bytes(call.args[0]))


def report_free_space(nbytes: int) -> AbstractContextManager[list[Call]]:
    """Make file systems report this many bytes as free, in whole pages."""
    free = SimpleNamespace(f_bavail=nbytes // mmap.PAGESIZE, f_frsize=mmap.PAGESIZE)
    return system_call("fstatvfs", returns=free)


@contextmanager
def without_libc_function(name: str) -> Iterator[None]:
    """Hide a function of the C library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libc, name, None)
        yield


# Reading through `open` ---------------------------------------------------------------------------


@contextmanager
def answered_files(
    concerned: Callable[[str], bool], answer: Callable[[Call], Any]
) -> Iterator[None]:
    """Replace "open" and "read" of files that are read through `open` by `answer`."""

    def call(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        path = place_of(file)
        if path is None or not concerned(path) or set(mode) & set("wax+"):
            return _open_file(file, mode, buffering, *args, **options)
        answer(Call("open", (path, os.O_RDONLY)))
        raw = _AnsweredFile(file, answer, options.get("opener"))
        if buffering == 0:
            return raw
        buffered = io.BufferedReader(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, options.get("encoding"), options.get("errors"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", call)
        patch.setattr(builtins, "open", call)
        yield


class _AnsweredFile(io.FileIO):
    def __init__(self, file: Any, answer: Callable[[Call], Any], opener: Any) -> None:
        super().__init__(file, "rb", opener=opener)
        self._answer = answer

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")

        def plain(_: int, nbytes: int) -> int:
            return super(_AnsweredFile, self).readinto(target[:nbytes]) or 0

        return int(self._answer(Call("read", (self.fileno(), len(target)), {}, plain)) or 0)

    def read(self, size: int | None = -1) -> bytes | None:
        return io.RawIOBase.read(self, -1 if size is None else size)

    def readall(self) -> bytes:
        return io.RawIOBase.readall(self) or b""
