"""The tier below the disk: groups in an object store, and a disk cache of fetched groups.

A fetched group is written to disk as an object file, in its own directory (`remote` in the
store's). Its name is derived from the URL, the ETag and the extents of its bytes. It is a copy on
the tier DISK like any other, within `disk_budget`; the planner drops it when space is needed, as it
can be fetched again. Checksums in the object file verify it; if they do not match, the group is
fetched again.

Nothing is ever written to an object store: the tier has a budget of 0 bytes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch

from tierstore.errors import CorruptDataError, TransferError, TruncatedFileError
from tierstore.model.groups import GroupId, Packing, Segment
from tierstore.model.locks import RLock
from tierstore.model.objects import StoredObject
from tierstore.model.tiers import Tier
from tierstore.system.files import parts, transfer_errors
from tierstore.tiers.assembly import StoreTiers
from tierstore.tiers.directory import ObjectDirectory
from tierstore.tiers.disk_tier import DiskTier
from tierstore.tiers.entry import REMOTE, GroupEntry
from tierstore.tiers.hop import Copied, Hop
from tierstore.tiers.host_tier import HostTier
from tierstore.tiers.object_store import RemoteObject
from tierstore.tiers.pages import fresh_memory
from tierstore.tiers.workers import RunParallel, Workers

PIECE = 8 << 20
"""Maximum bytes per request."""

IN_FLIGHT = 8
"""Number of parallel requests."""

NEAR = 64 << 10
"""Maximum gap in bytes between tensors of one request: another request would take longer."""

CACHE = "remote"
"""Name of the subdirectory for fetched groups."""


# Requests ----------------------------------------------------------------------------------------


@dataclass(eq=False, frozen=True)
class RemoteSource:
    """The segments of a group, and the `objects` that contain them, by URL."""

    segments: tuple[Segment, ...]
    objects: Mapping[str, RemoteObject]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(segment.extent.nbytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """The bytes from `start` to `stop` of an object, which overlap all of `segments`."""

    url: str
    start: int
    stop: int
    segments: tuple[Segment, ...]

    def scatter(self, data: memoryview, buffer: memoryview) -> None:
        """Copy the received bytes to the places of the segments in the packed group."""
        come, packed = np.frombuffer(data, np.uint8), np.frombuffer(buffer, np.uint8)
        for segment in self.segments:
            extent = segment.extent
            begin = max(self.start, extent.offset)
            end = min(self.stop, extent.offset + extent.nbytes)
            at = segment.at + begin - extent.offset
            # numpy releases the GIL for this copy.
            packed[at : at + end - begin] = come[begin - self.start : end - self.start]


def requests(segments: Iterable[Segment], block: int = PIECE) -> Iterator[RangeRequest]:
    """Yield few ranges of at most `block` bytes that cover the segments, which do not overlap."""
    for url, run in _runs(segments):
        start = run[0].extent.offset
        stop = run[-1].extent.offset + run[-1].extent.nbytes
        starts = [segment.extent.offset for segment in run]
        for offset, nbytes in parts(stop - start, block):
            begin, end = start + offset, start + offset + nbytes
            first = bisect_right(starts, begin) - 1
            inside = tuple(s for s in run[first:] if _overlaps(s, begin, end))
            if inside:
                yield RangeRequest(url, begin, end, inside)


def _overlaps(segment: Segment, begin: int, end: int) -> bool:
    extent = segment.extent
    return extent.offset < end and begin < extent.offset + extent.nbytes


def _runs(segments: Iterable[Segment]) -> Iterator[tuple[str, list[Segment]]]:
    """Group segments that are near each other in an object, in the order of their offsets."""
    run: list[Segment] = []
    for segment in sorted(segments, key=lambda s: (s.extent.path, s.extent.offset)):
        extent = segment.extent
        if not extent.nbytes:
            continue
        last = run[-1].extent if run else None
        if last is not None and (
            last.path != extent.path or extent.offset - last.offset - last.nbytes > NEAR
        ):
            yield last.path, run
            run = []
        run.append(segment)
    if run:
        yield run[-1].extent.path, run


def fetch(
    source: RemoteSource,
    buffer: memoryview,
    run_parallel: RunParallel,
    closed: threading.Event | None = None,
) -> int:
    """Read a group into `buffer`, which has the group's size. Returns the bytes requested.

    Raises StaleCheckpointError, TransferError, or, without further requests, ClosedError once
    `closed` is set.
    """

    def get(request: RangeRequest) -> None:
        data = source.objects[request.url].read(request.start, request.stop, closed)
        request.scatter(data, buffer)

    todo = list(requests(source.segments))
    run_parallel(functools.partial(get, request) for request in todo)
    return sum(request.stop - request.start for request in todo)


def cache_key(packing: Packing, source: RemoteSource, number: int) -> str:
    """Return the name of a fetched group. It changes when the objects do.

    `number` distinguishes groups with identical bytes: each has its own file.
    """
    rows = sorted(
        (
            source.objects[s.extent.path].url,
            source.objects[s.extent.path].stamp.etag
            or source.objects[s.extent.path].stamp.modified,
            source.objects[s.extent.path].stamp.size,
            s.extent.offset,
            s.extent.nbytes,
            s.at,
        )
        for s in source.segments
    )
    blocks = [(block.name, block.dtype, block.shape) for block in packing.blocks]
    description = json.dumps([rows, blocks, number]).encode()
    return hashlib.sha256(description).hexdigest()[:40]


# The cache ---------------------------------------------------------------------------------------


@dataclass(eq=False, frozen=True)
class CachedFile:
    """The file of a fetched group. `version` distinguishes it from a later file of that name."""

    cache: RemoteCache
    key: str
    version: int

    def remove(self) -> None:
        """Remove the file, unless it was fetched again meanwhile.

        If that fails, the file stays for the next store to find.
        """
        with contextlib.suppress(TransferError):
            self.cache.remove(self)


@dataclass(eq=False)
class RemoteCache:
    """The files of groups fetched by this store and by earlier stores of the directory.

    `unclaimed` are those for which no group is registered yet. `sources` locates groups in object
    stores. Once `closing` is set, nothing more is fetched.
    """

    path: str
    disk: DiskTier
    unclaimed: dict[str, GroupEntry] = field(default_factory=dict)
    closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.sources = WeakKeyDictionary[GroupEntry, RemoteSource]()
        self._keys = WeakKeyDictionary[GroupEntry, str]()
        self._directory = ObjectDirectory(self.path, durable=False)
        self._versions: dict[str, int] = {}
        self._taken: set[str] = set()
        self._lock = RLock()
        for number, stored in enumerate(self._directory.objects()):
            spec, key = stored.spec(), stored.key
            group = GroupId(f"{CACHE}/{key}", -1 - number)
            entry = GroupEntry(group, spec, packing=stored.packing)
            self._found(entry, stored)
            self.add(entry, RemoteSource((), {}))  # a placeholder, which is never fetched
            self._keys[entry] = key
            self.unclaimed[key] = entry
        for name in self._directory.damaged:  # useless, and takes disk space
            with transfer_errors("removing", path=self.path):
                os.unlink(os.path.join(self.path, "objects", name))

    def _found(self, entry: GroupEntry, stored: StoredObject) -> None:
        entry.source = stored.source(self._directory.path_of(stored.key))
        version = self._versions.get(stored.key, 0)
        self.disk.fetched[entry] = CachedFile(self, stored.key, version)

    def add(self, entry: GroupEntry, source: RemoteSource) -> None:
        """Record that a group lies in an object store."""
        self.sources[entry] = source
        entry.backing = REMOTE

    def take(self, entry: GroupEntry) -> GroupEntry | None:
        """Name a group's cache file. Returns the unclaimed entry of that name, if any.

        The unclaimed file is the group's copy after this call.
        """
        assert entry.packing is not None
        source, number = self.sources[entry], 0
        with self._lock:
            while (key := cache_key(entry.packing, source, number)) in self._taken:
                number += 1
            self._taken.add(key)
        self._keys[entry] = key
        left = self.unclaimed.pop(key, None)
        if left is not None:
            entry.source = left.source
            self.disk.fetched[entry] = self.disk.fetched.pop(left)
            del self._keys[left]
        return left

    def unregister(self, entry: GroupEntry) -> None:
        """Forget that a group lies in an object store."""
        if self.sources.pop(entry, None) is not None:
            entry.backing = None
            with self._lock:
                self._taken.discard(self._keys.pop(entry, ""))

    def save(self, entry: GroupEntry, data: memoryview, run_parallel: RunParallel) -> None:
        """Write a fetched group to disk. Raises DiskFullError or TransferError."""
        key = self._keys[entry]
        assert entry.packing is not None
        staged = self._directory.stage(
            key, entry.packing, data, single=False, run_parallel=run_parallel
        )
        with self._lock:
            self._versions[key] = self._versions.get(key, 0) + 1
            self._directory.commit(staged)
            self.disk.files.forget(self._directory.path_of(key))
            self._found(entry, staged.stored)

    def remove(self, cached: CachedFile) -> None:
        """Remove a file, unless another has replaced it. Raises TransferError."""
        with self._lock:
            if self._versions.get(cached.key, 0) == cached.version:
                self._directory.remove(cached.key)
                self.disk.files.forget(self._directory.path_of(cached.key))

    def close(self) -> None:
        """Close the cache, and leave the files to the next store."""
        self._directory.close()


# The tier ----------------------------------------------------------------------------------------


class RemoteTier:
    """Groups in an object store, located by their entries."""

    tier = REMOTE
    capacity = 0
    alignment = 1
    peak_bytes = None

    def __init__(self, cache: RemoteCache) -> None:
        self.cache = cache

    def holds(self, entry: GroupEntry) -> bool:
        return entry in self.cache.sources

    def reserve(self, entry: GroupEntry, *, for_caller: bool = False) -> None:
        raise AssertionError("object stores are read-only")

    def view(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        raise RuntimeError(f"group {entry.group.key!r} is in an object store")

    def drop(self, entry: GroupEntry) -> None:
        """Forget the group's location. The objects do not change."""
        self.cache.unregister(entry)

    def stop_waiting(self) -> None:
        """Stop fetching: a server may not answer for a while, and groups may be large."""
        self.cache.closing.set()

    def close(self, entries: Iterable[GroupEntry]) -> None:
        self.cache.close()


