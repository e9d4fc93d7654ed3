"""Read trace files that `TierStore.trace` wrote."""

from tierstore.observe.trace import Recorded, TraceSlice, read_trace

__all__ = ["Recorded", "TraceSlice", "read_trace"]
