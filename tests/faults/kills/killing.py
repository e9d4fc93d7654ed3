"""Kills processes that use a store, and checks the state that they leave.

    python -m tests.faults.kills.killing '[{"places": {"disk": "/tmp/x"}, "kills": 100, ...}]'

All are forked from this process, which computes nothing and starts no thread: torch is imported
once. A killed process leaves its directory to the next one, which opens it, reports what it finds,
continues the work, and is killed in turn, without a cleanup in between. After some kills,
`tierstore-inspect` checks the directory, and the next directory is used.

Some processes are killed at a chosen system call, others after a random time. Prints a line of JSON
for each process: the number of the run, and an `Outcome`.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from tests.faults.kills.killer import AFTER, BEFORE, HALF
from tests.faults.kills.working import Plan, warm_up, work
from tests.faults.promised import Promised, read_back
from tests.helpers.processes import forked, messages_from
from tierstore.cli.commands import inspector

LIVES = 40  # in one directory
CALLS = 50
"""A process dies within this many system calls.

Opening an empty directory takes about as many, and a put is on disk after half of them.
"""

COMMITTING = ("rename", "rename", "unlink", "fsync", "pwrite")
"""Rare calls that commits depend on: half of the processes die at one of these."""

DOINGS = (
    "put", "edit", "put_for_now", "discard", "take", "flush", "offload", "get", "prefetch",
    "register", "close",
)  # fmt: skip


@dataclass
class Outcome:
    """The outcome of one process: how and where it died, and the faults found then."""

    place: str
    seed: str
    how: str = ""  # "call" or "time"
    killed: bool = False
    at: str = ""  # the call it died at
    during: list[str] = field(default_factory=list)
    left: int = 0  # temporary files left after its death
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


# A directory in which one process after another is killed -----------------------------------------


class Scene:
    """A store's directory, its surroundings, and the promises about its contents."""

    def __init__(self, root: Path, place: str, seed: str, run: Run) -> None:
        self._root = root
        self._place = place
        self._seed = seed
        self._run = run
        self._random = random.Random(seed)
        self._promised = Promised()
        self.lives = 0
        self.disk_dir = root / "made" / "store"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        self.disk_dir.parent.mkdir()
        (root / "file of somebody").write_bytes(b"bytes")
        self._around = self._look_around()

    def _look_around(self) -> dict[str, tuple[int, int]]:
        """Check that no name, size or time outside the store's directory has changed."""
        found = {}
        for path in self._root.rglob("*"):
            if self.disk_dir not in (path, *path.parents) and path != self.disk_dir.parent:
                status = path.stat()
                found[str(path)] = (status.st_size, status.st_mtime_ns)
        return found

    def kill_one(self) -> Outcome:
        """Run a process on the directory, and kill it."""
        outcome = Outcome(self._place, f"{self._seed} {self.lives}")
        plan, kill = self._plan(outcome)
        begun = time.monotonic()
        child, source = forked(lambda tell: work(plan, tell))
        under_way: dict[int, str] = {}
        for told in messages_from(child, source, kill):
            self._hear(told, outcome, under_way)
        outcome.during = sorted(set(under_way.values()))
        outcome.seconds = time.monotonic() - begun
        if self.disk_dir.is_dir():
            outcome.left = len(list(self.disk_dir.glob("tmp/*")))
        if (around := self._look_around()) != self._around:
            outcome.wrong.append(f"outside: {set(around.items()) ^ set(self._around.items())}")
            self._around = around
        if outcome.left and self._random.random() < 0.2 and (self.disk_dir / "STORE.json").exists():
            outcome.wrong += self._prune()
        return outcome

    def _plan(self, outcome: Outcome) -> tuple[Plan, tuple[str, float] | None]:
        chance = self._random
        self.lives += 1
        plan = {
            "seed": chance.randrange(1 << 20) * 100 + self.lives,  # no two write the same numbers
            "disk_dir": str(self.disk_dir),
            "steps": chance.choice((3, 10, 30)),
            "threads": chance.choice((1, 1, 2)),
            "mutant": self._run.mutant,
        }
        if chance.random() < 0.1:
            return Plan(**plan), None
        if not self._run.only and chance.random() < 0.3:
            outcome.how = "time"
            return Plan(**plan), (chance.choice(("does", "found")), chance.expovariate(1 / 0.03))
        outcome.how = "call"
        opening = self.lives == 1 or chance.random() < 0.15
        doing = "open" if opening else chance.choice(DOINGS)
        turn = 1 if doing in ("open", "close") else chance.choice((1, 1, 2, 4))
        plan |= {"doing": doing, "turn": turn, "when": chance.choice((BEFORE, AFTER))}
        if not self._run.only and chance.random() < 0.5:
            return Plan(**plan, target=chance.randint(1, CALLS)), None
        only = self._run.only or chance.choice(COMMITTING)
        plan |= {"when": HALF} if only == "pwrite" else {}
        return Plan(**plan, target=chance.randint(1, 5), only=only), None

    def _hear(self, told: list[Any], outcome: Outcome, under_way: dict[int, str]) -> None:
        match told:
            case ["begin" | "sure" | "all sure", *_]:
                self._promised.told(*told)
            case ["does", number, name]:
                under_way[number] = name
            case ["done", number]:
                under_way.pop(number, None)
            case ["found", names, left]:
                found = read_back(names)
                outcome.wrong += self._promised.broken_by(found)
                outcome.wrong += [f"left behind: {name}" for name in left]
                self._promised.begin_with(found)
            case ["dies", call]:
                outcome.at = call
            case ["died", code]:
                outcome.killed = code == -signal.SIGKILL
                outcome.wrong += [f"ended with {code}"] if code not in (0, -signal.SIGKILL) else []
            case ["wrong" | "outside" as kind, what]:
                outcome.wrong.append(f"{kind}: {what}")

    def _prune(self) -> list[str]:
        """Delete orphans with `tierstore-inspect` instead of by opening the store."""
        wrong, _ = self._inspect("prune", "-y")
        return wrong + [f"not pruned: {path.name}" for path in self.disk_dir.glob("tmp/*")]

    def _inspect(self, command: str, *options: str) -> tuple[list[str], Any]:
        """Return faults in the exit status and output of `tierstore-inspect`."""
        said: dict[str, Any] = {}
        wrong = []

        def inspect(tell: Callable[..., None]) -> None:
            result = CliRunner().invoke(
                inspector, (command, str(self.disk_dir), "--json", *options)
            )
            tell("said", result.exit_code, result.output[-3000:])

        for told in messages_from(*forked(inspect)):
            if told[0] == "said" and told[1] == 0:
                said = json.loads(told[2])
            elif told[0] in ("said", "wrong"):
                wrong.append(f"{command}: {told[1:]}")
        return wrong, said

    def end(self) -> Outcome:
        """Open and close the directory once more, and check all that is left."""
        outcome = Outcome(self._place, f"{self._seed} at the end")
        plan = Plan(0, str(self.disk_dir), steps=0)
        for told in messages_from(*forked(lambda tell: work(plan, tell))):
            self._hear(told, outcome, {})
        outcome.wrong += self._inspect("verify", "--data")[0]
        wrong, said = self._inspect("prune", "-y")
        outcome.wrong += wrong
        outcome.wrong += [f"left for prune: {each}" for each in said.get("removed", ())]
        shutil.rmtree(self._root)
        return outcome


