"""Metadata of one file of a checkpoint, local or remote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.model.groups import FileTensor
from tierstore.system.files import FileStamp
from tierstore.tiers.object_store import ObjectStamp, RemoteObject


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint and its tensors. `path` is a URL if the file is `remote`."""

    path: str
    stamp: FileStamp | ObjectStamp
    header_digest: str
    tensors: tuple[FileTensor, ...]
    metadata: Mapping[str, str]
    remote: RemoteObject | None = None
