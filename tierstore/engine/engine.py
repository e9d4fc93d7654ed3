"""The engine of a store: its core, and the parts that use it."""

from __future__ import annotations

import functools
import logging
import time
from typing import NoReturn

from tierstore.engine.copy_threads import CopyThreads
from tierstore.engine.core import Core
from tierstore.engine.derived_cache import (
    DerivedCache,
    LocalObjectFiles,
    Objects,
    ServiceObjectFiles,
)
from tierstore.engine.device_memory import DeviceMemory
from tierstore.engine.groups import Groups
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.leases import Leases
from tierstore.engine.loops import Loops
from tierstore.engine.mutable_groups import MutableGroups
from tierstore.engine.puts import Puts
from tierstore.engine.reporting import Reporting
from tierstore.engine.request_loop import RequestLoop
from tierstore.engine.saved_tensors import SavedTensors
from tierstore.engine.saves import Saves
from tierstore.engine.service_allowance import ServiceAllowance
from tierstore.engine.settings import Settings
from tierstore.engine.transaction import transaction
from tierstore.model.formatting import count, size
from tierstore.model.locks import check_may_wait
from tierstore.observe.passes import Passes
from tierstore.observe.report import totals_of
from tierstore.system.streams import device_selector, is_captured

logger = logging.getLogger("tierstore.engine")


class Engine:
    """The implementation of a `TierStore`.

    Adapters use its `leases`, `groups`, `mutable_groups`, `saved_tensors`, `device_memory` and
    `passes`.
    """

    def __init__(self, settings: Settings) -> None:
        self._opened = time.monotonic()
        self.core = core = Core(settings)
        self.copy_threads = CopyThreads(device_selector(settings.tiers.device), core.current_stream)
        self.lease_table = LeaseTable(core)
        self.requests = RequestLoop(core, self.lease_table)
        self.puts = Puts(core, self.requests, self.copy_threads)
        self.leases = Leases(core, self.lease_table, self.requests, self.copy_threads, self.puts)
        self.saves = Saves(core, self.requests)
        link = settings.tiers.link
        self.objects = LocalObjectFiles(core, self.puts, self.saves)
        objects: Objects = self.objects if link is None else ServiceObjectFiles(link)
        self.groups = Groups(core, DerivedCache(objects))
        self.mutable_groups = MutableGroups(
            core, self.lease_table, self.requests, self.puts, self.saves, self.groups
        )
        self.loops = Loops(core, self.lease_table, self.leases, self.mutable_groups)
        self.saved_tensors = SavedTensors(core, self.puts, self.groups)
        self.device_memory = DeviceMemory(core, self.lease_table)
        device = core.tiers.device
        times = None if device is None else device.times
        self.passes = Passes(times, functools.partial(is_captured, core.device))
        self.reporting = Reporting(core, self.passes)
        try:
            self._allowance = link and ServiceAllowance(core, self.lease_table, link)
        except BaseException:
            core.finalizer()
            raise
        self._log_opening(settings)

    def _log_opening(self, settings: Settings) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        link = settings.tiers.link
        budgets = [
            f"{self.reporting.budget_name(tier)} {'no limit' if n is None else size(n)}"
            for tier, n in self.reporting.weight_budgets().items()
        ]
        logger.info(
            "opened %s on %s%s: %s; %s",
            self.core.directory.path,
            self.core.device,
            "" if link is None else f" beside the service at {link.path}",
            ", ".join(budgets),
            count(len(self.core.current), "group"),
        )

    @property
    def is_connected(self) -> bool:
        """True if a service holds the registered groups."""
        return self.core.tiers.host.connected

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a TierStore cannot be sent to another process: open one there, with another disk_dir"
        )

    def close(self) -> None:
        """See `TierStore.close`."""
        core = self.core
        if core.closed:
            return
        core.check_process()
        check_may_wait()
        try:
            core.references.remove_for_close()
            self._begin_to_close()
            self.saves.flush_for_close()
        finally:
            self._end()
            self.copy_threads.stop()
            core.finalizer()
            self._log_closing()

    def _log_closing(self) -> None:
        if logger.isEnabledFor(logging.INFO):
            seconds = time.monotonic() - self._opened
            totals = totals_of(self.reporting.stats())
            logger.info("closed %s after %.1f s: %s", self.core.directory.path, seconds, totals)

    @transaction
    def _begin_to_close(self) -> None:
        self.core.closing = True
        self.core.leave_loop("the store is closed")
        self.core.queue.notify_change()

    @transaction
    def _end(self) -> None:
        core = self.core
        core.closed = True
        core.queue.notify_change()
        core.tiers.host.preserve_for_readers(core.mover.entry(each.group) for each in core.leases)
