"""Read `.metadata`, the pickle of a checkpoint, without importing or calling what it names.

Each class and function that the pickle names becomes a record of its name and arguments. The
objects of `torch.distributed.checkpoint.metadata` are rebuilt from these records, field by field.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from tierstore.torch_private import stored_at

DATA = re.compile(r"__\d+_(\d+)\.distcp")  # the names of files with data


class _Record:
    """An object that a pickle would create: the name of its callable, its arguments, its state."""

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self, kind: type) -> dict[str, Any]:
        """Return the attributes of an instance of `kind`. Raises ValueError for another class."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        _check(self.name == name, f"{self.name:.80} is not a {kind.__name__}")
        return dict(self.state)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a record class for any name, without importing it."""
        return type("_Named", (_Record,), {"name": f"{module}.{name}"})


def parsed_metadata(raw: bytes) -> dcp.Metadata:
    """Return the tensors and values of a checkpoint, and the location of each.

    Raises an Exception of any kind if the pickle was not written by torch or lacks a part of a
    tensor.
    """
    fields = _Unpickler(io.BytesIO(raw)).load().fields(dcp.Metadata)
    stored = {_index(key): _place(value) for key, value in fields["storage_data"].items()}
    items = fields["state_dict_metadata"].items()
    found = {"" + name: _item(name, node, stored) for name, node in items}
    return dcp.Metadata(found, storage_data=stored)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _sizes(node: Any) -> torch.Size:
    found = torch.Size(node.arguments[0] if isinstance(node, _Record) else node)
    _check(min(found, default=0) >= 0, "a size is negative")
    return found


def _index(node: _Record) -> dcp.MetadataIndex:
    fields = node.fields(dcp.MetadataIndex)
    offset = fields.get("offset")
    return dcp.MetadataIndex(fields["fqn"], None if offset is None else _sizes(offset))


def _place(node: _Record) -> Any:
    fields = node.fields(type(stored_at("", 0, 0)))
    name = fields["relative_path"]
    _check(DATA.fullmatch(name) is not None, f"{name!r:.80} is not a checkpoint file")
    _check(not fields.get("transform_descriptors"), f"{name} is compressed or encrypted")
    return stored_at(name, *_sizes((fields["offset"], fields["length"])))


def _item(name: str, node: _Record, stored: dict[dcp.MetadataIndex, Any]) -> Any:
    if node.name.endswith(".BytesStorageMetadata"):
        _check(dcp.MetadataIndex(name) in stored, f"{name!r:.80} is missing")
        return dcp.BytesStorageMetadata()
    fields = node.fields(dcp.TensorStorageMetadata)
    dtype = getattr(torch, fields["properties"].state[0].name.removeprefix("torch."))
    _check(isinstance(dtype, torch.dtype), f"{name!r:.80} has no dtype")
    parts = [each.fields(dcp.ChunkStorageMetadata) for each in fields["chunks"]]
    chunks = [dcp.ChunkStorageMetadata(_sizes(p["offsets"]), _sizes(p["sizes"])) for p in parts]
    size, filled = _sizes(fields["size"]), {}
    for chunk in chunks:
        rows = zip(chunk.offsets, chunk.sizes, size, strict=True)
        _check(
            dcp.MetadataIndex(name, chunk.offsets) in stored
            and all(offset + length <= whole for offset, length, whole in rows),
            f"a chunk of {name!r:.80} is missing, or lies outside the tensor",
        )
        if elements := math.prod(chunk.sizes):
            filled[chunk.offsets] = elements
    _check(sum(filled.values()) == math.prod(size), f"{name!r:.80} is incomplete")
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), size, chunks)
