"""How groups are saved: `flush`, and what `close` does before it ends."""

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

DEAD = 30.0
"""Seconds without any sign of life after which `close` does not wait for a disk any more."""


class Saves:
    """Saves of durable groups, and removals of files. Its public methods may wait."""

    def __init__(self, core: Core, requests: RequestLoop) -> None:
        self.core = core
        self._requests = requests

    def flush(self, timeout: float | None = None) -> None:
        """See `TierStore.flush`."""
        ends = None if timeout is None else time.monotonic() + timeout
        errors = []
        for key in bar(self._dirty_keys(), "Writing what is not on disk", "groups"):
            left = None if ends is None else max(ends - time.monotonic(), 0.0)
            errors.append(self._error_of(key, left))
        errors += self.core.tiers.disk.remove_leftovers()
        _raise_first(errors)

    def flush_before_end(self) -> None:
        """Flush, for as long as the disk does anything."""
        disk = self.core.tiers.disk
        errors: list[BaseException | None] = []
        for key in bar(self._dirty_keys(), "Writing what is not on disk", "groups"):
            error = self._error_of(key, DEAD)
            while isinstance(error, StoreTimeoutError) and disk.idle_for() < DEAD:
                error = self._error_of(key, DEAD)
            if isinstance(error, ClosedError):
                return  # somebody else closes the store, too, and was faster
            errors.append(error)
            if isinstance(error, StoreTimeoutError):
                break
        else:
            errors += disk.remove_leftovers()
        _raise_first(errors)

    def flush_key(self, key: str, timeout: float | None = None) -> None:
        """Wait until nothing older than what there is now of a key is on disk."""
        group = self._begin(key)
        attempt = self._removed if group is NO_GROUP else self._saved
        self._requests.wait(_save_request(key, group), attempt, timeout)

    def wait_until_saved(self, key: str, group: GroupId) -> None:
        """Wait until a group that is being saved is on disk. Raises what its save raises."""
        self._requests.wait(_save_request(key, group), self._saved)

    def _error_of(self, key: str, timeout: float | None) -> BaseException | None:
        try:
            self.flush_key(key, timeout)
        except TierStoreError as error:
            return error
        return None

    @transaction
    def _dirty_keys(self) -> list[str]:
        """The keys of which something else is on disk than there should be."""
        core = self.core
        core.collect_garbage()
        unsaved = {key: None for key, group in core.current.items() if self._is_dirty(group)}
        return list(unsaved | dict.fromkeys(core.tiers.disk.removing()))

    @transaction
    def _begin(self, key: str) -> GroupId:
        """The group of a key that is not on disk yet, but will be; NO_GROUP if there is none."""
        core = self.core
        group = core.current.get(key)
        if group is None or not self._is_dirty(group):
            return NO_GROUP
        core.tell(events.SaveRequested(group))
        return group

    def _is_dirty(self, group: GroupId) -> bool:
        return self.core.mover.entry(group).durable and not self.core.planner.saved(group)

    def _saved(self, request: Request) -> bool | None:
        """Whether a save is over."""
        core, group = self.core, request.group
        core.check_open(saving=True)
        core.collect_garbage()
        if group not in core.planner:
            return self._superseded(request)
        if core.planner.saved(group):
            return True
        error = core.planner.error_of(group)
        if error is not None:
            core.tell(events.ErrorReported(group))
            raise error
        if not core.planner.saving(group):
            # Changed again before we woke up, or somebody else was told of a failure.
            core.tell(events.SaveRequested(group))
        return None

    def _superseded(self, request: Request) -> bool | None:
        """Whether the disk has nothing older than what was to be saved, and then was replaced."""
        newest = self.core.current.get(request.key)
        if newest is not None and self.core.mover.entry(newest).durable:
            request.group = newest
            return self._saved(request)
        return self._removed(request)

    def _removed(self, request: Request) -> bool | None:
        """Whether no file of the key is being removed."""
        self.core.check_open(saving=True)
        return request.key not in self.core.tiers.disk.removing() or None


def _save_request(key: str, group: GroupId) -> Request:
    return Request(key, RequestKind.SAVE, group=group)


def _raise_first(errors: Iterable[BaseException | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
