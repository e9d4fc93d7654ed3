"""Reports about a store: statistics, snapshots, and data for a trace."""

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
from tierstore.observe.report import Description
from tierstore.observe.stats import GroupSnapshot, Snapshot, Stats
from tierstore.observe.trace_writer import Notes


class Reporting:
    """Reports about a store. No method waits.

    `keys`, `stats`, `notes` and `snapshot` first run deferred actions.
    """

    def __init__(self, core: Core, passes: Passes) -> None:
        self.core = core
        self._passes = passes

    def _run_deferred(self) -> None:
        """Run the deferred actions of finalizers, so that a report is up to date."""
        self.core.mover.poll()
        if not self.core.closed:
            self.core.run_deferred()

    @transaction
    def keys(self, prefix: str) -> list[str]:
        """See `TierStore.keys`."""
        self._run_deferred()
        return sorted(key for key in self.core.current if key.startswith(prefix))

    @transaction
    def stats(self) -> Stats:
        """See `TierStore.stats`."""
        self._run_deferred()
        return self._stats(self.core.mover.journal.summary())

    @transaction
    def weight_budgets(self) -> dict[Tier, int | None]:
        """Return the budget for registered weights by tier, in bytes.

        In a worker, the one for HOST is the host budget of its service.
        """
        core = self.core
        budgets = {tier: core.planner.budgets[tier] for tier in core.planner.tiers}
        return {**budgets, Tier.HOST: core.tiers.host.weight_budget(budgets[Tier.HOST])}

    def budget_name(self, tier: Tier) -> str:
        """Return the user's name for a budget of `weight_budgets`."""
        if tier is not Tier.HOST:
            return f"{tier.name.lower()}_budget"
        return self.core.tiers.host.budget_name

    def _stats(self, summary: Summary) -> Stats:
        core = self.core
        drivers = core.mover.drivers.items()
        peak = {tier: d.peak_bytes for tier, d in drivers if d.peak_bytes is not None}
        return self._with_service_counts(core.observer.stats(summary, core.planner, peak))

    def overview(self) -> Description:
        """Describe the store, for debuggers, logs and notebooks.

        Takes no lock and changes nothing, because the caller may be inside a transaction, or debug
        one that hangs. The numbers are therefore not one consistent snapshot.
        """
        core = self.core
        where = f"on {core.device} in {core.directory.path}"
        if core.forked():
            return Description(f"TierStore of another process, {where}")
        planner = core.planner
        stats = core.observer.sample(core.mover.journal.sample(), planner, planner.peak)
        if core.is_stopped():  # its memory was freed
            return Description(f"TierStore, closed, {where}", replace(stats, used_bytes={}))
        groups = count(len(core.current), "group")
        return Description(f"TierStore {where}, {groups}", self._with_service_counts(stats))

    def _with_service_counts(self, stats: Stats) -> Stats:
        """Count memory leased from a service separately."""
        leased, allowed = self.core.planner.shared_used, self.core.shared_budget
        return replace(stats, used_bytes=self._used(), leased_bytes=leased, allowed_bytes=allowed)

    def _used(self) -> dict[str, int]:
        """Return the bytes on each tier, without those leased from a service."""
        planner = self.core.planner
        used = {tier.name: planner.used[tier] for tier in planner.tiers}
        return {**used, Tier.HOST.name: used[Tier.HOST.name] - planner.shared_used}

    @transaction
    def notes(self) -> Notes:
        """Return the data of a trace."""
        self._run_deferred()
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
        self._run_deferred()
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
