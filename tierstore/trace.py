"""Trace files, for programs that read them; `TierStore.trace` writes them."""

from tierstore.observe.trace import Recorded, Slice, read_trace

__all__ = ["Recorded", "Slice", "read_trace"]
