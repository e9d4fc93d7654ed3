"""What a benchmark says: a page of Markdown with the machine, tables, and claims held or missed."""

from __future__ import annotations

import datetime
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
    """Prints what it is told, and keeps it for a file. `method` is a script's own description."""

    def __init__(self, method: str, directory: Path, packages: Iterable[str]) -> None:
        title, _, rest = method.strip().partition("\n\n")
        self._kept = [f"# {title.rstrip('.')}", "", str(datetime.date.today()), ""]
        prose = [part for part in rest.split("\n\n") if not part.startswith("    ")]
        self._kept += ["\n\n".join(prose), "", "```sh", _command(), "```", ""]
        self.text("\n".join(f"- {line}" for line in machine.describe(directory, packages)))

    def text(self, text: str) -> None:
        """A paragraph."""
        print(f"{text.strip()}\n", flush=True)
        self._kept += [text.strip(), ""]

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table."""
        self.text(machine.table(columns, rows))

    def claims(self, claims: Iterable[Claim]) -> None:
        """What was to be shown, and whether it was."""
        self.text("\n".join(f"- {claim.verdict()}" for claim in claims))

    def write(self, path: Path | None) -> None:
        """The whole page as a file, if there shall be one."""
        if path is not None:
            path.write_text("\n".join(self._kept).rstrip() + "\n")


def _command() -> str:
    """The command line, without the places of files, which are of no interest to others."""
    words = shlex.split(machine.command_line())
    places = [i for i, word in enumerate(words) if word in ("--dir", "--markdown")]
    return shlex.join(w for i, w in enumerate(words) if i not in places and i - 1 not in places)
