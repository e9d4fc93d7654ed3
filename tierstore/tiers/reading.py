"""Reads groups from disk into host memory, and verifies them."""

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
from tierstore.tiers.spill import UNNAMED
from tierstore.tiers.workers import Job, Workers


class NotCheckedError(TierStoreError):
    """A part was read of a group that must be read and verified as a whole.

    Users never see it: the caller reads the whole group instead.
    """


class DiskReader:
    """Reads groups with several threads, and verifies them as configured by `verify`.

    Groups in `fetched` are verified at the first read whatever `verify` says.
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
        # Source and stamps with which the checksums of a group were last verified.
        self._verified = WeakKeyDictionary[GroupEntry, tuple[Source, Mapping[str, FileStamp]]]()
        self._first_digests = WeakKeyDictionary[GroupEntry, list[str]]()

    def read(
        self,
        entry: GroupEntry,
        buffer: memoryview,
        ending: Callable[[], None] = lambda: None,
        beside: Iterable[Job] = (),
    ) -> int:
        """Read a group's copy on disk into `buffer`, on this thread and on idle ones.

        `buffer` is page-aligned memory of the size of the group's slot. `ending` is called when the
        last piece is started. The same threads run the jobs in `beside`, and start them first; none
        is running when this returns or raises. Returns the bytes requested. Raises
        CorruptDataError, StaleCheckpointError, TruncatedFileError or another TransferError.
        """
        source = entry.source
        assert source is not None
        stamps = self._read_pieces(entry, source, buffer, pieces(source), ending, beside)
        self.check(entry, buffer, source, stamps)
        return source.nbytes

    def may_read_parts(self, entry: GroupEntry) -> bool:
        """Return whether `read_part` may be called.

        False if bytes must be moved after the read, or compared with checksums, which cover whole
        tensors.
        """
        source = entry.source
        if source is None or source.moves:
            return False
        checked = self._verified.get(entry, (None,))[0] is source or not source.checks
        return self._trusts(entry) or (checked and self._verify != "always")

    def read_part(self, entry: GroupEntry, buffer: memoryview, offset: int) -> int:
        """Read `len(buffer)` bytes of a group, starting at byte `offset`.

        Both are multiples of a page. Returns the bytes requested. Raises the errors of `read`, and
        NotCheckedError if the files have changed since the group was verified: the whole group must
        be read and verified before parts are read again.
        """
        source = entry.source
        assert source is not None
        todo = list(_parts_within(pieces(source), offset, len(buffer)))
        stamps = self._read_pieces(entry, source, buffer, todo)
        if source.checks and not self._is_checked(entry, source, stamps):
            self._verified.pop(entry, None)
            raise NotCheckedError(f"group {entry.group.key!r} has changed since it was checked")
        return sum(piece.needed for piece in todo)

    def _read_pieces(
        self,
        entry: GroupEntry,
        source: Source,
        buffer: memoryview,
        todo: Iterable[ReadPiece],
        ending: Callable[[], None] = lambda: None,
        beside: Iterable[Job] = (),
    ) -> dict[str, FileStamp]:
        """Read pieces into `buffer`. Returns the stamps of files that others could change."""
        files = {path: self._open(entry, path) for path in source.paths}
        reads = (
            functools.partial(self._read, entry, buffer, piece, files[piece.path]) for piece in todo
        )
        self.workers.run_parallel(chain(beside, reads), ending)
        return self._stamps(entry, files)

    def _open(self, entry: GroupEntry, path: str) -> DataFile:
        """Return the file. Raises StaleCheckpointError if it has changed."""
        held = entry.files.get(path)
        with transfer_errors("reading", key=entry.group.key, path=path):
            return self.files.get(path) if held is None else self.files.open(held)

    def _stamps(self, entry: GroupEntry, files: Mapping[str, DataFile]) -> dict[str, FileStamp]:
        """Check that the files did not change during the read.

        Returns the stamps of files that others could change.
        """
        stamps = {}
        for path, file in files.items():
            with transfer_errors("reading", key=entry.group.key, path=path):
                if path in entry.files:
                    self.files.check(file, entry.files[path])
                if not path.startswith(UNNAMED):
                    stamps[path] = file.stamp()
        return stamps

    def _read(
        self, entry: GroupEntry, buffer: memoryview, piece: ReadPiece, file: DataFile
    ) -> None:
        part = buffer[piece.at : piece.at + piece.nbytes]
        with transfer_errors("reading", key=entry.group.key, path=piece.path):
            file.read_at_least(part, piece.offset, piece.needed)

    def check(
        self, entry: GroupEntry, data: memoryview, source: Source, stamps: Mapping[str, FileStamp]
    ) -> None:
        """Move the bytes that were read to their place, and verify them.

        `stamps` are those of the files that others could change.
        """
        array = np.frombuffer(data, dtype=np.uint8)
        for move in source.moves:  # numpy handles overlapping ranges
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
        """Verify a source without checksums against the digests of its first read."""
        found = [digest(data[s.at : s.at + s.extent.nbytes]) for s in source.segments]
        first = self._first_digests.setdefault(entry, found)
        for expected, now in zip(first, found, strict=True):
            if expected != now:
                raise _corrupt(entry, source, "the checkpoint's bytes", expected, now)

    def _trusts(self, entry: GroupEntry) -> bool:
        """Return whether verification is off for this group.

        Groups fetched from an object store are always verified: `verify="never"` vouches for the
        user's own files only.
        """
        return self._verify == "never" and entry not in self._fetched

    def _is_checked(
        self, entry: GroupEntry, source: Source, stamps: Mapping[str, FileStamp]
    ) -> bool:
        """Return whether a group needs no check: it is trusted, or unchanged since the last one."""
        if self._trusts(entry):
            return True
        verified, with_stamps = self._verified.get(entry, (None, None))
        return self._verify != "always" and verified is source and with_stamps == stamps


def _parts_within(read: Iterable[ReadPiece], offset: int, nbytes: int) -> Iterator[ReadPiece]:
    """Yield the parts of `read` that lie in `nbytes` bytes of a group from `offset`.

    Their places are relative to `offset`.
    """
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
        f"{found} instead of {expected}): the disk or another program changed it; remove it with "
        "tierstore-inspect rm and put the group again, or download the checkpoint again",
        key=entry.group.key,
        path=path,
        expected=expected,
        found=found,
    )
