"""Write, replace and read the files of a checkpoint of `torch.distributed.checkpoint`.

    __0_5.distcp   written by rank 0 in save number 5: chunks of tensors and other values, by
                   `torch.save`
    .metadata      torch's pickle, which maps chunks to files; then the size and checksum of each
                   file, and the checksum of `.metadata` itself

torch reads only the pickle. Files of different saves have different names, and `.metadata` is
renamed into place last, so a reader finds either the old save or the new one. See decision 49.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Any, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from tierstore import errors
from tierstore.adapters.codecs.memory import over, owns_storage, span
from tierstore.adapters.training.checkpoint_metadata import DATA, parsed_metadata
from tierstore.model.header import digest
from tierstore.progress import bar
from tierstore.system.files import CHUNK, sync_names, write_all
from tierstore.system.locking import try_lock
from tierstore.system.objects import READ
from tierstore.system.private import READABLE, deny_others_writing
from tierstore.torch_private import file_view, stored_at

METADATA, DRAFT = ".metadata", ".saving-"
FORMAT = 1
ADVICE = "restore it, or load another save"
_PASS = "pass the path that you gave to save_training"
_UNSYNCED = 64 << 20  # dirty bytes of a file that may accumulate in the page cache


class FileSum(NamedTuple):
    """The size and checksum of a file."""

    nbytes: int
    xxh3: str


class _Output(io.FileIO):
    """A new file for `torch.save` to write to; computes its checksum on the fly."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "xb")
        self._end = self._synced = 0
        self._sum = xxhash.xxh3_64()

    def tell(self) -> int:
        return self._end

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        write_all(self.fileno(), view, self._end)
        self._sum.update(view)
        self._end += len(view)
        if self._end - self._synced > _UNSYNCED:
            self.sync()
        return len(view)

    def sync(self) -> FileSum:
        """Sync the file, drop it from the page cache, and return its size and checksum so far."""
        os.fsync(self.fileno())
        os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._synced = self._end
        return FileSum(self._end, self._sum.hexdigest())


class CheckpointWriter(FileSystemWriter):
    """Writes each rank's part to one file, an item at a time.

    torch's own writer keeps all tensors of a file in memory until the file is written. Ranks send
    the checksums of their files to the first rank as results of extra, unplanned items.
    """

    def __init__(self, draft: str, number: int) -> None:
        super().__init__(draft)
        self._number = number

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        """Write the items of this rank in the order of the plan."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._written(plan, planner) if plan.items else [])
        return future

    def _written(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name, results = f"{plan.storage_data.prefix}{self._number}.distcp", []
        with _Output(os.path.join(self.path, name)) as output:
            for item in bar(plan.items, f"Saving {name}", "tensors"):
                start = output.tell()
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    _save(data, output)
                else:
                    output.write(data.getbuffer())
                del data  # free its RAM for the next item
                nbytes = output.tell() - start
                results.append(WriteResult(item.index, nbytes, stored_at(name, start, nbytes)))
            return [*results, WriteResult(MetadataIndex(name), 0, output.sync())]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and the checksums, on the first rank."""
        found = [result for of_rank in results for result in of_rank]
        sums = {r.index.fqn: r.storage_data for r in found if isinstance(r.storage_data, FileSum)}
        super().finish(metadata, [[r for r in found if not isinstance(r.storage_data, FileSum)]])
        with open(os.path.join(self.path, METADATA), "r+b") as file:
            pickled = file.read()
            file.write(seal_metadata(pickled, sums).removeprefix(pickled))
            file.flush()
            os.fsync(file.fileno())


