"""Models in the Hugging Face hub, by their ids: from its cache on this machine, or from the headers
of their files, of which ranges are read.

All requests are made by huggingface_hub, with its settings: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE,
HF_ENDPOINT, HF_TOKEN. It comes with the extra `diffusers`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierstore.errors import TierStoreError, TransferError
from tierstore.forecasting.sources import (
    INDEX,
    CheckpointError,
    CheckpointSource,
    LocalSource,
    components,
)
from tierstore.model.weight_files import SUFFIX, has_weights, is_pickle, main_file
from tierstore.progress import bar

if TYPE_CHECKING:
    from tierstore.model.groups import FileTensor

_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
HEADERS_AT_ONCE = 8


class _OfflineError(CheckpointError):
    """The hub may not be asked."""


class _UnreachableError(_OfflineError, TransferError):
    """The hub does not answer."""


def may_be_id(text: str) -> bool:
    """Whether it could name a model in the hub, such as `black-forest-labs/FLUX.1-dev`.

    >>> may_be_id("gpt2"), may_be_id("org/model"), may_be_id("a/b/c"), may_be_id("./model")
    (True, True, False, False)
    """
    return _ID.fullmatch(text) is not None and not text.endswith(SUFFIX)


def source_of(name: str, report: Callable[[str], None]) -> CheckpointSource:
    """Find a model in the cache, if all of it is there; else in the hub. Raises TierStoreError."""
    try:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(name)
    except ImportError as error:
        raise CheckpointError(
            f"there is no file or directory {name}, and to look for a model of this name in the "
            "Hugging Face hub takes huggingface_hub, which is not installed: give the path of a "
            "checkpoint, or: pip install 'tierstore[diffusers]'"
        ) from error
    except HFValidationError as error:
        raise CheckpointError(
            f"there is no file or directory {name}, and no model can have this name: give the path "
            "of a checkpoint, its URL, or its id in the Hugging Face hub"
        ) from error
    cached = _cached(name)
    missing = [] if cached is None else list(_missing(cached))
    if cached is not None and not missing:
        return cached
    why = f", as the cache lacks {', '.join(missing)}" if missing else ""
    report(f"Asking the Hugging Face hub for {name}{why}...")
    try:
        return _ask(name)
    except _OfflineError as error:
        if cached is None or not _is_usable(cached):
            raise
        report(f"{error}. In the cache, these are missing: {', '.join(missing)}.")
        return cached


# In the cache -------------------------------------------------------------------------------------


def _cached(name: str) -> LocalSource | None:
    """Find the newest downloaded revision, whole or not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path: str | None = snapshot_download(name, local_files_only=True)
    except LocalEntryNotFoundError as error:  # it may be there, but not whole
        path = getattr(error, "snapshot_path", None)
    return None if path is None else LocalSource(path, f"{name} in the cache, {path}")


def _missing(source: LocalSource) -> Iterator[str]:
    """List the components and shards that a whole checkpoint would have in addition."""
    root = source.names("")
    folders = _folders(source) if INDEX in root else [""]
    for folder in folders:
        names = source.names(folder) if folder else root
        # A folder with this file is a model.
        lacks = "config.json" in names and not _has_any_weights(names)
        if not names or lacks or (not folder and not _has_any_weights(names)):
            yield folder or "weights"
        yield from _missing_shards(source, folder, main_file(names))


def _folders(source: LocalSource) -> list[str]:
    try:
        return [name for name, _ in components(source.content(INDEX))]
    except ValueError:
        return []


def _has_any_weights(names: Sequence[str]) -> bool:
    return has_weights(names) or any(map(is_pickle, names))


def _missing_shards(source: LocalSource, folder: str, name: str | None) -> list[str]:
    from tierstore.engine.checkpoints import checkpoint_files

    if name is None or not name.endswith(".json"):
        return []
    try:
        files = checkpoint_files(os.path.join(source.path, folder, name))
    except (TierStoreError, ValueError):  # it is damaged
        return [name]
    return [os.path.basename(path) for path in files if not os.path.exists(path)]


def _is_usable(source: LocalSource) -> bool:
    """Whether there is a model with weights: others may be missing."""
    return INDEX in source.names("") and any(
        has_weights(source.names(folder)) for folder in _folders(source)
    )


