"""Sources of checkpoints to plan: on disk, in an object store, or in the Hugging Face hub.

Only the headers of their files are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tierstore.errors import TierStoreError
from tierstore.model.weight_files import (
    INDEX_SUFFIX,
    SUFFIX,
    USUAL_NAMES,
    has_weights,
    is_pickle,
    main_file,
    variants_among,
)
from tierstore.tiers.object_store import is_url

if TYPE_CHECKING:
    from tierstore.model.groups import FileTensor

INDEX = "model_index.json"
"""The index of a diffusers pipeline. It names the components, each of which has a folder."""
LARGEST_INDEX = 1 << 20
LOOPS = ("transformer", "unet", "prior")
"""Prefixes of the names of components that run in every step of a pipeline."""

_AUTOENCODER_BLOCKS = ("quant_conv", "post_quant_conv", "encoder", "decoder")


class CheckpointError(TierStoreError):
    """The checkpoint, or a requested part of it, does not exist. The message says what to do."""


class CheckpointSource(Protocol):
    """A checkpoint at some location. Folders are named relative to its root, which is `""`."""

    @property
    def described(self) -> str:
        """Its location, for messages; empty for a path."""

    @property
    def disk(self) -> str | None:
        """A path on the disk from which it is (or will be) read; None if unknown."""

    def names(self, folder: str) -> Sequence[str]:
        """Return the names of the files in a folder; none if it does not exist."""

    def content(self, name: str) -> bytes:
        """Read a small file in the root."""

    def tensors(self, folder: str, name: str | None) -> list[FileTensor]:
        """Read the headers of a file, of the files in an index, or (None) of all files.

        Raises TierStoreError, OSError or ValueError.
        """


def source_of(checkpoint: str, report: Callable[[str], None]) -> CheckpointSource:
    """Find a checkpoint by its path, its URL or its id in the hub.

    `report` is called with a message before the hub is queried. Raises TierStoreError.
    """
    if is_url(checkpoint):
        return UrlSource(checkpoint.rstrip("/"))
    if os.path.lexists(checkpoint):
        return LocalSource(checkpoint)
    from tierstore.forecasting import hub  # only for ids

    if hub.may_be_id(checkpoint):
        return hub.source_of(checkpoint, report)
    raise CheckpointError(
        f"there is no file or directory {checkpoint}: give the path of a checkpoint, its URL, or "
        "its id in the Hugging Face hub"
    )


@dataclass(frozen=True)
class LocalSource:
    """A file or a directory."""

    path: str
    described: str = ""

    @property
    def disk(self) -> str:
        """The path itself."""
        return self.path

    def names(self, folder: str) -> list[str]:
        """See `CheckpointSource`."""
        place = os.path.join(self.path, folder)
        # Unlike glob, listdir raises an error without permission.
        return os.listdir(place) if os.path.isdir(place) else []

    def content(self, name: str) -> bytes:
        """See `CheckpointSource`."""
        with open(os.path.join(self.path, name), "rb") as file:
            return file.read(LARGEST_INDEX)

    def tensors(self, folder: str, name: str | None) -> list[FileTensor]:
        """See `CheckpointSource`."""
        return _read(os.path.join(self.path, *filter(None, (folder, name))))


@dataclass(frozen=True)
class UrlSource:
    """A file or a directory in an object store."""

    url: str
    disk: None = None

    @property
    def described(self) -> str:
        """The URL, for messages."""
        return f"{self.url}, headers only"

    def names(self, folder: str) -> list[str]:
        """See `CheckpointSource`. Web servers cannot list files, so the usual names are tried."""
        if self.url.endswith((SUFFIX, ".json")):
            return []
        from tierstore.tiers.object_store import RemoteDirectory

        directory = RemoteDirectory(self._at(folder))
        names = directory.names()
        if names is None:
            usual = [name + suffix for name in USUAL_NAMES for suffix in (INDEX_SUFFIX, SUFFIX)]
            tried = usual if folder else [INDEX, *usual]
            names = [name for name in tried if directory.find(name) is not None]
        return names

    def content(self, name: str) -> bytes:
        """See `CheckpointSource`."""
        from tierstore.tiers.object_store import RemoteDirectory

        found = RemoteDirectory(self.url).find(name)
        if found is None:
            raise FileNotFoundError(f"{self._at(name)} no longer exists")
        return bytes(found.read(0, min(found.stamp.size, LARGEST_INDEX)))

    def tensors(self, folder: str, name: str | None) -> list[FileTensor]:
        """See `CheckpointSource`."""
        return _read(self._at(*filter(None, (folder, name))))

    def _at(self, *parts: str) -> str:
        return "/".join([self.url, *filter(None, parts)])


def _read(checkpoint: str) -> list[FileTensor]:
    from tierstore.engine.checkpoints import read_checkpoint

    return [tensor for file in read_checkpoint(checkpoint) for tensor in file.tensors]


# Models -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model of a checkpoint. Its name is empty if it is the only one.

    `blocks` are names of modules that count as blocks.
    """

    name: str
    tensors: tuple[FileTensor, ...]
    blocks: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors in the files."""
        return sum(tensor.extent.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class FoundModels:
    """The models of a checkpoint, and the components that only have `pickles`."""

    models: tuple[Model, ...]
    pickles: tuple[str, ...]


def models_of(
    source: CheckpointSource, typed: str, only: str | None, variant: str | None
) -> FoundModels:
    """Read the models of a checkpoint, or `only` the one of that name.

    Uses the files that `from_pretrained` would use (see `main_file`). Error messages name the
    checkpoint as `typed`. Raises TierStoreError, OSError or ValueError.
    """
    root = source.names("")
    folders = dict(components(source.content(INDEX))) if INDEX in root else {"": ""}
    names = {folder: source.names(folder) if folder else root for folder in folders}
    is_model = {f: not f or has_weights(names[f]) for f in folders}
    if only is not None and not (only and is_model.get(only)):
        there = ", ".join(filter(None, (f for f in folders if is_model[f])))
        raise CheckpointError(
            f"{typed} has no component {only!r} with safetensors files: "
            + (f"it has {there}" if there else "it has no components, so omit --component")
        )
    wanted = [f for f in folders if is_model[f] and only in (None, f)]
    variants = sorted({each for folder in wanted for each in variants_among(names[folder])})
    if variant is not None and variant not in variants:
        there = ", ".join(variants) or "none"
        raise CheckpointError(f"{typed} has no variant {variant!r}: it has {there}")
    models = [
        Model(
            folder,
            tuple(source.tensors(folder, main_file(names[folder], variant))),
            _AUTOENCODER_BLOCKS if folders[folder].startswith("AutoencoderKL") else (),
        )
        for folder in wanted
    ]
    pickles = [f for f in folders if not has_weights(names[f]) and any(map(is_pickle, names[f]))]
    if not any(model.nbytes for model in models):
        found = ", only torch pickles, which cannot be read" if pickles else ""
        raise CheckpointError(
            f"{typed} has no weights in safetensors files{found}: give another CHECKPOINT, or "
            "convert it with safetensors"
        )
    return FoundModels(tuple(models), tuple(pickles if only is None else ()))


def components(raw: bytes) -> Iterator[tuple[str, str]]:
    """Parse the index of a pipeline. Yields components and their classes. Raises ValueError."""
    try:
        document = json.loads(raw)
    except RecursionError as error:
        raise ValueError(f"{INDEX} is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"{INDEX} is not a JSON object")
    for name, value in document.items():
        kind = value[-1] if isinstance(value, list) and value else None
        if isinstance(kind, str) and os.path.basename(name) == name and name not in ("", ".", ".."):
            yield name, kind


def looping_models(models: Iterable[Model]) -> list[Model]:
    """Return the models that run in every step: those with usual names, or else the largest."""
    filled = [model for model in models if model.nbytes]
    usual = [model for model in filled if model.name.startswith(LOOPS)]
    return usual or [max(filled, key=lambda model: model.nbytes)]
