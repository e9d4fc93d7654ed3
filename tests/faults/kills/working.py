"""A process that uses a store, reports its actions, and may be killed at any moment.

First it opens the directory in which others were killed, and reports its contents. Then its threads
run `promised.Worker`, with memory for only a few of their groups.
"""

from __future__ import annotations

import gc
import itertools
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy.ma  # noqa: F401  torch imports it lazily
import torch

from tests.faults.kills.killer import AFTER, Killer
from tests.faults.kills.mutants import MUTANTS
from tests.faults.promised import BUDGET, Worker, look, name_of, value
from tests.helpers.processes import Tell
from tierstore import TierStore
from tierstore.engine.in_place_groups import content_hash
from tierstore.model.sizes import PAGE
from tierstore.system import files as disk_module
from tierstore.tiers import directory as directory_module

PARTS = 4 * PAGE
"""Bytes per write, so that small groups are written in several calls, by several threads."""

CALLS_OF_CLOSING = 12


@dataclass(frozen=True)
class Plan:
    """The work of one process, and the moment of its death.

    It dies at call `target` after it begins `doing` for the `turn`-th time ("open" comes first),
    or, if it never does, after it begins to close. `only` limits the counted calls to one name. A
    target of 0 never kills.
    """

    seed: int
    disk_dir: str
    doing: str = "open"
    turn: int = 1
    target: int = 0
    when: str = AFTER
    only: str = ""
    mutant: str = ""
    steps: int = 20
    threads: int = 1


class Life:
    """One process's use of a store."""

    def __init__(self, plan: Plan, tell: Tell) -> None:
        self._plan, self._tell = plan, tell
        self._killer = Killer(tell, plan.disk_dir)
        self._numbers = itertools.count()
        self._turns: Counter[str] = Counter()

    @contextmanager
    def _doing(self, name: str) -> Iterator[None]:
        """Report the begin and the end of an action. Arms the killer if it is due."""
        number, plan = next(self._numbers), self._plan
        self._tell("does", number, name)
        self._turns[name] += 1
        if plan.target and (name, self._turns[name]) == (plan.doing, plan.turn):
            self._killer.arm(plan.target, plan.when, plan.only)
        elif plan.target and name == "close":
            self._killer.arm(plan.target % CALLS_OF_CLOSING + 1, plan.when)
        yield
        self._tell("done", number)

    def live(self) -> None:
        """Open, inspect, work and close."""
        with self._doing("open"):
            store = TierStore(BUDGET, self._plan.disk_dir, device="cpu")
        self._tell("found", *look(store, Path(self._plan.disk_dir)))
        workers = [
            Worker(store, str(number), self._plan.seed, self._tell, self._doing)
            for number in range(self._plan.threads)
        ]
        threads = [threading.Thread(target=self._work, args=(each,)) for each in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self._doing("close"):
            store.close()
        self._tell("all sure", "")

    def _work(self, worker: Worker) -> None:
        try:
            worker.go_on(self._plan.steps)
        except BaseException:
            self._tell("wrong", traceback.format_exc()[-3000:])


def work(plan: Plan, tell: Tell) -> None:
    """Live one life. Raises any error in it."""
    if plan.mutant:
        MUTANTS[plan.mutant]()
    directory_module.WRITE_BLOCK = disk_module.WRITE_BLOCK = PARTS
    Life(plan, tell).live()


def warm_up() -> None:
    """Do once, without threads, what is slow the first time: forked processes inherit it."""
    group = value("key", 1)
    name_of({name: tensor.view(torch.uint8).view(tensor.dtype) for name, tensor in group.items()})
    group["data"].as_strided((2,), (1,))
    content_hash(group)
    gc.collect()
    gc.freeze()