@dataclass(frozen=True)
class Run:
    """Kill `kills` processes, in each place (a name and a directory) in turn.

    Stops at the first fault if `until_wrong`. `only` kills at calls of that name, else at any.
    """

    places: dict[str, str]
    kills: int
    seed: str
    only: str = ""
    mutant: str = ""
    until_wrong: bool = False

    def outcomes(self) -> Iterator[Outcome]:
        """Kill the processes, and yield their outcomes."""
        scenes: dict[str, Scene] = {}
        killed = 0
        wrong = False
        for number in itertools.count():
            place = list(self.places)[number % len(self.places)]
            if place not in scenes:
                root = Path(self.places[place]) / f"scene {number}"
                scenes[place] = Scene(root, place, f"{self.seed} {number}", self)
            outcome = scenes[place].kill_one()
            yield outcome
            killed += outcome.killed
            wrong = wrong or bool(outcome.wrong)
            if killed == self.kills or (wrong and self.until_wrong):
                break
            if scenes[place].lives >= LIVES:
                yield scenes.pop(place).end()
        for scene in scenes.values():
            yield scene.end()


def main(runs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    warm_up()
    for number, run in enumerate(runs):
        for outcome in Run(**run).outcomes():
            print("OUTCOME " + json.dumps([number, asdict(outcome)]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
