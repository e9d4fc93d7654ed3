"""Makes the calls fail by which Python reaches files: any one of them, or all from one on.

Functions of `os`, `fcntl` and `mmap`, and what reads through `open`, are replaced by ones that
count the calls that concern files below some directory. A call that fails does what such a call of
the system does: a close that fails has closed, and a sync that fails has lost what it was to write.
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
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tierstore.system import files as disk
from tierstore.system import mapping

OPENING = frozenset({"open", "open to write", "create", "listdir", "scandir"})
LOOKING = frozenset({"stat", "lstat", "fstat", "statvfs", "fstatvfs"})
READING = frozenset({"read", "pread", "preadv"})
WRITING = frozenset({"write", "pwrite", "pwritev"})
CHANGING = frozenset({"mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link"})
SIZING = frozenset({"ftruncate", "posix_fallocate"})
SYNCING = frozenset({"fsync", "fdatasync"})
OTHER = frozenset({"close", "flock", "mmap", "posix_fadvise", "statx"})
EVERY = OPENING | LOOKING | READING | WRITING | CHANGING | SIZING | SYNCING | OTHER
TAKES_ROOM = {"create", "mkdir", "link", "rename", "replace"} | WRITING | SIZING | SYNCING


@dataclass(frozen=True)
class Fault:
    """An error of the system, and the calls that may end with it; or short reads and writes."""

    name: str
    number: int
    calls: frozenset[str]


FAULTS = {
    name: Fault(name, getattr(errno, name, 0), frozenset(calls))
    for name, calls in {
        "EIO": EVERY - {"open", "flock"},
        "ENOSPC": TAKES_ROOM,
        "EDQUOT": TAKES_ROOM | {"close"},
        "EROFS": {"open to write", "create"} | CHANGING | SIZING,
        "EMFILE": OPENING,
        # Those that Python does not repeat by itself; of the others, see the tests with strace.
        "EINTR": {"listdir", "scandir", "stat", "lstat", "statvfs", "close"} | CHANGING,
        "EACCES": OPENING | {"stat", "lstat", "mmap"} | CHANGING,
        "ESTALE": EVERY - {"close", "mmap", "posix_fadvise"},
        "ENOMEM": OPENING | {"stat", "mmap", "flock"},
        "short": READING | WRITING,
    }.items()
}


@dataclass
class Injector:
    """Lets call number `first` below `root` fail, and those after it too unless it is `once`.

    Only calls that the fault may concern are counted. `failed` says which have failed.
    """

    root: str
    fault: Fault
    first: int
    once: bool
    count: int = 0
    failed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fires(self, call: str, path: str | None) -> bool:
        """Whether this call is to fail."""
        if path is None or call not in self.fault.calls or not self._concerns(path):
            return False
        with self.lock:
            self.count += 1
            chosen = self.count == self.first if self.once else self.count >= self.first
            if chosen:
                self.failed.append(f"{call} {path}")
            return chosen

    def _concerns(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + "/") or path in OF_THIS_PROCESS

    def error(self, path: object) -> OSError:
        """What the failing call raises."""
        name = path if isinstance(path, str | bytes) else None
        return OSError(self.fault.number, os.strerror(self.fault.number), name)


OF_THIS_PROCESS = ("/proc/self/maps", "/proc/self/pagemap")
BY_TWO_NAMES = ("rename", "replace", "link")

# The real functions: what is here has to work while they are replaced.
_readlink, _fsencode, _abspath = os.readlink, os.fsencode, os.path.abspath
_fstat, _ftruncate, _open_file = os.fstat, os.ftruncate, io.open


def _place(path: Any, folder: int | None = None) -> str | None:
    """The path that a call is about, given a name or a descriptor."""
    if isinstance(path, int):
        try:
            return _readlink(f"/proc/self/fd/{path}")
        except OSError:
            return None
    name = os.fsdecode(path)
    if name.startswith("/proc/self/fd/"):
        return _place(int(name.rpartition("/")[2]))
    if folder is not None and not name.startswith("/"):
        return f"{_place(folder)}/{name}"
    return _abspath(name)


def _kind(name: str, args: tuple[Any, ...]) -> str:
    if name != "open":
        return name
    flags = args[1]
    if flags & os.O_CREAT or flags & os.O_TMPFILE == os.O_TMPFILE:
        return "create"
    return "open to write" if flags & (os.O_WRONLY | os.O_RDWR) else "open"


def _counting(injector: Injector, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The function, counted, and failing where the injector says so."""
    folder = "src_dir_fd" if name in BY_TWO_NAMES else "dir_fd"

    @functools.wraps(plain)
    def call(*args: Any, **options: Any) -> Any:
        target = args[0] if args else "."
        path = _place(target, options.get(folder))
        if not injector.fires(_kind(name, args), path):
            return plain(*args, **options)
        if injector.fault.name == "short":
            return _in_part(name, plain, args)
        if name == "close":
            plain(*args)
        elif name in SYNCING:
            _lose(args[0])
        raise injector.error(target)

    return call


