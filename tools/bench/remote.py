"""A model whose checkpoint is in an object store, with RAM and disk for three quarters of it.

A Flux transformer of 500 MB (bfloat16, 64 image tokens) runs block by block from an S3 server, with
a RAM budget of a quarter of the weights and a disk budget of half. The server is a simple threaded
one in a separate process on this machine. It supports GET and HEAD of S3 with ranges, ETags and
If-Match; a full S3 simulator would be too slow. To simulate a network, it limits the total bytes
per second of all connections (`--bandwidth`).

Speeds are measured in rounds of turns: obstore's own ranged reads of the same object (8 MiB each, 8
at a time), the store's fetches into memory, and the whole path through the store: to disk, with
checksums, and into RAM. With a server that sends from memory on the same cores, every copy of the
bytes costs time; behind a network, only waiting does.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import obstore
import torch
from obstore.store import from_url
from torch.func import functional_call

from tierstore import TierStore
from tierstore.engine.checkpoints import read_checkpoint
from tierstore.model.groups import Segment
from tierstore.tiers.pages import fresh_memory
from tierstore.tiers.remote_tier import RemoteSource, fetch
from tools.bench import flux
from tools.bench.apart import Apart
from tools.bench.page import Claim, Page
from tools.bench.runner import Bench, interleave, median, ratios

PACKAGES, ROUNDS = ("torch", "diffusers", "obstore"), 5
BUCKET, NAME = "models", "diffusion_pytorch_model.safetensors"
URL = f"s3://{BUCKET}/{NAME}"
PIECE, AT_ONCE, STEPS = 8 << 20, 8, 8


# --- the server, in a separate process ------------------------------------------------------------


class Limit:
    """A limit in bytes per second of all connections together; 0 for none."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth, self._free_at, self._lock = bandwidth, 0.0, threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Block until `nbytes` more bytes may be sent."""
        if self._bandwidth:
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._bandwidth
                until = self._free_at
            time.sleep(max(until - time.monotonic(), 0.0))


def serve(path: Path, bandwidth: float) -> Generator[int, Any, None]:
    """Serve a file. Yields the port."""
    etag, size, limit = f'"{path.stat().st_mtime_ns}"', path.stat().st_size, Limit(bandwidth)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

        def do_HEAD(self) -> None:
            self._answer(200, 0, size)

        def do_GET(self) -> None:
            if self.headers.get("If-Match", etag) != etag:
                self.send_response(412)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, stop = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, size)
            self._answer(206 if wanted else 200, start, stop)
            with path.open("rb") as file:
                while start < stop:
                    part = min(1 << 20, stop - start)
                    limit.wait(part)
                    start += os.sendfile(self.connection.fileno(), file.fileno(), start, part)

        def _answer(self, status: int, start: int, stop: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(stop - start))
            self.send_header("ETag", etag)
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]


@contextlib.contextmanager
def server(path: Path, bandwidth: float = 0.0) -> Iterator[None]:
    """Start a server, and set the environment variables by which obstore finds it."""
    with Apart(serve, path, bandwidth) as process:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{process.answer()}",
            "AWS_ALLOW_HTTP": "true",
        }
        yield


# --- a model that takes its blocks from a store ---------------------------------------------------


class Block(torch.nn.Module):
    """A block whose weights are leased for each forward."""

    def __init__(self, store: TierStore, key: str, block: torch.nn.Module) -> None:
        super().__init__()
        self._store, self._key, self._held = store, key, [block]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._store.acquire(self._key) as lease:
            cut = len(self._key) + 1
            tensors = {name[cut:]: value for name, value in lease.tensors.items()}
            return functional_call(self._held[0], tensors, args, kwargs)


