"""A model whose checkpoint lies in an object store, of which RAM and disk hold three quarters.

    python tools/bench/remote.py [--small] [--rounds N] --dir DIR [--markdown FILE]

A Flux transformer of 500 MB (bfloat16, 64 image tokens) runs from an S3 server block by block: a
RAM budget of a quarter of the weights, a disk budget of a half. The server is a plain one of
threads in a process of its own, on this machine, that answers GET and HEAD of S3 with ranges, ETags
and If-Match: a simulator of all of S3 is too slow to measure anything against. Where a network
matters, it sends no more than so many bytes per second (`--bandwidth`), all connections together.

Speeds are those of rounds in turn: obstore's own ranged reads of the same object (8 MiB each, 8 at
once), the store's fetches into memory, and all of the way through the store: to disk, with
checksums, and into RAM. Of a server that sends from memory at hand, on the same cores, each copy
of the bytes shows; behind a network, what waits for it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.report import Claim, Page

BUCKET, NAME = "models", "diffusion_pytorch_model.safetensors"
URL = f"s3://{BUCKET}/{NAME}"
PIECE, AT_ONCE = 8 << 20, 8
STEPS = 8


# --- the server, in a process of its own ----------------------------------------------------------


class Limit:
    """So many bytes per second, of all who ask; 0 for no limit."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Until so many bytes may have been sent."""
        if not self._bandwidth:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._bandwidth
            until = self._free_at
        time.sleep(max(until - time.monotonic(), 0.0))


def serve(directory: Path, bandwidth: float) -> None:
    """Serve the file in a directory. Prints the port."""
    path = directory / NAME
    etag = f'"{hashlib.md5(str(path.stat().st_mtime_ns).encode()).hexdigest()}"'
    size, limit = path.stat().st_size, Limit(bandwidth)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

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
        print(server.server_address[1], flush=True)
        server.serve_forever()


