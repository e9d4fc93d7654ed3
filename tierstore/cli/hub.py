"""Models in the Hugging Face hub, by their ids: those in its cache on this machine, and others by
the headers of their files, of which ranges are read.

All of it is done by huggingface_hub, with its settings: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE,
HF_ENDPOINT, HF_TOKEN. It comes with the extra `diffusers`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierstore.cli.contents import entries
from tierstore.cli.output import Code, Failure, remark
from tierstore.cli.sources import INDEX, CheckpointSource, LocalSource
from tierstore.model.errors import TierStoreError
from tierstore.model.weight_files import SUFFIX, has_weights, is_pickle, main_file
from tierstore.progress import bar

if TYPE_CHECKING:
    from tierstore.model.groups import FileTensor

_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
HEADERS_AT_ONCE = 8


class _Unreachable(Failure):
    """Nobody could be asked."""


def may_be_id(text: str) -> bool:
    """Whether it could name a model in the hub, such as `black-forest-labs/FLUX.1-dev`.

    >>> may_be_id("gpt2"), may_be_id("org/model"), may_be_id("a/b/c"), may_be_id("./model")
    (True, True, False, False)
    """
    return _ID.fullmatch(text) is not None and not text.endswith(SUFFIX)


def source_of(name: str) -> CheckpointSource:
    """A model in the cache, if all of it is there; else in the hub. Raises Failure."""
    try:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(name)
    except ImportError as error:
        raise Failure(
            f"there is no file or directory {name}, and to look for a model of this name in the "
            "Hugging Face hub takes huggingface_hub, which is not installed",
            "Give the path of a checkpoint, or: pip install 'tierstore[diffusers]'",
        ) from error
    except HFValidationError as error:
        raise Failure(
            f"there is no file or directory {name}, and no model can have this name",
            "Give the path of a checkpoint, its URL, or its id in the Hugging Face hub.",
        ) from error
    cached = _cached(name)
    missing = [] if cached is None else list(_missing(cached))
    if cached is not None and not missing:
        return cached
    try:
        return _asked(name, missing)
    except _Unreachable as error:
        if cached is None or not _is_usable(cached):
            raise
        remark(f"{error}. In the cache, these are missing: {', '.join(missing)}.")
        return cached


# In the cache -------------------------------------------------------------------------------------


def _cached(name: str) -> LocalSource | None:
    """What was downloaded of its newest revision that is known here."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path: str | None = snapshot_download(name, local_files_only=True)
    except LocalEntryNotFoundError as error:  # it may be there, but not whole
        path = getattr(error, "snapshot_path", None)
    return None if path is None else LocalSource(path, f"{name} in the cache, {path}")


def _missing(source: LocalSource) -> Iterator[str]:
    """What a whole checkpoint would have besides: components, and shards."""
    root = source.names("")
    folders = _folders(source) if INDEX in root else [""]
    for folder in folders:
        names = source.names(folder) if folder else root
        # What has a configuration of this name is a model.
        lacks = "config.json" in names and not _has_any_weights(names)
        if not names or lacks or (not folder and not _has_any_weights(names)):
            yield folder or "weights"
        yield from _missing_shards(source, folder, main_file(names))


def _folders(source: LocalSource) -> list[str]:
    try:
        return [name for name, _ in entries(source.content(INDEX))]
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
    """Whether there is a model with all its weights: others may be left out."""
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
    def told(self) -> str:
        """Its id, and what was read."""
        return f"{self.name} in the hub, revision {self.revision[:12]}, headers only"

    @property
    def disk(self) -> str:
        """Where it would be downloaded to."""
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
            raise Failure(
                f"{self.name} in the hub lacks {lacking[0]}, which its index names",
                "Give another CHECKPOINT.",
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
        """The tensors of one file: its header is validated as that of a file on disk."""
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


def _asked(name: str, missing: Sequence[str]) -> HubSource:
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # of each small file
    why = f", as the cache lacks {', '.join(missing)}" if missing else ""
    remark(f"Asking the Hugging Face hub for {name}{why}...")
    api = HfApi()
    with _failures(name):
        info = api.model_info(name, files_metadata=True, timeout=HF_HUB_ETAG_TIMEOUT)
    siblings = info.siblings or []
    return HubSource(name, info.sha or "main", {s.rfilename: s.size or 0 for s in siblings}, api)


@contextmanager
def _failures(name: str) -> Iterator[None]:
    """What the hub answers, or what keeps it from answering, in words."""
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise _Unreachable(
            f"there is no file or directory {name}, and the model {name} is not (or not whole) in "
            "the cache of the Hugging Face hub, which may not be asked: HF_HUB_OFFLINE is set",
            "Give the path of a checkpoint, or unset HF_HUB_OFFLINE.",
        ) from error
    except errors.GatedRepoError as error:
        raise Failure(
            f"{name} is gated: the hub shows its files to those who accepted its conditions",
            f"Accept them at https://huggingface.co/{name}, then log in: `hf auth login`, or set "
            "HF_TOKEN.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise Failure(
            f"there is no file or directory {name}, and no model {name} in the Hugging Face hub "
            "that you may see",
            "Check the name. For a private model log in: `hf auth login`, or set HF_TOKEN.",
        ) from error
    except errors.SafetensorsParsingError as error:
        raise Failure(f"{name} in the hub: {error}", "Give another CHECKPOINT.") from error
    except (OSError, errors.HTTPError) as error:  # the latter is its client's, of whatever kind
        raise _Unreachable(
            f"there is no file or directory {name}, and the Hugging Face hub could not be asked "
            f"for a model of this name ({_first_line(error)})",
            "Check the network (and HF_ENDPOINT), or give the path of a checkpoint.",
            Code.UNEXPECTED,
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
