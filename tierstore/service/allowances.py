"""How many bytes each worker may lease at once.

A worker keeps what it leases for as long as its own plan wants it; what is leased cannot make room
for others. So it may lease an equal share: as much as a store of its own would have of the same
memory, for what stays and for what it fetches ahead. Where everything that is registered fits into
the budget, there is nothing to share out. No share is smaller than two groups of the worker's
largest size, the one in use and the next: where there are too many workers for that, they give back
what they do not use as soon as somebody waits for room.
"""

from __future__ import annotations

from collections.abc import Mapping

GROUPS = 2
"""Groups of its largest size that a worker may lease, however many workers there are."""


def allowances(budget: int, registered: int, largest: Mapping[int, int]) -> dict[int, int]:
    """Bytes for each worker, by its number: `largest` has the bytes of its largest group.

    `budget` is that of the arena, `registered` the bytes of all groups that workers have.

    >>> allowances(100, 80, {1: 10, 2: 10})
    {1: 100, 2: 100}
    >>> allowances(90, 500, {1: 10, 2: 40, 3: 0})
    {1: 45, 2: 80, 3: 45}
    """
    if registered <= budget:
        return dict.fromkeys(largest, budget)
    share = budget // max(sum(size > 0 for size in largest.values()), 1)
    return {worker: min(max(share, GROUPS * size), budget) for worker, size in largest.items()}
