"""What a store says of itself: numbers, what is where, and notes for a trace."""

from __future__ import annotations

import time
from dataclasses import replace

from tierstore.engine.core import Core
from tierstore.engine.transaction import transaction
from tierstore.model.formatting import count
from tierstore.model.groups import GroupId
from tierstore.model.tiers import Tier
from tierstore.observe.journal import Summary
from tierstore.observe.passes import Passes
from tierstore.observe.report import Shown
from tierstore.observe.stats import GroupSnapshot, Snapshot, Stats
from tierstore.observe.trace_writer import Notes


class Reporting:
    """Each method is one look. None waits; all but `look` first do what finalizers have left."""

    def __init__(self, core: Core, passes: Passes) -> None:
        self.core = core
        self._passes = passes

    def _catch_up(self) -> None:
        """Take back what finalizers have left, so that one sees what really is there."""
        self.core.mover.look()
        if not self.core.closed:
            self.core.collect_garbage()

    @transaction
    def keys(self, prefix: str) -> list[str]:
        """See `TierStore.keys`."""
        self._catch_up()
        return sorted(key for key in self.core.current if key.startswith(prefix))

    @transaction
    def stats(self) -> Stats:
        """See `TierStore.stats`."""
        self._catch_up()
        return self._stats(self.core.mover.journal.summary())

    @transaction
    def weight_budgets(self) -> dict[Tier, int | None]:
        """Bytes by tier for what is registered: of a worker, its service's host memory."""
        core = self.core
        budgets = {tier: core.planner.budgets[tier] for tier in core.planner.tiers}
        return {**budgets, Tier.HOST: core.tiers.host.weight_budget(budgets[Tier.HOST])}

    def budget_name(self, tier: Tier) -> str:
        """What a user calls the budget of `weight_budgets`."""
        if tier is not Tier.HOST:
            return f"{tier.name.lower()}_budget"
        return self.core.tiers.host.budget_name

    def _stats(self, summary: Summary) -> Stats:
        core = self.core
        drivers = core.mover.drivers.items()
        peak = {tier: d.peak_bytes for tier, d in drivers if d.peak_bytes is not None}
        return self._of_service(core.observer.stats(summary, core.planner, peak))

    def look(self) -> Shown:
        """What a store looks like, for debuggers, logs and notebooks.

        It takes no lock of the store and changes nothing, as whoever asks may be in the middle of
        a transaction, or wait for one that never ends. So the numbers may be of different moments.
        """
        core = self.core
        where = f"on {core.device} in {core.directory.path}"
        if core.forked():
            return Shown(f"TierStore of another process, {where}")
        planner = core.planner
        stats = core.observer.glance(core.mover.journal.glance(), planner, planner.peak)
        if core.ended():  # its memory was given back
            return Shown(f"TierStore, closed, {where}", replace(stats, used_bytes={}))
        groups = count(len(core.current), "group")
        return Shown(f"TierStore {where}, {groups}", self._of_service(stats))

    def _of_service(self, stats: Stats) -> Stats:
        """What a service lends is counted apart."""
        leased, allowed = self.core.planner.shared_used, self.core.shared_budget
        return replace(stats, used_bytes=self._used(), leased_bytes=leased, allowed_bytes=allowed)

    def _used(self) -> dict[str, int]:
        """Bytes on each tier, without those that are leased of a service."""
        planner = self.core.planner
        used = {tier.name: planner.used[tier] for tier in planner.tiers}
        return {**used, Tier.HOST.name: used[Tier.HOST.name] - planner.shared_used}

    @transaction
    def notes(self) -> Notes:
        """What a trace is made of."""
        self._catch_up()
        core = self.core
        journal, groups = core.mover.journal, core.current.items()
        summary, spans = journal.read()
        now = time.monotonic()
        return Notes(
            self._stats(summary),
            summary,
            spans,
            journal.uses.events(),
            journal.levels.events(),
            {key: core.mover.entry(group).spec.nbytes for key, group in groups},
            str(core.device),
            journal.dropped + self._passes.dropped,
            journal.number,
            now,
            core.events.record(),
            self._passes.events(now),
            journal.plans.events(),
        )

    @transaction
    def snapshot(self) -> Snapshot:
        """See `TierStore.snapshot`."""
        self._catch_up()
        planner = self.core.planner
        groups = [self._group(key, group) for key, group in sorted(self.core.current.items())]
        return Snapshot(
            tuple(groups),
            self._used(),
            {t.name: planner.budgets[t] for t in planner.tiers},
        )

    def _group(self, key: str, group: GroupId) -> GroupSnapshot:
        spec = self.core.mover.entry(group).spec
        tiers = tuple(tier.name for tier in self.core.planner.residence(group))
        return GroupSnapshot(key, spec.nbytes, tiers, len(spec.tensors))
