"""Stores whose power is cut while they are at work, again and again.

    python -m tests.faults.power '[{"kind": "ext4", "place": ..., "cuts": 50}]'

The file system is one of its own, in a file. A process works in a store on it and tells of what it
does; from here, outside, the file system is made to forget what is not on its disk. The process is
killed, the file system is mounted again, and another process opens the store and reads everything.

All are forked from this process, which computes nothing itself: so torch is imported once, and
nobody is forked with threads. Prints a line of JSON for each: the number of the plan, and a `Cut`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.facilities import cut_power, loop_mounted, make_image
from tests.faults.promised import BUDGET, Name, Promised, Tell, Worker, contents, without_syncs
from tests.helpers.processes import forked
from tierstore import TierStore
from tierstore.model.errors import TierStoreError
from tierstore.tiers.directory import ObjectDirectory

LONGEST = 0.06
"""Seconds of work until the power is cut, at the most, where the moment is left to chance."""
PATIENCE = 60.0
HOW = ("stopped", "stopped", "opening", "working", "working", "killed")
"""What happens before the power is cut. Behind an acknowledgement nothing more does; while the
store is opened or at work, the moment is left to chance. Or the process is killed, just when a name
has changed, and then the next one opens the store, sees what there is, and closes it."""
STILL_ALIVE = (0.0, 0.3, 0.002)
"""Seconds that a process at work may go on when the power is off: some see that nothing can be
written any more, and some are gone before. A busy machine, too, lets most of them see by then."""
STEPS = 60
"""What a worker does before the store is closed and opened again."""


@dataclass
class Plan:
    """What to do: `cuts` times, from `seed` on, as the arguments of this program say.

    `threads` work at once. All cuts are made as `how` says, one of HOW; None: by chance. `without`
    syncs of `"files"` or `"directories"`, or of `"doubts"`, that is of what killed processes have
    left: negative controls.
    """

    kind: str
    place: str
    cuts: int
    seed: int = 0
    threads: int = 2
    how: str | None = None
    without: str | None = None


@dataclass
class Cut:
    """What came of one cut, made as `how` says: what was `broken` of the promises, and `left` in
    the directory without any business there."""

    seed: int
    how: str
    acknowledged: int = 0
    found: int = 0
    ended: str = ""
    broken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


# Processes ----------------------------------------------------------------------------------------


class Listening:
    """Reads what a child tells, line by line."""

    def __init__(self, child: int, source: int) -> None:
        self._child = child
        self._source = source
        self._rest = b""

    def until(self, seconds: float, stop: str = "") -> Iterator[list[Any]]:
        """What is told for so long, or until something begins with `stop`, or the end."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self._source], [], [], left)[0]:
                return
            read = os.read(self._source, 65536)
            if not read:
                return
            *lines, self._rest = (self._rest + read).split(b"\n")
            told = [json.loads(line) for line in lines]
            yield from told
            if any(each[0] == stop for each in told):
                return

    def kill(self) -> None:
        os.kill(self._child, signal.SIGKILL)

    def bury(self) -> None:
        """Wait until nothing of the child is left."""
        os.waitpid(self._child, 0)
        os.close(self._source)


# What they do -------------------------------------------------------------------------------------


class Telling:
    """`tell`, for several threads. Once `stop_at` acknowledgements were told, nobody returns."""

    def __init__(self, tell: Tell, stop_at: int | None) -> None:
        self._tell = tell
        self._left = stop_at
        self._lock = threading.Lock()

    def __call__(self, *told: Any) -> None:
        with self._lock:
            self._tell(*told)
            if self._left is not None and told[0] == "all sure":
                self._left -= 1
                if not self._left:
                    self._tell("stopped")
                    threading.Event().wait()


