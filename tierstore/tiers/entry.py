"""What the tiers know of a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierstore.model.groups import GroupId, GroupSpec, Packing, Segment, Source
from tierstore.model.tiers import Tier, UseOrder
from tierstore.system.file_table import HeldFile
from tierstore.system.files import FileStamp
from tierstore.tiers.arena import Slot
from tierstore.tiers.object_store import RemoteObject
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


@dataclass(eq=False, frozen=True)
class RemoteSource:
    """Where a group's bytes lie in `objects` of a store, by URL, and go to in the packed group."""

    segments: tuple[Segment, ...]
    objects: Mapping[str, RemoteObject]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(segment.extent.nbytes for segment in self.segments)


class CachedCopy(Protocol):
    """A file that holds what was fetched, until it is removed."""

    def remove(self) -> None:
        """Remove the file, on a thread that may wait. Never raises."""


@dataclass(eq=False)
class GroupEntry:
    """One version of a group, as those who move it need to know it.

    `slots` is its memory, by tier. `arrival` is an event of the device that has passed once the
    copy there has come. `source` says how to read it from disk; None while it is not there.
    `packing` is how to write it; None for what came from checkpoints, which is written only once it
    was changed. `durable` groups are written as object files, others into the spill. `files` are
    the checkpoint files in `source`, by path, which stay open because of that. Of two versions of
    one key, the disk keeps the one of the higher `order`. Its checksums were right when its files
    had the stamps in `verified`. Of a `mutable` group, the spilled copy always lies in the same
    `spill_extent`, where it can be viewed. `backed`, `use_order` and `sticky` are what the
    planner was told of it. What is `shared` is leased of a service, which reads it. What lies in an
    object store is `remote`; its copy on disk is `cached`, under the name `cache_key`. Object files
    that `source` reads stay for as long as its `references`.
    """

    group: GroupId
    spec: GroupSpec
    source: Source | None = None
    packing: Packing | None = None
    durable: bool = True
    single: bool = False
    files: Mapping[str, HeldFile] = field(default_factory=dict)
    order: int = 0
    verified: Mapping[str, FileStamp] | None = None
    spilled_at: int | None = None
    slots: dict[Tier, Slot] = field(default_factory=dict)
    arrival: Any = None
    first_digests: list[str] | None = None
    mutable: bool = False
    spill_extent: SpillExtent | None = None
    backed: bool = False
    use_order: UseOrder = UseOrder.LEARNED
    sticky: bool = False
    shared: SharedGroup | None = None
    remote: RemoteSource | None = None
    cached: CachedCopy | None = None
    references: tuple[object, ...] = ()
    cache_key: str = ""

    @property
    def backing(self) -> Tier | None:
        """The tier on which a file of the user's holds the bytes; None if none does."""
        if self.remote is not None:
            return REMOTE
        return Tier.DISK if self.backed else None
