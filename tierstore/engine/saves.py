"""Saves of groups: `flush`, and the flush of `close`."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tierstore.engine.core import Core
from tierstore.engine.request_loop import RequestLoop
from tierstore.engine.transaction import transaction
from tierstore.engine.wait_queue import Request, RequestKind
from tierstore.errors import ClosedError, StoreTimeoutError, TierStoreError
from tierstore.model import events
from tierstore.model.groups import NO_GROUP, GroupId
from tierstore.progress import bar

UNRESPONSIVE_SECONDS = 30.0
"""Seconds without progress after which `close` stops waiting for a disk."""


class Saves:
    """Saves of durable groups, and removals of files. Public methods may block."""

    def __init__(self, core: Core, requests: RequestLoop) -> None:
        self.core = core
        self._requests = requests

    def flush(self, timeout: float | None = None) -> None:
        """See `TierStore.flush`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        errors = []
        for key in bar(self._dirty_keys(), "Writing to disk", "groups"):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            errors.append(self._error_of(key, left))
        errors += self.core.tiers.disk.retry_deletes()
        _raise_first(errors)

    def flush_for_close(self) -> None:
        """Flush, as long as the disk makes progress."""
        disk = self.core.tiers.disk
        errors: list[BaseException | None] = []
        for key in bar(self._dirty_keys(), "Writing to disk", "groups"):
            error = self._error_of(key, UNRESPONSIVE_SECONDS)
            while isinstance(error, StoreTimeoutError) and disk.idle_for() < UNRESPONSIVE_SECONDS:
                error = self._error_of(key, UNRESPONSIVE_SECONDS)
            if isinstance(error, ClosedError):
                return  # another thread closed the store first
            errors.append(error)
            if isinstance(error, StoreTimeoutError):
                break
        else:
            errors += disk.retry_deletes()
        _raise_first(errors)

    def flush_key(self, key: str, timeout: float | None = None) -> None:
        """Wait until the disk has the current state of a key, or a newer one."""
        group = self._request_save(key)
        attempt = self._removed if group is NO_GROUP else self._saved
        self._requests.wait(_save_request(key, group), attempt, timeout)

    def wait_until_saved(self, key: str, group: GroupId) -> None:
        """Wait until a group that is being saved is on disk. Raises the error of the save."""
        self._requests.wait(_save_request(key, group), self._saved)

    def _error_of(self, key: str, timeout: float | None) -> BaseException | None:
        try:
            self.flush_key(key, timeout)
        except TierStoreError as error:
            return error
        return None

    @transaction
    def _dirty_keys(self) -> list[str]:
        """Return the keys whose state on disk is not up to date."""
        core = self.core
        core.run_deferred()
        unsaved = {key: None for key, group in core.current.items() if self._is_dirty(group)}
        return list(unsaved | dict.fromkeys(core.tiers.disk.removing()))

    @transaction
    def _request_save(self, key: str) -> GroupId:
        """Begin to save the group of a key. Return it, or NO_GROUP if there is nothing to save."""
        core = self.core
        group = core.current.get(key)
        if group is None or not self._is_dirty(group):
            return NO_GROUP
        core.apply(events.SaveRequested(group))
        return group

    def _is_dirty(self, group: GroupId) -> bool:
        return self.core.mover.entry(group).durable and not self.core.planner.saved(group)

    def _saved(self, request: Request) -> bool | None:
        """Return True if a group is saved, else None. Raises the error of the save."""
        core, group = self.core, request.group
        core.check_open(saving=True)
        core.run_deferred()
        if group not in core.planner:
            return self._superseded(request)
        if core.planner.saved(group):
            return True
        error = core.planner.error_of(group)
        if error is not None:
            core.apply(events.ErrorReported(group))
            raise error
        if not core.planner.saving(group):
            # Changed again before this thread woke, or another caller took the error.
            core.apply(events.SaveRequested(group))
        return None

    def _superseded(self, request: Request) -> bool | None:
        """Return True if no older state of a replaced group remains on disk, else None."""
        newest = self.core.current.get(request.key)
        if newest is not None and self.core.mover.entry(newest).durable:
            request.group = newest
            return self._saved(request)
        return self._removed(request)

    def _removed(self, request: Request) -> bool | None:
        """Return True if no file of the key is being removed, else None."""
        self.core.check_open(saving=True)
        return request.key not in self.core.tiers.disk.removing() or None


def _save_request(key: str, group: GroupId) -> Request:
    return Request(key, RequestKind.SAVE, group=group)


def _raise_first(errors: Iterable[BaseException | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
