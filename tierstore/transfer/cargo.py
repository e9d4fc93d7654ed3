"""What a carrier knows of a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstore.model.groups import GroupSpec, Packing, Source
from tierstore.model.tiers import Tier
from tierstore.transfer.arena import Slot
from tierstore.transfer.disk import FileStamp
from tierstore.transfer.spill import Place


@dataclass(eq=False)
class Cargo:
    """One version of a group, as the carrier needs to know it.

    `source` says how to read it from disk; None while it is not there. `packing` is how to write
    it; None for what came from checkpoints, which is written only once it was changed. `durable`
    groups are written as object files, others into the spill. `stamps` is what the checkpoint files
    in `source` must look like. Of two versions of one key, the disk keeps the one of the higher
    `order`. Its checksums were right when its files had the stamps in `verified`. Of a
    `settled` group, the spilled copy always lies in the same `place`, where it can be shown.
    `backed`, `guided` and `kept` are what the planner was told of it.
    """

    key: str
    spec: GroupSpec
    source: Source | None = None
    packing: Packing | None = None
    durable: bool = True
    single: bool = False
    stamps: Mapping[str, FileStamp] = field(default_factory=dict)
    order: int = 0
    verified: Mapping[str, FileStamp] | None = None
    spilled_at: int | None = None
    slots: dict[Tier, Slot] = field(default_factory=dict)
    views: dict[str, torch.Tensor] | None = None
    arrival: Any = None
    first_digests: list[str] | None = None
    settled: bool = False
    place: Place | None = None
    backed: bool = False
    guided: bool = False
    kept: bool = False

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where there is a copy, complete or not, or room for one."""
        on_disk = (Tier.DISK,) if self.source is not None else ()
        return (*self.slots, *on_disk)
