"""Models in the Hugging Face hub, by id.

They are read from the cache on this machine, or from the hub by fetching only file headers. All
requests are made by huggingface_hub, with its settings: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE,
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
    """Offline mode forbids queries of the hub."""


class _UnreachableError(_OfflineError, TransferError):
    """The hub cannot be reached."""


def may_be_id(text: str) -> bool:
    """Return whether a text could be the id of a model, such as `black-forest-labs/FLUX.1-dev`.

    >>> may_be_id("gpt2"), may_be_id("org/model"), may_be_id("a/b/c"), may_be_id("./model")
    (True, True, False, False)
    """
    return _ID.fullmatch(text) is not None and not text.endswith(SUFFIX)


def source_of(name: str, report: Callable[[str], None]) -> CheckpointSource:
    """Find a model in the cache if it is complete there, else in the hub. Raises TierStoreError."""
    try:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(name)
    except ImportError as error:
        raise CheckpointError(
            f"there is no file or directory {name}, and searching the Hugging Face hub for a model "
            "of this name requires huggingface_hub, which is not installed: give the path of a "
            "checkpoint, or: pip install 'tierstore[diffusers]'"
        ) from error
    except HFValidationError as error:
        raise CheckpointError(
            f"there is no file or directory {name}, and it is not a valid id of a model: give the "
            "path of a checkpoint, its URL, or its id in the Hugging Face hub"
        ) from error
    cached = _cached(name)
    missing = [] if cached is None else list(_missing(cached))
    if cached is not None and not missing:
        return cached
    why = f", because the cache lacks {', '.join(missing)}" if missing else ""
    report(f"Querying the Hugging Face hub for {name}{why}...")
    try:
        return _query_hub(name)
    except _OfflineError as error:
        if cached is None or not _is_usable(cached):
            raise
        report(f"{error}. Missing from the cache: {', '.join(missing)}.")
        return cached


# In the cache -------------------------------------------------------------------------------------


def _cached(name: str) -> LocalSource | None:
    """Find the newest downloaded revision, complete or not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path: str | None = snapshot_download(name, local_files_only=True)
    except LocalEntryNotFoundError as error:  # it may be there, but incomplete
        path = getattr(error, "snapshot_path", None)
    return None if path is None else LocalSource(path, f"{name} in the cache, {path}")


def _missing(source: LocalSource) -> Iterator[str]:
    """Yield the components and shards that are missing from a checkpoint."""
    root = source.names("")
    folders = _folders(source) if INDEX in root else [""]
    for folder in folders:
        names = source.names(folder) if folder else root
        # A folder with a config.json is a model.
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
    """Return whether any model of the pipeline has weights."""
    return INDEX in source.names("") and any(
        has_weights(source.names(folder)) for folder in _folders(source)
    )


# In the hub ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubSource:
    """A revision of a model in the hub; `sizes` has the bytes of its files by path."""

    name: str
    revision: str
    sizes: dict[str, int]
    _api: Any = field(repr=False)

    @property
    def described(self) -> str:
        """Id and revision, for messages."""
        return f"{self.name} in the hub, revision {self.revision[:12]}, headers only"

    @property
    def disk(self) -> str:
        """The directory to which it would be downloaded."""
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
                cache_dir=directory,  # do not touch the user's cache
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
        """Read the tensors of one file. Its header is validated like that of a local file."""
        from tierstore.model.groups import Extent, FileTensor
        from tierstore.model.header import parse_header

        metadata = self._api.parse_safetensors_file_metadata(
            self.name, path, revision=self.revision
        )
        tensors = {
            name: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
            for name, info in metadata.tensors.items()
        }
        raw = json.dumps(tensors).encode()
        data = max((info.data_offsets[1] for info in metadata.tensors.values()), default=0)
        entries_of_file = parse_header(raw, 8 + len(raw) + data, path).entries
        start = max(self.sizes[path] - data, 0)  # the data ends where the file ends
        return [
            FileTensor(e.name, e.dtype, e.shape, Extent(path, start + e.begin, e.end - e.begin))
            for e in entries_of_file
        ]


def _query_hub(name: str) -> HubSource:
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # one for each small file
    api = HfApi()
    with _failures(name):
        info = api.model_info(name, files_metadata=True, timeout=HF_HUB_ETAG_TIMEOUT)
    siblings = info.siblings or []
    return HubSource(name, info.sha or "main", {s.rfilename: s.size or 0 for s in siblings}, api)


@contextmanager
def _failures(name: str) -> Iterator[None]:
    """Convert errors of the hub to TierStoreError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise _OfflineError(
            f"there is no file or directory {name}, the Hugging Face cache has no complete model "
            f"{name}, and HF_HUB_OFFLINE forbids querying the hub: give the path of a checkpoint, "
            "or unset HF_HUB_OFFLINE"
        ) from error
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated: accept its conditions at https://huggingface.co/{name}, then log in "
            "with `hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no file or directory {name}, and no model {name} in the Hugging Face hub "
            "that you may access: check the name; for a private model, log in with "
            "`hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.SafetensorsParsingError as error:
        raise CheckpointError(f"{name} in the hub: {error}; give another CHECKPOINT") from error
    except (OSError, errors.HTTPError) as error:  # HTTPError: from the HTTP client in use
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _UnreachableError(
            f"there is no file or directory {name}, and the Hugging Face hub could not be queried "
            f"for a model of this name ({why}): check the network (and HF_ENDPOINT), or give the "
            "path of a checkpoint"
        ) from error
