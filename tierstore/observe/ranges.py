"""Named ranges for profilers: waits and moves in `torch.profiler` and Nsight Systems.

A range is a `torch.profiler.record_function`, which takes some microseconds. Without a profiler no
range is made, and the check takes less than 0.1 µs. By default a profiler records only the thread
that started it. So waits always appear, and moves only if the caller's thread makes them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.profiler import record_function

from tierstore.torch_private import profiler_enabled

PREFIX = "tierstore: "

MOVES = {
    "DISK>HOST": "read",
    "HOST>DISK": "write",
    "HOST>DEVICE": "to device",
    "DEVICE>HOST": "to host",
    "REMOTE>DISK": "download",
}
"""Name of a move, by hop."""

_NOTHING: AbstractContextManager[Any] = nullcontext()


def ranged(what: str, key: str) -> AbstractContextManager[Any]:
    """Show the block to profilers as `tierstore: WHAT KEY`."""
    return record_function(f"{PREFIX}{what} {key}") if profiler_enabled() else _NOTHING
