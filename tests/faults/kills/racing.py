"""Processes that open one directory at the same moment, again and again.

    python -m tests.faults.kills.racing DIRECTORY PROCESSES ROUNDS

In each round all of them try at once. The winner keeps the directory until all have tried. Prints a
line of JSON for each round: the number of winners, the errors of the others, and the faults.
Imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.system_calls import system_call, until_the_end
from tierstore.errors import StoreLockedError
from tierstore.tiers.directory import ObjectDirectory

WON = "won"


@dataclass
class Round:
    """One round. `told` has the errors of the processes that did not win."""

    winners: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return all files, with attributes that show whether they were written to or replaced."""
    found = {}
    for path in sorted((root, *root.rglob("*"))):
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


class Racer:
    """A process that opens and closes the directory on command."""

    def __init__(self, directory: Path) -> None:
        listens, self._speaks = os.pipe()
        self._listens, speaks = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(self._speaks)
            os.close(self._listens)
            try:
                self._race(directory, listens, speaks)
            finally:
                os._exit(0)
        os.close(listens)
        os.close(speaks)

    @staticmethod
    def _race(directory: Path, listens: int, speaks: int) -> None:
        while os.read(listens, 1):
            opened = None
            try:
                opened = ObjectDirectory(directory)
                answer = WON
            except StoreLockedError as error:
                answer = str(error)
            except BaseException as error:
                answer = f"wrong: {error!r}"
            os.write(speaks, json.dumps(answer).encode())
            os.read(listens, 1)
            if opened is not None:
                opened.close()
            os.write(speaks, b"0")

    def tell(self) -> None:
        """Let it continue."""
        os.write(self._speaks, b".")

    def answer(self) -> Any:
        """Return its next line of output."""
        return json.loads(os.read(self._listens, 4096))

    def end(self) -> None:
        """End the process."""
        os.close(self._speaks)
        os.close(self._listens)
        os.waitpid(self.process, 0)


def run_round(racers: list[Racer], directory: Path) -> Round:
    found = Round()
    for racer in racers:
        racer.tell()
    for racer in racers:
        answer = racer.answer()
        if answer == WON:
            found.winners.append(racer.process)
        else:
            found.told.append(answer)
    before = tree(directory)
    try:
        ObjectDirectory(directory).close()
        found.wrong.append("one more could open it")
    except StoreLockedError as error:
        found.told.append(str(error))
    if tree(directory) != before:
        found.wrong.append("who could not open it has changed something")
    for racer in racers:
        racer.tell()
        racer.answer()
    return found


def main(directory: Path, processes: int, rounds: int, mutant: str = "") -> None:
    if mutant == "no lock":
        until_the_end(system_call("flock", returns=None))
    # A racer inherits the pipes of earlier racers, so it ends first.
    racers = [Racer(directory) for _ in range(processes)]
    for _ in range(rounds):
        print(json.dumps(asdict(run_round(racers, directory))), flush=True)
    for racer in reversed(racers):
        racer.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
