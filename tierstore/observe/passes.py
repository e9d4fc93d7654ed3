"""Records when whole models ran: each forward and each optimizer step is one *pass*.

The adapters report the beginning and the end of each pass. A denoising step of a pipeline is a pass
of its transformer; its text encoder and its autoencoder have passes before and after those. If a
model runs inside another one, its passes are nested.

On an accelerator, a pass begins and ends when the device reaches the work queued at that moment.
Nothing here blocks.
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

if TYPE_CHECKING:  # they need torch; the command line reads passes without it
    from tierstore.observe.device_times import DeviceTimes, Mark

KEPT = 1 << 13
"""Passes to keep. Beyond that, the oldest are dropped."""

FORWARD = "forward"
"""The `does` of a forward. Other passes are named after the method that was called."""


@dataclass(eq=False, slots=True)
class ModelPass:
    """Pass number `number` of `model`, counted from 1 for each kind.

    `does` names the kind: `FORWARD` or a method. `start` and `end` are seconds of `time.monotonic`;
    `end` is 0.0 while the pass runs.
    """

    model: str
    does: str
    number: int
    start: float
    end: float = 0.0
    failed: bool = False
    mark: Mark | None = None


class Passes:
    """The newest passes of all models of a store. Safe to use from any thread.

    `times` is None if the device is the CPU. `is_captured` returns whether this thread is capturing
    its work into a graph instead of queueing it: then the pass is timed by the host's clock.
    """

    def __init__(
        self, times: DeviceTimes | None, is_captured: Callable[[], bool], kept: int = KEPT
    ) -> None:
        self._times = times
        self._is_captured = is_captured
        self._lock = RLock()
        self._ended_passes: Ring[ModelPass] = Ring(kept)
        self._going: dict[ModelPass, None] = {}
        self._numbers: dict[tuple[str, str], Iterator[int]] = {}

    def begin(self, model: str, does: str = FORWARD) -> ModelPass:
        """Begin a pass, which lasts until `end`."""
        numbers = self._numbers.setdefault((model, does), itertools.count(1))
        running = ModelPass(model, does, next(numbers), time.monotonic(), mark=self._mark())
        self._going[running] = None
        return running

    def end(self, running: ModelPass | None, *, failed: bool = False) -> None:
        """End a pass. Does nothing if it has ended already, or is None."""
        if running is None or running not in self._going:
            return
        running.failed = failed
        first, last = running.mark, self._mark()
        running.mark = None  # an event holds memory of the device's driver
        self._going.pop(running, None)
        if self._times is None or first is None or last is None:
            self._set_times(running, [running.start, time.monotonic()])
        else:
            self._times.notify(functools.partial(self._set_times, running), first, last)

    def _mark(self) -> Mark | None:
        return None if self._times is None or self._is_captured() else self._times.mark()

    def _set_times(self, running: ModelPass, times: list[float]) -> None:
        running.start, running.end = times
        under(self._lock, lambda: self._ended_passes.add(running))

    def events(self, now: float) -> list[ModelPass]:
        """Return the finished passes, and those that still run with `now` as their end."""
        going = [replace(one, end=now, mark=None) for one in list(self._going)]
        return [*under(self._lock, self._ended_passes.events), *going]

    @property
    def dropped(self) -> int:
        """Number of finished passes that were dropped."""
        return self._ended_passes.dropped


class ModelPasses:
    """Records the passes of one model."""

    def __init__(self, passes: Passes, model: str) -> None:
        self._passes = passes
        self._model = model

    def begin(self, does: str = FORWARD) -> ModelPass:
        """Begin a pass of the model."""
        return self._passes.begin(self._model, does)

    def end(self, running: ModelPass | None, *, failed: bool = False) -> None:
        """End a pass. Does nothing if it has ended already, or is None."""
        self._passes.end(running, failed=failed)
