"""Mirrors: local copies of files in an object store, for libraries that open files by path.

The objects under a URL are downloaded to `mirrors/` in the store's directory, under the same names.
From then on they are a checkpoint on disk: read in place, and counted in no budget. The next start
lists the object store once, and downloads the objects that have changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from tierstore.engine.remote_groups import run_jobs
from tierstore.errors import StaleCheckpointError, TransferError
from tierstore.model.formatting import size
from tierstore.model.scanning import Scanner
from tierstore.model.weight_files import variant_of
from tierstore.progress import byte_bar
from tierstore.system.files import parts, read_fully, sync_names, transfer_errors, write_all
from tierstore.system.objects import READ
from tierstore.system.private import OWNER_ONLY, make_directories
from tierstore.tiers.object_store import MAX_OBJECTS, ObjectStamp, RemoteDirectory, RemoteObject
from tierstore.tiers.remote_tier import IN_FLIGHT, PIECE

MIRRORS = "mirrors"
"""Directory of all mirrors, inside the store's directory."""

LIST = ".objects.json"
"""File with the object stamp of each file of a mirror, by name."""

MAX_LIST_BYTES = 64 << 20

_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW

OTHER_FORMATS = (
    *(".bin", ".ckpt", ".pkl", ".pt", ".pth", ".h5", ".msgpack", ".ot"),
    *(".onnx", ".onnx_data", ".pb", ".tflite", ".xml", ".gguf"),
)
"""Weights in other formats, and pickles, which are not downloaded."""

logger = logging.getLogger("tierstore.engine")

Advance = Callable[[int], None]


def mirror(url: str, directory: str, *, subfolder: str = "", variant: str | None = None) -> str:
    """Download the files of the pretrained model at `url`, and return their directory.

    `directory` is the store's. Only safetensors weights are downloaded: those of a `variant`
    ("fp16") in folders that have it, or else those without a variant. With `subfolder`, only
    objects in that folder are downloaded.

    Raises TransferError if objects cannot be listed or read, StaleCheckpointError if an object is
    replaced or removed during the download, and DiskFullError. Files that were downloaded before
    the error are complete.
    """
    named = hashlib.sha256(json.dumps([url.rstrip("/"), subfolder, variant]).encode()).hexdigest()
    place = os.path.join(directory, MIRRORS, named[:32])
    source = RemoteDirectory(url)
    objects = _wanted(source.list_all(), subfolder.strip("/"), variant)
    if not objects:
        raise TransferError(
            f"{url} has no files to load{f' in {subfolder}' if subfolder else ''}: check the URL; "
            "it must be the prefix of a pipeline or a model",
            path=url,
        )
    with transfer_errors("writing", path=place):
        make_directories(directory)
        with _Mirror(directory, named[:32]) as mirrored:
            mirrored.remove_stale(objects)
            before = mirrored.read_list()
            there = {
                name: before[name]
                for name, stamp in objects.items()
                if before.get(name) == _row(stamp) and mirrored.has(name, stamp.size)
            }
            lacking = {name: each for name, each in objects.items() if name not in there}
            if lacking:
                _download(source, mirrored, there, lacking)
            elif there != before:
                mirrored.write_list(there)
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
        parts_of_it = name.split("/")
        unusable = any(part in ("", ".", "..") or "\0" in part for part in parts_of_it)
        if unusable or parts_of_it[-1].startswith(LIST):
            raise TransferError(f"{name!r} is not a valid file name: rename the object")
    has_variant = {
        os.path.dirname(name) for name in names if variant and variant_of(name) == variant
    }
    return {
        name: objects[name]
        for name in names
        if variant_of(name) in (None, variant if os.path.dirname(name) in has_variant else "")
    }


def _row(stamp: ObjectStamp) -> str:
    return json.dumps([stamp.etag, stamp.size, stamp.modified])


