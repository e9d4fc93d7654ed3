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
    groups are written as object files, others into the spill. `stamps` is what the checkpoint
    files in `source` must look like. Of two versions of one key, the disk keeps the one of the
    higher `order`. The device's copy may have been `handed_over` to a caller. Of a `settled` group,
    the spilled copy always lies in the same `place`, where it can be shown.
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
    handed_over: bool = False
    settled: bool = False
    place: Place | None = None
