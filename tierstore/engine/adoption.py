"""From tensors, or a checkpoint's files, to groups whose bytes stay where they are."""

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
from tierstore.system.views import DTYPES, blocks_of, dtype_name, show_block

WEIGHTS = "weights/"
"""Objects under this prefix hold weights that no checkpoint holds, named by their content."""


CASTS = "casts/"
"""Objects under this prefix tell the content of what was cast from a checkpoint's bytes, so that it
is found again without those being read."""

CONTENT = "content"
"""The name of the one tensor in objects under `CASTS`."""


class ObjectReference:
    """Keeps an object file of the store's: see `ObjectReferences`. It ends with its last user.

    Weights that were derived from a checkpoint keep the `note` that tells of them.
    """

    __slots__ = ("__weakref__", "key", "note")

    def __init__(self, key: str) -> None:
        self.key = key
        self.note: ObjectReference | None = None


@dataclass(frozen=True)
class KeptObject:
    """An object file that is there for as long as the `reference` is; None: for good."""

    path: str
    stored: StoredObject
    reference: ObjectReference | None = None

    def views(self) -> dict[str, torch.Tensor]:
        """Its tensors as copy-on-write maps, which keep the file, too."""
        return object_views(self.path, self.stored, self.reference)


@dataclass(frozen=True)
class Unadopted:
    """Tensors that are not in files as they are wanted.

    `casts` has the dtypes that some of them are wanted in. `derivation` names the bytes of files
    that all of them come from, and what they are cast to; None if some come from elsewhere.
    """

    tensors: Mapping[str, torch.Tensor]
    casts: Mapping[str, torch.dtype]
    derivation: str | None

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a tensor is wanted in."""
        return self.casts.get(name, self.tensors[name].dtype)

    def values(self) -> dict[str, torch.Tensor]:
        """The tensors as they are wanted."""
        return {name: tensor.to(self.dtype_of(name)) for name, tensor in self.tensors.items()}

    def is_as(self, stored: StoredObject) -> bool:
        """Whether a file holds tensors like these."""
        views = [view for block in stored.packing.blocks for view in block.views]
        return {v.name: (DTYPES[v.dtype], v.shape) for v in views} == {
            name: (self.dtype_of(name), tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        }


WriteOnce = Callable[[Unadopted], KeptObject]
ReferenceTo = Callable[[str], ObjectReference | None]


@dataclass(frozen=True)
class Adoption:
    """A group made of tensors that lie in files.

    `homes` shows each tensor's true value on the CPU without taking memory; `stamps` is what the
    files look like now.
    """

    spec: GroupSpec
    source: Source
    homes: dict[str, torch.Tensor]
    stamps: dict[str, FileStamp]


def checkpoint_groups(
    files: list[CheckpointFile], prefix: str, groups: Mapping[str, Iterable[str]] | None
) -> dict[str, tuple[GroupSpec, Source]]:
    """The groups of a checkpoint by key: one for each tensor, or as `groups` says."""
    tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
    wanted = {name: [name] for name in tensors} if groups is None else groups
    found = {}
    for key, names in wanted.items():
        names = list(names)
        for name in names:
            if name not in tensors:
                raise UnknownKeyError(name)
        if len(set(names)) != len(names):
            raise ValueError(f"group {key!r} names a tensor twice: name each once")
        placement = place([tensors[name] for name in names])
        spec = group_of(prefix + key, placement.specs, placement.end)
        found[prefix + key] = (spec, Source(placement.segments, placement.moves))
    return found


def adopt(
    tensors: Mapping[str, torch.Tensor],
    space: AddressSpace,
    write_once: WriteOnce,
    casts: Mapping[str, torch.dtype],
    reference_to: ReferenceTo,
) -> Adoption:
    """Find the file bytes behind each tensor; have `write_once` put the rest into a file, and what
    is to be cast. `reference_to` keeps the file at a path, if that is an object of the store's."""
    found = {name: _file_tensor(name, tensor, space) for name, tensor in tensors.items()}
    rest = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if found[name] is None or name in casts
    }
    if rest and len(rest) < len(tensors):
        # Tensors that this store has written go together again, so that their object is found.
        rest |= {
            name: tensors[name].detach()
            for name, file in found.items()
            if file is not None and reference_to(file.extent.path) is not None
        }
        _take_what_overlaps(tensors, rest)
    in_files = [file for name, file in found.items() if file is not None and name not in rest]
    stamps = {path: stamp_of(path) for path in {t.extent.path for t in in_files}}
    homes = _maps_of(in_files, reference_to)
    for path, stamp in stamps.items():
        if stamp_of(path) != stamp:
            raise StaleCheckpointError(
                f"{path} was changed while it was put on a store: load it again when it is "
                "complete",
                path=path,
            )
    placement = place(in_files)
    specs, segments, moves = list(placement.specs), placement.segments, placement.moves
    checks: tuple[Check, ...] = ()
    end = placement.end
    if rest:
        derivation = _derivation([found[name] for name in rest], casts) if casts else None
        kept = write_once(Unadopted(rest, casts, derivation))
        written = kept.stored.source(kept.path, end)
        specs += kept.stored.packing.specs(end)
        segments, moves = segments + written.segments, moves + written.moves
        checks = written.checks
        end += kept.stored.packing.nbytes
        homes.update(kept.views())
    by_name = {spec.name: spec for spec in specs}
    spec = group_of("", [by_name[name] for name in tensors], end)
    return Adoption(spec, Source(segments, moves, checks), homes, stamps)


