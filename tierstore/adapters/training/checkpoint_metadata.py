"""What a checkpoint of `torch.distributed.checkpoint` says of itself: a pickle, read with care.

It names no class but those that metadata consist of, so that nothing in it can run code; and what
was made of it is looked at as a whole before any of it is used. See decision 35.
"""

from __future__ import annotations

import functools
import io
import math
import pathlib
import pickle
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from tierstore.torch_private import classes_of_metadata


def parsed_metadata(raw: bytes) -> Metadata:
    """What a file of metadata says. Raises whatever comes for what torch has not written."""
    metadata = _MetadataUnpickler(io.BytesIO(raw)).load()
    _check_metadata(metadata)
    return metadata  # type: ignore[no-any-return]


@functools.cache
def _admitted() -> dict[tuple[str, str], Any]:
    return {(each.__module__, each.__qualname__): each for each in classes_of_metadata()}


# Python's own in Python: that in C takes as much memory as a pickle says that it needs.
_Unpickler: Any = pickle._Unpickler


class _MetadataUnpickler(_Unpickler):
    """Makes what metadata consist of, and nothing else."""

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePosixPath  # where it was saved: nothing is done with that
        if (module, name) not in _admitted():
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _admitted()[module, name]

    def load_build(self) -> None:
        """Give an object its attributes: an object, and no class, which others use as well."""
        if type(self.stack[-2]) not in _admitted().values():
            raise pickle.UnpicklingError("it gives attributes to what has none")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def _check_metadata(metadata: Any) -> None:
    """Raise ValueError, or whatever comes, for what is not built like metadata, and for tensors of
    which not every part is somewhere."""
    _expect(type(metadata) is Metadata, "it is none of metadata")
    stored = metadata.storage_data
    _expect(isinstance(stored, dict) and isinstance(metadata.state_dict_metadata, dict), "no dict")
    for index, where in stored.items():
        _expect(type(index) is MetadataIndex, "what is stored has no index")
        numbers = where.offset, where.length
        _expect(isinstance(where.relative_path, str) and _are_sizes(numbers), "no offset in a file")
        _expect(not getattr(where, "transform_descriptors", None), "it was transformed")
    for name, of_item in metadata.state_dict_metadata.items():
        _expect(isinstance(name, str), "a name is no text")
        if isinstance(of_item, TensorStorageMetadata):
            _check_chunks(name, of_item, stored)
        else:
            _expect(isinstance(of_item, BytesStorageMetadata), f"{name!r:.80} is of no kind")
            _expect(MetadataIndex(name) in stored, f"{name!r:.80} is nowhere")


def _check_chunks(name: str, tensor: TensorStorageMetadata, stored: dict[Any, Any]) -> None:
    _expect(isinstance(tensor.properties.dtype, torch.dtype), f"{name!r:.80} has no dtype")
    _expect(_are_sizes(tensor.size), f"{name!r:.80} has no shape")
    covered, places = 0, set()
    for chunk in tensor.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        rows = list(zip(offsets, sizes, tensor.size, strict=True))
        inside = all(offset + size <= whole for offset, size, whole in rows)
        _expect(_are_sizes((*offsets, *sizes)) and inside, f"{name!r:.80} has a chunk outside")
        _expect(MetadataIndex(name, chunk.offsets) in stored, f"a chunk of {name!r:.80} is nowhere")
        covered += math.prod(sizes)
        if math.prod(sizes):
            _expect(offsets not in places, f"{name!r:.80} has two chunks at one offset")
            places.add(offsets)
    _expect(covered == math.prod(tensor.size), f"{name!r:.80} is not all there")


def _are_sizes(values: Any) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _expect(fulfilled: bool, otherwise: str) -> None:
    if not fulfilled:
        raise ValueError(otherwise)
