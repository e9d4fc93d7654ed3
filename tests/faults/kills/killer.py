"""Kills its own process at a chosen system call.

All functions of `os` and similar modules through which the library accesses files are wrapped. From
a given moment on, the n-th call by any thread is the last: the process dies before it, after it, or
halfway through a write. Changes outside one directory are reported, too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from typing import Any

from tests.helpers.processes import Tell
from tests.helpers.system_calls import Call, answered, until_the_end
from tierstore.model.sizes import PAGE

BEFORE, HALF, AFTER = "before", "half of", "after"

CALLS = (
    "open", "close", "pread", "preadv", "pwrite", "pwritev", "fsync", "fdatasync", "rename",
    "replace", "link", "unlink", "remove", "mkdir", "rmdir", "ftruncate", "truncate",
    "posix_fallocate", "fstat", "stat", "listdir", "scandir", "symlink", "posix_fadvise", "chmod",
    "utime",
)  # fmt: skip

CHANGES = {
    "rename": 2, "replace": 2, "link": 2, "unlink": 1, "remove": 1, "mkdir": 1, "rmdir": 1,
    "truncate": 1, "symlink": 2, "chmod": 1, "utime": 1,
}  # fmt: skip
"""Calls that change a directory's contents, and the number of paths they take."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Killer:
    """Counts calls once it is armed. `inside` is the only directory that may be changed."""

    def __init__(self, tell: Tell, inside: str) -> None:
        self._tell = tell
        self._inside = os.path.realpath(inside)
        self._calls = itertools.count(1)  # for every thread
        self._target: int | None = None
        self._when, self._names = BEFORE, CALLS
        until_the_end(answered((*CALLS, "flock"), self._answer))

    def arm(self, target: int, when: str, only: str = "") -> None:
        """Arm it: die at call number `target` of all calls, or of those named `only`."""
        self._calls = itertools.count(1)
        self._target, self._when = target, when
        self._names = (only,) if only else (*CALLS, "flock")

    def _answer(self, call: Call) -> Any:
        self._look_where(call.name, call.args, call.options)
        if not self._is_due(call.name):
            return call.go_on()
        if self._when == BEFORE:
            self._die(BEFORE, call.name)
        if self._when == HALF and call.name == "pwrite":
            nbytes = len(call.args[1])
            with contextlib.suppress(OSError):  # direct writes need whole pages
                call.in_part(nbytes // 2 // PAGE * PAGE or nbytes // 2)
            self._die(HALF, call.name)
        try:
            return call.go_on()
        finally:
            self._die(AFTER, call.name)

    def _is_due(self, name: str) -> bool:
        return (
            self._target is not None and name in self._names and next(self._calls) == self._target
        )

    def _die(self, when: str, name: str) -> None:
        self._tell("dies", f"{when} {name}")
        os.kill(os.getpid(), signal.SIGKILL)

    def _look_where(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if name == "open":
            flags = args[1] if len(args) > 1 else options["flags"]
            paths = [args[0]] if flags & WRITING else []
        else:
            paths = list(args[: CHANGES.get(name, 0)])
        for path, directory in zip(paths, ("src_dir_fd", "dst_dir_fd"), strict=False):
            if isinstance(path, int):
                continue
            below = options.get("dir_fd", options.get(directory))
            where = self._where(os.fsdecode(path), below)
            if not (where + os.sep).startswith(self._inside + os.sep):
                self._tell("outside", f"{name} {where}")

    def _where(self, path: str, below: int | None) -> str:
        if path.startswith("/proc/self/fd/"):
            return os.readlink(path)
        if below is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{below}"), path)
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
