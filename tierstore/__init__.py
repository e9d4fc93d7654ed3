"""A tensor store for models that do not fit: one cache over GPU, pinned RAM and NVMe.

>>> from tierstore import TierStore, enable_group_offload

Errors are in `tierstore.errors`, and types of returned objects in `tierstore.types`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tierstore.errors import CorruptDataError, TierStoreError, TransferError
from tierstore.model.systems import require_known_system
from tierstore.model.tiers import Access, Tier

if TYPE_CHECKING:
    from tierstore.adapters.activations import offload_activations
    from tierstore.adapters.checkpointing import checkpoint_activations
    from tierstore.adapters.dispatch import (
        cpu_offload,
        disk_offload,
        dispatch_model,
        load_checkpoint_and_dispatch,
    )
    from tierstore.adapters.editing import edit_weights
    from tierstore.adapters.group_offload import (
        disable_offload,
        enable_group_offload,
    )
    from tierstore.adapters.pretrained import from_pretrained, from_single_file
    from tierstore.adapters.training import OffloadModel, OffloadOptimizer
    from tierstore.adapters.training.loading import load_training
    from tierstore.adapters.training.saving import export_safetensors, save_training
    from tierstore.lease import Lease
    from tierstore.observe.stats import Stats
    from tierstore.store import TierStore

__version__ = "0.1.0"

require_known_system()

# Imported at first use, so that the command line does not wait for torch, nor users for diffusers.
_LAZY = {
    "TierStore": "tierstore.store",
    "Lease": "tierstore.lease",
    "Stats": "tierstore.observe.stats",
    "offload_activations": "tierstore.adapters.activations",
    "checkpoint_activations": "tierstore.adapters.checkpointing",
    "enable_group_offload": "tierstore.adapters.group_offload",
    "disable_offload": "tierstore.adapters.group_offload",
    "cpu_offload": "tierstore.adapters.dispatch",
    "disk_offload": "tierstore.adapters.dispatch",
    "dispatch_model": "tierstore.adapters.dispatch",
    "load_checkpoint_and_dispatch": "tierstore.adapters.dispatch",
    "edit_weights": "tierstore.adapters.editing",
    "from_pretrained": "tierstore.adapters.pretrained",
    "from_single_file": "tierstore.adapters.pretrained",
    "OffloadModel": "tierstore.adapters.training",
    "OffloadOptimizer": "tierstore.adapters.training",
    "export_safetensors": "tierstore.adapters.training.saving",
    "load_training": "tierstore.adapters.training.loading",
    "save_training": "tierstore.adapters.training.saving",
}

__all__ = [
    "Access",
    "CorruptDataError",
    "Lease",
    "OffloadModel",
    "OffloadOptimizer",
    "Stats",
    "Tier",
    "TierStore",
    "TierStoreError",
    "TransferError",
    "checkpoint_activations",
    "cpu_offload",
    "disable_offload",
    "disk_offload",
    "dispatch_model",
    "edit_weights",
    "enable_group_offload",
    "export_safetensors",
    "from_pretrained",
    "from_single_file",
    "load_checkpoint_and_dispatch",
    "load_training",
    "offload_activations",
    "save_training",
]


def __getattr__(name: str) -> object:
    if name == "types":
        return import_module("tierstore.types")
    if name not in _LAZY:
        raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """List the public names and modules only, imported or not."""
    return sorted([*__all__, "errors", "types"])