def die_behind(number: int) -> None:
    """From now on, the process is killed when it has changed the `number`-th name."""
    left = itertools.count(number, -1)

    def deadly(original: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            original(*arguments, **options)
            if next(left) == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    os.rename, os.unlink = deadly(os.rename), deadly(os.unlink)


def work(disk_dir: Path, plan: Plan, seed: int, tell: Tell) -> None:
    """Work in a store, until an error of the store (the power is off) or for ever."""
    done = 0
    while True:
        # Numbers of values are never used twice: not by another process, nor here.
        errors = _work_once(disk_dir, plan, seed * 100 + done, tell)
        done += 1
        if errors:
            tell("ended", *errors)
            return


def _work_once(disk_dir: Path, plan: Plan, seed: int, tell: Tell) -> list[str]:
    """Open, work, close. Returns what was raised, if it is what a store may raise."""
    errors: list[str] = []

    def go_on(worker: Worker) -> None:
        try:
            worker.go_on(STEPS)
        except (TierStoreError, OSError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        except BaseException:
            tell("wrong", traceback.format_exc())
            raise

    try:
        tell("opening")
        store = TierStore(BUDGET, disk_dir, device="cpu")
        workers = [Worker(store, str(n), seed, tell) for n in range(plan.threads)]
        running = [threading.Thread(target=go_on, args=(worker,)) for worker in workers]
        tell("working")
        with without_syncs(plan.without):
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
            if not errors:
                store.close()
                tell("all sure", "")
    except (TierStoreError, OSError) as error:
        errors.append(f"{type(error).__name__}: {error}")
    return errors


def found_by_another(disk_dir: Path, result: Cut) -> dict[str, Name | str] | None:
    """What another process finds that opens the store and reads everything. None: it could not."""
    child = Listening(*forked(lambda tell: tell("found", *contents(disk_dir))))
    told = list(child.until(PATIENCE, "found"))
    child.bury()
    if not told or told[-1][0] != "found":
        result.broken.append(f"surprise: it could not be opened: {told}")
        return None
    found, result.left = told[-1][1:]
    result.found = len(found)
    return {
        key: name if isinstance(name, str) else (name[0], name[1]) for key, name in found.items()
    }


# Cuts ---------------------------------------------------------------------------------------------


class Machine:
    """One file system, and what was promised of the store on it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._image = Path(plan.place) / f"{plan.kind}.image"
        self._at = Path(plan.place) / f"{plan.kind}.mounted"
        make_image(self._image, plan.kind)
        self._store: str | None = None
        self._promised = Promised()

    def cut(self, seed: int) -> Cut:
        """Work, cut the power, look."""
        chosen = random.Random(seed)
        result = Cut(seed, self._plan.how or chosen.choice(HOW))
        with loop_mounted(self._image, self._at) as directory:
            if self._store is None or chosen.random() < 0.15:
                self._store = self._begin_anew(directory, f"store-{seed}")
            before = self._promised.acknowledged
            self._work_until_cut(directory, self._store, result, chosen)
            result.acknowledged = self._promised.acknowledged - before
        with loop_mounted(self._image, self._at) as directory:
            self._look(directory / self._store, result)
        if result.broken:
            self._store = None
        return result

    def _begin_anew(self, directory: Path, name: str) -> str:
        """From now on, work in a directory that was never opened before."""
        for old in directory.glob("store-*"):
            shutil.rmtree(old)
        self._promised = Promised()
        return name

    def _work_until_cut(
        self, directory: Path, store: str, result: Cut, chosen: random.Random
    ) -> None:
        number = chosen.randint(1, 6)

        def at_work(tell: Tell) -> None:
            if result.how == "killed":
                die_behind(number)
            told = Telling(tell, number if result.how == "stopped" else None)
            work(directory / store, self._plan, result.seed, told)

        child = Listening(*forked(at_work))
        try:
            self._hear(child, PATIENCE, result.how, result)
            if result.how in ("opening", "working"):
                self._hear(child, chosen.uniform(0, LONGEST), "", result)
            if result.ended:
                result.broken.append(f"surprise: {result.ended}")
            if result.how != "killed":
                cut_power(directory)
                lives = chosen.choice(STILL_ALIVE) if result.how != "stopped" else 0.0
                self._hear(child, lives, "ended", result)
        finally:
            child.kill()
            self._hear(child, PATIENCE, "", result)
            child.bury()
        if result.how == "killed":
            self._look(directory / store, result)  # who has closed the store may rely on it
            cut_power(directory)

    def _hear(self, child: Listening, seconds: float, stop: str, result: Cut) -> None:
        for what, *about in child.until(seconds, stop):
            if what == "wrong":
                result.broken.append(f"surprise: {about[0]}")
            elif what == "ended":
                result.ended = about[0]
            else:
                self._promised.told(what, *about)

    def _look(self, disk_dir: Path, result: Cut) -> None:
        found = found_by_another(disk_dir, result)
        if found is not None:
            result.broken += self._promised.broken_by(found)
            self._promised.begin_with(found)


@contextlib.contextmanager
def without_doubts(without: str | None) -> Iterator[None]:
    """Nobody who opens a directory doubts what is there, if it is to be without `"doubts"`."""
    with pytest.MonkeyPatch.context() as patch:
        if without == "doubts":
            patch.setattr(ObjectDirectory, "_sync_everything", lambda _: None)
        yield


def main(plans: list[Plan]) -> None:
    torch.set_num_threads(1)
    for number, plan in enumerate(plans):
        machine = Machine(plan)
        with without_doubts(plan.without):
            for seed in range(plan.seed, plan.seed + plan.cuts):
                print("RESULT " + json.dumps([number, asdict(machine.cut(seed))]), flush=True)


if __name__ == "__main__":
    main([Plan(**plan) for plan in json.loads(sys.argv[1])])
