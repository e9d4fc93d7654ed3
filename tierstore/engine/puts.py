"""Puts: memory is claimed, filled by the caller's thread, and then published to readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch

from tierstore.engine.copy_threads import CopyThreads
from tierstore.engine.core import Core, begin_fill, end_fill
from tierstore.engine.request_loop import RequestLoop
from tierstore.engine.transaction import transaction
from tierstore.engine.wait_queue import Request, RequestKind
from tierstore.errors import TransferError
from tierstore.model import events
from tierstore.model.groups import NO_GROUP
from tierstore.model.objects import check_readable
from tierstore.system.views import pack_tensors, packed_spec
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.workers import Future

T = TypeVar("T")

Tensors = torch.Tensor | Mapping[str, torch.Tensor]


class Puts:
    """Puts copies of tensors. `put`, `put_async` and `put_with` may block for memory."""

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
        """See `TierStore.put`. `settings` are fields of `GroupEntry`."""
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
        """Put a group whose memory `fill` writes. Returns the result of `fill`.

        `settings` are fields of `GroupEntry`.
        """
        request = Request(key, RequestKind.PUT)
        try:
            data = self._claim(request, tensors, durable, settings)
            self._requests.wait(request, self._try_grant, timeout)
            filled = fill(self.core.mover.entry(request.group), data)
            self.publish(request, durable)
            return filled
        except BaseException:
            self._requests.cancel(request)
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
        request = Request(key, RequestKind.PUT)
        try:
            data = self._claim(request, tensors, durable, {})
            await self._requests.wait_async(request, self._try_grant, timeout)
        except BaseException:
            self._requests.cancel(request)
            raise
        await self._copy_threads.run(lambda: self._fill_and_publish(request, data, durable))

    def _fill_and_publish(
        self, request: Request, data: Mapping[str, torch.Tensor], durable: bool
    ) -> None:
        """Fill the granted memory and publish the group, or cancel the request."""
        try:
            self._fill(self.core.mover.entry(request.group), data)
            self.publish(request, durable)
        except BaseException:
            self._requests.cancel(request)
            raise

    def _fill(self, entry: GroupEntry, data: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors. Does not wait for other callers."""
        self.core.tiers.host.fill(entry, data)

    def _claim(
        self, request: Request, tensors: Tensors, durable: bool, settings: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Request memory for a put. Return the tensors to fill it with."""
        core = self.core
        core.check_open()
        core.check_not_capturing()
        key = request.key
        settings = {"single": isinstance(tensors, torch.Tensor), **settings}
        named = {key: tensors} if isinstance(tensors, torch.Tensor) else tensors
        packing, sources = pack_tensors(key, named)
        if durable:
            check_readable(key, packing, single=settings["single"])
        spec = packed_spec(key, packing, named)
        group = core.new_group(key)
        self._submit(request, GroupEntry(group, spec, None, packing, durable, **settings))
        return sources

    @transaction
    def _submit(self, request: Request, entry: GroupEntry) -> None:
        core = self.core
        core.check_open()
        if not core.planner.has_space(entry.spec.nbytes):
            core.leave_loop("memory was requested")
        instructions = core.instructions_for(
            events.Claimed(entry.group, entry.spec.nbytes, use_order=entry.use_order)
        )
        core.mover.add(entry)
        request.group = entry.group  # first: cancelling the request needs it
        core.unpublished[entry.group] = None
        core.deliver(instructions)

    def _try_grant(self, request: Request) -> bool | None:
        """Return True if the memory for a put is granted, else None."""
        core = self.core
        core.check_open()
        core.run_deferred()
        error = core.planner.error_of(request.group)
        if error is not None:
            raise error
        if not core.planner.granted(request.group):
            core.leave_loop("memory was requested")
            return None
        begin_fill(core, request)
        return True

    def publish(self, request: Request, durable: bool) -> None:
        """Publish a filled group to readers."""
        removal = self._make_visible(request, durable)
        if removal is not None:
            # If the removal fails, the put is still valid, and `flush` raises.
            with suppress(TransferError):
                self.core.wait_for_removal(removal)

    @transaction
    def _make_visible(self, request: Request, durable: bool) -> Future[None] | None:
        """Make the new group current. Return the pending removal of the old one's file."""
        core = self.core
        core.check_open()  # a closing store would not write this group
        group, key = request.group, request.key
        replaced = core.current.get(key)
        core.leave_loop("a group was replaced", key)
        was_durable = replaced is not None and core.mover.entry(replaced).durable
        entry = core.mover.entry(group)
        entry.order = newest = core.next_number()
        core.current[key] = group
        end_fill(core, group)
        request.group = NO_GROUP
        instructions = core.instructions_for(events.Filled(group))
        if replaced is not None:
            instructions += core.instructions_for(events.Discarded(replaced))
        core.deliver(instructions)
        return None if durable else core.tiers.disk.remove(key, newest, was_durable)
