"""Weights that no checkpoint holds as they are wanted: written once, and found again.

Cast, quantised or joined weights, and those that only memory holds, become object files, named by
their content. What was made of a checkpoint's bytes is found again by where these lie, as long as
the files are what they were; then nothing is read or made.

A store keeps them in its directory. A worker hands them over to its service, which keeps them for
all: whoever needs them first has the library that makes them, and the values at hand. The service
needs neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from tierstore.engine.adoption import CASTS, WEIGHTS, content_hash, object_views
from tierstore.engine.core import Core, refuse_beyond_the_disk
from tierstore.engine.puts import Puts
from tierstore.engine.saves import Saves
from tierstore.engine.transaction import transaction
from tierstore.model import events
from tierstore.model.objects import StoredObject
from tierstore.model.tiers import Tier
from tierstore.observe.journal import hop
from tierstore.system.maps import nameless_file_memory
from tierstore.system.objects import OBJECTS, intact_object, object_name
from tierstore.system.views import laid_out, packed
from tierstore.tiers.entry import GroupEntry

if TYPE_CHECKING:  # it needs a package that not every installation has
    from tierstore.tiers.service_link import ServiceLink

CONTENT = "content"
"""The name of the one tensor in objects under `CASTS`."""

Values = Mapping[str, torch.Tensor]


class Objects(Protocol):
    """Object files that are written once."""

    def has(self, key: str) -> bool:
        """Whether there is one of this key."""

    def put_once(self, key: str, tensors: Values, *, of_any_size: bool = False) -> None:
        """Write one, unless it is there. `of_any_size`: it may be larger than host memory."""

    def stored(self, key: str) -> tuple[str, StoredObject]:
        """The path of one that is there, and what it holds."""


class MadeWeights:
    """Finds what was made before, or keeps it. Its methods may wait."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def keep(
        self, derivation: str | None, values: Values, *, of_any_size: bool
    ) -> tuple[str, StoredObject]:
        """The object file with exactly these tensors. It is found again by `derivation`."""
        content = content_hash(values)
        key = WEIGHTS + content
        self._objects.put_once(key, values, of_any_size=of_any_size)
        if derivation is not None:
            told = torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
            self._objects.put_once(CASTS + derivation, {CONTENT: told})
        return self._objects.stored(key)

    def find(self, derivation: str | None) -> tuple[str, StoredObject] | None:
        """The object file of what was made of the same bytes before; None if there is none."""
        objects, key = self._objects, f"{CASTS}{derivation}"
        if derivation is None or not objects.has(key):
            return None
        told = object_views(*objects.stored(key)).get(CONTENT)
        content = "" if told is None else bytes(told.tolist()).hex()
        return objects.stored(WEIGHTS + content) if objects.has(WEIGHTS + content) else None


class OwnObjects:
    """The object files of a store's own directory."""

    def __init__(self, core: Core, puts: Puts, saves: Saves) -> None:
        self.core = core
        self._puts = puts
        self._saves = saves

    def has(self, key: str) -> bool:
        return key in self.core.current

    def put_once(self, key: str, tensors: Values, *, of_any_size: bool = False) -> None:
        if key in self.core.current:
            self._offload(key)
            return
        budget = self.core.planner.budgets[Tier.HOST]
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if of_any_size and budget is not None and nbytes > budget:
            self.write(key, tensors)
        else:
            self._puts.put(key, tensors, durable=True)
        self._saves.flush_key(key)
        self._offload(key)

    @transaction
    def _offload(self, key: str) -> None:
        """It is not needed in memory for now."""
        self.core.check_open()
        self.core.tell(events.Offloaded(self.core.lookup(key)))

    def stored(self, key: str) -> tuple[str, StoredObject]:
        self._saves.flush_key(key)  # another thread may have put it, or a write may have failed
        path = self.core.directory.path_of(key)
        return path, intact_object(path)

    def write(self, key: str, tensors: Values) -> None:
        """Put a group on disk that need not fit into memory: by way of a file without a name.

        Raises what `put` raises.
        """
        core = self.core
        packing, blocks = packed(key, tensors)
        spec = laid_out(key, packing, tensors)
        refuse_beyond_the_disk(core, key, spec.nbytes)
        memory = nameless_file_memory(core.directory.path, packing.nbytes)
        target = torch.frombuffer(memory, dtype=torch.uint8)
        for block, at in zip(packing.blocks, packing.offsets, strict=True):
            target[at : at + block.nbytes].copy_(blocks[block.name])
        group = core.new_group(key)
        entry = GroupEntry(group, spec, None, packing, order=core.newest())
        core.tiers.disk.write(entry, memory)
        core.mover.journal.count(hop(Tier.HOST, Tier.DISK), spec.nbytes)
        self._know(key, entry)

    @transaction
    def _know(self, key: str, entry: GroupEntry) -> None:
        core = self.core
        core.check_open()
        core.mover.add(entry)
        core.tell(events.Registered(entry.group, entry.spec.nbytes))
        core.current[key] = entry.group


class ServiceObjects:
    """The object files of a service's directory."""

    def __init__(self, link: ServiceLink) -> None:
        self._link = link

    def has(self, key: str) -> bool:
        return self._link.find(key)

    def put_once(self, key: str, tensors: Values, *, of_any_size: bool = False) -> None:
        if self._link.find(key):
            return
        packing, blocks = packed(key, tensors)

        def data() -> Iterator[memoryview]:
            here = 0
            for block, at in zip(packing.blocks, packing.offsets, strict=True):
                yield memoryview(bytes(at - here))
                yield blocks[block.name].cpu().numpy().data
                here = at + block.nbytes
            yield memoryview(bytes(max(packing.nbytes, 1) - here))

        self._link.upload(key, packing.specs(), max(packing.nbytes, 1), data())

    def stored(self, key: str) -> tuple[str, StoredObject]:
        path = os.path.join(self._link.directory(), OBJECTS, object_name(key))
        return path, intact_object(path)
