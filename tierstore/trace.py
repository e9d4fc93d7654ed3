"""Trace files, for programs that read them; `TierStore.trace` writes them."""

from tierstore.observe.trace import Recorded, TraceSlice, read_trace

__all__ = ["Recorded", "TraceSlice", "read_trace"]
