"""Groups read from disk into host memory, and the proof that they arrived as written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import numpy as np

from tierstore.model.errors import CorruptDataError
from tierstore.model.groups import Source
from tierstore.model.header import digest
from tierstore.model.tiers import Tier
from tierstore.system.file_table import FileTable
from tierstore.system.files import DataFile, FileStamp, ReadPiece, pieces, transfer_errors
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.hop import Copied
from tierstore.tiers.host_tier import HostTier
from tierstore.tiers.workers import Job, Workers


class DiskReader:
    """Reads groups with several threads and checks what was read, as `verify` says."""

    def __init__(self, files: FileTable, workers: Workers, verify: str) -> None:
        self.files = files
        self.workers = workers
        self._verify = verify

    def read(
        self,
        entry: GroupEntry,
        room: memoryview,
        ending: Callable[[], None] = lambda: None,
        beside: Iterable[Job] = (),
    ) -> int:
        """Read a group's copy on disk into `room`, on this thread and on others that are idle.

        `room` is page-aligned memory of the size of the group's slot. `ending` is told when the
        last piece is begun. The jobs in `beside` are done by the same threads, and begun first;
        none is under way any more when this returns or raises. Returns the bytes that were asked
        for. Raises what is wrong with a file: CorruptDataError, StaleCheckpointError,
        TruncatedFileError or another TransferError.
        """
        source = entry.source
        assert source is not None
        files = {path: self._open(entry, path) for path in source.paths}
        todo = (
            functools.partial(self._read, entry, room, piece, files[piece.path])
            for piece in pieces(source)
        )
        self.workers.run_parallel(chain(beside, todo), ending)
        stamps = self._stamps(entry, files)
        self.check(entry, room, source, stamps)
        return source.nbytes

    def _open(self, entry: GroupEntry, path: str) -> DataFile:
        """The file, if it is what it was."""
        held = entry.files.get(path)
        with transfer_errors("reading", key=entry.group.key, path=path):
            return self.files.get(path) if held is None else self.files.open(held)

    def _stamps(self, entry: GroupEntry, files: Mapping[str, DataFile]) -> dict[str, FileStamp]:
        """See that the files are still what they were: what changed meanwhile is no good either.
        Returns the stamps of those that others could change."""
        stamps = {}
        for path, file in files.items():
            with transfer_errors("reading", key=entry.group.key, path=path):
                if path in entry.files:
                    self.files.check(file, entry.files[path])
                if entry.spilled_at is None and entry.spill_extent is None:
                    stamps[path] = file.stamp()  # what is spilled, nobody else can open
        return stamps

    def _read(self, entry: GroupEntry, room: memoryview, piece: ReadPiece, file: DataFile) -> None:
        part = room[piece.at : piece.at + piece.nbytes]
        with transfer_errors("reading", key=entry.group.key, path=piece.path):
            file.read_at_least(part, piece.offset, piece.needed)

    def check(
        self, entry: GroupEntry, data: memoryview, source: Source, stamps: Mapping[str, FileStamp]
    ) -> None:
        """Put bytes that were read into place, and see that they are the ones written.

        `stamps` are those of the files that others could change.
        """
        array = np.frombuffer(data, dtype=np.uint8)
        for move in source.moves:  # the two ranges may overlap: numpy sees to that
            array[move.dst : move.dst + move.nbytes] = array[move.src : move.src + move.nbytes]
        # What was fetched is not the user's file, whose bytes they may vouch for.
        trusted = self._verify == "never" and entry.cached is None
        if trusted or (self._verify != "always" and entry.verified == stamps):
            return
        for check in source.checks:
            found = digest(data[check.offset : check.offset + check.nbytes])
            if found != check.digest:
                raise _corrupt(entry, source, check.name, check.digest, found)
        if self._verify == "always" and not source.checks:
            _check_against_first_read(entry, source, data)
        entry.verified = stamps


class DiskToHost:
    """Reads groups from files into host memory, on several threads."""

    src = Tier.DISK
    dst = Tier.HOST
    times = None

    def __init__(self, reader: DiskReader, host: HostTier) -> None:
        self.workers = reader.workers
        self._reader = reader
        self._host = host

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        slot, key = entry.slots[self.dst], entry.group.key
        with transfer_errors("reading", key=key, path=f"group {key!r}"):
            beside = self._host.provide(entry)
        slot.wait()
        return Copied(self._reader.read(entry, slot.bytes(), ending, beside))


def _check_against_first_read(entry: GroupEntry, source: Source, data: memoryview) -> None:
    """A checkpoint carries no checksums: what it held at the first read must remain so."""
    found = [digest(data[s.at : s.at + s.extent.nbytes]) for s in source.segments]
    if entry.first_digests is None:
        entry.first_digests = found
    for expected, now in zip(entry.first_digests, found, strict=True):
        if expected != now:
            raise _corrupt(entry, source, "the checkpoint's bytes", expected, now)


def _corrupt(
    entry: GroupEntry, source: Source, what: str, expected: str, found: str
) -> CorruptDataError:
    path = source.segments[0].extent.path if source.segments else ""
    return CorruptDataError(
        f"group {entry.group.key!r}: {what!r} in {path} is not what was written (checksum "
        f"{found} instead of {expected}): the disk or somebody changed it; remove it with "
        "tierstore-inspect rm and put the group again, or download the checkpoint again",
        key=entry.group.key,
        path=path,
        expected=expected,
        found=found,
    )
