"""Files out of an object store, for libraries that open files.

What lies under a URL is downloaded to `mirrors/` in the store's directory, with the names that it
has there, and is a checkpoint on disk from then on: read in place, counted in no budget. The next
start asks the object store for its list, with one request, and downloads what has changed since.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tierstore.engine.remote_groups import all_done
from tierstore.model.errors import StaleCheckpointError, TransferError
from tierstore.model.weight_files import variant_of
from tierstore.model.words import size
from tierstore.progress import byte_bar
from tierstore.system.files import parts, sync_names, transfer_errors, write_all
from tierstore.tiers.object_store import ObjectStamp, RemoteDirectory, RemoteObject
from tierstore.tiers.remote_tier import IN_FLIGHT, PIECE

MIRRORS = "mirrors"
"""The directory, in a store's, of all mirrors."""

LIST = ".objects.json"
"""What the files of a mirror were made of: stamps of objects, by name."""

OTHER_FORMATS = (
    *(".bin", ".ckpt", ".pkl", ".pt", ".pth", ".h5", ".msgpack", ".ot"),
    *(".onnx", ".onnx_data", ".pb", ".tflite", ".xml", ".gguf"),
)
"""Weights for others, and pickles, which are not read."""

logger = logging.getLogger("tierstore.engine")

Advance = Callable[[int], None]


def mirror(url: str, directory: str, *, subfolder: str = "", variant: str | None = None) -> str:
    """A directory with what a library loads of the pretrained model at `url`.

    `directory` is the store's. Of weights it has safetensors files: those of a `variant` ("fp16")
    where there are any, and else those of none. With `subfolder`, it has only what is in there.

    Raises TransferError where nothing can be listed or read, StaleCheckpointError for an object
    that is replaced meanwhile, DiskFullError. What was there before is whole then.
    """
    named = hashlib.sha256(json.dumps([url.rstrip("/"), subfolder, variant]).encode()).hexdigest()
    place = os.path.join(directory, MIRRORS, named[:32])
    source = RemoteDirectory(url)
    objects = _wanted(source.everything(), subfolder.strip("/"), variant)
    if not objects:
        raise TransferError(
            f"{url} has nothing{f' in {subfolder}' if subfolder else ''} that could be loaded: "
            "check the URL; it names what would be the directory of a pipeline or a model",
            path=url,
        )
    with transfer_errors("writing", path=place):
        os.makedirs(place, exist_ok=True)
        _tidy(place, objects)
        before = _read_list(place)
        there = {name: before[name] for name in objects if _is_there(place, name, before, objects)}
        lacking = {name: each for name, each in objects.items() if name not in there}
        if lacking:
            _download(source, place, there, lacking)
        elif there != before:
            _write_list(place, there)
    return place


def _wanted(
    objects: dict[str, ObjectStamp], subfolder: str, variant: str | None
) -> dict[str, ObjectStamp]:
    names = [
        name
        for name in objects
        if not name.endswith(OTHER_FORMATS) and (not subfolder or name.startswith(f"{subfolder}/"))
    ]
    for name in names:
        if any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
            raise TransferError(f"{name!r} cannot be the name of a file: rename the object")
    has_variant = {
        os.path.dirname(name) for name in names if variant and variant_of(name) == variant
    }
    return {
        name: objects[name]
        for name in names
        if variant_of(name) in (None, variant if os.path.dirname(name) in has_variant else "")
    }


def _row(stamp: ObjectStamp) -> list[Any]:
    return [stamp.etag, stamp.size, stamp.modified]


def _read_list(place: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        read = json.loads(Path(place, LIST).read_bytes())
        if isinstance(read, dict):
            return read
    return {}


def _write_list(place: str, stamps: dict[str, list[Any]]) -> None:
    draft = Path(place, f"{LIST}.tmp")
    draft.write_text(json.dumps(stamps))
    os.replace(draft, Path(place, LIST))


def _is_there(
    place: str, name: str, before: dict[str, Any], objects: dict[str, ObjectStamp]
) -> bool:
    """Whether a file was made of the object as it is now."""
    path, stamp = os.path.join(place, name), objects[name]
    same = before.get(name) == _row(stamp)
    return same and os.path.isfile(path) and os.path.getsize(path) == stamp.size


def _tidy(place: str, objects: dict[str, ObjectStamp]) -> None:
    """Remove files of what is not there any more: a library would load them, too."""
    known = {*objects, LIST}
    for folder, _, names in os.walk(place):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.relpath(path, place) not in known:
                os.unlink(path)


def _download(
    source: RemoteDirectory,
    place: str,
    there: dict[str, list[Any]],
    objects: dict[str, ObjectStamp],
) -> None:
    """Bring objects beside those that are there; each is a file under its own name once all of it
    is."""
    nbytes = sum(stamp.size for stamp in objects.values())
    if objects:
        logger.info("downloading %d files of %s: %s", len(objects), source.url, size(nbytes))
    with (
        byte_bar(f"Downloading {source.url}", nbytes) as advance,
        ThreadPoolExecutor(IN_FLIGHT) as pool,
    ):
        done = there
        for name, stamp in objects.items():
            found = source.find(name)
            if found is None:
                raise StaleCheckpointError(
                    f"{source.url}/{name} was removed while it was downloaded: load it again",
                    path=f"{source.url}/{name}",
                )
            path = Path(place, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with _draft(path, found.stamp.size) as descriptor:
                _fill(pool, descriptor, found, advance)
            # If it was replaced since it was listed, the next start brings it again.
            _write_list(place, done := {**done, name: _row(stamp)})


@contextlib.contextmanager
def _draft(path: Path, nbytes: int) -> Iterator[int]:
    """A file of `nbytes` bytes, open for writing; at `path`, and synced, once all went well."""
    draft = path.with_name(f"{path.name}.tmp")
    descriptor = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)  # or the disk is full now
        yield descriptor
        os.fsync(descriptor)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_names(folder)
    finally:
        os.close(folder)


def _fill(pool: ThreadPoolExecutor, descriptor: int, found: RemoteObject, advance: Advance) -> None:
    """Write an object into a file, in pieces, several at once."""

    def bring(start: int, nbytes: int) -> None:
        write_all(descriptor, found.read(start, start + nbytes), start)
        advance(nbytes)

    all_done(
        pool,
        (
            functools.partial(bring, start, nbytes)
            for start, nbytes in parts(found.stamp.size, PIECE)
        ),
    )
