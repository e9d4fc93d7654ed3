"""Groups on their way from files to host memory, and the proof that they arrived as written."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping

from tierstore.model.errors import CorruptDataError, TransferError
from tierstore.model.groups import Source, name_of
from tierstore.model.header import digest
from tierstore.model.moves import Copy
from tierstore.model.tiers import Tier
from tierstore.transfer.arena import Arena, Slot
from tierstore.transfer.cargo import Cargo
from tierstore.transfer.disk import FileStamp, FileTable, ReadPiece, pieces, transfer_error
from tierstore.transfer.figures import DEFAULT_BLOCK
from tierstore.transfer.workers import Workers


def explained(error: BaseException, copy: Copy) -> BaseException:
    """The library's error for a failed copy, with the cause attached."""
    key = name_of(copy.key)
    if isinstance(error, TransferError):
        error.key = error.key or key
        return without_frames(error)
    if isinstance(error, OSError):
        without_frames(error)
        doing = "reading" if copy.src is Tier.DISK else "writing"
        return transfer_error(error, doing, key=key, path=str(error.filename or f"group {key!r}"))
    failed = TransferError(
        f"moving group {key!r} from {copy.src.name} to {copy.dst.name} failed "
        f"({type(error).__name__}: {error}): free memory on that tier or lower its budget",
        key=key,
    )
    failed.add_note("".join(traceback.format_exception(error)))
    failed.__cause__ = without_frames(error)
    return failed


def without_frames(error: BaseException) -> BaseException:
    """The error, without the frames that it came through: they hold the memory of the group."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error


class Reader:
    """Reads groups with several threads and checks what was read, as `verify` says."""

    def __init__(self, arena: Arena, files: FileTable, workers: Workers, verify: str) -> None:
        self.arena = arena
        self.files = files
        self.workers = workers
        self._verify = verify

    def check(
        self, cargo: Cargo, slot: Slot, source: Source, stamps: Mapping[str, FileStamp]
    ) -> None:
        """Put bytes that were read into place, and see that they are the ones written.

        `stamps` are those of the files that others could change.
        """
        assert slot.memory is not None
        array = slot.memory.numpy()
        for move in source.moves:  # the two ranges may overlap: numpy sees to that
            array[move.dst : move.dst + move.nbytes] = array[move.src : move.src + move.nbytes]
        data = slot.bytes()
        if self._verify == "never" or (self._verify == "first" and cargo.verified == stamps):
            return
        for check in source.checks:
            found = digest(data[check.offset : check.offset + check.nbytes])
            if found != check.digest:
                raise self._corrupt(cargo, source, check.name, check.digest, found)
        if self._verify == "always" and not source.checks:
            self._check_against_first_read(cargo, source, data)
        cargo.verified = stamps

    def _check_against_first_read(self, cargo: Cargo, source: Source, data: memoryview) -> None:
        """A checkpoint carries no checksums: what it held at the first read must remain so."""
        found = [digest(data[s.at : s.at + s.extent.nbytes]) for s in source.segments]
        if cargo.first_digests is None:
            cargo.first_digests = found
        for expected, now in zip(cargo.first_digests, found, strict=True):
            if expected != now:
                raise self._corrupt(cargo, source, "the checkpoint's bytes", expected, now)

    def _corrupt(
        self, cargo: Cargo, source: Source, what: str, expected: str, found: str
    ) -> CorruptDataError:
        path = source.segments[0].extent.path if source.segments else ""
        return CorruptDataError(
            f"group {name_of(cargo.key)!r}: {what!r} in {path} is not what was written (checksum "
            f"{found} instead of {expected}): the disk or somebody changed it; remove it with "
            "tierstore-inspect rm and put the group again, or download the checkpoint again",
            key=name_of(cargo.key),
            path=path,
            expected=expected,
            found=found,
        )


class Reading:
    """One group on its way from disk to host memory, in pieces that several threads read.

    `ending` is told when the last of them is begun, `done` when the group is there or has failed.
    """

    def __init__(
        self,
        reader: Reader,
        copy: Copy,
        cargo: Cargo,
        slot: Slot,
        done: Callable[[Copy, BaseException | None], None],
        ending: Callable[[Copy], None] = lambda copy: None,
    ) -> None:
        assert cargo.source is not None
        self._reader = reader
        self._done = done
        self._ending = functools.partial(ending, copy)
        self._copy = copy
        self._cargo = cargo
        self._source = cargo.source
        self._slot = slot
        self._stamps: dict[str, FileStamp] = {}

    def begin(self) -> None:
        """Read the group, on this thread and on others that are idle, and tell of its arrival."""
        error: BaseException | None = None
        try:
            self._reader.arena.fill(self._slot)
            self._slot.wait()
            block = self._check_files()
            todo = pieces(self._source, block)
            parts = (functools.partial(self._read, piece) for piece in todo)
            self._reader.workers.together(parts, self._ending)
            self._check_files()  # what changed while it was read is no good either
            self._reader.check(self._cargo, self._slot, self._source, self._stamps)
        except BaseException as failure:  # reported, like every failure of a job
            error = explained(failure, self._copy)
        self._done(self._copy, error)

    def _check_files(self) -> int:
        """See that the files are what they were. Returns how many bytes a read should have."""
        block = DEFAULT_BLOCK
        for path in {segment.extent.path for segment in self._source.segments}:
            try:
                file = self._reader.files.check(path, self._cargo.stamps.get(path))
                block = file.block
                if self._cargo.spilled_at is None and self._cargo.place is None:
                    self._stamps[path] = file.stamp()  # what is spilled, nobody else can open
            except OSError as error:
                raise self._failed(error, path) from error
        return block

    def _read(self, piece: ReadPiece) -> None:
        # A function of its own: no reference to the memory may outlive the report of its arrival.
        room = self._slot.bytes()[piece.at : piece.at + piece.nbytes]
        try:
            self._reader.files.get(piece.path).read_at_least(room, piece.offset, piece.needed)
        except OSError as error:
            raise self._failed(error, piece.path) from error

    def _failed(self, error: OSError, path: str) -> TransferError:
        return transfer_error(error, "reading", key=name_of(self._copy.key), path=path)
