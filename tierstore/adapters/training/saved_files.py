"""The files of a saved training: written a chunk at a time, and read only as they were written."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash

from tierstore.model.errors import CorruptDataError, TruncatedFileError
from tierstore.model.groups import Block, TensorSpec, block_of, contiguous_stride, pack
from tierstore.model.header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    NO_SUM,
    build_header,
    digest,
)
from tierstore.model.objects import decode_object
from tierstore.model.sizes import PAGE
from tierstore.progress import bar
from tierstore.system.files import WRITE_BLOCK, OpenForWriting, write_all
from tierstore.system.objects import read_header
from tierstore.system.views import dtype_name, show_one

MODEL, OPTIMIZER, TRAINING = "model.safetensors", "optimizer.safetensors", "training.json"
PARTS = (MODEL, OPTIMIZER, TRAINING)
CHUNK = WRITE_BLOCK
"""Bytes of a tensor that are in memory for its sake."""

CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def write_tensors(folder: int, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write one safetensors file and sync it. Returns what tells it from any other."""
    packing = pack(_block(each, tensor) for each, tensor in tensors.items())
    header = functools.partial(build_header, name, packing, extra={"format": "pt"})
    start = len(header([NO_SUM] * len(packing.blocks)))  # whatever the checksums are
    if len(packing.blocks) > MAX_TENSORS or start > MAX_HEADER_BYTES:
        raise ValueError(
            f"{len(packing.blocks)} tensors are more than one safetensors file can list: save with "
            "torch.save(model.state_dict(), ...) instead"
        )
    nbytes = start + packing.dense_nbytes
    descriptor = os.open(name, CREATE, 0o666, dir_fd=folder)
    file = OpenForWriting(descriptor, name, folder)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # a full disk is known at once
        stream = _Stream(file, start)
        sums = []
        for block in bar(packing.blocks, f"Saving {name}", "tensors"):
            checksum = xxhash.xxh3_64()
            for part in _bytes_of(tensors[block.views[0].name]):
                checksum.update(part)
                stream.append(part)
            sums.append(checksum.hexdigest())
        stream.flush()
        head = header(sums)
        write_all(descriptor, memoryview(head), 0)
        os.fsync(descriptor)
    finally:
        file.close()
    return {"bytes": nbytes, "header": digest(head[LENGTH_BYTES:])}


def _block(name: str, tensor: torch.Tensor) -> Block:
    shape = tuple(tensor.shape)
    spec = TensorSpec(name, dtype_name(tensor, name), shape, contiguous_stride(shape), 0)
    return block_of([spec], spec.nbytes)


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor as a contiguous one has them, a chunk at a time, in CPU memory."""
    for part in _parts(tensor.detach()):
        plain = part.cpu().resolve_conj().resolve_neg().contiguous()
        yield plain.view(-1).view(torch.uint8).numpy().data


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.nbytes <= CHUNK:
        yield tensor
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    rows = CHUNK * len(tensor) // tensor.nbytes
    if rows:
        yield from tensor.split(rows)
        return
    for row in tensor:
        yield from _parts(row)


def _chunk() -> memoryview:
    """Memory for a chunk, at a page boundary."""
    return memoryview(mmap.mmap(-1, CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class _Stream:
    """Writes one after the other, in chunks of whole pages, past the page cache."""

    def __init__(self, file: OpenForWriting, offset: int) -> None:
        self._file = file
        self._offset = offset
        self._room = _chunk()
        self._filled = 0

    def append(self, data: memoryview) -> None:
        while len(data):
            taken = data[: CHUNK - self._filled]
            self._room[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            data = data[len(taken) :]
            if self._filled == CHUNK:
                self.flush()

    def flush(self) -> None:
        """Write what is left. Its end may be no page multiple: nothing can be appended then."""
        whole = self._filled // PAGE * PAGE
        self._file.write(self._room[:whole], self._offset)
        write_all(self._file.cached, self._room[whole : self._filled], self._offset + whole)
        self._offset += self._filled
        self._filled = 0


class TensorFile:
    """One safetensors file of a save, open, with the header that it was saved with."""

    def __init__(self, descriptor: int, path: str, expected: Mapping[str, Any]) -> None:
        self._descriptor = descriptor
        self.path = path
        self._refuse_other_size(expected["bytes"])
        header, _ = read_header(descriptor, path)
        if header.digest != expected["header"]:
            raise CorruptDataError(
                f"{path} is not the file that was saved with the {TRAINING} beside it: its header "
                "was changed, or it is of another save; restore it, or load another save",
                path=path,
                expected=expected["header"],
                found=header.digest,
            )
        stored = decode_object(header, path)
        self._start = header.data_start
        rows = zip(stored.packing.blocks, stored.packing.dense, stored.digests, strict=True)
        self._found = {block.views[0].name: (block, at, total) for block, at, total in rows}

    def _refuse_other_size(self, expected: int) -> None:
        nbytes = os.fstat(self._descriptor).st_size
        if nbytes < expected:
            raise TruncatedFileError(
                f"{self.path} ends at byte {nbytes:,} of {expected:,}: restore it, or load another "
                "save",
                path=self.path,
            )
        if nbytes > expected:
            raise CorruptDataError(
                f"{self.path} has {nbytes:,} bytes, {expected:,} were saved: restore it, or load "
                "another save",
                path=self.path,
                expected=str(expected),
                found=str(nbytes),
            )

    def specs(self) -> dict[str, TensorSpec]:
        """What each tensor is."""
        return {name: block.views[0] for name, (block, _, _) in self._found.items()}

    def check(self) -> None:
        """Read all of it. Raises CorruptDataError or TruncatedFileError."""
        room = _chunk()
        doing = f"Checking {os.path.basename(self.path)}"
        for name, (block, at, expected) in bar(self._found.items(), doing, "tensors"):
            checksum = xxhash.xxh3_64()
            for part in self._read(self._start + at, block.nbytes, room):
                checksum.update(part)
            if checksum.hexdigest() != expected:
                raise CorruptDataError(
                    f"{self.path} holds other bytes for {name!r} than were saved: check the disk, "
                    "and restore the file or load another save",
                    path=self.path,
                    expected=expected,
                    found=checksum.hexdigest(),
                )

    def _read(self, offset: int, nbytes: int, room: memoryview) -> Iterator[memoryview]:
        while nbytes:
            got = os.preadv(self._descriptor, [room[: min(nbytes, CHUNK)]], offset)
            if not got:
                raise TruncatedFileError(
                    f"{self.path} ends at byte {offset:,}: somebody truncated it just now; restore "
                    "it, or load another save",
                    path=self.path,
                )
            yield room[:got]
            offset, nbytes = offset + got, nbytes - got

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as a private map of the file: it takes no memory until somebody writes to it."""
        block, at, _ = self._found[name]
        spec = replace(block.views[0], offset=self._start + at)
        return show_one(spec, self._memory)

    @functools.cached_property
    def _memory(self) -> mmap.mmap:
        return mmap.mmap(self._descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
