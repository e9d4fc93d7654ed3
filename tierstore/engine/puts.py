"""How groups are put: room is claimed, filled by the caller's thread, and then shown to readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch

from tierstore.engine.copy_threads import CopyThreads
from tierstore.engine.core import Core, begin_room, end_room
from tierstore.engine.request_loop import RequestLoop
from tierstore.engine.transaction import transaction
from tierstore.engine.wait_queue import Request, RequestKind
from tierstore.errors import TransferError
from tierstore.model import events
from tierstore.model.groups import NO_GROUP
from tierstore.model.objects import refuse_unreadable
from tierstore.system.views import laid_out, packed
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.workers import Future

T = TypeVar("T")

Tensors = torch.Tensor | Mapping[str, torch.Tensor]


class Puts:
    """Puts of copies of tensors. `put`, `put_async` and `put_with` may wait for room."""

    def __init__(self, core: Core, requests: RequestLoop, copy_threads: CopyThreads) -> None:
        self.core = core
        self._requests = requests
        self._copy_threads = copy_threads

    def put(
        self,
        key: str,
        tensors: Tensors,
        *,
        durable: bool,
        timeout: float | None = None,
        **settings: Any,
    ) -> None:
        """See `TierStore.put`. `settings` are fields of the group's entry."""
        self.put_with(key, tensors, self._fill, durable=durable, timeout=timeout, **settings)

    def put_with(
        self,
        key: str,
        tensors: Tensors,
        fill: Callable[[GroupEntry, Mapping[str, torch.Tensor]], T],
        *,
        durable: bool = False,
        timeout: float | None = None,
        **settings: Any,
    ) -> T:
        """Put what `fill` copies into the room that is claimed. Returns what that returns.

        `settings` are fields of the group's entry.
        """
        request = Request(key, RequestKind.ROOM)
        try:
            data = self._claim(request, tensors, durable, settings)
            self._requests.wait(request, self._granted, timeout)
            filled = fill(self.core.mover.entry(request.group), data)
            self.publish(request, durable)
            return filled
        except BaseException:
            self._requests.give_up(request)
            raise

    async def put_async(
        self,
        key: str,
        tensors: Tensors,
        *,
        durable: bool,
        timeout: float | None = None,
    ) -> None:
        """See `TierStore.aput`."""
        request = Request(key, RequestKind.ROOM)
        try:
            data = self._claim(request, tensors, durable, {})
            await self._requests.wait_async(request, self._granted, timeout)
        except BaseException:
            self._requests.give_up(request)
            raise
        await self._copy_threads.run(lambda: self._fill_whole(request, data, durable))

    def _fill_whole(
        self, request: Request, data: Mapping[str, torch.Tensor], durable: bool
    ) -> None:
        """Fill the room and publish it, or nothing at all."""
        try:
            self._fill(self.core.mover.entry(request.group), data)
            self.publish(request, durable)
        except BaseException:
            self._requests.give_up(request)
            raise

    def _fill(self, entry: GroupEntry, data: Mapping[str, torch.Tensor]) -> None:
        """Copies; waits for nobody."""
        self.core.tiers.host.fill(entry, data)

    def _claim(
        self, request: Request, tensors: Tensors, durable: bool, settings: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Ask for room for what is put. Returns the bytes to fill it with."""
        core = self.core
        core.check_open()
        core.refuse_capture()
        key = request.key
        settings = {"single": isinstance(tensors, torch.Tensor), **settings}
        named = {key: tensors} if isinstance(tensors, torch.Tensor) else tensors
        packing, sources = packed(key, named)
        if durable:
            refuse_unreadable(key, packing, single=settings["single"])
        spec = laid_out(key, packing, named)
        group = core.new_group(key)
        self._enter(request, GroupEntry(group, spec, None, packing, durable, **settings))
        return sources

    @transaction
    def _enter(self, request: Request, entry: GroupEntry) -> None:
        core = self.core
        core.check_open()
        if not core.planner.has_room(entry.spec.nbytes):
            core.leave_loop("room was asked for")
        instructions = core.handled(
            events.Claimed(entry.group, entry.spec.nbytes, use_order=entry.use_order)
        )
        core.mover.add(entry)
        request.group = entry.group  # first: who gives it up looks for this
        core.unseen[entry.group] = None
        core.deliver(instructions)

    def _granted(self, request: Request) -> bool | None:
        """Whether the room for a put is there."""
        core = self.core
        core.check_open()
        core.collect_garbage()
        error = core.planner.error_of(request.group)
        if error is not None:
            raise error
        if not core.planner.granted(request.group):
            core.leave_loop("room was asked for")
            return None
        begin_room(core, request)
        return True

    def publish(self, request: Request, durable: bool) -> None:
        """Let readers see what was put into the room that was granted."""
        removal = self._show(request, durable)
        if removal is not None:
            # If it fails, this is put all the same, and who flushes is told.
            with suppress(TransferError):
                self.core.wait_for_removal(removal)

    @transaction
    def _show(self, request: Request, durable: bool) -> Future[None] | None:
        """Readers see the new group from now on. Returns the removal of the old one's file."""
        core = self.core
        core.check_open()  # what is not seen now is not written by who closes the store
        group, key = request.group, request.key
        replaced = core.current.get(key)
        core.leave_loop("a group was replaced", key)
        was_durable = replaced is not None and core.mover.entry(replaced).durable
        entry = core.mover.entry(group)
        entry.order = newest = core.newest()
        core.current[key] = group
        end_room(core, group)
        request.group = NO_GROUP
        instructions = core.handled(events.Filled(group))
        if replaced is not None:
            instructions += core.handled(events.Discarded(replaced))
        core.deliver(instructions)
        return None if durable else core.tiers.disk.remove(key, newest, was_durable)
