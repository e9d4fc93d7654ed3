"""What was measured of disks, remembered between processes.

`tierstore-inspect bench DIR` measures; a store looks here when it opens files. The file lies in the
user's cache directory, for the owner only. It holds hints and no more: where it is missing, damaged
or of another machine, the defaults apply.

The defaults (six threads, 16 MiB for each read) keep a disk busy, since the kernel cuts one large
direct read into many requests by itself, and since some threads can wait for fsync meanwhile.
Where it was tried, other settings were as good within the noise (see docs/benchmarks). That is
why no store measures on its own: it would have to try settings that are worse, on reads that
somebody is waiting for, to gain next to nothing. Disks that want more threads (a network, an
array) are worth one run of the command.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierstore.model.sizes import PAGE

MIB = 1 << 20
DEFAULT_BLOCK = 16 * MIB
DEFAULT_THREADS = 6

_LARGEST_FILE = MIB
_BLOCKS = range(PAGE, 1024 * MIB + 1, PAGE)
_THREADS = range(1, 65)


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """What is best for one disk, and what it reached then.

    `block` is bytes per system call, `threads` how many of them are on their way at once. `read`
    and `write` are bytes per second, `measured` is a time in seconds since 1970.
    """

    block: int
    threads: int
    read: float
    write: float
    measured: float


def cache_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the figures are kept."""
    wanted = environment.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored, says the specification of these variables.
    root = Path(wanted) if os.path.isabs(wanted) else Path(os.path.expanduser("~"), ".cache")
    return root / "tierstore" / "disks.json"


def known_figures(path: str | os.PathLike[str] | int) -> DiskFigures | None:
    """What was measured of the file system of `path` (or of an open file) on this machine.

    None if nothing was, or if it cannot be told.
    """
    try:
        return _figures(_entries().get(_name_of(path)))
    except OSError:
        return None


def disk_threads() -> int:
    """How many threads a store's disk work is best given.

    One store reads from several disks. What is too many for one of them costs next to nothing, so
    it is as many as the most demanding of this machine wants.
    """
    here = f"{os.uname().nodename} "
    found = [_figures(entry) for name, entry in _entries().items() if name.startswith(here)]
    return max((figures.threads for figures in found if figures), default=DEFAULT_THREADS)


def remember(path: str | os.PathLike[str], figures: DiskFigures) -> Path:
    """Keep what was measured of the file system of `path`. Raises OSError if that cannot be."""
    file = cache_file()
    if not file.is_absolute():
        raise FileNotFoundError("this user has no home directory: set XDG_CACHE_HOME")
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    entries = {**_entries(), _name_of(path): asdict(figures)}
    temporary = file.with_name(f"{file.name}-{os.urandom(8).hex()}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="ascii") as opened:
            json.dump({"version": 1, "disks": entries}, opened, indent=2)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return file


def _name_of(path: str | os.PathLike[str] | int) -> str:
    """A file system's name. A device's number alone would be another disk's after a restart."""
    device, identity = os.stat(path).st_dev, os.statvfs(path).f_fsid
    return f"{os.uname().nodename} {device:x} {identity:x}"


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe in its place shall keep nobody waiting


def _entries() -> dict[str, Any]:
    """Everything in the file, of whatever shape; nothing if it is no file of ours."""
    try:
        with open(cache_file(), "rb", opener=_open_at_once) as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                return {}
            document = json.loads(opened.read(_LARGEST_FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or document.get("version") != 1:
        return {}
    entries = document.get("disks")
    return entries if isinstance(entries, dict) else {}


def _figures(entry: Any) -> DiskFigures | None:
    """An entry, if it is one that can be used."""
    try:
        figures = DiskFigures(**entry)
        rates = figures.read, figures.write, figures.measured
        usable = (
            type(figures.block) is int
            and figures.block in _BLOCKS
            and type(figures.threads) is int
            and figures.threads in _THREADS
            and all(type(rate) in (int, float) and 0 < rate < math.inf for rate in rates)
        )
    except TypeError:
        return None
    return figures if usable else None