@contextlib.contextmanager
def server(directory: Path, bandwidth: float = 0.0) -> Iterator[None]:
    """A server, found by obstore through the environment."""
    command = [sys.executable, __file__, "--serve", str(directory), "--bandwidth", str(bandwidth)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        os.environ.update(
            AWS_ACCESS_KEY_ID="key",
            AWS_SECRET_ACCESS_KEY="secret",
            AWS_REGION="us-east-1",
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
            AWS_ALLOW_HTTP="true",
        )
        try:
            yield
        finally:
            process.kill()


# --- a model that takes its blocks from a store ---------------------------------------------------


def streamed(checkpoint: Path, store: Any, source: str) -> Callable[[], Any]:
    """Registers the checkpoint at `source`, and gives what runs one step with its weights."""
    import torch
    from torch.func import functional_call

    from tools.bench import flux

    with torch.device("meta"):
        model = flux.CLASS.from_config(flux.CLASS.load_config(checkpoint)).eval()
    groups: dict[str, list[str]] = {"rest": []}
    for name in model.state_dict():
        found = re.match(r"((?:single_)?transformer_blocks\.\d+)\.", name)
        groups.setdefault(found[1] if found else "rest", []).append(name)
    store.register_checkpoint(source, groups=groups)
    store.prefetch(groups)  # of the first step, nobody else can tell what comes when

    class Block(torch.nn.Module):
        """Stands for a block, whose weights are not there between its uses."""

        def __init__(self, key: str, block: torch.nn.Module) -> None:
            super().__init__()
            self.key, self.held = key, [block]

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with store.acquire(self.key) as lease:
                cut = len(self.key) + 1
                tensors = {name[cut:]: value for name, value in lease.tensors.items()}
                return functional_call(self.held[0], tensors, args, kwargs)

    for kind in ("transformer_blocks", "single_transformer_blocks"):
        blocks = getattr(model, kind)
        for number, block in enumerate(blocks):
            blocks[number] = Block(f"{kind}.{number}", block)

    @torch.no_grad()
    def step() -> Any:
        with store.acquire("rest") as lease:
            rest = {name: value.clone() for name, value in lease.tensors.items()}
        return functional_call(model, rest, (), inputs())[0]

    return step


def inputs() -> dict[str, Any]:
    """What the transformer is called with: the same in each step."""
    import torch

    from tools.bench import flux

    made = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Any:
        return torch.randn(*shape, generator=made).bfloat16()

    ids = torch.zeros(flux.IMAGE_TOKENS, 3)
    ids[:, 1], ids[:, 2] = torch.arange(flux.IMAGE_TOKENS) // 8, torch.arange(flux.IMAGE_TOKENS) % 8
    return {
        "hidden_states": noise(1, flux.IMAGE_TOKENS, flux.CHANNELS),
        "encoder_hidden_states": noise(1, flux.TEXT_TOKENS, 256),
        "pooled_projections": noise(1, 128),
        "timestep": torch.tensor([0.5]).bfloat16(),
        "guidance": torch.tensor([3.5]).bfloat16(),
        "img_ids": ids,
        "txt_ids": torch.zeros(flux.TEXT_TOKENS, 3),
        "return_dict": False,
    }


# --- what is measured -----------------------------------------------------------------------------


class Bench:
    """One checkpoint, and what is looked at."""

    def __init__(self, page: Page, place: Path, checkpoint: Path, rounds: int) -> None:
        self.page, self.place, self.checkpoint, self.rounds = page, place, checkpoint, rounds
        self.nbytes = (checkpoint / NAME).stat().st_size

    def store(self, name: str, disk: float | None = 0.5) -> Any:
        from tierstore import TierStore

        budget = None if disk is None else int(self.nbytes * disk)
        ram = self.nbytes // 4
        return TierStore(ram, self.place / name, device="cpu", disk_budget=budget)

    def fresh(self, name: str) -> str:
        shutil.rmtree(self.place / name, ignore_errors=True)
        return name

    def steps(self) -> list[Claim]:
        """Steps with little memory and half a disk, and again in another store on the same disk."""
        import torch

        from tools.bench import flux

        with torch.no_grad():
            expected = flux.load(self.checkpoint).eval()(**inputs())[0]
        rows, equal = [], True
        with self.store(self.fresh("steps")) as store:
            step, fetched = streamed(self.checkpoint, store, URL), [0]
            for _ in range(STEPS):
                equal &= torch.equal(step(), expected)
                fetched.append(store.stats().bytes_fetched)
            groups = store.snapshot().groups
            largest = max(group.nbytes for group in groups)
            cached = sum(group.nbytes for group in groups if "DISK" in group.tiers)
            peaks = store.stats().peak_bytes
        each = [b - a for a, b in itertools.pairwise(fetched)]
        with self.store("steps") as store:
            step = streamed(self.checkpoint, store, URL)
            equal &= torch.equal(step(), expected)
            again = store.stats().bytes_fetched
        rows = [(f"{n}", f"{b / 1e6:.1f}") for n, b in enumerate(each, 1)]
        self.page.table(
            ("step", "MB fetched"), [*rows, ("1 of the second run", f"{again / 1e6:.1f}")]
        )
        bound = self.nbytes - self.nbytes // 4 - self.nbytes // 2 + 3 * largest
        self.page.text(
            f"The largest group has {largest / 1e6:.1f} MB, so {bound / 1e6:.1f} MB are the bound "
            f"of a step. At most {peaks['HOST'] / 1e6:.1f} MB were in RAM and "
            f"{peaks['DISK'] / 1e6:.1f} MB on disk; {cached / 1e6:.1f} MB were left there."
        )
        more = (again - (self.nbytes - cached)) / largest
        return [
            Claim("outputs are those of the model in memory, bit for bit", equal, at_least=1),
            Claim("the most fetched in a step, from the third on, of the bound",
                  max(each[2:]) / bound, at_most=1.1),
            Claim("the mean of these steps, of the bound",
                  statistics.mean(each[2:]) / bound, at_most=1.1),
            Claim("RAM at its peak, of the budget",
                  peaks["HOST"] / (self.nbytes // 4), at_most=1),
            Claim("disk at its peak, of the budget",
                  peaks["DISK"] / (self.nbytes // 2), at_most=1),
            Claim("groups fetched in the second run although they were there", more, at_most=1.05),
        ]  # fmt: skip

    def warm(self) -> list[Claim]:
        """With room for all of it on disk, nothing is fetched twice."""
        with self.store(self.fresh("warm"), None) as store:
            streamed(self.checkpoint, store, URL)()
        with self.store("warm", None) as store:
            step = streamed(self.checkpoint, store, URL)
            step()
            again = store.stats().bytes_fetched
        return [Claim("bytes fetched with a warm cache of everything", again, at_most=0)]

    def speeds(self, server: str) -> list[Claim]:
        """obstore's own reads, the store's fetches, and all of the way."""
        took: list[list[float]] = [[], [], []]
        for turn in range(self.rounds + 1):
            for which, measure in enumerate((self._obstore, self._fetch, self._all_the_way)):
                seconds = measure()
                if turn:  # the first one warms up
                    took[which].append(seconds)
        names = ("obstore's own ranged reads", "fetched into memory", "to disk, and into RAM")
        rows = [
            (name, f"{self.nbytes / statistics.median(times) / 1e6:.0f}")
            for name, times in zip(names, took, strict=True)
        ]
        self.page.table((f"from {server}", "MB/s"), rows)
        own, fetched, through = took
        ratios = [
            statistics.median(a / b for a, b in zip(own, other, strict=True))
            for other in (fetched, through)
        ]
        ways = ("fetches into memory", "all of the way")
        return [
            Claim(f"from {server}: {what}, of obstore's own speed", ratio, at_least=0.85)
            for what, ratio in zip(ways, ratios, strict=True)
        ]

    def _obstore(self) -> float:
        import obstore
        from obstore.store import from_url

        remote = from_url(f"s3://{BUCKET}")
        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for part in pool.map(
                lambda at: obstore.get_range(
                    remote, NAME, start=at, end=min(at + PIECE, self.nbytes)
                ),
                range(0, self.nbytes, PIECE),
            ):
                len(part)
        return time.monotonic() - began

    def _fetch(self) -> float:
        from tierstore.engine.checkpoints import read_checkpoint
        from tierstore.model.groups import Segment
        from tierstore.tiers.entry import RemoteSource
        from tierstore.tiers.pages import fresh_memory
        from tierstore.tiers.remote_tier import fetch

        [file] = read_checkpoint(URL)
        start = min(t.extent.offset for t in file.tensors)
        segments = tuple(Segment(t.extent, t.extent.offset - start) for t in file.tensors)
        room = fresh_memory(self.nbytes).numpy().data
        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            source = RemoteSource(segments, {file.path: file.remote})
            fetch(source, room, lambda jobs: [None for _ in pool.map(lambda job: job(), jobs)])
        return time.monotonic() - began

    def _all_the_way(self) -> float:
        with self.store(self.fresh("speed"), None) as store:
            keys = store.register_checkpoint(URL, groups=self._runs())
            began = time.monotonic()
            store.prefetch(keys)
            for key in keys:
                store.acquire(key).release()
            return time.monotonic() - began

    def _runs(self) -> dict[str, list[str]]:
        """Groups of neighbours, as large as blocks are."""
        from tierstore.engine.checkpoints import read_checkpoint

        [file] = read_checkpoint(URL)
        groups: dict[str, list[str]] = {}
        for tensor in file.tensors:
            groups.setdefault(f"{tensor.extent.offset // (self.nbytes // 24)}", []).append(
                tensor.name
            )
        return groups

    def first_output(self) -> list[Claim]:
        """The first step out of the object store, and after a download."""
        took: list[tuple[float, float]] = []
        for _ in range(self.rounds):
            began = time.monotonic()
            with self.store(self.fresh("first")) as store:
                streamed(self.checkpoint, store, URL)()
                direct = time.monotonic() - began
            began = time.monotonic()
            local = self.place / "downloaded.safetensors"
            self._download(local)
            with self.store(self.fresh("first")) as store:
                streamed(self.checkpoint, store, str(local))()
                took.append((direct, time.monotonic() - began))
            local.unlink()
        direct, downloaded = (statistics.median(times) for times in zip(*took, strict=True))
        rows = [("from the object store", f"{direct:.2f}"), ("downloaded", f"{downloaded:.2f}")]
        self.page.table(("to the first output", "seconds"), rows)
        ratio = statistics.median(a / b for a, b in took)
        return [Claim("time to the first output, of download and run", ratio, at_most=0.75)]

    def _download(self, local: Path) -> None:
        import obstore
        from obstore.store import from_url

        remote = from_url(f"s3://{BUCKET}")

        def bring(at: int) -> None:
            part = obstore.get_range(remote, NAME, start=at, end=min(at + PIECE, self.nbytes))
            os.pwrite(descriptor, part, at)

        descriptor = os.open(local, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(bring, range(0, self.nbytes, PIECE)):
                pass
        os.fsync(descriptor)
        os.close(descriptor)


def main() -> None:
    options = parse()
    if options.serve:
        serve(options.serve, options.bandwidth)
        return
    from tools.bench import flux

    place = Path(options.dir).resolve()
    checkpoint = place / "flux"
    checkpoint.mkdir(parents=True, exist_ok=True)
    flux.save(flux.Shape(3, 4, 16) if options.small else flux.Shape(9, 3, 14), checkpoint)
    page = Page(__doc__ or "", place, ("torch", "diffusers", "obstore"))
    bench = Bench(page, place, checkpoint, options.rounds)
    bandwidth = options.bandwidth or (100e6 if options.small else 200e6)
    page.text(
        f"{bench.nbytes / 1e6:.0f} MB of weights; {options.rounds} rounds; where a network "
        f"matters, {bandwidth / 1e6:.0f} MB/s"
    )
    with server(checkpoint):
        claims = bench.steps() + bench.warm() + bench.speeds("memory at hand")
    with server(checkpoint, bandwidth):
        claims += bench.speeds("a network") + bench.first_output()
    page.claims(claims)
    page.write(options.markdown)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bandwidth", type=float, default=0.0, help="bytes per second")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.serve and not options.dir:
        parser.error("--dir is needed")
    return options


if __name__ == "__main__":
    main()
