"""Describe groups whose bytes stay in the files that already hold them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash

from tierstore.engine.checkpoints import CheckpointFile
from tierstore.errors import StaleCheckpointError, UnknownKeyError
from tierstore.model.groups import (
    Check,
    FileTensor,
    GroupSpec,
    Source,
    TensorSpec,
    file_ranges,
    group_of,
    place,
    placed,
)
from tierstore.model.objects import StoredObject
from tierstore.system.files import FileStamp, transfer_error
from tierstore.system.maps import AddressSpace, map_file
from tierstore.system.views import DTYPES, block_tensors, blocks_of, dtype_name

WEIGHTS = "weights/"
"""Prefix of object files with weights that no checkpoint has, named by content."""


CASTS = "casts/"
"""Prefix of notes: small object files that map a derivation to the content hash of its result.

With a note, weights derived from a checkpoint are found again without reading the checkpoint."""

CONTENT = "content"
"""Name of the only tensor in a note: the content hash, as 16 uint8 values."""


class ObjectReference:
    """Keeps an object file of the store while the reference is alive: see `ObjectReferences`.

    For weights derived from a checkpoint, it also keeps the `note` that leads to them.
    """

    __slots__ = ("__weakref__", "key", "note")

    def __init__(self, key: str) -> None:
        self.key = key
        self.note: ObjectReference | None = None


@dataclass(frozen=True)
class ObjectFile:
    """An object file, which exists as long as `reference` is alive (None: permanently)."""

    path: str
    stored: StoredObject
    reference: ObjectReference | None = None

    def views(self) -> dict[str, torch.Tensor]:
        """Return its tensors as copy-on-write maps, which also keep the file."""
        return object_views(self.path, self.stored, self.reference)


@dataclass(frozen=True)
class TensorsToWrite:
    """Tensors that no file holds in the required form, so they must be written.

    `casts` gives the required dtype of tensors that are cast. `derivation` identifies the source
    bytes of all tensors and their casts, or is None if a tensor is not mapped from a file.
    """

    tensors: Mapping[str, torch.Tensor]
    casts: Mapping[str, torch.dtype]
    derivation: str | None

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the required dtype of a tensor."""
        return self.casts.get(name, self.tensors[name].dtype)

    def values(self) -> dict[str, torch.Tensor]:
        """Return the tensors in their required dtypes."""
        return {name: tensor.to(self.dtype_of(name)) for name, tensor in self.tensors.items()}

    def matches(self, stored: StoredObject) -> bool:
        """Return True if an object file has tensors of these names, dtypes and shapes."""
        views = [view for block in stored.packing.blocks for view in block.views]
        return {v.name: (DTYPES[v.dtype], v.shape) for v in views} == {
            name: (self.dtype_of(name), tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        }


WriteOnce = Callable[[TensorsToWrite], ObjectFile]
ReferenceTo = Callable[[str], ObjectReference | None]


@dataclass(frozen=True)
class InPlaceGroup:
    """A group of tensors that are stored in files.

    `host_views` are CPU tensors with the same values, mapped from the files. `stamps` are the
    current stamps of the files, by path.
    """

    spec: GroupSpec
    source: Source
    host_views: dict[str, torch.Tensor]
    stamps: dict[str, FileStamp]


def checkpoint_groups(
    files: list[CheckpointFile], prefix: str, groups: Mapping[str, Iterable[str]] | None
) -> dict[str, tuple[GroupSpec, Source]]:
    """Return the groups of a checkpoint by key: one for each tensor, or those of `groups`."""
    tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
    wanted = {name: [name] for name in tensors} if groups is None else groups
    found = {}
    for key, names in wanted.items():
        names = list(names)
        for name in names:
            if name not in tensors:
                raise UnknownKeyError(name, tensors, in_checkpoint=True)
        if len(set(names)) != len(names):
            raise ValueError(f"group {key!r} names a tensor twice: name each once")
        placement = place([tensors[name] for name in names])
        spec = group_of(prefix + key, placement.specs, placement.end)
        found[prefix + key] = (spec, Source(placement.segments, placement.moves))
    return found


def describe_in_place(
    tensors: Mapping[str, torch.Tensor],
    space: AddressSpace,
    write_once: WriteOnce,
    casts: Mapping[str, torch.dtype],
    reference_to: ReferenceTo,
) -> InPlaceGroup:
    """Describe tensors as a group in files.

    Finds the file bytes behind each tensor. Tensors that are not mapped from a file, or that are
    cast, are written by `write_once`. `reference_to` returns a reference to the file at a path if
    it is an object file of the store. Raises StaleCheckpointError if a file changes meanwhile.
    """
    found = {name: _file_tensor(name, tensor, space) for name, tensor in tensors.items()}
    rest = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if found[name] is None or name in casts
    }
    if rest and len(rest) < len(tensors):
        # Keep tensors that this store has written together, so that their object file is reused.
        rest |= {
            name: tensors[name].detach()
            for name, file in found.items()
            if file is not None and reference_to(file.extent.path) is not None
        }
        _add_overlapping(tensors, rest)
    in_files = [file for name, file in found.items() if file is not None and name not in rest]
    stamps = {path: stamp_of(path) for path in {t.extent.path for t in in_files}}
    host_views = _maps_of(in_files, reference_to)
    for path, stamp in stamps.items():
        if stamp_of(path) != stamp:
            raise StaleCheckpointError(
                f"{path} was modified while it was registered: load it again when it is complete",
                path=path,
            )
    placement = place(in_files)
    specs, segments, moves = list(placement.specs), placement.segments, placement.moves
    checks: tuple[Check, ...] = ()
    end = placement.end
    if rest:
        derivation = _derivation([found[name] for name in rest], casts) if casts else None
        kept = write_once(TensorsToWrite(rest, casts, derivation))
        written = kept.stored.source(kept.path, end)
        specs += kept.stored.packing.specs(end)
        segments, moves = segments + written.segments, moves + written.moves
        checks = written.checks
        end += kept.stored.packing.nbytes
        host_views.update(kept.views())
    by_name = {spec.name: spec for spec in specs}
    spec = group_of("", [by_name[name] for name in tensors], end)
    return InPlaceGroup(spec, Source(segments, moves, checks), host_views, stamps)


