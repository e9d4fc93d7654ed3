"""The state of a group that the tiers share."""

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
"""An object store, which is read only.

A store has this tier once a checkpoint there is registered, or if its directory has files that were
fetched from one.
"""


@dataclass(eq=False, frozen=True)
class SharedGroup:
    """A group that a service serves: the location of its bytes, in files held open here."""

    key: str
    nbytes: int
    source: Source
    files: Mapping[str, HeldFile]


@dataclass(eq=False)
class GroupEntry:
    """One version of a group, as needed to move it.

    `slots` is its memory, by tier. `source` locates its bytes on disk; None while they are not
    there. `files` are the checkpoint files in `source`, by path, held open by this reference.
    `packing` is its layout for writing; None for groups of checkpoints, which are written only
    after a change. `durable` groups are written as object files, others into the spill; the spilled
    copy of a `mutable` group always lies in the same `spill_extent`, where it can be viewed. The
    disk keeps the version of a key with the highest `order`. `backing` is the tier on
    which a file of the user holds the bytes, if any; the planner receives it with `use_order` and
    `sticky`. Drivers keep other state by the entry.
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
        """A device event that completes once the group has arrived there, or None."""
        slot = self.slots.get(Tier.DEVICE)
        return None if slot is None else slot.arrival
