"""Records this process's file operations, as Python's audit events report them.

An audit hook cannot be removed, so there is one for the whole process, which records events only
while a watcher is active. Python reports every file that is opened, listed, created, renamed or
removed, and everything that loads code into the process.
"""

from __future__ import annotations

import encodings.utf_16_be
import encodings.utf_16_le
import encodings.utf_32_be
import encodings.utf_32_le  # `json` guesses encodings: Python itself needs these
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.ctypeslib  # libraries import this and the next when they first need them
import numpy.ma
import rich.progress  # progress bars import it when something first takes long
import torch
from click.testing import CliRunner
from rich.cells import cell_len

from tierstore import TierStore
from tierstore.cli.commands import inspector
from tierstore.tiers.directory import TEMPORARY_NAME

assert encodings.utf_16_be and encodings.utf_32_le and numpy.ma and rich.progress

PATHS = {
    "open": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.link": (0, 1),
    "os.listdir": (0,),
    "os.listxattr": (0,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.scandir": (0,),
    "os.symlink": (0, 1),
    "os.truncate": (0,),
    "os.utime": (0,),
    "shutil.rmtree": (0,),
}
"""Arguments of an event that are paths."""

CODE = (
    "pickle.find_class",
    "exec",
    "compile",
    "import",
    "ctypes.dlopen",
    "marshal.loads",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "subprocess.Popen",
    "socket.__new__",
    "socket.connect",
    "socket.bind",
    "urllib.Request",
)
"""Events that load code, start a process, or reach for the network."""

SYSTEM = ("/proc", "/sys")

Event = tuple[str, tuple[Any, ...]]

_noted: list[Event] | None = None
_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _noted is not None and (event in PATHS or event in CODE):
        _noted.append((event, arguments))


class Watch:
    """Events recorded while a watcher is active."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    def code(self) -> list[Event]:
        """Return events that loaded code, started a process, or reached for the network."""
        return [event for event in self.events if event[0] in CODE]

    def outside(self, *places: Path) -> list[Event]:
        """Return events on files outside these places."""
        allowed = [str(place) for place in places] + [*map(os.path.realpath, places), *SYSTEM]
        return [e for e in self.events if not all(_is_in(p, e, allowed) for p in _paths(e))]

    def opened(self) -> list[str]:
        """Return the files that were opened by a full path."""
        return [path for event in self.events if event[0] == "open" for path in _paths(event)]


def _paths(event: Event) -> list[str]:
    name, arguments = event
    found = [arguments[place] for place in PATHS.get(name, ())]
    return [os.fsdecode(path) for path in found if not isinstance(path, (int, type(None)))]


def _is_in(path: str, event: Event, allowed: list[str]) -> bool:
    if not os.path.isabs(path):
        return _is_below_an_open_directory(path, event)
    return any(path == place or path.startswith(place + os.sep) for place in allowed)


def _is_below_an_open_directory(name: str, event: Event) -> bool:
    """Return whether a name below an open directory cannot lead elsewhere.

    Only opening follows a link, unless it has O_NOFOLLOW. A draft is reopened under the unguessable
    name that it was just created with.
    """
    if name in ("", ".", "..") or os.sep in name:
        return False
    if event[0] != "open" or TEMPORARY_NAME.fullmatch(name):
        return True
    return bool(event[1][2] & (os.O_NOFOLLOW | os.O_EXCL))


@functools.cache
def warm_up() -> None:
    """Import everything and fill all caches: those events are not of interest."""
    with tempfile.TemporaryDirectory() as place:
        for _ in range(2):
            with TierStore("1MB", place, device="cpu") as store:
                store.put("key", {"a": torch.ones(4), "b": torch.ones(4)[1:3]})
                store.flush()
                store.get("key")
        for words in (["ls", "--json"], ["ls"], ["verify", "--data"], ["prune", "-y"]):
            CliRunner().invoke(inspector, [words[0], place, *words[1:]])
        CliRunner().invoke(inspector, ["show", place, "key"])
    cell_len("\u6f22")  # it reads a file for this


@contextmanager
def watched() -> Iterator[Watch]:
    """Record events inside the block."""
    global _noted, _hooked
    warm_up()
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    assert _noted is None, "another watcher is active"
    events: list[Event] = []
    _noted = events
    try:
        yield Watch(events)
    finally:
        _noted = None
