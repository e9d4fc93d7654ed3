"""Memory that torch keeps of an accelerator, as a cache for later tensors."""

from __future__ import annotations

import torch


def empty_cache(device: torch.device) -> None:
    """Give the memory that torch keeps for later back to the device, for any stream to have it.

    Waits for the device. Nothing happens where torch keeps none.
    """
    empty = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty is not None:
        empty()