def _add_overlapping(tensors: Mapping[str, torch.Tensor], rest: dict[str, torch.Tensor]) -> None:
    """Add to `rest` the tensors that share memory with those in it: sharing is preserved."""
    for block, _ in blocks_of(tensors):
        names = [view.name for view in block.views]
        if not rest.keys().isdisjoint(names):
            rest.update({name: tensors[name].detach() for name in names})


def _derivation(
    sources: Iterable[FileTensor | None], casts: Mapping[str, torch.dtype]
) -> str | None:
    """Return an identifier of these source bytes and casts, or None if a source is not a file."""
    described = []
    stamps: dict[str, FileStamp] = {}
    for source in sources:
        if source is None:
            return None
        path = source.extent.path
        stamp = stamps[path] if path in stamps else stamps.setdefault(path, stamp_of(path))
        row = dataclasses.astuple(source), dataclasses.astuple(stamp), str(casts.get(source.name))
        described.append(row)
    return hashlib.sha256(json.dumps(sorted(described)).encode()).hexdigest()[:32]


def derivation_of(
    tensors: Mapping[str, torch.Tensor], casts: Mapping[str, torch.dtype], recipe: str
) -> str | None:
    """Return an identifier for the result of a derivation from tensors that are mapped from files.

    `casts` are applied first; `recipe` identifies the derivation after that. Returns None if a
    tensor is not mapped from a file.
    """
    space = AddressSpace()
    sources = [_file_tensor(name, tensor, space) for name, tensor in tensors.items()]
    derived = _derivation(sources, casts)
    return None if derived is None else hashlib.sha256((derived + recipe).encode()).hexdigest()[:32]


def _maps_of(found: list[FileTensor], reference_to: ReferenceTo) -> dict[str, torch.Tensor]:
    """Return the tensors as separate copy-on-write maps of their files.

    A page that is written to is copied, and the copy lives as long as the map. These maps end with
    the group, while a loaded checkpoint is often one map for all groups.
    """
    host_views = {}
    for path, start, stop, members in file_ranges(found):
        mapped = map_file(path, start, stop - start)
        _keep_while_mapped(mapped, reference_to(path))
        for block in _overlapping(members):
            first = block[0].extent.offset
            specs = [placed(tensor, tensor.extent.offset - first) for tensor in block]
            host_views.update(block_tensors(specs, mapped, first - start))
    return host_views


def _overlapping(members: list[FileTensor]) -> list[list[FileTensor]]:
    """Return the tensors of a file in file order, in lists of those that share bytes."""
    blocks: list[list[FileTensor]] = []
    end = -1
    for tensor in members:
        if tensor.extent.offset < end:
            blocks[-1].append(tensor)
        else:
            blocks.append([tensor])
        end = max(end, tensor.extent.offset + tensor.extent.nbytes)
    return blocks


def stamp_of(path: str) -> FileStamp:
    """Return the current stamp of a file. Raises TransferError."""
    try:
        return FileStamp.of(os.stat(path))
    except OSError as error:
        raise transfer_error(error, "reading", key=None, path=path) from error


def _file_tensor(name: str, tensor: torch.Tensor, space: AddressSpace) -> FileTensor | None:
    if (
        tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or tensor.is_conj()  # its bytes differ from its value
        or tensor.is_neg()
        or hasattr(tensor, "__tensor_flatten__")
    ):
        return None
    extent = space.extent_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    if extent is None:
        return None
    return FileTensor(name, dtype_name(tensor, name), tuple(tensor.shape), extent)


def content_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of the names, dtypes, shapes, strides and bytes of tensors: 32 hex digits."""
    description = []
    for block, data in blocks_of(tensors):
        views = [(v.name, v.dtype, v.shape, v.stride, v.offset) for v in block.views]
        content = xxhash.xxh3_128_hexdigest(data.cpu().numpy().data)
        description.append((views, content))
    return hashlib.sha256(json.dumps(sorted(description)).encode()).hexdigest()[:32]


def object_views(
    path: str, stored: StoredObject, reference: ObjectReference | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of an object file as copy-on-write maps, which keep `reference` alive."""
    packing = stored.packing
    if not packing.dense_nbytes:
        return {v.name: _empty(v) for b in packing.blocks for v in b.views}
    mapped = map_file(path, stored.data_start, packing.dense_nbytes)
    _keep_while_mapped(mapped, reference)
    views = {}
    for block, dense in zip(packing.blocks, packing.dense, strict=True):
        views.update(block_tensors(block.views, mapped, dense))
    return views


def _keep_while_mapped(mapped: memoryview, reference: ObjectReference | None) -> None:
    """Keep a reference until the last tensor over the mapped memory is collected."""
    if reference is not None:
        weakref.finalize(mapped, _no_op, reference).atexit = False


def _no_op(_: ObjectReference) -> None:
    """Do nothing: the finalizer only holds the reference."""


def _empty(view: TensorSpec) -> torch.Tensor:
    return torch.empty(0, dtype=DTYPES[view.dtype]).as_strided(view.shape, view.stride)
