"""What a benchmark says: the machine, tables, and claims that are held or missed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench import machine


@dataclass(frozen=True)
class Claim:
    """Something that was looked at: `value` shall be within the bounds."""

    text: str
    value: float
    at_least: float = float("-inf")
    at_most: float = float("inf")

    @property
    def held(self) -> bool:
        """Whether it is so."""
        return self.at_least <= self.value <= self.at_most

    def verdict(self) -> str:
        """In one line."""
        return f"{'held' if self.held else 'MISSED'}: {self.text} ({self.value:.3g})"


class Page:
    """Prints what it is told, and keeps it for a page of Markdown."""

    def __init__(self, title: str, directory: Path, packages: Iterable[str]) -> None:
        self._title = title.splitlines()[0]
        self._timed_by_device: list[str] = []
        self.text("\n".join(f"- {line}" for line in machine.describe(directory, packages)))
        self.text(f"```sh\n{_command()}\n```")

    def text(self, text: str) -> None:
        """A paragraph."""
        print(f"{text.strip()}\n", flush=True)
        self._timed_by_device.append(text.strip())

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table."""
        self.text(machine.table(columns, rows))

    def claims(self, claims: Iterable[Claim]) -> None:
        """What was to be shown, and whether it was."""
        self.text("\n".join(f"- {claim.verdict()}" for claim in claims))

    def write(self, page: Path | None) -> None:
        """Put it into a page, if there shall be one."""
        if page is not None:
            machine.publish(page, self._title, "\n\n".join(self._timed_by_device))


def _command() -> str:
    """The command line, without the places of files, which are of no interest to others."""
    words = shlex.split(machine.command_line())
    places = [i for i, word in enumerate(words) if word in ("--dir", "--markdown")]
    return shlex.join(w for i, w in enumerate(words) if i not in places and i - 1 not in places)
