"""When a whole model ran: each forward, and each step of an optimizer, as one *pass*.

The adapters tell of them, as they are called at both ends. A denoising step of a pipeline is a pass
of its transformer; between those are the passes of its text encoder and its autoencoder. A pass of
a model inside of another one is inside of that one's.

On an accelerator a pass begins and ends when the device gets to what was queued then. Nothing here
waits.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tierstore.model.locks import RLock, under
from tierstore.observe.journal import Ring

if TYPE_CHECKING:  # they need torch, and the command line, which reads passes, does not
    from tierstore.observe.device_times import DeviceTimes, Mark

KEPT = 1 << 13
"""Passes that are kept; of more, the oldest are dropped."""

FORWARD = "forward"
"""What most passes do. Others are named for the method that was called."""


@dataclass(eq=False, slots=True)
class ModelPass:
    """The pass `number` (from 1 on) in which `model` did what `does` names: from when to when, in
    seconds of `time.monotonic`. `end` is 0.0 until it is over."""

    model: str
    does: str
    number: int
    start: float
    end: float = 0.0
    failed: bool = False
    mark: Mark | None = None


class Passes:
    """The newest passes of all models of a store. On any thread.

    `times` is None where the device is the CPU. `is_captured` tells whether what this thread tells
    the device goes into a graph instead: then the host's clock has to do.
    """

    def __init__(
        self, times: DeviceTimes | None, is_captured: Callable[[], bool], kept: int = KEPT
    ) -> None:
        self._times = times
        self._is_captured = is_captured
        self._lock = RLock()
        self._over: Ring[ModelPass] = Ring(kept)
        self._going: dict[ModelPass, None] = {}
        self._numbers: dict[tuple[str, str], Iterator[int]] = {}

    def begin(self, model: str, does: str = FORWARD) -> ModelPass:
        """A pass begins: what is done from now on, until `end`."""
        numbers = self._numbers.setdefault((model, does), itertools.count(1))
        begun = ModelPass(model, does, next(numbers), time.monotonic(), mark=self._mark())
        self._going[begun] = None
        return begun

    def end(self, begun: ModelPass | None, *, failed: bool = False) -> None:
        """It is over. A second time, nothing happens."""
        if begun is None or begun not in self._going:
            return
        begun.failed = failed
        first, last = begun.mark, self._mark()
        begun.mark = None  # it keeps memory of the device's driver
        self._going.pop(begun, None)
        if self._times is None or first is None or last is None:
            self._ended(begun, [begun.start, time.monotonic()])
        else:
            self._times.tell(functools.partial(self._ended, begun), first, last)

    def _mark(self) -> Mark | None:
        return None if self._times is None or self._is_captured() else self._times.mark()

    def _ended(self, begun: ModelPass, times: list[float]) -> None:
        begun.start, begun.end = times
        under(self._lock, lambda: self._over.add(begun))

    def events(self, now: float) -> list[ModelPass]:
        """Those that are known, and those that are going on, as if they ended now."""
        going = [replace(one, end=now, mark=None) for one in list(self._going)]
        return [*under(self._lock, self._over.events), *going]

    @property
    def dropped(self) -> int:
        """How many were forgotten."""
        return self._over.dropped


class PassesOf:
    """The passes of one model, for who tells of them."""

    def __init__(self, passes: Passes, model: str) -> None:
        self._passes = passes
        self._model = model

    def begin(self, does: str = FORWARD) -> ModelPass:
        """A pass begins."""
        return self._passes.begin(self._model, does)

    def end(self, begun: ModelPass | None, *, failed: bool = False) -> None:
        """It is over. A second time, nothing happens."""
        self._passes.end(begun, failed=failed)
