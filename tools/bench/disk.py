"""The disk engine

The engine against fio and against alternatives, on the same files. Requires fio, which every
distribution has. Every round runs everything once, in another order, with the page cache dropped
before each run (if permitted). A figure is the median over rounds of the ratio to the fio
configuration that was best over all rounds.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tierstore.model.header import digest
from tierstore.system.files import DISK_THREADS, READ_BLOCK
from tierstore.tiers.arena import Slot
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.pages import fresh_memory
from tools.bench import disk_peers as peers
from tools.bench import fio, machine
from tools.bench.disk_engine import Engine, digest_of, one_tensor, pieces
from tools.bench.fio import MIB, Rate
from tools.bench.page import Claim, Page
from tools.bench.runner import Bench, median, ratios, spread

PACKAGES, ROUNDS = ("torch", "safetensors", "numpy", "aiofiles"), 7
Run = Callable[[], Rate]

OURS = "tierstore"
PIECES = "tierstore, groups of 4 MiB, into 16 MiB"
CHECKED = "tierstore, every checksum compared"
ROOMY = f"fio's {fio.ROOMY}, into 256 MiB"
PIECE = 4 * MIB
"""With four groups in flight, the engine reads into 16 MiB, as the best fio configuration does."""
SPILL = "tierstore, spill into room used before"
SPILL_NEW = "tierstore, spill into new room"
DURABLE = "tierstore, durable (checksums, fsync, rename)"

PREDICTED = {
    OURS: ("1.00", ".008"),
    PIECES: ("0.95", ".03"),
    CHECKED: ("0.95", ".04"),
    "O_DIRECT preadv into 4 KiB pages": ("0.50", ".035"),
    "buffered preadv": ("0.50", ".4"),
    "numpy memmap, copied": ("0.60", ".21"),
    "safetensors load_file, copied": ("0.50", ".45"),
    "safetensors get_tensor, copied": ("0.25", "1.0"),
    "torch.load(mmap=True), copied": ("0.50", ".4"),
    "aiofiles readinto": ("0.30", ".8"),
    SPILL: ("0.95", ".04"),
    SPILL_NEW: ("0.50", ".04"),
    DURABLE: ("0.48", ".045"),
    "fio, new files, synced": ("0.50", ".015"),
    "safetensors save_file, synced": ("0.10", "1.5"),
    "write through the page cache, synced": ("0.15", "1.0"),
}
"""Predicted ratio to fio and CPU seconds per GB, recorded before the first run of this script."""


@dataclass(frozen=True)
class Sizes:
    """The bytes to read and write: `groups` tensors of `group` bytes each."""

    group: int
    groups: int

    @property
    def total(self) -> int:
        return self.group * self.groups


FULL = Sizes(32 * MIB, 32)
SMALL = Sizes(32 * MIB, 4)


def rated(nbytes: int, work: Callable[[], object]) -> Rate:
    """Measure the rate of `work`, which moves `nbytes` bytes."""
    with machine.Stopwatch() as watch:
        work()
    return Rate(nbytes / watch.seconds, watch.cpu_seconds / nbytes * 1e9)


# Reading -----------------------------------------------------------------------------------------


class Files:
    """A checkpoint, saved by safetensors and by torch, and memory for its tensors."""

    def __init__(self, directory: Path, sizes: Sizes) -> None:
        self.directory = directory
        self.sizes = sizes
        self.safetensors = directory / "model.safetensors"
        self.torch = directory / "model.pt"
        self.memory: dict[str, torch.Tensor] = {}
        self._room = fresh_memory(sizes.total)
        self._room.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
        for i in range(sizes.groups):
            part = self._room[i * sizes.group : (i + 1) * sizes.group]
            self.memory[f"blocks.{i:03}.weight"] = part.view(torch.bfloat16)
        save_file(self.memory, self.safetensors)
        torch.save(dict(self.memory), self.torch)
        self.small = peers.small_pages(peers.THREADS * peers.BLOCK)

    @property
    def room(self) -> memoryview:
        return self._room.numpy().data


def reads(engine: Engine, files: Files) -> dict[str, Run]:
    """Return all ways to read the checkpoint, by name."""
    total = files.sizes.total
    cut = {size: engine.checkpoint(files.safetensors, size) for size in (files.sizes.group, PIECE)}
    for largest, entries in cut.items():
        verify_reads(engine, entries, files, largest)
    stored = store_groups(engine, files)

    def ours(entries: Sequence[GroupEntry], verify: str) -> Run:
        read = functools.partial(engine.each, entries, engine.reading(verify))
        return lambda: rated(fio.LOOPS * total, lambda: [read() for _ in range(fio.LOOPS)])

    def peer(work: Callable[..., object], *arguments: object) -> Run:
        return lambda: rated(total, lambda: work(*arguments))

    def by_fio(how: str) -> Run:
        options = ("--rw=read", f"--loops={fio.LOOPS}")
        return functools.partial(fio.run, files.safetensors, how, total, *options)

    named = (files.safetensors, files.memory)
    return {
        OURS: ours(cut[files.sizes.group], "never"),
        PIECES: ours(cut[PIECE], "never"),
        CHECKED: ours(stored, "always"),
        "O_DIRECT preadv into 4 KiB pages": peer(
            peers.read_in_threads, files.safetensors, files.small, os.O_DIRECT
        ),
        "buffered preadv": peer(peers.read_in_threads, files.safetensors, files.room),
        "numpy memmap, copied": peer(peers.copy_from_memory_map, *named),
        "safetensors load_file, copied": peer(peers.load_whole_file, *named),
        "safetensors get_tensor, copied": peer(peers.get_each_tensor, *named),
        "torch.load(mmap=True), copied": peer(peers.torch_load, files.torch, files.memory),
        "aiofiles readinto": peer(peers.read_with_aiofiles, files.safetensors, files.room),
        **({ROOMY: by_fio(fio.ROOMY)} if total >= fio.ROOM else {}),
        **{f"fio {name}": by_fio(name) for name in fio.READS},
    }


def store_groups(engine: Engine, files: Files) -> list[GroupEntry]:
    """Store as many groups in the store's directory as the checkpoint has."""
    spec, packing = one_tensor(files.sizes.group)
    slots = [engine.filled(spec, seed=i) for i in range(files.sizes.groups)]
    engine.store_all(packing, slots)
    engine.give(slots)
    return engine.stored()


