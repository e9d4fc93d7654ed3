"""What a checkpoint of `torch.distributed.checkpoint` says of itself: a pickle, read with care.

It is read as a description (see `checkpoint_pickles`), which may name only the classes that
metadata consist of. What is used of it is made from that, each field checked. See decision 35.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tierstore.adapters.training.checkpoint_pickles import Made, Named, Pairs, described
from tierstore.torch_private import classes_of_metadata, stored_at

LONGEST_NAME = 4096
MAX_RANK = 64  # what torch can have


def parsed_metadata(raw: bytes) -> Metadata:
    """What a file of metadata says: its tensors and values, and where each is.

    Raises ValueError or UnpicklingError for what is not built like metadata, and for tensors of
    which not every part is somewhere.
    """
    fields = _fields(described(raw, _admits), Metadata)
    stored = {_index(index): _stored(where) for index, where in _pairs(fields.get("storage_data"))}
    items = {
        _name(name): _item(_name(name), item, stored)
        for name, item in _pairs(fields.get("state_dict_metadata"))
    }
    return Metadata(items, storage_data=stored)


@functools.cache
def _names() -> frozenset[str]:
    """Classes, functions and dtypes of torch that metadata may name."""
    classes = {f"{each.__module__}.{each.__qualname__}" for each in classes_of_metadata()}
    dtypes = {str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)}
    return frozenset(classes | dtypes)


def _admits(name: str) -> bool:
    of_path = name.startswith("pathlib.") and name.endswith((".PosixPath", ".WindowsPath"))
    return of_path or name in _names()


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)


def _called(node: Any, function: Any) -> Any:
    """The arguments of a call of this class or function; None for anything else."""
    named = f"{function.__module__}.{function.__qualname__}"
    if type(node) is Made and type(node.function) is Named and node.function.name == named:
        return node.arguments
    return None


def _fields(node: Any, kind: type) -> dict[str, Any]:
    """The attributes of an object of this class, each once."""
    if _called(node, kind) != () or node.members or len(node.states) > 1:
        _refuse(f"it is no {kind.__name__}")
    return {_name(key): value for key, value in _pairs(node.states[0])} if node.states else {}


def _pairs(node: Any) -> list[tuple[Any, Any]]:
    if type(node) is not Pairs:
        _refuse("it is no dict")
    return list(zip(node.members[::2], node.members[1::2], strict=True))


def _name(node: Any) -> str:
    if type(node) is not str:
        _refuse("a name is no text")
    if len(node) > LONGEST_NAME:
        _refuse(f"a name has {len(node):,} characters")
    return str(node)


def _sizes(node: Any) -> torch.Size:
    arguments = _called(node, torch.Size)
    if type(arguments) is tuple and len(arguments) == 1:
        node = arguments[0]
    if type(node) not in (tuple, list) or len(node) > MAX_RANK or not all(map(_is_size, node)):
        _refuse("what should be sizes is none")
    return torch.Size(node)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _index(node: Any) -> MetadataIndex:
    fields = _fields(node, MetadataIndex)
    offset, number = fields.get("offset"), fields.get("index")
    if number is not None and not _is_size(number):
        _refuse("what is stored has no index")
    return MetadataIndex(
        _name(fields.get("fqn")), None if offset is None else _sizes(offset), number
    )


def _stored(node: Any) -> Any:
    fields = _fields(node, type(stored_at("", 0, 0)))
    path, offset, length = (fields.get(name) for name in ("relative_path", "offset", "length"))
    if not (type(offset) is type(length) is int and _is_size(offset) and _is_size(length)):
        _refuse("what is stored has no offset in a file")
    if fields.get("transform_descriptors"):
        _refuse("it was transformed")
    return stored_at(_name(path), offset, length)


def _item(name: str, node: Any, stored: dict[Any, Any]) -> Any:
    if _called(node, BytesStorageMetadata) is not None:
        if MetadataIndex(name) not in stored:
            _refuse(f"{name!r:.80} is nowhere")
        return BytesStorageMetadata()
    fields = _fields(node, TensorStorageMetadata)
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        _refuse(f"{name!r:.80} has no chunks")
    found = TensorStorageMetadata(
        TensorProperties(_dtype(name, fields.get("properties"))),
        _sizes(fields.get("size")),
        [_chunk(each) for each in chunks],
    )
    _check_chunks(name, found, stored)
    return found


def _dtype(name: str, node: Any) -> torch.dtype:
    """The first part of the state of a tensor's properties: that is a tuple."""
    state = node.states[0] if _called(node, TensorProperties) == () and node.states else None
    dtype = state[0] if type(state) is tuple and state else None
    found = (
        getattr(torch, dtype.name.removeprefix("torch."), None) if type(dtype) is Named else None
    )
    if not isinstance(found, torch.dtype):
        _refuse(f"{name!r:.80} has no dtype")
    return found


def _chunk(node: Any) -> ChunkStorageMetadata:
    fields = _fields(node, ChunkStorageMetadata)
    return ChunkStorageMetadata(_sizes(fields.get("offsets")), _sizes(fields.get("sizes")))


def _check_chunks(name: str, tensor: TensorStorageMetadata, stored: dict[Any, Any]) -> None:
    covered, places = 0, set()
    for chunk in tensor.chunks:
        rows = list(zip(chunk.offsets, chunk.sizes, tensor.size, strict=True))
        if any(offset + size > whole for offset, size, whole in rows):
            _refuse(f"{name!r:.80} has a chunk outside")
        if MetadataIndex(name, chunk.offsets) not in stored:
            _refuse(f"a chunk of {name!r:.80} is nowhere")
        elements = math.prod(chunk.sizes)
        covered += elements
        if elements and chunk.offsets in places:
            _refuse(f"{name!r:.80} has two chunks at one offset")
        if elements:
            places.add(chunk.offsets)
    if covered != math.prod(tensor.size):
        _refuse(f"{name!r:.80} is not all there")
