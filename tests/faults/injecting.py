"""Makes Python's file system calls fail: any single one, or all from one on.

Calls that concern files below some directory are counted. A failing call has the effects of the
system's failing call: a failed close has closed the file, and a failed sync has lost the data it
was to write.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.system_calls import SYNCING, Call, answered, answered_files

OPENING = frozenset({"open", "open to write", "create", "listdir", "scandir"})
LOOKING = frozenset({"stat", "lstat", "fstat", "statvfs", "fstatvfs"})
READING = frozenset({"read", "pread", "preadv"})
WRITING = frozenset({"write", "pwrite", "pwritev"})
CHANGING = frozenset({"mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link"})
SIZING = frozenset({"ftruncate", "posix_fallocate"})
OTHER = frozenset({"close", "flock", "mmap", "posix_fadvise", "statx"})
EVERY = OPENING | LOOKING | READING | WRITING | CHANGING | SIZING | SYNCING | OTHER
TAKES_ROOM = {"create", "mkdir", "link", "rename", "replace"} | WRITING | SIZING | SYNCING


@dataclass(frozen=True)
class Fault:
    """A system error and the calls that may fail with it; or short reads and writes."""

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
        # Python does not repeat these calls by itself; the tests with strace cover the others.
        "EINTR": {"listdir", "scandir", "stat", "lstat", "statvfs", "close"} | CHANGING,
        "EACCES": OPENING | {"stat", "lstat", "mmap"} | CHANGING,
        "ESTALE": EVERY - {"close", "mmap", "posix_fadvise"},
        "ENOMEM": OPENING | {"stat", "mmap", "flock"},
        "short": READING | WRITING,
    }.items()
}


@dataclass
class Injector:
    """Makes call number `first` below `root` fail, and all later ones too unless it is `once`.

    Only calls that can have the fault are counted. `failed` lists the calls that failed.
    """

    root: str
    fault: Fault
    first: int
    once: bool
    count: int = 0
    failed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fires(self, call: str, path: str | None) -> bool:
        """Return whether this call is to fail."""
        if path is None or call not in self.fault.calls or not self.concerns(path):
            return False
        with self.lock:
            self.count += 1
            chosen = self.count == self.first if self.once else self.count >= self.first
            if chosen:
                self.failed.append(f"{call} {path}")
            return chosen

    def concerns(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + "/") or path in OF_THIS_PROCESS

    def answer(self, call: Call) -> Any:
        """Make the call, or make it fail."""
        if not self.fires(_kind(call), call.path):
            return call.go_on()
        return call.fail(self.fault.number) if self.fault.number else call.in_part()


OF_THIS_PROCESS = ("/proc/self/maps", "/proc/self/pagemap")


def _kind(call: Call) -> str:
    if call.name != "open":
        return call.name.partition(" ")[0]  # both functions that map files are one kind
    if call.flags & os.O_CREAT or call.flags & os.O_TMPFILE == os.O_TMPFILE:
        return "create"
    return "open to write" if call.flags & (os.O_WRONLY | os.O_RDWR) else "open"


@contextmanager
def injected(root: Any, fault: Fault, first: int, *, once: bool) -> Iterator[Injector]:
    """Inject a fault into calls that concern files below `root`, inside the block."""
    injector = Injector(str(root), fault, first, once)
    names = EVERY - {"open to write", "create"} | {"mmap of libc"}
    with (
        answered(sorted(names), injector.answer),
        answered_files(injector.concerns, injector.answer),
    ):
        yield injector
