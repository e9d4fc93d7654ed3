"""Types of objects that public calls return, for annotations and `isinstance`."""

from tierstore.adapters.activations import ActivationOffload
from tierstore.adapters.group_offload import OffloadHandle
from tierstore.observe.stats import ActivationStats, Snapshot

__all__ = ["ActivationOffload", "ActivationStats", "OffloadHandle", "Snapshot"]
