"""Alternative ways to read a safetensors file and to write tensors, for `disk.py`.

Each reader fills the existing tensors of `memory`, by name. Each writer creates one file per
tensor, which survives a power cut.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import aiofiles
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Tensors = Mapping[str, torch.Tensor]

BLOCK = 16 << 20
THREADS = 4


def load_whole_file(path: Path, memory: Tensors) -> None:
    for name, tensor in load_file(path).items():
        memory[name].copy_(tensor)


def get_each_tensor(path: Path, memory: Tensors) -> None:
    with safe_open(path, "pt") as file:
        for name, tensor in memory.items():
            tensor.copy_(file.get_tensor(name))


def copy_from_memory_map(path: Path, memory: Tensors) -> None:
    header_length = int.from_bytes(path.open("rb").read(8), "little")
    header = json.loads(path.open("rb").read(8 + header_length)[8:])
    mapped = np.memmap(path, np.uint8, "r")
    for name, tensor in memory.items():
        begin, end = (at + 8 + header_length for at in header[name]["data_offsets"])
        np.copyto(tensor.view(torch.uint8).numpy(), mapped[begin:end])


def torch_load(path: Path, memory: Tensors) -> None:
    for name, tensor in torch.load(path, mmap=True).items():
        memory[name].copy_(tensor)


def read_with_aiofiles(path: Path, room: memoryview) -> None:
    async def read() -> None:
        async with aiofiles.open(path, "rb", buffering=0) as file:
            while await file.readinto(room[:BLOCK]):
                pass

    asyncio.run(read())


def read_in_threads(path: Path, room: memoryview, flags: int = 0) -> None:
    """Read with `preadv` on several threads, each with its own buffer. Whole blocks only."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    offsets = iter(range(0, os.fstat(descriptor).st_size // BLOCK * BLOCK, BLOCK))

    def read(number: int) -> Callable[[], None]:
        def work() -> None:
            mine = room[number * BLOCK : (number + 1) * BLOCK]
            for offset in _shared(offsets, lock):
                os.preadv(descriptor, [mine], offset)

        return work

    lock = threading.Lock()
    try:
        _in_threads(read(number) for number in range(THREADS))
    finally:
        os.close(descriptor)


def save_with_safetensors(directory: Path, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        save_file({name: tensor}, directory / name)
        _sync(directory / name)
    _sync(directory)


def write_plainly(directory: Path, tensors: Tensors) -> None:
    """Write through the page cache with `open` and `write`, and sync."""
    for name, tensor in tensors.items():
        with open(directory / name, "wb", buffering=0) as file:
            file.write(tensor.view(torch.uint8).numpy())
            os.fsync(file.fileno())
    _sync(directory)


def small_pages(nbytes: int) -> memoryview:
    """Allocate populated memory in 4 KiB pages."""
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    np.frombuffer(mapped, np.uint8)[:] = 1
    return memoryview(mapped)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _shared(offsets: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    while True:
        with lock:
            offset = next(offsets, None)
        if offset is None:
            return
        yield offset


def _in_threads(jobs: Iterable[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
