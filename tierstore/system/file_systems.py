"""Which file system a directory lies on."""

from __future__ import annotations

import os
import re
from pathlib import Path

IN_MEMORY = frozenset({"ramfs", "tmpfs"})
"""What is written there takes memory."""

OF_OTHER_MACHINES = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4"}
    | {"smb3", "smbfs", "virtiofs"}
)
"""Several machines may see the same directory."""


MOUNTS = "/proc/self/mountinfo"


def file_system_of(directory: str, mounts: str = MOUNTS) -> str | None:
    """The type of the file system that a directory lies on, such as `ext4`; None: not known."""
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
        # Of two mounts on one point, the later one is on top.
        if is_below and len(point) >= longest:
            longest, found = len(point), after.split()[0]
    return found
