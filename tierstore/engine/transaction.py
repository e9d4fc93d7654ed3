"""One transaction at a time, each whole or followed by a rebuild.

What a store believes is changed in *transactions*, under one lock. Any of them may be cut short:
Ctrl-C raises KeyboardInterrupt between two instructions of the interpreter, and so may others. A
core whose transaction was cut short is *dirty*: half of a change is in it. The next transaction
then begins with `Core.rebuild`, which derives everything anew from what there is.

A transaction never begins inside another. If it would, a finalizer or a signal handler has called
the store in the middle of that one, where nothing can be relied on: ReentrantCallError. Methods
that are parts of transactions are not decorated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tierstore.errors import ReentrantCallError, TierStoreError
from tierstore.model.locks import if_free, inside, under

P = ParamSpec("P")
T = TypeVar("T")


class Transactional(Protocol):
    """What transactions change."""

    lock: Any  # an RLock
    dirty: bool

    def rebuild(self) -> None:
        """Derive everything anew."""

    def check_process(self) -> None:
        """Raise ClosedError in a forked process: its copy of the lock may never be given back."""


class Part(Protocol):
    """A part of the engine, whose methods are transactions of its core."""

    @property
    def core(self) -> Transactional: ...


S = TypeVar("S", bound=Part)


def transaction(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method a transaction. Raises ReentrantCallError in the middle of another.

    An error of this library is raised where nothing is half-done yet. Any other exception may have
    come from anywhere, and so may a ReentrantCallError that a handler has let go by.
    """

    @functools.wraps(method)
    def whole(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        core = self.core
        if inside():
            raise ReentrantCallError
        core.check_process()
        return under(core.lock, functools.partial(_locked, core, method, self, *args, **kwargs))

    return whole


def transact(core: Transactional, action: Callable[[], object]) -> None:
    """Do something as a transaction. Raises ReentrantCallError in the middle of another."""
    core.check_process()
    under(core.lock, functools.partial(_locked, core, action))


def transact_if_free(core: Transactional, action: Callable[[], object]) -> None:
    """Do something as a transaction, or nothing if that would have to wait. For finalizers."""
    if not inside():
        if_free(core.lock, functools.partial(_locked, core, action), 0.0)


def _locked(core: Transactional, action: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    if core.dirty:
        core.rebuild()
    core.dirty = True
    try:
        result = action(*args, **kwargs)
    except ReentrantCallError:
        raise
    except TierStoreError:
        core.dirty = False
        raise
    core.dirty = False
    return result
