"""The files of a checkpoint of `torch.distributed.checkpoint`, written and read chunk by chunk.

    __0_0.distcp      what rank 0 has written: chunks of tensors, and other values, by `torch.save`
    .metadata         which tensors there are, and where each chunk of them is: a pickle
    tierstore.json    ours: the size and the checksum of each of the others, and of itself

Others read the first two, and never look at the third. What others have written lacks it, and is
taken as it is. Nothing in these files can run code: the pickle may name no class but those that
metadata consist of, and `torch.load` is told that weights are all that it may load. (See decision
35. Only `checkpoint_pickles` and, after it, torch read pickles.)
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from tierstore.adapters.codecs.memory import has_storage_of_its_own, over, span
from tierstore.adapters.training.checkpoint_archives import loaded_value
from tierstore.adapters.training.checkpoint_metadata import parsed_metadata
from tierstore.adapters.training.checkpoint_pickles import MAX_PICKLE_BYTES
from tierstore.adapters.training.directory_swap import SwappedDirectory
from tierstore.model.errors import (
    CorruptDataError,
    TierStoreError,
    TransferError,
    TruncatedFileError,
)
from tierstore.model.header import digest
from tierstore.model.scanning import Scanner
from tierstore.model.sizes import PAGE
from tierstore.progress import bar
from tierstore.system.files import OpenForWriting, read_fully, write_all
from tierstore.torch_private import stored_at

METADATA, SUMS = ".metadata", "tierstore.json"
FORMAT = 1
CHUNK = 4 << 20
"""Bytes that are in memory for the sake of writing, or of comparing."""
MAX_FILES = 100_000
MAX_SUMS_BYTES = 16 << 20
"""Of what says the sums of as many files."""
OTHERS_ADVICE = "restore it, or load another save"

_CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True)
class FileSum:
    """What tells a file from a damaged one."""

    nbytes: int
    xxh3: str


def _chunk() -> memoryview:
    """Memory for a chunk, at a page boundary."""
    return memoryview(mmap.mmap(-1, CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


# Writing ------------------------------------------------------------------------------------------


class _Output(io.RawIOBase):
    """A new file that is written from its beginning to its end, past the page cache. What
    `torch.save` writes to."""

    def __init__(self, folder: int, name: str, expected: int) -> None:
        super().__init__()
        descriptor = os.open(name, _CREATE, 0o644, dir_fd=folder)
        self._file = OpenForWriting(descriptor, name, folder)
        self._room = _chunk()
        self._filled = 0
        self._written = 0
        self._sum = xxhash.xxh3_64()
        try:
            os.posix_fallocate(descriptor, 0, max(expected, 1))  # a full disk is known at once
        except BaseException:
            self.close()
            raise

    def tell(self) -> int:
        return self._written + self._filled

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        nbytes = len(rest)
        self._sum.update(rest)
        while len(rest):
            taken = rest[: CHUNK - self._filled]
            self._room[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            rest = rest[len(taken) :]
            if self._filled == CHUNK:
                self._empty()
        return nbytes

    def flush(self) -> None:
        """What `torch.save` calls after each tensor. Pages are written when they are full."""

    def _empty(self) -> None:
        whole = self._filled // PAGE * PAGE
        self._file.write(self._room[:whole], self._written)
        write_all(self._file.cached, self._room[whole : self._filled], self._written + whole)
        self._written += self._filled
        self._filled = 0

    def finish(self) -> FileSum:
        """Nothing more is written."""
        self._empty()
        os.truncate(self._file.cached, self._written)
        os.fsync(self._file.cached)
        return FileSum(self._written, self._sum.hexdigest())

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._file.close()


class CheckpointWriter(FileSystemWriter):
    """Writes each rank's part of a checkpoint to one file, one item after the other, and keeps none
    of them. (What it extends keeps all of a file's tensors until that is written.)

    Metadata are as everybody's. The sums of the files come to the first rank as results of writes
    that nobody planned, and go to a file of their own.
    """

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The directory is there, and empty."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        """Write the items of this rank, in their order."""
        name = f"{plan.storage_data.prefix}0.distcp"
        results = self._written(name, plan, planner) if plan.items else []
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(results)
        return future

    def _written(self, name: str, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results = []
        expected = sum(map(_bytes_of_item, plan.items))
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            output = _Output(folder, name, expected)
            try:
                for item in bar(plan.items, f"Saving {name}", "tensors"):
                    start = output.tell()
                    data = planner.resolve_data(item)
                    if isinstance(data, torch.Tensor):
                        torch.save(_alone(data), output)  # type: ignore[arg-type]
                    else:
                        output.write(data.getbuffer())
                    del data  # before the next one is brought, whose room it may take
                    nbytes = output.tell() - start
                    where = stored_at(name, start, nbytes)
                    results.append(WriteResult(item.index, nbytes, where))
                total = output.finish()
            finally:
                output.close()
        finally:
            os.close(folder)
        return [*results, WriteResult(MetadataIndex(name), 0, total)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written theirs."""
        found = [result for of_rank in results for result in of_rank]
        sums = {r.index.fqn: r.storage_data for r in found if isinstance(r.storage_data, FileSum)}
        super().finish(metadata, [[r for r in found if not isinstance(r.storage_data, FileSum)]])
        data = (pathlib.Path(self.path) / METADATA).read_bytes()
        sums[METADATA] = FileSum(len(data), digest(data))
        files = {name: {"bytes": each.nbytes, "xxh3": each.xxh3} for name, each in sums.items()}
        body = json.dumps({"format": FORMAT, "files": files}, separators=(",", ":")).encode()
        descriptor = os.open(pathlib.Path(self.path) / SUMS, _CREATE, 0o644)
        try:
            write_all(descriptor, memoryview(sealed(body)), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _bytes_of_item(item: Any) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same values on the CPU, in a storage with nothing else in it: all of it is saved."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if not plain.numel() or span(plain) != plain.nbytes:
        return plain.contiguous() if plain.numel() else plain.clone()
    return plain if has_storage_of_its_own(plain) else over(plain)


class Encoded(io.BytesIO):
    """A value as it is saved. Raises TypeError for one that could not be loaded again."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__()
        try:
            torch.save(value, self)
            loaded_value(io.BytesIO(self.getvalue()))
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{name!r} is a {type(value).__name__} that could not be loaded again without "
                "running code of its own: make it of tensors, numbers, text, lists and dicts, or "
                "leave it out and pass what it takes to make it again as `extra`"
            ) from error


# The sums -----------------------------------------------------------------------------------------


def sealed(body: bytes) -> bytes:
    """A JSON object that begins with the checksum of its rest."""
    return b'{"xxh3":"' + digest(body).encode() + b'",\n' + body[1:] + b"\n"


def read_sums(raw: bytes, path: str) -> dict[str, FileSum]:
    """What SUMS says. Raises CorruptDataError, or TierStoreError for a newer format."""
    body = b"{" + raw.partition(b"\n")[2][:-1]
    if raw != sealed(body):
        raise CorruptDataError(
            f"{path} does not match its checksum: it was damaged or edited; {OTHERS_ADVICE}",
            path=path,
            found=digest(body),
        )

    def refuse(why: str) -> NoReturn:
        raise _nothing_that_is_written(path, why)

    scanner = Scanner(body, refuse)
    found, files = None, {}
    for member in scanner.members(MAX_FILES):
        if member == "format":
            found = scanner.number()
            if found != FORMAT:
                raise TierStoreError(
                    f"{path} says format {found}, this version of tierstore knows {FORMAT}: "
                    "upgrade tierstore, or save with this version"
                )
        elif found is None:
            refuse("it does not begin with its format")
        elif member == "files":
            files = {name: _sum(scanner, refuse) for name in scanner.members(MAX_FILES)}
        else:
            scanner.skip()
    scanner.end()
    return files


def _sum(scanner: Scanner, refuse: Callable[[str], NoReturn]) -> FileSum:
    nbytes, xxh3 = None, None
    for member in scanner.members(2):
        if member == "bytes":
            nbytes = scanner.number()
        elif member == "xxh3":
            xxh3 = scanner.text()
        else:
            scanner.skip()
    if nbytes is None or xxh3 is None:
        refuse("a file has no size or no checksum")
    return FileSum(nbytes, xxh3)


def _nothing_that_is_written(path: str, error: object) -> CorruptDataError:
    return CorruptDataError(
        f"{path} is nothing that is written for a checkpoint ({error!s:.200}): {OTHERS_ADVICE}",
        path=path,
    )


# Reading ------------------------------------------------------------------------------------------


class CheckpointFiles:
    """The files of one checkpoint, all of the same save, open until `stack` is closed.

    Raises TransferError where there is none, CorruptDataError for metadata that nobody writes.
    """

    def __init__(self, directory: SwappedDirectory, stack: ExitStack) -> None:
        self.path = directory.path
        self._descriptors = directory.open(stack)
        self.sums: dict[str, FileSum] = {}
        if SUMS in self._descriptors:
            self.sums = read_sums(self._all_of(SUMS, MAX_SUMS_BYTES), self._where(SUMS))
        if METADATA not in self._descriptors:
            raise self.missing(METADATA)
        self._refuse_other_size(METADATA)
        raw = self._all_of(METADATA, MAX_PICKLE_BYTES)
        expected = self.sums.get(METADATA)
        if expected is not None and digest(raw) != expected.xxh3:
            raise self._damaged(METADATA, expected.xxh3, digest(raw))
        self.metadata = self._parsed(raw)

    def _where(self, name: str) -> str:
        return os.path.join(self.path, name)

    def missing(self, name: str) -> TransferError:
        """The error for a file that is not there."""
        path = self._where(name)
        return TransferError(
            f"{path} is missing: restore it, or pass a directory that save_training has saved",
            path=path,
        )

    def missing_sums(self) -> TransferError:
        """The error for files that tierstore has written, without their sums."""
        return self.missing(SUMS)

    def _damaged(self, name: str, expected: str, found: str) -> CorruptDataError:
        path = self._where(name)
        return CorruptDataError(
            f"{path} is not the file that was saved with the {SUMS} beside it: check the disk, and "
            + OTHERS_ADVICE,
            path=path,
            expected=expected,
            found=found,
        )

    def _refuse_other_size(self, name: str) -> None:
        if name not in self._descriptors:
            raise self.missing(name)
        expected = self.sums.get(name)
        found = os.fstat(self._descriptors[name]).st_size
        if expected is None or found == expected.nbytes:
            return
        if found < expected.nbytes:
            path = self._where(name)
            raise TruncatedFileError(
                f"{path} ends at byte {found:,} of {expected.nbytes:,}: {OTHERS_ADVICE}", path=path
            )
        raise self._damaged(name, f"{expected.nbytes:,} bytes", f"{found:,} bytes")

    def _all_of(self, name: str, most: int) -> bytes:
        nbytes = os.fstat(self._descriptors[name]).st_size
        if nbytes > most:
            raise _nothing_that_is_written(
                self._where(name), f"it has {nbytes:,} bytes, more than {most:,}"
            )
        return read_fully(self._descriptors[name], nbytes, 0)

    def check(self, rank: int, ranks: int) -> None:
        """Read every `ranks`-th file that has a sum, from number `rank` on, and compare it."""
        for name in self.sums:
            self._refuse_other_size(name)
        mine = [name for name in sorted(self.sums) if name != METADATA][rank::ranks]
        room = _chunk()
        for name in mine:
            checksum = xxhash.xxh3_64()
            expected = self.sums[name]
            parts = self._parts(name, expected.nbytes, room)
            for part in bar(parts, f"Checking {name}", "parts"):
                checksum.update(part)
            if checksum.hexdigest() != expected.xxh3:
                raise self._damaged(name, expected.xxh3, checksum.hexdigest())

    def _parts(self, name: str, nbytes: int, room: memoryview) -> Iterator[memoryview]:
        offset = 0
        while offset < nbytes:
            got = os.preadv(self._descriptors[name], [room[: nbytes - offset]], offset)
            if not got:
                path = self._where(name)
                raise TruncatedFileError(
                    f"{path} ends at byte {offset:,}: somebody truncated it just now; "
                    + OTHERS_ADVICE,
                    path=path,
                )
            yield room[:got]
            offset += got

    def value(self, index: MetadataIndex) -> Any:
        """What is stored there: a chunk of a tensor, or another value."""
        where = self.metadata.storage_data[index]
        name = where.relative_path
        if name not in self._descriptors:
            raise self.missing(name)
        source = _Slice(self._descriptors[name], where.offset, where.length)
        try:
            return loaded_value(source)
        except OSError:
            raise
        except Exception as error:  # bytes that torch has not written may be anything
            raise _nothing_that_is_written(self._where(name), error) from error

    def _parsed(self, raw: bytes) -> Metadata:
        try:
            return parsed_metadata(raw)
        except Exception as error:  # a pickle that was not written by torch may do anything else
            raise _nothing_that_is_written(self._where(METADATA), error) from error


class _Slice(io.RawIOBase):
    """Bytes `start` to `start + nbytes` of a file, as a file."""

    def __init__(self, descriptor: int, start: int, nbytes: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._start = start
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, room: Any) -> int:
        wanted = memoryview(room).cast("B")[: max(self._nbytes - self._at, 0)]
        if not len(wanted):
            return 0
        got = os.preadv(self._descriptor, [wanted], self._start + self._at)
        self._at += got
        return got
