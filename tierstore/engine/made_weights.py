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

from tierstore.engine.adoption import (
    CASTS,
    CONTENT,
    WEIGHTS,
    KeptObject,
    ObjectReference,
    content_hash,
)
from tierstore.engine.core import Core, refuse_beyond_the_disk
from tierstore.engine.puts import Puts
from tierstore.engine.saves import Saves
from tierstore.engine.transaction import transaction
from tierstore.model import events
from tierstore.model.tiers import Tier
from tierstore.observe.journal import hop
from tierstore.system.maps import nameless_file_memory
from tierstore.system.objects import OBJECTS, intact_object, object_name
from tierstore.system.views import laid_out, packed
from tierstore.tiers.entry import GroupEntry

if TYPE_CHECKING:  # it needs a package that not every installation has
    from tierstore.tiers.service_link import ServiceLink

Values = Mapping[str, torch.Tensor]


class Objects(Protocol):
    """Object files that are written once."""

    def put_once(self, key: str, tensors: Values, *, of_any_size: bool = False) -> KeptObject:
        """Write one, unless it is there. `of_any_size`: it may be larger than host memory."""

    def stored(self, key: str) -> KeptObject | None:
        """One that is there; None if there is none."""

    def note_derived(self, weights: KeptObject, note: KeptObject) -> None:
        """Weights were derived from a checkpoint, as a note tells a later start."""


class MadeWeights:
    """Finds what was made before, or keeps it. Its methods may wait."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def keep(self, derivation: str | None, values: Values, *, of_any_size: bool) -> KeptObject:
        """The object file with exactly these tensors. It is found again by `derivation`."""
        content = content_hash(values)
        weights = self._objects.put_once(WEIGHTS + content, values, of_any_size=of_any_size)
        if derivation is not None:
            told = torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
            note = self._objects.put_once(CASTS + derivation, {CONTENT: told})
            self._objects.note_derived(weights, note)
        return weights

    def find(self, derivation: str | None) -> KeptObject | None:
        """The object file of what was made of the same bytes before; None if there is none."""
        note = None if derivation is None else self._objects.stored(f"{CASTS}{derivation}")
        if note is None:
            return None
        told = note.views().get(CONTENT)
        weights = None if told is None else self._objects.stored(_weights_told(told))
        if weights is not None:
            self._objects.note_derived(weights, note)
        return weights


def _weights_told(content: torch.Tensor) -> str:
    return WEIGHTS + bytes(content.tolist()).hex()


class OwnObjects:
    """The object files of a store's own directory."""

    def __init__(self, core: Core, puts: Puts, saves: Saves) -> None:
        self.core = core
        self._puts = puts
        self._saves = saves

    def has(self, key: str) -> bool:
        """Whether there is one of this key."""
        return key in self.core.current

    def put_once(self, key: str, tensors: Values, *, of_any_size: bool = False) -> KeptObject:
        reference = self.core.references.hold(key)
        if key in self.core.current:
            self._offload(key)
            return self._kept(reference)
        budget = self.core.planner.budgets[Tier.HOST]
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if of_any_size and budget is not None and nbytes > budget:
            self.write(key, tensors)
        else:
            self._puts.put(key, tensors, durable=True)
        self._saves.flush_key(key)
        self._offload(key)
        return self._kept(reference)

    @transaction
    def _offload(self, key: str) -> None:
        """It is not needed in memory for now."""
        self.core.check_open()
        self.core.tell(events.Offloaded(self.core.lookup(key)))

    def stored(self, key: str) -> KeptObject | None:
        reference = self.core.references.hold_if_there(key)
        return None if reference is None else self._kept(reference)

    def _kept(self, reference: ObjectReference) -> KeptObject:
        key = reference.key
        self._saves.flush_key(key)  # another thread may have put it, or a write may have failed
        path = self.core.directory.path_of(key)
        return KeptObject(path, intact_object(path), reference)

    @transaction
    def note_derived(self, weights: KeptObject, note: KeptObject) -> None:
        assert weights.reference is not None and note.reference is not None, "they are our own"
        self.core.references.note_derived(weights.reference, note.reference)

    def write(self, key: str, tensors: Values) -> None:
        """Put a group on disk that need not fit into memory: by way of a file without a name.

        Unless somebody refers to it, it goes when its room is wanted. Raises what `put` raises.
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
        core.references.know(key)


class ServiceObjects:
    """The object files of a service's directory."""

    def __init__(self, link: ServiceLink) -> None:
        self._link = link

    def put_once(self, key: str, tensors: Values, *, of_any_size: bool = False) -> KeptObject:
        if self._link.find(key):
            return self._kept(key)
        packing, blocks = packed(key, tensors)

        def data() -> Iterator[memoryview]:
            here = 0
            for block, at in zip(packing.blocks, packing.offsets, strict=True):
                yield memoryview(bytes(at - here))
                yield blocks[block.name].cpu().numpy().data
                here = at + block.nbytes
            yield memoryview(bytes(max(packing.nbytes, 1) - here))

        self._link.upload(key, packing.specs(), max(packing.nbytes, 1), data())
        return self._kept(key)

    def stored(self, key: str) -> KeptObject | None:
        return self._kept(key) if self._link.find(key) else None

    def _kept(self, key: str) -> KeptObject:
        path = os.path.join(self._link.directory(), OBJECTS, object_name(key))
        return KeptObject(path, intact_object(path))

    def note_derived(self, weights: KeptObject, note: KeptObject) -> None:
        """The service finds out by itself."""
