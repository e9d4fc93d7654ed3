"""One pass of a model, and in which order it uses groups of parameters."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierstore.adapters.unit_use import Arguments

if TYPE_CHECKING:
    from tierstore.adapters.training.weights import Weights


class PassOrder:
    """The order in which groups were used in the last pass, which foretells this one."""

    def __init__(self) -> None:
        self._last: list[Weights] = []
        self._now: list[Weights] = []
        self._place = 0  # in the last pass

    def after(self, used: Weights, nbytes: int) -> list[Weights]:
        """A group is used now: which others come next, each once, up to so many bytes."""
        self._now.append(used)
        with contextlib.suppress(ValueError):  # it was not used again: nothing is known better
            self._place = self._last.index(used, self._place) + 1
        coming: dict[Weights, None] = {}
        for weights in itertools.islice(self._last, self._place, None):
            if weights is not used and weights not in coming:
                nbytes -= weights.buffer.nbytes
                if nbytes < 0:
                    break
                coming[weights] = None
        return list(coming)

    def over(self) -> None:
        """The pass is over, if it has begun."""
        if self._now:
            self._last, self._now, self._place = self._now, [], 0


@dataclass(eq=False)
class Pass:
    """One call of the whole module, which `enter` and `leave` are told of: a `UnitUse`."""

    enter: Callable[[], None]
    leave: Callable[[], None]
    inside: bool = False

    def begin(self) -> bool:
        """It begins."""
        self.inside = True
        self.enter()
        return True

    def finish(self, result: Any, given: Arguments) -> Any:
        """It ends. What it returns is as it was."""
        self.end()
        return result

    def end(self) -> None:
        """It ends. To be called again if it was interrupted."""
        if self.inside:
            self.inside = False
            self.leave()
