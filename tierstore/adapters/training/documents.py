"""TRAINING, the document of a saved training: whatever is part of its state and is no tensor.

JSON, sealed by a checksum. Values that JSON does not have are dicts of one item that says what they
are: {"tensor": name}, {"tuple": [...]}, and so also {"dict": {...}}; {"items": [[key, value], ...]}
where keys are no text, {"counter": [[key, value], ...]} for a Counter. A document that has its
checksum may still be none that `save_training` writes: it is looked at as a whole before any of it
is used.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tierstore.adapters.training.saved_files import CREATE, MODEL, OPTIMIZER, TRAINING
from tierstore.model.errors import CorruptDataError, TierStoreError
from tierstore.model.header import digest
from tierstore.system.files import write_all
from tierstore.system.views import blocks_of

FORMAT = 1
MAX_TRAINING_BYTES = 1 << 30

KINDS = {"tensor": str, "tuple": list, "dict": dict, "items": list, "counter": list}
"""What a dict of one item says that it is, and of what type that is in JSON."""


# Values -------------------------------------------------------------------------------------------


def encoded(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON can hold it. Tensors in it go to `tensors`, under names from `name` on."""
    if isinstance(value, torch.Tensor):
        if name in tensors:
            raise ValueError(f"two tensors would be saved as {name!r}: rename a parameter")
        blocks_of({name: value})  # raises TypeError for what is no plain tensor
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, (list, tuple)):
        found = [encoded(each, f"{name}.{i}", tensors) for i, each in enumerate(value)]
        return found if isinstance(value, list) else {"tuple": found}
    if isinstance(value, Mapping):
        return _encoded_mapping(value, name, tensors)
    if _is_plain(value):
        return value
    raise TypeError(
        f"{name!r} is a {type(value).__name__}, which cannot be saved: make it a tensor, a number "
        "or text, or leave it out and pass what it takes to make it again as `extra`"
    )