class _Mirror:
    """The files of one mirror, in a directory that only its owner can access.

    Each directory is opened relative to its parent, and no link is followed, so nothing outside of
    the store's directory is written or removed.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.path = os.path.join(directory, MIRRORS, name)
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for each in (MIRRORS, name):
                above, self._root = self._root, self._open_folder(self._root, each)
                os.close(above)
        except BaseException:
            os.close(self._root)
            raise

    def __enter__(self) -> _Mirror:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._root)

    def _open_folder(self, above: int, name: str) -> int:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, OWNER_ONLY, dir_fd=above)
        try:
            return os.open(name, READ | os.O_DIRECTORY, dir_fd=above)
        except NotADirectoryError as error:
            raise TransferError(
                f"{name!r} in {self.path} is a link or a file, and links are not followed: remove "
                "it, and load again",
                path=self.path,
            ) from error

    @contextlib.contextmanager
    def folder(self, name: str) -> Iterator[tuple[int, str]]:
        """Create and open the directory of a file. Yields its descriptor and the file name."""
        *folders, last = name.split("/")
        here = os.dup(self._root)
        try:
            for each in folders:
                above, here = here, self._open_folder(here, each)
                os.close(above)
            yield here, last
        finally:
            os.close(here)

    def has(self, name: str, nbytes: int) -> bool:
        """Return True if there is a regular file with this name and size."""
        with self.folder(name) as (here, last), contextlib.suppress(FileNotFoundError):
            status = os.stat(last, dir_fd=here, follow_symlinks=False)
            return stat.S_ISREG(status.st_mode) and status.st_size == nbytes
        return False

    def remove_stale(self, objects: Collection[str]) -> None:
        """Remove links, and files whose object is gone: a library would load them too."""
        known = {*objects, LIST}
        for folder, inner, names, here in os.fwalk(".", dir_fd=self._root, follow_symlinks=False):
            for name in names:
                if os.path.normpath(os.path.join(folder, name)) not in known:
                    os.unlink(name, dir_fd=here)
            for name in inner:
                if stat.S_ISLNK(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=here)

    def read_list(self) -> dict[str, str]:
        """Return the stamp of the object of each file, by file name."""
        with contextlib.suppress(OSError, _InvalidListError):
            descriptor = os.open(LIST, READ, dir_fd=self._root)
            try:
                nbytes = os.fstat(descriptor).st_size
                raw = read_fully(descriptor, min(nbytes, MAX_LIST_BYTES), 0)
            finally:
                os.close(descriptor)
            scanner = Scanner(raw, _invalid_list)
            found = {name: scanner.text() for name in scanner.members(MAX_OBJECTS)}
            scanner.end()
            return found
        return {}

    def write_list(self, stamps: dict[str, str]) -> None:
        """Write the stamp of the object of each file, by file name."""
        with self.draft(LIST) as descriptor:
            write_all(descriptor, memoryview(json.dumps(stamps).encode()), 0)

    @contextlib.contextmanager
    def draft(self, name: str, nbytes: int = 0) -> Iterator[int]:
        """Open a temporary file of `nbytes` bytes for writing. Sync and rename it on success."""
        with self.folder(name) as (here, last):
            draft = f"{last}.tmp"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=here)
            descriptor = os.open(draft, _NEW, 0o600, dir_fd=here)
            try:
                if nbytes:
                    os.posix_fallocate(descriptor, 0, nbytes)  # fail now if the disk is full
                yield descriptor
                os.fsync(descriptor)
                os.replace(draft, last, src_dir_fd=here, dst_dir_fd=here)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(draft, dir_fd=here)
                raise
            finally:
                os.close(descriptor)
            sync_names(here)


class _InvalidListError(Exception):
    """The list file of a mirror is malformed."""


def _invalid_list(reason: str) -> NoReturn:
    raise _InvalidListError(reason)


def _download(
    source: RemoteDirectory,
    mirrored: _Mirror,
    there: dict[str, str],
    objects: dict[str, ObjectStamp],
) -> None:
    """Download objects next to the files that are `there`.

    Each file gets its name only when it is complete.
    """
    nbytes = sum(stamp.size for stamp in objects.values())
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
            with mirrored.draft(name, found.stamp.size) as descriptor:
                _fill(pool, descriptor, found, advance)
            # If it was replaced since it was listed, the next start downloads it again.
            mirrored.write_list(done := {**done, name: _row(stamp)})


def _fill(pool: ThreadPoolExecutor, descriptor: int, found: RemoteObject, advance: Advance) -> None:
    """Write an object to a file, in several parallel pieces."""

    def bring(start: int, nbytes: int) -> None:
        write_all(descriptor, found.read(start, start + nbytes), start)
        advance(nbytes)

    run_jobs(
        pool,
        (
            functools.partial(bring, start, nbytes)
            for start, nbytes in parts(found.stamp.size, PIECE)
        ),
    )
