"""Detects the file system that a directory lies on."""

from __future__ import annotations

import os
import re
from pathlib import Path

MEMORY_FILE_SYSTEMS = frozenset({"ramfs", "tmpfs"})
"""Types of file systems whose files take memory."""

NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4"}
    | {"smb3", "smbfs", "virtiofs"}
)
"""Types of file systems that several machines may share."""


MOUNTS = "/proc/self/mountinfo"


def file_system_of(directory: str, mounts: str = MOUNTS) -> str | None:
    """Return the type of the file system of a directory, such as `ext4`; None if unknown."""
    here = os.path.realpath(directory)
    try:
        lines = Path(mounts).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    longest, found = -1, None
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        is_below = here == point or here.startswith(point.rstrip("/") + "/")
        # If two mounts share a point, the later one is on top.
        if is_below and len(point) >= longest:
            longest, found = len(point), after.split()[0]
    return found