def _save(tensor: torch.Tensor, output: Any) -> None:
    """Save the values of a tensor, copied if needed, because torch saves whole storages."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if not plain.numel() or span(plain) != plain.nbytes:
        plain = plain.contiguous() if plain.numel() else plain.clone()
    try:
        torch.save(plain if owns_storage(plain) else over(plain), output)
    except RuntimeError as error:  # torch wraps errors of the disk
        raise error.__context__ or error from None


def _loaded(source: Any) -> Any:
    return torch.load(source, map_location="cpu", weights_only=True)


_NOT_PLAIN = (pickle.PickleError, AttributeError, RecursionError, TypeError)
"""Errors of `_encode` for a value that could not be loaded again."""


def _encode(value: Any, output: io.BytesIO) -> None:
    """Save a value, and check that it can be loaded."""
    torch.save(value, output)
    _loaded(io.BytesIO(output.getvalue()))


class Encoded(io.BytesIO):
    """A value encoded by `torch.save`. Raises TypeError if it could not be loaded again."""

    def __init__(self, value: Any, name: str) -> None:
        super().__init__()
        try:
            _encode(value, self)
        except _NOT_PLAIN as error:
            if isinstance(error, RecursionError):
                raise TypeError(f"{name} is nested too deeply: save fewer levels") from error
            part, found = _not_plain(name, value)
            rest = (
                ""
                if name == "extra"
                else "; or leave it out, and save what recreates it as `extra`"
            )
            raise TypeError(
                f"{part} is of type {found}, which cannot be loaded without running code: {name} "
                f"may hold tensors, text, numbers, lists, tuples and dicts{rest}"
            ) from error


def _not_plain(name: str, value: Any) -> tuple[str, str]:
    """Return the path and the type of the first part of a value that cannot be loaded."""
    for _ in range(100):  # a container may contain itself
        if isinstance(value, dict):
            items: Any = value.items()
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        else:
            break
        wrong = next(((key, item) for key, item in items if not _is_plain(item)), None)
        if wrong is None:  # a key, or the class of the container
            break
        name, value = f"{name}[{wrong[0]!r}]", wrong[1]
    return name, type(value).__name__


def _is_plain(value: Any) -> bool:
    try:
        _encode(value, io.BytesIO())
    except _NOT_PLAIN:
        return False
    return True


def seal_metadata(pickled: bytes, sums: dict[str, FileSum]) -> bytes:
    """Return the contents of `.metadata`: the pickle, the checksums of the files, and its own."""
    trailer = json.dumps({"format": FORMAT, "files": sums}, separators=(",", ":"))
    body = pickled + b"\n" + trailer.encode() + b"\n"
    return body + digest(body).encode()


@contextlib.contextmanager
def draft_directory(path: str) -> Iterator[tuple[str, int]]:
    """Yield a draft directory for a checkpoint, and the save number for its files.

    If the block ends without an error, the draft's files replace the checkpoint in `path`.
    Raises StoreLockedError while another save to `path` is in progress.
    """
    _make_directories(path)
    with _opened(path) as folder:
        if not try_lock(folder):
            raise errors.StoreLockedError(
                f"another save to {path} is in progress: wait for it, or choose another path"
            )
        names = os.listdir(folder)
        for name in names:
            if name.startswith(DRAFT):  # left by a crashed process
                shutil.rmtree(os.path.join(path, name), ignore_errors=True)
        draft = tempfile.mkdtemp(prefix=DRAFT, dir=path)
        try:
            yield draft, max((int(f[1]) + 1 for f in map(DATA.fullmatch, names) if f), default=0)
            new = os.listdir(draft)
            for name in sorted(new, key=lambda name: name == METADATA):
                deny_others_writing(os.path.join(draft, name))
                if name == METADATA:
                    sync_names(folder)
                os.rename(os.path.join(draft, name), os.path.join(path, name))
            sync_names(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        for name in os.listdir(folder):
            if DATA.fullmatch(name) and name not in new:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    folder = os.open(path, READ | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)


def _make_directories(path: str) -> None:
    """Create a directory and its parents durably: they survive a power cut."""
    if not os.path.isdir(path):
        above = os.path.dirname(path)
        _make_directories(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, READABLE)
        with _opened(above) as folder:
            sync_names(folder)


class CheckpointFiles:
    """The files of one save, open until `stack` is closed.

    Raises TransferError if a file is missing, CorruptDataError if `.metadata` is not one that torch
    writes, and TierStoreError if its format is newer.
    """

    def __init__(self, path: str, stack: ExitStack) -> None:
        self.path = path
        self._files: dict[str, IO[bytes]] = {}
        metadata = os.path.join(path, METADATA)
        while True:
            try:
                file = stack.enter_context(os.fdopen(os.open(metadata, READ), "rb"))
                for name in self._parsed(file.read()):
                    descriptor = os.open(os.path.join(path, name), READ)
                    self._files[name] = stack.enter_context(os.fdopen(descriptor, "rb"))
                return
            except FileNotFoundError as error:
                lacking = str(error.filename)
                if lacking == metadata or os.path.samestat(
                    os.stat(metadata), os.fstat(file.fileno())
                ):
                    raise self._missing(lacking) from None
            except NotADirectoryError:
                why = f"is not a directory: {_PASS}"
                raise self._error(errors.TransferError, path, why) from None

    def _missing(self, name: str) -> errors.TransferError:
        """Return the error for a file that does not exist, or for the directory without it."""
        if not os.path.exists(self.path):
            text = f"there is no directory {self.path}: {_PASS}"
            return errors.TransferError(text, path=self.path)
        if not any(name == METADATA or DATA.fullmatch(name) for name in os.listdir(self.path)):
            text = f"{self.path} has no saved training: {_PASS}"
            return errors.TransferError(text, path=name)
        why = f"is missing: {ADVICE}"
        return errors.TransferError(f"{name} {why}", path=name)

    def _parsed(self, raw: bytes) -> set[str]:
        """Read the metadata and the checksums. Return the names of the data files."""
        body, _, seal = raw.rpartition(b"\n")
        self._sums: dict[str, FileSum] = {}  # empty if written by torch alone
        try:
            if is_sealed := seal == digest(body + b"\n").encode():
                raw, _, line = body.rpartition(b"\n")
                trailer = json.loads(line)
                if trailer["format"] != FORMAT:
                    raise errors.TierStoreError(
                        f"{self.path} has a newer format than {FORMAT}: upgrade tierstore"
                    )
                files = trailer["files"].items()
                self._sums = {name: FileSum(int(n), str(xxh3)) for name, (n, xxh3) in files}
            self.metadata = parsed_metadata(raw)
            names = {place.relative_path for place in self.metadata.storage_data.values()}
            if is_sealed and names != self._sums.keys():
                raise ValueError("it has checksums of other files")
            return names
        except errors.TierStoreError:
            raise
        except Exception as error:  # a damaged or foreign pickle may raise anything
            raise self._unreadable(METADATA, error) from error

    def _error(self, kind: Any, name: str, why: str, **found: str) -> Any:
        path = os.path.join(self.path, name)
        return kind(f"{path} {why}", path=path, **found)

    def _unreadable(self, name: str, error: Exception) -> Any:
        why = f"is not a valid checkpoint file of torch ({error!s:.200}): {ADVICE}"
        return self._error(errors.CorruptDataError, name, why)

    def check_has_sums(self) -> None:
        """Raise CorruptDataError if there are no checksums; every save of tierstore has them."""
        if not self._sums:
            why = f"does not match its checksum: it was damaged or edited; {ADVICE}"
            raise self._error(errors.CorruptDataError, METADATA, why)

    def check(self, rank: int, ranks: int) -> None:
        """Check the size of every file, and the checksums of this rank's share of the files.

        Raises TruncatedFileError or CorruptDataError.
        """
        for name, (expected, _) in self._sums.items():
            nbytes = os.fstat(self._files[name].fileno()).st_size
            if nbytes < expected:
                why = f"ends at byte {nbytes:,} of {expected:,}: {ADVICE}"
                raise self._error(errors.TruncatedFileError, name, why)
            self._check_equal(name, f"{nbytes:,} bytes", f"{expected:,} bytes")
        buffer = memoryview(bytearray(CHUNK))
        for name in sorted(self._sums)[rank::ranks]:
            file, found = self._files[name], xxhash.xxh3_64()
            count = -(-self._sums[name].nbytes // CHUNK)
            for _ in bar(range(count), f"Checking {name}", "parts"):
                found.update(buffer[: file.readinto(buffer)])  # type: ignore[attr-defined]
            self._check_equal(name, found.hexdigest(), self._sums[name].xxh3)

    def _check_equal(self, name: str, found: str, expected: str) -> None:
        if found != expected:
            why = f"is not the file that was saved with the {METADATA} beside it: {ADVICE}"
            raise self._error(errors.CorruptDataError, name, why, expected=expected, found=found)

    def value(self, index: MetadataIndex) -> Any:
        """Load a chunk of a tensor, or another value."""
        place = self.metadata.storage_data[index]
        try:
            return _loaded(file_view(self._files[place.relative_path], place.offset, place.length))
        except OSError:
            raise
        except Exception as error:  # torch may raise anything for a file that it did not write
            raise self._unreadable(place.relative_path, error) from error
