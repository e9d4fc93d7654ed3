"""Named ranges for profilers: what `torch.profiler` and Nsight Systems show of waits and moves.

A range is a `torch.profiler.record_function`. Without a profiler that would take some microseconds,
so none is made then: to ask takes less than a tenth of one. A profiler sees the thread that started
it, unless it was told to see all; so waits are always seen, and a move where its caller makes it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.profiler import record_function

from tierstore.torch_private import is_profiled

PREFIX = "tierstore: "

MOVES = {
    "DISK>HOST": "read",
    "HOST>DISK": "write",
    "HOST>DEVICE": "to device",
    "DEVICE>HOST": "to host",
    "REMOTE>DISK": "download",
}
"""What the move on a hop is called."""

_NOTHING: AbstractContextManager[Any] = nullcontext()


def ranged(what: str, key: str) -> AbstractContextManager[Any]:
    """What happens in the block is seen by profilers, as `tierstore: WHAT KEY`."""
    return record_function(f"{PREFIX}{what} {key}") if is_profiled() else _NOTHING
