"""Files: which are open, where a group's is, and damage as disks do it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstore.inspection.survey import survey
from tierstore.system.objects import object_name


def damaged_objects(store_dir: Path | str) -> dict[str, str]:
    """What lies where objects are and is none that can be used, and why: by name."""
    unusable = survey(str(store_dir)).unusable
    return {group.item.name: group.problem.reason for group in unusable if group.problem}


def object_file(store_dir: Path, key: str) -> Path:
    """Where the object file of a key is, if there is one."""
    return Path(store_dir) / "objects" / object_name(key)


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit of a file in place, as a disk that rots does: its size and times stay.

    An offset below zero counts from the end of the file.
    """
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        value = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([value ^ 1 << bit]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def with_flipped_bit(raw: bytes, offset: int, bit: int = 0) -> bytes:
    """The same bytes but for one bit."""
    changed = bytearray(raw)
    changed[offset] ^= 1 << bit
    return bytes(changed)


def open_files(below: Path | None = None, process: int | str = "self") -> dict[int, str]:
    """What a process has open, by descriptor: everything, or what is in a directory."""
    found = {}
    for name in os.listdir(f"/proc/{process}/fd"):
        try:
            path = os.readlink(f"/proc/{process}/fd/{name}")
        except OSError:
            continue  # it was closed meanwhile, as that of the list itself is
        if below is None or path.startswith(str(below)):
            found[int(name)] = path
    return found


def is_open(descriptor: int) -> bool:
    """Whether this number is that of something open."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """As a full disk: no file can grow beyond it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
