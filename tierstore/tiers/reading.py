"""Groups read from disk into host memory, and the proof that they arrived as written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import chain
from weakref import WeakKeyDictionary

import numpy as np

from tierstore.errors import CorruptDataError, TierStoreError
from tierstore.model.groups import Source
from tierstore.model.header import digest
from tierstore.model.tiers import Tier
from tierstore.system.file_table import FileTable
from tierstore.system.files import DataFile, FileStamp, ReadPiece, pieces, transfer_errors
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.hop import Copied
from tierstore.tiers.host_tier import HostTier
from tierstore.tiers.spill import NAMELESS
from tierstore.tiers.workers import Job, Workers


class NotCheckedError(TierStoreError):
    """A part of a group was read that has to be read as a whole, to be checked. Users never see it:
    whoever reads parts reads the group instead."""


class DiskReader:
    """Reads groups with several threads and checks what was read, as `verify` says.

    Groups in `fetched` are checked at the first read whatever `verify` says.
    """

    def __init__(
        self,
        files: FileTable,
        workers: Workers,
        verify: str,
        fetched: Container[GroupEntry] = (),
    ) -> None:
        self.files = files
        self._fetched = fetched
        self.workers = workers
        self._verify = verify
        # The checksums of a group were right when it was read from this source, with these stamps.
        self._verified = WeakKeyDictionary[GroupEntry, tuple[Source, Mapping[str, FileStamp]]]()
        self._first_digests = WeakKeyDictionary[GroupEntry, list[str]]()

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
        stamps = self._read_pieces(entry, source, room, pieces(source), ending, beside)
        self.check(entry, room, source, stamps)
        return source.nbytes

    def may_read_parts(self, entry: GroupEntry) -> bool:
        """Return whether `read_part` may be called: not where bytes have to be moved after they
        were read, nor where they have to be compared with checksums, which are those of tensors."""
        source = entry.source
        if source is None or source.moves:
            return False
        checked = self._verified.get(entry, (None,))[0] is source or not source.checks
        return self._trusts(entry) or (checked and self._verify != "always")

    def read_part(self, entry: GroupEntry, room: memoryview, offset: int) -> int:
        """Read as many bytes of a group as `room` has, from byte `offset` of it on.

        Both are multiples of a page. Returns the bytes that were asked for. Raises what `read`
        raises, and NotCheckedError if the files have changed since the group was checked: it may
        not be read in parts again before all of it was read, and compared with its checksums.
        """
        source = entry.source
        assert source is not None
        todo = list(_parts_within(pieces(source), offset, len(room)))
        stamps = self._read_pieces(entry, source, room, todo)
        if source.checks and not self._is_checked(entry, source, stamps):
            self._verified.pop(entry, None)
            raise NotCheckedError(f"group {entry.group.key!r} has changed since it was checked")
        return sum(piece.needed for piece in todo)

    def _read_pieces(
        self,
        entry: GroupEntry,
        source: Source,
        room: memoryview,
        todo: Iterable[ReadPiece],
        ending: Callable[[], None] = lambda: None,
        beside: Iterable[Job] = (),
    ) -> dict[str, FileStamp]:
        """Read pieces into `room`. Returns the stamps of files that others could change."""
        files = {path: self._open(entry, path) for path in source.paths}
        reads = (
            functools.partial(self._read, entry, room, piece, files[piece.path]) for piece in todo
        )
        self.workers.run_parallel(chain(beside, reads), ending)
        return self._stamps(entry, files)

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
                if not path.startswith(NAMELESS):
                    stamps[path] = file.stamp()
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
        if self._is_checked(entry, source, stamps):
            return
        for check in source.checks:
            found = digest(data[check.offset : check.offset + check.nbytes])
            if found != check.digest:
                raise _corrupt(entry, source, check.name, check.digest, found)
        if self._verify == "always" and not source.checks:
            self._check_against_first_read(entry, source, data)
        self._verified[entry] = source, stamps

    def _check_against_first_read(
        self, entry: GroupEntry, source: Source, data: memoryview
    ) -> None:
        """A checkpoint carries no checksums: what it held at the first read must remain so."""
        found = [digest(data[s.at : s.at + s.extent.nbytes]) for s in source.segments]
        first = self._first_digests.setdefault(entry, found)
        for expected, now in zip(first, found, strict=True):
            if expected != now:
                raise _corrupt(entry, source, "the checkpoint's bytes", expected, now)

    def _trusts(self, entry: GroupEntry) -> bool:
        """Return whether nothing is checked. What was fetched from an object store always is: it is
        not the user's file, whose bytes they may vouch for."""
        return self._verify == "never" and entry not in self._fetched

    def _is_checked(
        self, entry: GroupEntry, source: Source, stamps: Mapping[str, FileStamp]
    ) -> bool:
        """Return whether a group needs no check, as its files are what they were at the last."""
        if self._trusts(entry):
            return True
        verified, with_stamps = self._verified.get(entry, (None, None))
        return self._verify != "always" and verified is source and with_stamps == stamps


def _parts_within(read: Iterable[ReadPiece], offset: int, nbytes: int) -> Iterator[ReadPiece]:
    """The parts of `read` that lie in `nbytes` bytes of a group from `offset` on, with their places
    counted from there."""
    for piece in read:
        start = max(piece.at, offset)
        stop = min(piece.at + piece.nbytes, offset + nbytes)
        needed = min(piece.at + piece.needed, stop) - start
        if needed > 0:
            begin = piece.offset + start - piece.at
            yield ReadPiece(piece.path, begin, start - offset, stop - start, needed)


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