def _lose(descriptor: int) -> None:
    """A sync has failed: what was written is gone, though the file looks as if it was there."""
    status = _fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        _ftruncate(descriptor, 0)
        _ftruncate(descriptor, status.st_size)


def _in_part(name: str, plain: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Read or write a third of what was asked for, and of one byte all."""
    descriptor, what, *rest = args
    if name in ("pread", "read"):
        return plain(descriptor, -(-what // 3), *rest)
    if name in ("preadv", "pwritev"):
        part = memoryview(what[0]).cast("B")
        return plain(descriptor, [part[: -(-len(part) // 3)]], *rest)
    part = memoryview(what).cast("B")
    return plain(descriptor, part[: -(-len(part) // 3)], *rest)


class _CountedFile(io.FileIO):
    """What reads through `open` do: each asks the injector."""

    def __init__(self, file: Any, injector: Injector, opener: Any) -> None:
        super().__init__(file, "rb", opener=opener)
        self._injector = injector
        self._place = _place(self.fileno())

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        if not self._injector.fires("read", self._place):
            return super().readinto(room) or 0
        if self._injector.fault.name != "short":
            raise self._injector.error(self._place)
        return super().readinto(room[: -(-len(room) // 3)]) or 0

    def read(self, size: int | None = -1) -> bytes | None:
        return io.RawIOBase.read(self, -1 if size is None else size)

    def readall(self) -> bytes:
        return io.RawIOBase.readall(self) or b""


def _counting_open(injector: Injector) -> Callable[..., Any]:
    def call(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        path = _place(file)
        concerned = path is not None and injector._concerns(path)
        if not concerned or set(mode) & set("wax+"):
            return _open_file(file, mode, buffering, *args, **options)
        if injector.fires("open", path):
            raise injector.error(path)
        raw = _CountedFile(file, injector, options.get("opener"))
        if buffering == 0:
            return raw
        buffered = io.BufferedReader(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, options.get("encoding"), options.get("errors"))

    return call


def _counting_map(injector: Injector) -> type[mmap.mmap]:
    class Counted(mmap.mmap):
        def __new__(cls, descriptor: int, *args: Any, **options: Any) -> Counted:
            if descriptor >= 0 and injector.fires("mmap", _place(descriptor)):
                raise injector.error(None)
            return super().__new__(cls, descriptor, *args, **options)

    return Counted


def _counting_pages(injector: Injector, plain: Any) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if injector.fires("mmap", _place(args[4])):
            ctypes.set_errno(injector.fault.number)
            return None
        return plain(*args)

    return call


def _counting_statx(injector: Injector, plain: Any) -> Callable[..., int]:
    def call(descriptor: int, *args: Any) -> int:
        if injector.fires("statx", _place(descriptor)):
            return -1
        found: int = plain(descriptor, *args)
        return found

    return call


@contextmanager
def injected(root: Any, fault: Fault, first: int, *, once: bool) -> Iterator[Injector]:
    """Inside, calls that concern files below `root` fail as is said."""
    injector = Injector(str(root), fault, first, once)
    with pytest.MonkeyPatch.context() as patch:
        for name in sorted(EVERY - {"open to write", "create", "flock", "mmap", "statx"}):
            patch.setattr(os, name, _counting(injector, name, getattr(os, name)))
        patch.setattr(fcntl, "flock", _counting(injector, "flock", fcntl.flock))
        patch.setattr(mmap, "mmap", _counting_map(injector))
        patch.setattr(disk, "_statx", _counting_statx(injector, disk._statx))
        patch.setattr(mapping, "_mmap", _counting_pages(injector, mapping._mmap))
        patch.setattr(io, "open", _counting_open(injector))
        patch.setattr(builtins, "open", _counting_open(injector))
        yield injector
