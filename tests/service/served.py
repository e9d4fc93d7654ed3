"""`tierstore-serve` as a user starts it, which records the files that it opens.

    python served.py NOTES DIR --ram ... [options of tierstore-serve]

On SIGUSR1, it starts to write the names of all opened files to NOTES ("-": never).
"""

from __future__ import annotations

import os
import signal
import sys

from tierstore.service.cli import serve


def note(descriptor: int, event: str, arguments: tuple[object, ...]) -> None:
    """Record each opened file, whichever part of Python opens it."""
    if event == "open":
        os.write(descriptor, f"{arguments[0]!s}\n".encode(errors="replace"))


def begin(descriptor: int) -> None:
    sys.addaudithook(lambda event, arguments: note(descriptor, event, arguments))
    os.write(descriptor, b"\n")  # from here on


if __name__ == "__main__":
    notes = sys.argv.pop(1)
    if notes != "-":
        to = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        signal.signal(signal.SIGUSR1, lambda *_: begin(to))
    serve()