def verify_reads(engine: Engine, entries: Sequence[GroupEntry], files: Files, largest: int) -> None:
    """Compare all bytes once, so that only correct reads are timed."""
    found: dict[str, str] = {}

    def arrived(entry: GroupEntry, slot: Slot) -> None:
        assert entry.source is not None
        found[entry.group.key] = digest_of(slot, entry.source)

    engine.each(entries, engine.reading("never", arrived))
    expected = {}
    for tensor_name, tensor in files.memory.items():
        data = tensor.view(torch.uint8).numpy().data
        for name, at, nbytes in pieces(tensor_name, len(data), largest):
            expected[name] = digest(data[at : at + nbytes])
    if found != expected:
        raise SystemExit("the engine read bytes that differ from the file")


# Writing -----------------------------------------------------------------------------------------


class Writing:
    """Groups of random bytes, and all ways to write them."""

    def __init__(self, engine: Engine, directory: Path, sizes: Sizes) -> None:
        self._engine = engine
        self._directory = directory
        self._total = sizes.total
        self._spec, self._packing = one_tensor(sizes.group)
        self._slots = [engine.filled(self._spec, seed=i) for i in range(sizes.groups)]
        self._tensors = {}
        for i, slot in enumerate(self._slots):
            assert slot.memory is not None
            self._tensors[f"group{i}"] = slot.memory[: sizes.group].view(torch.bfloat16)
        self._over = directory / "overwritten"
        fio.run(self._over, "psync 16M x4", self._total, "--rw=write", "--fallocate=posix")

    def runs(self) -> dict[str, Run]:
        """Return the ways to write, by name."""
        save, plain = peers.save_with_safetensors, peers.write_plainly
        return {
            SPILL: self.spill_again,
            SPILL_NEW: self.spill_anew,
            DURABLE: self.durable,
            "fio, new files, synced": self.fio_anew,
            "safetensors save_file, synced": lambda: self.by_peer(save),
            "write through the page cache, synced": lambda: self.by_peer(plain),
            **{f"fio {name}": functools.partial(self.fio_again, name) for name in fio.WRITES},
        }

    def spill_again(self) -> Rate:
        self._spill_once()  # an earlier run may have trimmed the file
        return self._spill(fio.LOOPS)

    def spill_anew(self) -> Rate:
        self._engine.spill.trim()
        return self._spill(1)

    def _spill(self, loops: int) -> Rate:
        return rated(loops * self._total, lambda: [self._spill_once() for _ in range(loops)])

    def _spill_once(self) -> None:
        for offset in self._engine.spill_all(self._slots):
            self._engine.spill.release(offset, self._spec.nbytes)

    def durable(self) -> Rate:
        self._engine.remove_all()
        return rated(self._total, lambda: self._engine.store_all(self._packing, self._slots))

    def by_peer(self, write: Callable[[Path, Mapping[str, torch.Tensor]], None]) -> Rate:
        made = Path(tempfile.mkdtemp(dir=self._directory))
        try:
            return rated(self._total, lambda: write(made, self._tensors))
        finally:
            shutil.rmtree(made)

    def fio_anew(self) -> Rate:
        made = self._directory / "new"
        try:
            options = ("--rw=write", "--fallocate=posix", "--end_fsync=1")
            return fio.run(made, "libaio 8M q4", self._total, *options)
        finally:
            made.unlink()

    def fio_again(self, configuration: str) -> Rate:
        options = ("--rw=write", "--overwrite=1", f"--loops={fio.LOOPS}")
        return fio.run(self._over, configuration, self._total, *options)


