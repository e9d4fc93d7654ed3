"""Scenarios that meet one fault at a time. The promises must hold during it and afterwards."""

from __future__ import annotations

import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from tests.faults.injecting import FAULTS, Fault, Injector, injected
from tests.faults.scenarios import (
    SCENARIOS,
    Scenario,
    Value,
    World,
    check_afterwards,
    check_directory,
    copy_tree,
    nothing_left_behind,
)
from tests.store.helpers import join

T = TypeVar("T")
Meet = Callable[[World], AbstractContextManager[T]]
"""Functions that cause a fault and end it."""

ONE_IN_THREE = pytest.mark.full(
    "the cases differ only in the caller: scenarios of one kind", keep="a third"
)
"""A sweep over scenarios; the default lane runs some of them."""

TOLERATED = {"short"}
"""Faults after which calls complete without an error."""
MOST = 1000
"""More calls than any scenario has."""


class Sweep:
    """A scenario, whose files are made once, in `scratch`, and used for any number of faults.

    In a control, `missing` removes a protection during the fault.
    """

    def __init__(
        self,
        name: str,
        scratch: Path,
        missing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._missing = missing
        self.scenario: Scenario = SCENARIOS[name]
        self._scratch = Path(tempfile.mkdtemp(dir=scratch))
        self._runs = 0
        world = World(self._scratch / "prepared")
        world.place.mkdir()
        self.scenario.prepare(world)
        self._durable: dict[str, set[Value]] = world.durable

    def meets(self, fault: Meet[T], *, untold: bool = False) -> T:
        """Run the scenario, with a fault during `act`. Raises if a promise is broken.

        Faults in `untold` calls raise in no caller.
        """
        self._runs += 1
        world = World(self._scratch / str(self._runs), self.scenario.budget)
        copy_tree(self._scratch / "prepared", world.place)
        world.durable = {key: set(values) for key, values in self._durable.items()}
        with nothing_left_behind():
            self.scenario.begin(world)
            with fault(world) as met, self._missing():
                self.scenario.act(world)
            assert not untold or world.errors == [], f"no recovery: {world.errors}"
            if world.disk_dir.exists():
                check_directory(world.disk_dir, world.durable, self._scratch)
            if world.store is None:
                assert world.open(), f"the store does not open without the fault: {world.errors}"
            check_afterwards(world)
            world.store = None
        check_directory(world.disk_dir, world.durable, self._scratch)
        shutil.rmtree(world.place, ignore_errors=True)  # mapped files may still have a name
        return met

    def surely_meets(self, what: str, fault: Meet[T], *, untold: bool = False) -> T:
        """Run `meets` on a separate thread, which must end. Failures include `what`."""
        ended: list[T] = []
        failures: list[str] = []

        def body() -> None:
            try:
                ended.append(self.meets(fault, untold=untold))
            except BaseException:
                failures.append(traceback.format_exc())

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        join(thread)
        if failures:
            raise AssertionError(f"{self.scenario.name}, {what}:\n{failures[0]}")
        return ended[0]

    def every_call(self, name: str, *, once: bool) -> int:
        """Make each call that can have the fault fail, in turn. Returns their number."""
        fault, first = FAULTS[name], 1
        while self.call(fault, first, once=once).failed:
            first += 1
            assert first < MOST
        return first - 1

    def call(self, fault: Fault, first: int, *, once: bool) -> Injector:
        """Make one call fail, or all from this one on."""
        how = f"{fault.name} at call {first} {'once' if once else 'and from then on'}"
        meet = partial(_injected, fault=fault, first=first, once=once)
        return self.surely_meets(how, meet, untold=fault.name in TOLERATED)


def _injected(
    world: World, fault: Fault, first: int, once: bool
) -> AbstractContextManager[Injector]:
    return injected(world.place, fault, first, once=once)


def no_fault(world: World) -> AbstractContextManager[None]:
    """Cause no fault."""
    return nullcontext()
