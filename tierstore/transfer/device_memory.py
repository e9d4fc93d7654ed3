"""Memory that torch has of an accelerator, for tensors and as a cache for later ones."""

from __future__ import annotations

import torch


def empty_cache(device: torch.device) -> None:
    """Give the memory that torch keeps for later back to the device, for any stream to have it.

    Waits for the device. Nothing happens where torch keeps none.
    """
    empty = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty is not None:
        empty()


def reserved_bytes(device: torch.device) -> int | None:
    """Bytes of the device that this process has taken, those that are kept for later included.

    None if torch cannot tell, as for the CPU.
    """
    ask = getattr(torch.get_device_module(device), "memory_reserved", None)
    return None if ask is None else int(ask(device))
