"""Files: open ones, the file of a group, and damage as disks cause it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstore.inspection.survey import survey
from tierstore.system.objects import object_name


def damaged_objects(store_dir: Path | str) -> dict[str, str]:
    """Return name -> why of each unusable file in the directory of objects."""
    unusable = survey(str(store_dir)).unusable
    return {group.item.name: group.problem.reason for group in unusable if group.problem}


def object_file(store_dir: Path, key: str) -> Path:
    """Return the object file of a key, or None."""
    return Path(store_dir) / "objects" / object_name(key)


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file in place, as a decaying disk does: size and times are unchanged.

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
    """Return the same bytes with one bit flipped."""
    changed = bytearray(raw)
    changed[offset] ^= 1 << bit
    return bytes(changed)


def open_files(below: Path | None = None, process: int | str = "self") -> dict[int, str]:
    """Return the open files of a process by descriptor; with `below`, only those in a directory."""
    found = {}
    for name in os.listdir(f"/proc/{process}/fd"):
        try:
            path = os.readlink(f"/proc/{process}/fd/{name}")
        except OSError:
            continue  # it was closed meanwhile, like the descriptor of the list itself
        if below is None or path.startswith(str(below)):
            found[int(name)] = path
    return found


def is_open(descriptor: int) -> bool:
    """Return whether this number is an open descriptor."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Limit the size of files, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
