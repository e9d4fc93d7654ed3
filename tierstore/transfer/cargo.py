"""What a carrier knows of a group, and counts of what it moved."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstore.model.groups import GroupSpec, Packing, Source
from tierstore.model.tiers import Tier
from tierstore.transfer.arena import Slot
from tierstore.transfer.disk import FileStamp


@dataclass(eq=False)
class Cargo:
    """One version of a group, as the carrier needs to know it.

    `source` says how to read it from disk; None while it is not there. `packing` is how to write
    it; None for what came from checkpoints, which is written only once it was changed. `durable`
    groups are written as object files, others into the spill. `stamps` is what the checkpoint
    files in `source` must look like. Of two versions of one key, the disk keeps the one of the
    higher `order`.
    """

    key: str
    spec: GroupSpec
    source: Source | None = None
    packing: Packing | None = None
    durable: bool = True
    single: bool = False
    stamps: Mapping[str, FileStamp] = field(default_factory=dict)
    order: int = 0
    verified: bool = False
    spilled_at: int | None = None
    slots: dict[Tier, Slot] = field(default_factory=dict)
    views: dict[str, torch.Tensor] | None = None
    arrival: Any = None
    first_digests: list[str] | None = None


@dataclass
class Totals:
    """What was moved so far, in bytes, by (source, destination)."""

    moved: dict[tuple[Tier, Tier], int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, src: Tier, dst: Tier, nbytes: int) -> None:
        """Count `nbytes` bytes."""
        with self.lock:
            self.moved[src, dst] = self.moved.get((src, dst), 0) + nbytes

    def get(self, src: Tier, dst: Tier) -> int:
        """Bytes moved from `src` to `dst`."""
        return self.moved.get((src, dst), 0)