def streamed(checkpoint: Path, store: TierStore, source: str) -> Callable[[], torch.Tensor]:
    """Register the checkpoint at `source`. Return a function that runs one step with it."""
    with torch.device("meta"):
        model = flux.CLASS.from_config(flux.CLASS.load_config(checkpoint)).eval()
    groups: dict[str, list[str]] = {"rest": []}
    for name in model.state_dict():
        found = re.match(r"((?:single_)?transformer_blocks\.\d+)\.", name)
        groups.setdefault(found[1] if found else "rest", []).append(name)
    store.register_checkpoint(source, groups=groups)
    store.prefetch(groups)  # the order is not learned before the first step
    for kind in ("transformer_blocks", "single_transformer_blocks"):
        blocks = getattr(model, kind)
        for number, block in enumerate(blocks):
            blocks[number] = Block(store, f"{kind}.{number}", block)

    @torch.no_grad()
    def step() -> torch.Tensor:
        with store.acquire("rest") as lease:
            rest = {name: value.clone() for name, value in lease.tensors.items()}
        found: torch.Tensor = functional_call(model, rest, (), INPUTS)[0]
        return found

    return step


INPUTS = flux.inputs(dtype=torch.bfloat16)


# --- measurements ---------------------------------------------------------------------------------


class Remote:
    """The measurements of one checkpoint."""

    def __init__(self, page: Page, place: Path, checkpoint: Path, rounds: int) -> None:
        self.page, self.place, self.checkpoint, self.rounds = page, place, checkpoint, rounds
        self.nbytes = (checkpoint / NAME).stat().st_size

    def store(self, name: str, disk: float | None = 0.5, *, fresh: bool = True) -> TierStore:
        if fresh:
            shutil.rmtree(self.place / name, ignore_errors=True)
        budget = None if disk is None else int(self.nbytes * disk)
        return TierStore(self.nbytes // 4, self.place / name, device="cpu", disk_budget=budget)

    def steps(self) -> Iterator[Claim]:
        """Run steps with small budgets, and again in another store on the same disk."""
        with torch.no_grad():
            expected = flux.load(self.checkpoint).eval()(**INPUTS)[0]
        equal = True
        with self.store("steps") as store:
            step, fetched = streamed(self.checkpoint, store, URL), [0]
            for _ in range(STEPS):
                equal &= torch.equal(step(), expected)
                fetched.append(store.stats().bytes_fetched)
            groups = store.snapshot().groups
            largest = max(group.nbytes for group in groups)
            cached = sum(group.nbytes for group in groups if "DISK" in group.tiers)
            peaks = store.stats().peak_bytes
        each = [b - a for a, b in itertools.pairwise(fetched)]
        with self.store("steps", fresh=False) as store:
            equal &= torch.equal(streamed(self.checkpoint, store, URL)(), expected)
            again = store.stats().bytes_fetched
        rows = {f"{n}": nbytes for n, nbytes in enumerate(each, 1)} | {"1 of the second run": again}
        self.page.table(("step", "MB fetched"), [(n, f"{b / 1e6:.1f}") for n, b in rows.items()])
        bound = self.nbytes - self.nbytes // 4 - self.nbytes // 2 + 3 * largest
        self.page.text(
            f"The largest group has {largest / 1e6:.1f} MB, so the bound of a step is "
            f"{bound / 1e6:.1f} MB. The peaks are {peaks['HOST'] / 1e6:.1f} MB in RAM and "
            f"{peaks['DISK'] / 1e6:.1f} MB on disk; {cached / 1e6:.1f} MB remained on disk."
        )
        more = (again - (self.nbytes - cached)) / largest
        yield Claim("outputs are bit-identical to those of the model in memory", equal, at_least=1)
        for text, value, at_most in (
            (
                "most bytes fetched in a step from the third on / bound",
                max(each[2:]) / bound,
                1.1,
            ),
            ("mean of these steps / bound", statistics.mean(each[2:]) / bound, 1.1),
            ("peak of RAM / budget", peaks["HOST"] / (self.nbytes // 4), 1),
            ("peak of disk / budget", peaks["DISK"] / (self.nbytes // 2), 1),
            ("groups fetched in the second run although cached", more, 1.05),
        ):
            yield Claim(text, value, at_most=at_most)

    def warm(self) -> Iterator[Claim]:
        """Check that nothing is fetched twice if the disk holds everything."""
        with self.store("warm", None) as store:
            streamed(self.checkpoint, store, URL)()
        with self.store("warm", None, fresh=False) as store:
            streamed(self.checkpoint, store, URL)()
            again = store.stats().bytes_fetched
        yield Claim("bytes fetched with a warm, complete cache", again, at_most=0)

    def speeds(self, server: str) -> Iterator[Claim]:
        """Compare obstore's own reads, the store's fetches, and the whole path."""
        sides = {
            "obstore's own ranged reads": lambda: self._ranged(lambda at, part: len(part)),
            "fetched into memory": self._fetch,
            "to disk, and into RAM": self._all_the_way,
        }
        took = {name: times[1:] for name, times in interleave(sides, self.rounds + 1).items()}
        rows = [(name, f"{self.nbytes / median(t) / 1e6:.0f}") for name, t in took.items()]
        self.page.table((f"from {server}", "MB/s"), rows)
        own, fetched, through = took.values()
        for text, other in (("fetches into memory", fetched), ("all of the way", through)):
            text = f"from {server}: speed of {text} / obstore's own"
            yield Claim(text, median(ratios(own, other)), at_least=0.85)

    def _ranged(self, take: Callable[[int, Any], object]) -> float:
        """Read everything with obstore, passing each piece to `take`. Return the seconds."""
        remote = from_url(f"s3://{BUCKET}")

        def bring(at: int) -> None:
            end = min(at + PIECE, self.nbytes)
            take(at, obstore.get_range(remote, NAME, start=at, end=end))

        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(bring, range(0, self.nbytes, PIECE)))
        return time.monotonic() - began

    def _fetch(self) -> float:
        (file,) = read_checkpoint(URL)
        start = min(t.extent.offset for t in file.tensors)
        segments = tuple(Segment(t.extent, t.extent.offset - start) for t in file.tensors)
        room = fresh_memory(self.nbytes).numpy().data
        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            source = RemoteSource(segments, {file.path: file.remote})
            fetch(source, room, lambda jobs: [None for _ in pool.map(lambda job: job(), jobs)])
        return time.monotonic() - began

    def _all_the_way(self) -> float:
        groups: dict[str, list[str]] = {}  # of neighbouring tensors, as large as blocks
        (file,) = read_checkpoint(URL)
        for tensor in file.tensors:
            number = tensor.extent.offset // (self.nbytes // 24)
            groups.setdefault(f"{number}", []).append(tensor.name)
        with self.store("speed", None) as store:
            keys = store.register_checkpoint(URL, groups=groups)
            began = time.monotonic()
            store.prefetch(keys)
            for key in keys:
                store.acquire(key).release()
            return time.monotonic() - began

    def first_output(self) -> Iterator[Claim]:
        """Compare the first step from the object store to one after a download."""
        local = self.place / "downloaded.safetensors"
        sides = {
            "from the object store": lambda: self._first(URL),
            "downloaded": lambda: self._download(local) + self._first(str(local)),
        }
        took = interleave(sides, self.rounds)
        rows = [(name, f"{median(times):.2f}") for name, times in took.items()]
        self.page.table(("to the first output", "seconds"), rows)
        ratio = median(ratios(*took.values()))
        yield Claim("time to the first output / time of download and run", ratio, at_most=0.75)

    def _first(self, source: str) -> float:
        began = time.monotonic()
        with self.store("first") as store:
            streamed(self.checkpoint, store, source)()
            return time.monotonic() - began

    def _download(self, local: Path) -> float:
        began = time.monotonic()
        descriptor = os.open(local, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        self._ranged(lambda at, part: os.pwrite(descriptor, part, at))
        os.fsync(descriptor)
        os.close(descriptor)
        return time.monotonic() - began


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bandwidth", type=float, default=0.0, help="network limit in bytes per second"
    )


def measure(bench: Bench) -> Iterator[Claim]:
    shape = flux.Shape(3, 4, 16) if bench.small else flux.Shape(9, 3, 14)
    checkpoint = flux.save(shape, bench.kept / "flux")
    remote = Remote(bench.page, bench.scratch, checkpoint, bench.rounds)
    bandwidth = bench.options.bandwidth or (100e6 if bench.small else 200e6)
    bench.page.text(
        f"{remote.nbytes / 1e6:.0f} MB of weights; {bench.rounds} rounds; network bandwidth "
        f"{bandwidth / 1e6:.0f} MB/s"
    )
    with server(checkpoint / NAME):
        yield from remote.steps()
        yield from remote.warm()
        yield from remote.speeds("memory at hand")
    with server(checkpoint / NAME, bandwidth):
        yield from remote.speeds("a network")
        yield from remote.first_output()