# The page ----------------------------------------------------------------------------------------


def show(page: Page, results: Mapping[str, Sequence[Rate]]) -> None:
    """Add a table of measured and predicted figures, relative to fio's best configuration."""
    speeds = {name: [rate.speed for rate in rates] for name, rates in results.items()}
    configurations = [name for name in results if name.startswith("fio ")]
    best = max(configurations, key=lambda name: median(speeds[name]))
    rows = []
    for name in (best, *(name for name in results if name not in configurations)):
        predicted, predicted_cpu = PREDICTED.get(name, ("", ""))
        rows.append(
            (
                f"**{name}** (the best of {len(configurations)})" if name == best else name,
                f"{median(speeds[name]) / 1e9:.2f}",
                predicted,
                spread(ratios(speeds[name], speeds[best])),
                predicted_cpu,
                f"{median(rate.cpu for rate in results[name]):.3f}",
            )
        )
    columns = ("", "GB/s", "predicted ratio", "ratio to fio", "predicted CPU s/GB", "CPU s/GB")
    page.table(columns, rows)
    every = [(name, spread([speed / 1e9 for speed in speeds[name]])) for name in configurations]
    page.text("Every configuration of fio:")
    page.table(("configuration", "GB/s"), every)


def measure(bench: Bench) -> Iterator[Claim]:
    if not fio.available():
        raise SystemExit("fio, the reference, is not installed: run apt-get install fio")
    sizes = SMALL if bench.small else FULL
    bench.page.text(
        f"{fio.version()}, its buffers in huge pages; {sizes.groups} groups of "
        f"{sizes.group // MIB} MiB, {bench.rounds} rounds; the engine has {DISK_THREADS} threads "
        f"and blocks of {READ_BLOCK // MIB} MiB."
    )
    if not bench.small and not machine.drop_page_cache():
        bench.page.text("**The page cache could not be dropped: peers that use it look too good.**")
    engine = Engine(bench.scratch / "store")
    try:
        bench.page.text("## Reading, cold")
        show(bench.page, bench.turns(reads(engine, Files(bench.scratch, sizes)), cold=True))
        bench.page.text("## Writing")
        show(bench.page, bench.turns(Writing(engine, bench.scratch, sizes).runs(), cold=True))
    finally:
        engine.close()
    yield from ()