class RemoteToDisk:
    """Fetches groups, and writes them to disk."""

    src = REMOTE
    dst = Tier.DISK
    times = None

    def __init__(self, cache: RemoteCache, workers: Workers) -> None:
        self.workers = workers
        self._cache = cache

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        memory = fresh_memory(entry.spec.nbytes).numpy().data
        return Copied(self.fetch_and_store(entry, memory))

    def has_fetched(self, entry: GroupEntry) -> bool:
        """Return whether the disk copy of a group was fetched, and can be fetched again."""
        return entry in self._cache.disk.fetched and entry in self._cache.sources

    def fetch_and_store(self, entry: GroupEntry, buffer: memoryview) -> int:
        """Fetch a group into `buffer`, and write it to disk. Returns the bytes requested."""
        source = self._cache.sources[entry]
        nbytes = fetch(source, buffer, self.workers.run_parallel, self._cache.closing)
        self._cache.save(entry, buffer, self.workers.run_parallel)
        return nbytes


class FetchedToHost:
    """Reads groups from disk by `reading`, and fetches missing or damaged cached groups again."""

    src = Tier.DISK
    dst = Tier.HOST
    times = None

    def __init__(self, reading: Hop, host: HostTier, fetching: RemoteToDisk) -> None:
        self.workers = reading.workers
        self._reading = reading
        self._host = host
        self._fetching = fetching

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        try:
            return self._reading.copy(entry, ending)
        except (CorruptDataError, TruncatedFileError, TransferError) as error:
            is_cache_fault = isinstance(error, CorruptDataError | TruncatedFileError) or isinstance(
                error.__cause__, FileNotFoundError
            )
            if not is_cache_fault or not self._fetching.has_fetched(entry):
                raise
        buffer = entry.slots[self.dst].bytes()
        return Copied(self._fetching.fetch_and_store(entry, buffer))


def remote_tier(
    tiers: StoreTiers, directory: str, reading: Hop
) -> tuple[RemoteTier, Collection[Hop]]:
    """Return the tier of a store whose directory is `directory`, and its hops.

    One of the hops replaces `reading`, from disk to host memory.
    """
    path = os.path.join(directory, CACHE)
    if os.path.islink(path):
        raise TransferError(
            f"{path} is a link, and links out of the store's directory are not followed: remove "
            "it, or pass a disk_dir on the other disk",
            path=path,
        )
    cache = RemoteCache(path, tiers.disk)
    fetching = RemoteToDisk(cache, Workers(IN_FLIGHT, "remote"))
    return RemoteTier(cache), (fetching, FetchedToHost(reading, tiers.host, fetching))


def has_cache(directory: str) -> bool:
    """Return whether a store's directory has fetched groups."""
    path = os.path.join(directory, CACHE)
    return os.path.isdir(path) and not os.path.islink(path)
