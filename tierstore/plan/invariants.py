"""The invariants of a planner after every event.

1. Every known group has a valid copy on some tier, or is being put.
2. No tier holds more bytes than its budget, counting copies still arriving. In host memory this
   excludes shared groups, whose separate budget may fall below the bytes in use.
3. A copy that is leased, or that a transfer reads or writes, is never dropped.
4. A group being changed has exactly one copy.
5. An unwanted copy is in use; otherwise it would have been dropped.

`check` also compares the prefetcher's records with the copies.

There is one liveness property, which only a complete history can show: once every lease is
released, every demand is met or has failed with an error that `Planner.error_of` returns.
"""

from __future__ import annotations

from tierstore.model.tiers import Access
from tierstore.plan.copies import CopyTable
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import GroupRecord, State
from tierstore.plan.requests import Requests


def check(copies: CopyTable, requests: Requests, prefetcher: Prefetcher) -> None:
    """Assert the invariants. Visits every group, so it is for tests."""
    for tier in copies.tiers:
        groups = [group for group in copies.groups.values() if tier in group.copies]
        carved_out = copies.carved_out[tier]
        held = carved_out + sum(group.cost(tier) for group in groups)
        assert held == copies.used[tier], (
            f"{tier.name}: has {held} bytes in copies, counts {copies.used[tier]}"
        )
        pool, budget = copies.pools[tier], copies.budgets[tier]
        mine = [group for group in groups if copies.pool(group, tier) is pool]
        own = carved_out + sum(group.cost(tier) for group in mine)
        assert own == pool.used, f"{tier.name}: {own} are not shared, counts {pool.used}"
        assert budget == pool.limit, f"{tier.name}: a budget of {budget}, and of {pool.limit}"
        assert budget is None or own <= budget, f"{tier.name}: {own} over {budget}"
        shared = copies.shared.used if tier is copies.host else 0
        assert held - own == shared, f"{tier.name}: {held - own} are shared, counts {shared}"
    leased = [group for group in copies.groups.values() if group.leases or group.host_lease]
    assert leased or not copies.leased, f"nothing is leased, but {copies.leased} are counted"
    for group in copies.groups.values():
        valid = any(group.present(tier) for tier in copies.tiers)
        known = not group.forgotten and group not in requests.claims
        assert valid or not known, f"{group.id.key} has no valid copy"
        _check_leases(group, copies)
        _check_copies(group, copies)
    numbered = copies.numbered.items()
    placed = {tier: {number for number, g in numbered if tier in g.copies} for tier in copies.tiers}
    prefetcher.check({number: group.nbytes for number, group in numbered}, placed)


def _check_leases(group: GroupRecord, copies: CopyTable) -> None:
    key = group.id.key
    assert group.present(copies.top) or not group.leases, f"{key} is leased but not resident"
    assert group.present(copies.host) or not group.host_lease, (
        f"{key} is leased in host memory but not resident"
    )
    assert not (group.host_lease and group.exclusive), (
        f"{key} is leased in host memory while it is being changed"
    )
    if group.exclusive:
        assert group.leases == 1, f"{key} has {group.leases} leases while it is being changed"
    if group.exclusive is Access.UPDATE:
        assert len(group.copies) == 1, f"{key} is being changed and has several copies"


def _check_copies(group: GroupRecord, copies: CopyTable) -> None:
    key = group.id.key
    assert group.backing is not None or not group.shared, (
        f"{key} is shared but not backed by a file"
    )
    for tier, copy in group.copies.items():
        reading = copy.readers > 0
        assert copy.state is State.PRESENT or not reading, f"{key} is read before it is complete"
        unused = not copies.in_use(group, tier)
        assert not (copy.unwanted and unused), f"{key} on {tier.name} should have been dropped"
        assert not (group.forgotten and unused), f"{key} on {tier.name} is forgotten"
