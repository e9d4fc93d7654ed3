"""What the tiers know of a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tierstore.model.groups import GroupId, GroupSpec, Packing, Source
from tierstore.model.tiers import Tier, UseOrder
from tierstore.system.file_table import HeldFile
from tierstore.tiers.arena import Slot
from tierstore.tiers.spill import SpillExtent

REMOTE = Tier(3, "REMOTE", persistent=True)
"""An object store, which is only read. A store has this tier once a checkpoint there is registered,
or if its directory holds what was fetched from one."""


@dataclass(eq=False, frozen=True)
class SharedGroup:
    """A group that a service serves: where its bytes lie, in files that are held open here."""

    key: str
    nbytes: int
    source: Source
    files: Mapping[str, HeldFile]


@dataclass(eq=False)
class GroupEntry:
    """One version of a group, as those who move it need to know it.

    `slots` is its memory, by tier. `source` says how to read it from disk; None while it is not
    there. `files` are the checkpoint files in `source`, by path, which stay open because of that.
    `packing` is how to write it; None for what came from checkpoints, which is written only once it
    was changed. `durable` groups are written as object files, others into the spill; of a `mutable`
    group, the spilled copy always lies in the same `spill_extent`, where it can be viewed. Of two
    versions of one key, the disk keeps the one of the higher `order`. On the tier `backing`, if
    any, a file of the user's holds the bytes; that, `use_order` and `sticky` are what the planner
    was told. Drivers keep what else they need to know by the entry.
    """

    group: GroupId
    spec: GroupSpec
    source: Source | None = None
    packing: Packing | None = None
    durable: bool = True
    single: bool = False
    files: Mapping[str, HeldFile] = field(default_factory=dict)
    order: int = 0
    slots: dict[Tier, Slot] = field(default_factory=dict)
    mutable: bool = False
    spill_extent: SpillExtent | None = None
    backing: Tier | None = None
    use_order: UseOrder = UseOrder.LEARNED
    sticky: bool = False

    @property
    def arrival(self) -> torch.Event | None:
        """An event of the device that has passed once the copy there has come."""
        slot = self.slots.get(Tier.DEVICE)
        return None if slot is None else slot.arrival
