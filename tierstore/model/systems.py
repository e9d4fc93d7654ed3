"""Supported systems: Linux with pages of 4096 bytes."""

from __future__ import annotations

import sys
from mmap import PAGESIZE

COMMANDS = ("tierstore-inspect", "tierstore-serve")

PAGE = 4096
"""Page size in bytes, assumed for addresses, shared-memory offsets and the page map.

With larger pages, a write to a weight could go unnoticed.
"""

_OTHER_SYSTEM = (
    "tierstore supports Linux only, not {platform!r}: it uses memory maps, page maps and file "
    "locks that other systems do not have. On Windows, use WSL2; on macOS, use a Linux container "
    "or virtual machine"
)

_OTHER_PAGES = (
    "tierstore supports memory pages of 4096 bytes only, but this kernel has pages of {page_size}"
    " bytes: boot a kernel with 4 KiB pages. On aarch64, distributions offer one besides the "
    "kernel with 64 KiB pages (often called 64k)"
)


def require_known_system(
    platform: str | None = None, page_size: int = PAGESIZE, program: str | None = None
) -> None:
    """Raise ImportError, with an explanation, on an unsupported system.

    `platform` defaults to `sys.platform`; `page_size` is in bytes. If `program` (by default
    `sys.argv[0]`) is one of this package's commands, raises SystemExit with the same message
    instead, so that the command prints no traceback.
    """
    platform = sys.platform if platform is None else platform
    if platform != "linux":
        message = _OTHER_SYSTEM.format(platform=platform)
    elif page_size != PAGE:
        message = _OTHER_PAGES.format(page_size=page_size)
    else:
        return
    if program is None:
        program = sys.argv[0] if getattr(sys, "argv", None) else ""
    # Windows paths have backslashes.
    command = program.replace("\\", "/").rpartition("/")[2].removesuffix(".exe")
    if command in COMMANDS:
        raise SystemExit(f"{command}: {message}")
    raise ImportError(message, name="tierstore")