def _encoded_mapping(
    value: Mapping[Any, Any], name: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    if all(isinstance(key, str) for key in value) and not isinstance(value, Counter):
        return {"dict": {k: encoded(v, f"{name}.{k}", tensors) for k, v in value.items()}}
    for key in value:
        if not _is_plain(key):
            raise TypeError(f"{name!r} is a dict with the key {key!r:.80}: it cannot be saved")
    items = [[k, encoded(v, f"{name}.{i}", tensors)] for i, (k, v) in enumerate(value.items())]
    return {"counter" if isinstance(value, Counter) else "items": items}


def decoded(value: Any, name: str, tensor_of: Callable[[str], Any]) -> Any:
    """What was encoded under `name`; `tensor_of` gives the tensors.

    Raises ValueError for what `encoded` does not give: tensors have names that tell their place.
    """
    if isinstance(value, list):
        return [decoded(each, f"{name}.{i}", tensor_of) for i, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    _expect(len(value) == 1, f"{name!r:.80} has {len(value)} kinds")
    [(kind, inner)] = value.items()
    _expect(type(inner) is KINDS.get(kind), f"{name!r:.80} is no {kind!r:.80}")
    if kind == "tensor":
        _expect(inner == name, f"{name!r:.80} has the tensor of another place")
        return tensor_of(inner)
    if kind == "tuple":
        return tuple(decoded(inner, name, tensor_of))
    if kind == "dict":
        return {key: decoded(each, f"{name}.{key}", tensor_of) for key, each in inner.items()}
    for item in inner:
        pair = isinstance(item, list) and len(item) == 2 and _is_plain(item[0])
        _expect(pair, f"{name!r:.80} has what is no item")
    items = {k: decoded(each, f"{name}.{i}", tensor_of) for i, (k, each) in enumerate(inner)}
    return Counter(items) if kind == "counter" else items


def tensors_in(values: Mapping[str, Any]) -> set[str]:
    """The names of the tensors in values that were encoded under these names."""
    found: set[str] = set()
    for name, value in values.items():
        decoded(value, name, found.add)
    return found


def _is_plain(value: Any) -> bool:
    """Whether JSON has it as it is."""
    return value is None or isinstance(value, (bool, int, float, str))


# The file -----------------------------------------------------------------------------------------


def as_json(document: Any) -> bytes:
    """As it is written. Raises TypeError for what JSON does not have."""
    return json.dumps(document, separators=(",", ":")).encode()


def _sealed(body: bytes) -> bytes:
    """A JSON object that begins with the checksum of its rest."""
    return b'{"xxh3":"' + digest(body).encode() + b'",\n' + body[1:] + b"\n"


def write_document(folder: int, document: dict[str, Any]) -> None:
    """Write TRAINING and sync it."""
    descriptor = os.open(TRAINING, CREATE, 0o666, dir_fd=folder)
    try:
        write_all(descriptor, memoryview(_sealed(as_json(document))), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_document(descriptor: int, path: str) -> Any:
    """What TRAINING says. Raises CorruptDataError, or TierStoreError for a newer format."""
    with open(descriptor, "rb", closefd=False) as file:
        raw = file.read(MAX_TRAINING_BYTES)
    _, _, rest = raw.partition(b"\n")
    body = b"{" + rest[:-1]
    if raw != _sealed(body):
        raise CorruptDataError(
            f"{path} does not match its checksum: it was damaged or edited; restore it, or load "
            "another save",
            path=path,
            found=digest(body),
        )
    try:
        document = json.loads(body)
        found = document.get("format")
        if found == FORMAT:
            _check(document)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(
            f"{path} is nothing that save_training writes ({error}): restore it, or load another "
            "save",
            path=path,
        ) from error
    if found != FORMAT:
        raise TierStoreError(
            f"{path} says format {found!r:.20}, this version of tierstore knows "
            f"{FORMAT}: upgrade tierstore, or save with this version"
        )
    return document


# What it has to look like -------------------------------------------------------------------------


def _check(document: dict[str, Any]) -> None:
    """Raise ValueError for what is not built like what is saved."""
    files = _dict("files", document.get("files"), {MODEL, OPTIMIZER})
    tensors_in(_dict("model", document.get("model")))
    _expect("extra" in document, "extra is missing")
    _expect(not tensors_in({"extra": document["extra"]}), "extra has a tensor")
    optimizer = document.get("optimizer")
    expected = {MODEL} if optimizer is None else {MODEL, OPTIMIZER}
    _expect(files.keys() == expected, f"its files are not {sorted(expected)}")
    for name, file in files.items():
        _dict(name, file, {"bytes", "header"})
        _expect(type(file.get("bytes")) is int, f"{name} has no size")
        _expect(isinstance(file.get("header"), str), f"{name} has no checksum")
    if optimizer is not None:
        _check_optimizer(_dict("optimizer", optimizer))


def _check_optimizer(saved: dict[str, Any]) -> None:
    _expect({"class", "master_dtype"} <= saved.keys(), "the optimizer's class is missing")
    _expect(isinstance(saved.get("param_groups"), list), "param_groups are no list")
    members: set[str] = set()
    for group in saved["param_groups"]:
        names = _dict("param_groups", group, {"params", "options"}).get("params")
        _expect(
            isinstance(names, list) and all(isinstance(name, str) for name in names),
            "the parameters of a group are no list of names",
        )
        members.update(names or ())
    state = _dict("state", saved.get("state"))
    _expect(state.keys() <= members, "there is state of what is in no group")
    for name, value in (*options_of(saved).items(), *state.items()):
        _expect(isinstance(value, dict) and "dict" in value, f"{name!r:.80} is no dict")
    tensors_of_optimizer(saved)


def options_of(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """What each group of a saved optimizer says besides its parameters, by the name that it was
    encoded under."""
    groups = optimizer["param_groups"]
    return {f"param_groups.{i}": group.get("options") for i, group in enumerate(groups)}


def tensors_of_optimizer(optimizer: Mapping[str, Any]) -> set[str]:
    """The names of the tensors of a saved optimizer."""
    return tensors_in(options_of(optimizer)) | tensors_in(optimizer["state"])


def _dict(what: str, found: Any, keys: set[str] | None = None) -> dict[str, Any]:
    _expect(isinstance(found, dict), f"{what} is no object")
    _expect(keys is None or found.keys() <= keys, f"{what} has other members")
    return dict(found)


def _expect(fulfilled: bool, otherwise: str) -> None:
    if not fulfilled:
        raise ValueError(otherwise)
