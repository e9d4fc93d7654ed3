"""Divides the arena's budget into allowances: bytes that each worker may lease at once.

A worker keeps its leases for as long as its own plan needs them, and leased groups cannot be
evicted for others. It therefore gets an equal share: as much memory as a private store would have
for resident and prefetched groups. Where all registered groups fit into the budget, each worker may
lease all of it. No share is smaller than two groups of the worker's largest size, the one in use
and the next. If there are too many workers for that, they release leases that are not in use as
soon as another worker waits for memory.
"""

from __future__ import annotations

from collections.abc import Mapping

GROUPS = 2
"""Groups of its largest size that a worker may lease, whatever the number of workers."""


def allowances(budget: int, registered: int, largest: Mapping[int, int]) -> dict[int, int]:
    """Return the allowance in bytes of each worker, by its number.

    `largest` has the bytes of each worker's largest group, `budget` is the arena's, and
    `registered` the bytes of all groups that workers have registered.

    >>> allowances(100, 80, {1: 10, 2: 10})
    {1: 100, 2: 100}
    >>> allowances(90, 500, {1: 10, 2: 40, 3: 0})
    {1: 45, 2: 80, 3: 45}
    """
    if registered <= budget:
        return dict.fromkeys(largest, budget)
    share = budget // max(sum(size > 0 for size in largest.values()), 1)
    return {worker: min(max(share, GROUPS * size), budget) for worker, size in largest.items()}