# In the hub ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubSource:
    """A revision of a model in the hub; `sizes` are the bytes of all its files."""

    name: str
    revision: str
    sizes: dict[str, int]
    _api: Any = field(repr=False)

    @property
    def described(self) -> str:
        """Its id and revision."""
        return f"{self.name} in the hub, revision {self.revision[:12]}, headers only"

    @property
    def disk(self) -> str:
        """The directory that it would be downloaded to."""
        from huggingface_hub.constants import HF_HUB_CACHE

        path: str = os.path.abspath(HF_HUB_CACHE)
        while not os.path.exists(path):
            path = os.path.dirname(path)
        return path

    def names(self, folder: str) -> list[str]:
        """See `CheckpointSource`."""
        return [os.path.basename(path) for path in self.sizes if os.path.dirname(path) == folder]

    def content(self, name: str) -> bytes:
        """See `CheckpointSource`."""
        with _failures(self.name), tempfile.TemporaryDirectory() as directory:
            place = self._api.hf_hub_download(
                self.name,
                name,
                revision=self.revision,
                cache_dir=directory,  # nothing is left in the user's, and nothing taken from there
            )
            with open(place, "rb") as file:
                return file.read()

    def tensors(self, folder: str, name: str | None) -> list[FileTensor]:
        """See `CheckpointSource`."""
        paths = [os.path.join(folder, file) for file in self._files(folder, name)]
        lacking = [path for path in paths if path not in self.sizes]
        if lacking:
            raise CheckpointError(
                f"{self.name} in the hub lacks {lacking[0]}, which its index names: give another "
                "CHECKPOINT"
            )
        with _failures(self.name), ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
            headers = pool.map(self._header, paths)
            read = list(bar(headers, f"Reading headers of {folder or self.name}", "files"))
        found = [tensor for tensors in read for tensor in tensors]
        if len({tensor.name for tensor in found}) < len(found):
            raise ValueError(f"{folder or 'its root'} has files with the same tensors")
        return found

    def _files(self, folder: str, name: str | None) -> Iterable[str]:
        from tierstore.engine.checkpoints import indexed

        if name is None:
            return [file for file in self.names(folder) if file.endswith(SUFFIX)]
        if not name.endswith(".json"):
            return [name]
        path = os.path.join(folder, name)
        return indexed(self.content(path), path)

    def _header(self, path: str) -> list[FileTensor]:
        """Read the tensors of one file, whose header is validated like that of a file on disk."""
        from tierstore.model.groups import Extent, FileTensor
        from tierstore.model.header import parse_header

        told = self._api.parse_safetensors_file_metadata(self.name, path, revision=self.revision)
        tensors = {
            name: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
            for name, info in told.tensors.items()
        }
        raw = json.dumps(tensors).encode()
        data = max((info.data_offsets[1] for info in told.tensors.values()), default=0)
        entries_of_file = parse_header(raw, 8 + len(raw) + data, path).entries
        start = max(self.sizes[path] - data, 0)  # the data ends where the file ends
        return [
            FileTensor(e.name, e.dtype, e.shape, Extent(path, start + e.begin, e.end - e.begin))
            for e in entries_of_file
        ]


def _ask(name: str) -> HubSource:
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # of each small file
    api = HfApi()
    with _failures(name):
        info = api.model_info(name, files_metadata=True, timeout=HF_HUB_ETAG_TIMEOUT)
    siblings = info.siblings or []
    return HubSource(name, info.sha or "main", {s.rfilename: s.size or 0 for s in siblings}, api)


@contextmanager
def _failures(name: str) -> Iterator[None]:
    """Raise errors of the hub as TierStoreError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise _OfflineError(
            f"there is no file or directory {name}, and the model {name} is not (or not whole) in "
            "the cache of the Hugging Face hub, which may not be asked, as HF_HUB_OFFLINE is set: "
            "give the path of a checkpoint, or unset it"
        ) from error
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated: accept its conditions at https://huggingface.co/{name}, then log "
            "in: `hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no file or directory {name}, and no model {name} in the Hugging Face hub "
            "that you may see: check the name; for a private model log in: `hf auth login`, or set "
            "HF_TOKEN"
        ) from error
    except errors.SafetensorsParsingError as error:
        raise CheckpointError(f"{name} in the hub: {error}; give another CHECKPOINT") from error
    except (OSError, errors.HTTPError) as error:  # the latter is its client's, of whatever kind
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _UnreachableError(
            f"there is no file or directory {name}, and the Hugging Face hub could not be asked "
            f"for a model of this name ({why}): check the network (and HF_ENDPOINT), or give the "
            "path of a checkpoint"
        ) from error