def _take_what_overlaps(tensors: Mapping[str, torch.Tensor], rest: dict[str, torch.Tensor]) -> None:
    """Add the tensors to `rest` that share memory with those in it, as they go on sharing it."""
    for block, _ in blocks_of(tensors):
        names = [view.name for view in block.views]
        if not rest.keys().isdisjoint(names):
            rest.update({name: tensors[name].detach() for name in names})


def _derivation(
    sources: Iterable[FileTensor | None], casts: Mapping[str, torch.dtype]
) -> str | None:
    """A name for what these bytes of files, as the files are now, are when they are cast."""
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
    tensors: Mapping[str, torch.Tensor], casts: Mapping[str, torch.dtype], made: str
) -> str | None:
    """A name for what is made of tensors that show bytes of files, after they are cast; `made`
    says how. None if some of them show no file."""
    space = AddressSpace()
    sources = [_file_tensor(name, tensor, space) for name, tensor in tensors.items()]
    derived = _derivation(sources, casts)
    return None if derived is None else hashlib.sha256((derived + made).encode()).hexdigest()[:32]


def _maps_of(found: list[FileTensor], reference_to: ReferenceTo) -> dict[str, torch.Tensor]:
    """The tensors as copy-on-write maps of their files that nobody else has.

    A page that is written to is copied, and the copy stays as long as the map. These go when the
    group does; what a checkpoint was loaded as is often one map for all groups.
    """
    homes = {}
    for path, start, stop, members in file_ranges(found):
        mapped = map_file(path, start, stop - start)
        _keep_while_mapped(mapped, reference_to(path))
        for block in _overlapping(members):
            first = block[0].extent.offset
            specs = [placed(tensor, tensor.extent.offset - first) for tensor in block]
            homes.update(show_block(specs, mapped, first - start))
    return homes


def _overlapping(members: list[FileTensor]) -> list[list[FileTensor]]:
    """Tensors of a file, in their order there, those together that share bytes."""
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
    """What a file looks like now. Raises TransferError."""
    try:
        return FileStamp.of(os.stat(path))
    except OSError as error:
        raise transfer_error(error, "reading", key=None, path=path) from error


def _file_tensor(name: str, tensor: torch.Tensor, space: AddressSpace) -> FileTensor | None:
    if (
        tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or tensor.is_conj()  # then the bytes are not the value
        or tensor.is_neg()
        or hasattr(tensor, "__tensor_flatten__")
    ):
        return None
    extent = space.extent_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    if extent is None:
        return None
    return FileTensor(name, dtype_name(tensor, name), tuple(tensor.shape), extent)


def content_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """Names, dtypes, shapes, strides and bytes of tensors as 32 hex digits."""
    description = []
    for block, data in blocks_of(tensors):
        views = [(v.name, v.dtype, v.shape, v.stride, v.offset) for v in block.views]
        content = xxhash.xxh3_128_hexdigest(data.cpu().numpy().data)
        description.append((views, content))
    return hashlib.sha256(json.dumps(sorted(description)).encode()).hexdigest()[:32]


def object_views(
    path: str, stored: StoredObject, reference: ObjectReference | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of an object file as copy-on-write maps of it, which keep the `reference`."""
    packing = stored.packing
    if not packing.dense_nbytes:
        return {v.name: _empty(v) for b in packing.blocks for v in b.views}
    mapped = map_file(path, stored.data_start, packing.dense_nbytes)
    _keep_while_mapped(mapped, reference)
    views = {}
    for block, dense in zip(packing.blocks, packing.dense, strict=True):
        views.update(show_block(block.views, mapped, dense))
    return views


def _keep_while_mapped(mapped: memoryview, reference: ObjectReference | None) -> None:
    """Keep a reference until the last tensor that shows the memory has gone."""
    if reference is not None:
        weakref.finalize(mapped, _nothing, reference).atexit = False


def _nothing(_: ObjectReference) -> None:
    """The reference ends with the finalizer that has it."""


def _empty(view: TensorSpec) -> torch.Tensor:
    return torch.empty(0, dtype=DTYPES[view.dtype]).as_strided(view.shape, view.stride)
