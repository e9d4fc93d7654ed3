"""Where a checkpoint lies that is planned: on disk, in an object store, or in the Hugging Face hub.

Whatever it is, it has folders with files, of which the headers are read and no weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tierstore.cli.output import Failure
from tierstore.model.weight_files import INDEX_SUFFIX, SUFFIX, USUAL_NAMES
from tierstore.tiers.object_store import is_url

if TYPE_CHECKING:
    from tierstore.model.groups import FileTensor

INDEX = "model_index.json"
"""Of a diffusers pipeline: it names the components, and each has a folder."""
LARGEST_INDEX = 1 << 20


class CheckpointSource(Protocol):
    """A checkpoint, wherever it lies. Folders are named from its root on, which is `""`."""

    @property
    def told(self) -> str:
        """Where it lies, for people."""

    @property
    def disk(self) -> str | None:
        """A path on the disk that it is read from, or will be; None if that is not known."""

    def names(self, folder: str) -> Sequence[str]:
        """The files right in a folder; none if there is no such folder."""

    def content(self, name: str) -> bytes:
        """What is in a small file of the root."""

    def tensors(self, folder: str, name: str | None) -> list[FileTensor]:
        """What the headers of a file list, or of all files of an index; None: of all there are.

        Raises TierStoreError, OSError or ValueError.
        """


def source_of(checkpoint: str) -> CheckpointSource:
    """Where what was typed lies. Raises Failure if it is nowhere."""
    if is_url(checkpoint):
        return UrlSource(checkpoint.rstrip("/"))
    if os.path.lexists(checkpoint):
        return LocalSource(checkpoint)
    from tierstore.cli import hub  # what it brings is for ids only

    if hub.may_be_id(checkpoint):
        return hub.source_of(checkpoint)
    raise Failure(
        f"there is no file or directory {checkpoint}",
        "Give the path of a checkpoint, its URL, or its id in the Hugging Face hub.",
    )


@dataclass(frozen=True)
class LocalSource:
    """A file or a directory. `told` says which one, if it is not simply its path."""

    path: str
    told: str = ""

    @property
    def disk(self) -> str:
        """Where it lies itself."""
        return self.path

    def names(self, folder: str) -> list[str]:
        """See `CheckpointSource`."""
        place = os.path.join(self.path, folder)
        # Unlike glob, listdir tells that it may not look.
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
    """A file, or what would be a directory, in an object store."""

    url: str
    disk: None = None

    @property
    def told(self) -> str:
        """Its URL, and that it stays there."""
        return f"{self.url}, headers only"

    def names(self, folder: str) -> list[str]:
        """See `CheckpointSource`. A web server is asked for the names that are usual."""
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
            raise FileNotFoundError(f"{self._at(name)} is gone")
        return bytes(found.read(0, min(found.stamp.size, LARGEST_INDEX)))

    def tensors(self, folder: str, name: str | None) -> list[FileTensor]:
        """See `CheckpointSource`."""
        return _read(self._at(*filter(None, (folder, name))))

    def _at(self, *parts: str) -> str:
        return "/".join([self.url, *filter(None, parts)])


def _read(checkpoint: str) -> list[FileTensor]:
    from tierstore.engine.checkpoints import read_checkpoint

    return [tensor for file in read_checkpoint(checkpoint) for tensor in file.tensors]
