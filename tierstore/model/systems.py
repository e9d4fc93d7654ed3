"""Which systems the package works on: Linux, with pages of 4096 bytes."""

from __future__ import annotations

import sys
from mmap import PAGESIZE

COMMANDS = ("tierstore-inspect", "tierstore-serve")

PAGE = 4096
"""Addresses, offsets in shared memory and the page map are reckoned in pages of this size. With
larger ones a weight that was written to could be taken for one that was not."""

_OTHER_SYSTEM = (
    "tierstore works on Linux only, and this is {platform!r}: it uses memory maps, page maps and "
    "file locks that other systems do not have. On Windows, use WSL2; on macOS, a Linux container "
    "or virtual machine"
)

_OTHER_PAGES = (
    "tierstore works with memory pages of 4096 bytes only, and this kernel has pages of {page_size}"
    ": start the machine with a kernel of 4 KiB pages. On aarch64, distributions have them beside "
    "those of 64 KiB (often called 64k)"
)


def require_known_system(
    platform: str | None = None, page_size: int = PAGESIZE, program: str | None = None
) -> None:
    """Raise ImportError, in words, on a system that the package does not work on.

    `platform` is as `sys.platform` (the default), `page_size` in bytes. If `program` (by default
    `sys.argv[0]`) is one of this package's commands, it ends with the same words instead: who has
    typed a command is helped by a line, not by a traceback.
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
    # A path may have either kind of slash, whichever system this is.
    command = program.replace("\\", "/").rpartition("/")[2].removesuffix(".exe")
    if command in COMMANDS:
        raise SystemExit(f"{command}: {message}")
    raise ImportError(message, name="tierstore")
