"""What must be true of a planner after every event: the five promises, asserted.

1. Every known group has a valid copy on some tier, or is just being put.
2. No tier holds more bytes than its budget, counting copies still arriving. In host memory, this
   is true of what is not shared; what is shared has a budget beside it, which may fall below what
   is in use.
3. A copy that is leased, or that a transfer reads or writes, is never dropped.
4. A group being changed has exactly one copy.
5. An unwanted copy is in use: had it not been, it would be gone.

What the prefetcher knows of the copies is compared with them.

And one of liveness, which only a whole history can show: once every lease is back, every demand is
met or has failed, with an error that `Planner.error_of` tells.
"""

from __future__ import annotations

from tierstore.model.tiers import Access
from tierstore.plan.copies import CopyTable
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import GroupRecord, State
from tierstore.plan.requests import Requests


def check(copies: CopyTable, requests: Requests, prefetcher: Prefetcher) -> None:
    """Assert the promises. Costs a walk over all groups: for tests."""
    for tier in copies.tiers:
        groups = [group for group in copies.groups.values() if tier in group.copies]
        borrowed = copies.borrowed[tier]
        held = borrowed + sum(group.cost(tier) for group in groups)
        assert held == copies.used[tier], f"{tier.name}: holds {held}, counts {copies.used[tier]}"
        pool, budget = copies.pools[tier], copies.budgets[tier]
        mine = [group for group in groups if copies.pool(group, tier) is pool]
        own = borrowed + sum(group.cost(tier) for group in mine)
        assert own == pool.used, f"{tier.name}: {own} are not shared, counts {pool.used}"
        assert budget == pool.limit, f"{tier.name}: a budget of {budget}, and of {pool.limit}"
        assert budget is None or own <= budget, f"{tier.name}: {own} over {budget}"
        shared = copies.shared.used if tier is copies.host else 0
        assert held - own == shared, f"{tier.name}: {held - own} are shared, counts {shared}"
    lent = [group for group in copies.groups.values() if group.leases or group.host_lease]
    assert lent or not copies.leased, f"nothing is lent, and {copies.leased} leases are counted"
    for group in copies.groups.values():
        valid = any(group.present(tier) for tier in copies.tiers)
        known = not group.forgotten and group not in requests.claims
        assert valid or not known, f"{group.id.key} is nowhere"
        _check_leases(group, copies)
        _check_copies(group, copies)
    numbered = copies.numbered.items()
    room = {tier: {number for number, g in numbered if tier in g.copies} for tier in copies.tiers}
    prefetcher.check({number: group.nbytes for number, group in numbered}, room)


def _check_leases(group: GroupRecord, copies: CopyTable) -> None:
    key = group.id.key
    assert group.present(copies.top) or not group.leases, f"{key} is leased but not there"
    assert group.present(copies.host) or not group.host_lease, f"{key} is held but not there"
    assert not (group.host_lease and group.exclusive), f"{key} is held beside its changer"
    if group.exclusive:
        assert group.leases == 1, f"{key} is lent to {group.leases} beside its changer"
    if group.exclusive is Access.UPDATE:
        assert len(group.copies) == 1, f"{key} is being changed and has several copies"


def _check_copies(group: GroupRecord, copies: CopyTable) -> None:
    key = group.id.key
    assert group.backing is not None or not group.shared, f"{key} is shared and in no file"
    for tier, copy in group.copies.items():
        reading = copy.readers > 0
        assert copy.state is State.PRESENT or not reading, f"{key} is read before it is there"
        unused = not copies.in_use(group, tier)
        assert not (copy.unwanted and unused), f"{key} on {tier.name} should be gone"
        assert not (group.forgotten and unused), f"{key} on {tier.name} is forgotten"
