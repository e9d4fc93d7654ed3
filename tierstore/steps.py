"""One step at a time, each whole or mended.

What a store believes is changed in *steps*, under one lock. Any of them may be cut short: Ctrl-C
raises KeyboardInterrupt between two instructions of the interpreter, and so may others. A store
whose step was cut short is *torn*: half of a change is in its books. The next step then begins
with mending it: the books are made anew from what there is (`Books._mend`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tierstore.model.errors import TierStoreError
from tierstore.model.locks import under

P = ParamSpec("P")
T = TypeVar("T")


class Stepping(Protocol):
    """What takes steps."""

    _lock: Any  # an RLock
    _torn: bool

    def _mend(self) -> None:
        """Make the books anew."""

    def _check_process(self) -> None:
        """Raise ClosedError in a forked process: its copy of the lock may never be given back."""


S = TypeVar("S", bound=Stepping)


def step(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method a step, or part of the step from which it is called.

    An error of this library is raised where nothing is half-done yet. Any other exception may have
    come from anywhere.
    """

    @functools.wraps(method)
    def whole(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        def locked() -> T:
            if self._torn:
                self._mend()
            self._torn = True
            try:
                result = method(self, *args, **kwargs)
            except TierStoreError:
                self._torn = False
                raise
            self._torn = False
            return result

        if self._lock._is_owned():
            return method(self, *args, **kwargs)
        self._check_process()
        return under(self._lock, locked)

    return whole
