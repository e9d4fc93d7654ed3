"""Which operating systems the package works on."""

from __future__ import annotations

from pathlib import PurePath

COMMANDS = ("tierstore-inspect", "tierstore-serve")

WHERE = (
    "tierstore works on Linux only, and this is {system!r}: it uses memory maps, page maps and file "
    "locks that other systems do not have. On Windows, use WSL2; on macOS, a Linux container or "
    "virtual machine"
)


def require_linux(platform: str, program: str) -> None:
    """Raise ImportError, in words, on any other system (`sys.platform`).

    If `program` (`sys.argv[0]`) is one of this package's commands, end it with the same words
    instead: who has typed a command is helped by a line, not by a traceback.
    """
    if platform == "linux":
        return
    message = WHERE.format(system=platform)
    # A path may have either kind of slash, whichever system this is.
    command = PurePath(program.replace("\\", "/")).stem
    if command in COMMANDS:
        raise SystemExit(f"{command}: {message}")
    raise ImportError(message, name="tierstore")
