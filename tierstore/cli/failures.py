"""How the command ends: exit codes, and failures that say what to do."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """What the command's exit code means. Scripts rely on these numbers."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    DAMAGED = 3
    UNKNOWN_KEY = 4
    LOCKED = 11
    INTERRUPTED = 130


class Failure(Exception):
    """The command cannot do what it was asked for; `advice` is what the user can do about it."""

    def __init__(self, message: str, advice: str, code: Code) -> None:
        super().__init__(message)
        self.advice = advice
        self.code = code


def system_failure(error: OSError, doing: str) -> Failure:
    """The failure for an error of the system."""
    return Failure(
        f"{doing} failed: {error.strerror or error}",
        "Check that the directory is there and that you may read (or change) it.",
        Code.UNEXPECTED,
    )
