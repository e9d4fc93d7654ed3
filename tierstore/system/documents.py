"""JSON documents in untrusted files."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from tierstore.system.objects import READ


def read_document(
    name: str | os.PathLike[str], limit: int, dir_fd: int | None = None, flags: int = READ
) -> dict[str, Any]:
    """Read the JSON object in a regular file; return an empty dict if that fails.

    The path may hold anything: a pipe does not block, a link is not followed (unless `flags` allow
    it), and at most `limit` bytes of a larger file are read.
    """
    try:
        with open(name, "rb", opener=lambda path, _: os.open(path, flags, dir_fd=dir_fd)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return {}
            found = json.loads(file.read(limit))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
