"""A cache of derived weights, which are written once and reused.

Weights that were cast, quantised or concatenated, and weights that exist only in memory, are
written to object files named by their content. A derivation from a checkpoint is identified by its
source bytes (file and extent). As long as the files are unchanged, its result is found without
reading the checkpoint or computing anything.

A store keeps these files in its directory. A worker uploads them to its service, which keeps them
for all workers. The first worker that needs them has the values and the library that computes
them; the service needs neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from tierstore.engine.core import Core, check_disk_budget
from tierstore.engine.in_place_groups import (
    CASTS,
    CONTENT,
    WEIGHTS,
    ObjectFile,
    ObjectReference,
    content_hash,
)
from tierstore.engine.puts import Puts
from tierstore.engine.saves import Saves
from tierstore.engine.transaction import transaction
from tierstore.model import events
from tierstore.model.tiers import Tier
from tierstore.observe.journal import hop
from tierstore.system.maps import unnamed_file_memory
from tierstore.system.objects import OBJECTS, object_name, read_valid_object
from tierstore.system.views import pack_tensors, packed_spec
from tierstore.tiers.entry import GroupEntry

if TYPE_CHECKING:  # needs an optional package
    from tierstore.tiers.service_link import ServiceLink

Values = Mapping[str, torch.Tensor]


class Objects(Protocol):
    """Storage of object files, which are written once."""

    def put_once(self, key: str, tensors: Values, *, of_any_size: bool = False) -> ObjectFile:
        """Write an object file unless it exists. With `of_any_size`, it may exceed host memory."""

    def stored(self, key: str) -> ObjectFile | None:
        """Return an existing object file, or None."""

    def note_derived(self, weights: ObjectFile, note: ObjectFile) -> None:
        """Record that weights are derived from a checkpoint, and that a note leads to them."""


class DerivedCache:
    """Results of derivations, by derivation and content. Methods may block."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def put(self, derivation: str | None, values: Values, *, of_any_size: bool) -> ObjectFile:
        """Store tensors in an object file. `get` finds it by `derivation`, if that is not None."""
        content = content_hash(values)
        weights = self._objects.put_once(WEIGHTS + content, values, of_any_size=of_any_size)
        if derivation is not None:
            digest = torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
            note = self._objects.put_once(CASTS + derivation, {CONTENT: digest})
            self._objects.note_derived(weights, note)
        return weights

    def get(self, derivation: str | None) -> ObjectFile | None:
        """Return the object file of an earlier result of a derivation, or None."""
        note = None if derivation is None else self._objects.stored(f"{CASTS}{derivation}")
        if note is None:
            return None
        digest = note.views().get(CONTENT)
        weights = None if digest is None else self._objects.stored(_weights_key(digest))
        if weights is not None:
            self._objects.note_derived(weights, note)
        return weights


def _weights_key(content: torch.Tensor) -> str:
    return WEIGHTS + bytes(content.tolist()).hex()


class LocalObjectFiles:
    """Object files in the directory of a store."""

    def __init__(self, core: Core, puts: Puts, saves: Saves) -> None:
        self.core = core
        self._puts = puts
        self._saves = saves

    def has(self, key: str) -> bool:
        """Return True if there is an object file with this key."""
        return key in self.core.current

    def put_once(self, key: str, tensors: Values, *, of_any_size: bool = False) -> ObjectFile:
        reference = self.core.references.hold(key)
        if key in self.core.current:
            self._offload(key)
            return self._object_file(reference)
        budget = self.core.planner.budgets[Tier.HOST]
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if of_any_size and budget is not None and nbytes > budget:
            self.write(key, tensors)
        else:
            self._puts.put(key, tensors, durable=True)
        self._saves.flush_key(key)
        self._offload(key)
        return self._object_file(reference)

    @transaction
    def _offload(self, key: str) -> None:
        """Hint: the object is not needed in memory for now."""
        self.core.check_open()
        self.core.apply(events.Offloaded(self.core.lookup(key)))

    def stored(self, key: str) -> ObjectFile | None:
        reference = self.core.references.hold_if_there(key)
        return None if reference is None else self._object_file(reference)

    def _object_file(self, reference: ObjectReference) -> ObjectFile:
        key = reference.key
        self._saves.flush_key(key)  # another thread may be writing it, or a write may have failed
        path = self.core.directory.path_of(key)
        return ObjectFile(path, read_valid_object(path), reference)

    @transaction
    def note_derived(self, weights: ObjectFile, note: ObjectFile) -> None:
        assert weights.reference is not None and note.reference is not None, (
            "object files of the store have references"
        )
        self.core.references.note_derived(weights.reference, note.reference)

    def write(self, key: str, tensors: Values) -> None:
        """Write a group of any size to disk, through an unlinked file.

        Unless referenced, it is removed when disk space is needed. Raises the errors of `put`.
        """
        core = self.core
        packing, blocks = pack_tensors(key, tensors)
        spec = packed_spec(key, packing, tensors)
        check_disk_budget(core, key, spec.nbytes)
        memory = unnamed_file_memory(core.directory.path, packing.nbytes)
        target = torch.frombuffer(memory, dtype=torch.uint8)
        for block, at in zip(packing.blocks, packing.offsets, strict=True):
            target[at : at + block.nbytes].copy_(blocks[block.name])
        group = core.new_group(key)
        entry = GroupEntry(group, spec, None, packing, order=core.next_number())
        core.tiers.disk.write(entry, memory)
        core.mover.journal.count(hop(Tier.HOST, Tier.DISK), spec.nbytes)
        self._add(key, entry)

    @transaction
    def _add(self, key: str, entry: GroupEntry) -> None:
        core = self.core
        core.check_open()
        core.mover.add(entry)
        core.apply(events.Registered(entry.group, entry.spec.nbytes))
        core.current[key] = entry.group
        core.references.add(key)


class ServiceObjectFiles:
    """Object files in the directory of a service."""

    def __init__(self, link: ServiceLink) -> None:
        self._link = link

    def put_once(self, key: str, tensors: Values, *, of_any_size: bool = False) -> ObjectFile:
        if self._link.find(key):
            return self._object_file(key)
        packing, blocks = pack_tensors(key, tensors)

        def data() -> Iterator[memoryview]:
            here = 0
            for block, at in zip(packing.blocks, packing.offsets, strict=True):
                yield memoryview(bytes(at - here))
                yield blocks[block.name].cpu().numpy().data
                here = at + block.nbytes
            yield memoryview(bytes(max(packing.nbytes, 1) - here))

        self._link.upload(key, packing.specs(), max(packing.nbytes, 1), data())
        return self._object_file(key)

    def stored(self, key: str) -> ObjectFile | None:
        return self._object_file(key) if self._link.find(key) else None

    def _object_file(self, key: str) -> ObjectFile:
        path = os.path.join(self._link.directory(), OBJECTS, object_name(key))
        return ObjectFile(path, read_valid_object(path))

    def note_derived(self, weights: ObjectFile, note: ObjectFile) -> None:
        """Do nothing: the service detects it itself."""
