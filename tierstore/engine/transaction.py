"""Transactions: one at a time, and each either complete or followed by a rebuild.

The state of a store changes in *transactions*, under one lock. Any of them may be interrupted:
Ctrl-C raises KeyboardInterrupt between two bytecode instructions, and other handlers may raise
there too. A core whose transaction was interrupted is *dirty*: its change is incomplete. The next
transaction then begins with `Core.rebuild`, which rebuilds the state.

A transaction never begins inside another. That would mean that a finalizer or a signal handler
called the store during a transaction, while its state is inconsistent: it raises
ReentrantCallError. Methods that are part of a transaction are not decorated.
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
    """The state that transactions change."""

    lock: Any  # an RLock
    dirty: bool

    def rebuild(self) -> None:
        """Rebuild the state after an interrupted transaction."""

    def check_process(self) -> None:
        """Raise ClosedError in a forked process, whose copy of the lock may never be released."""


class Part(Protocol):
    """A part of the engine, with methods that are transactions of its core."""

    @property
    def core(self) -> Transactional: ...


S = TypeVar("S", bound=Part)


def transaction(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method a transaction. It raises ReentrantCallError inside another.

    Errors of this library are raised before the state changes, so they leave the core clean. Any
    other exception may come from anywhere, including a ReentrantCallError that a handler lets pass:
    it leaves the core dirty.
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
    """Run an action as a transaction. Raises ReentrantCallError inside another."""
    core.check_process()
    under(core.lock, functools.partial(_locked, core, action))


def transact_if_free(core: Transactional, action: Callable[[], object]) -> None:
    """Run an action as a transaction if the lock is free; else do nothing. For finalizers."""
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
