"""Serve one model to two processes from one host memory, and run both at once.

The example writes a checkpoint of random weights (nothing is downloaded) and starts
`tierstore-serve` and two workers: processes that load the model and run it a few times. They lease
weights from the service, which reads each from disk once. At the end it prints the bytes read and
leased, and whether the results equal those of the plain model.

Takes less than a minute on two cores, and 70 MB of disk. Needs `tierstore[serve]`; no GPU, no
network.

    python docs/examples/serve_two_workers.py
    python docs/examples/serve_two_workers.py --size 4GB --ram 3GB --workers 4 --dir /nvme/example

With less --ram than weights, the service reads some of them again. With --dir, the files are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

from tierstore import TierStore, load_checkpoint_and_dispatch
from tierstore.model.sizes import parse_size
from tierstore.wire.status import query_status

LAYERS = 16


def main() -> int:
    """Serve the model, run the workers, and compare."""
    options = parse_arguments()
    if options.worker:
        print(json.dumps(work(options)))
        return 0
    with contextlib.ExitStack() as stack:
        # A socket needs a short path, in a directory of its user only.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tierstore-example-"))
        directory = options.dir or Path(folder)
        checkpoint = directory / f"layers-{options.size}.safetensors"
        weights = save(checkpoint, options.size)
        socket, ram = Path(folder) / "s", options.ram or weights * 5 // 4
        with serving(directory / "served", ram, socket):
            started = time.perf_counter()
            workers = [start(options, checkpoint, socket) for _ in range(options.workers)]
            done = [result_of(worker) for worker in workers]
            seconds = time.perf_counter() - started
            read = query_status(str(socket)).read_bytes
        expected = run(plain(checkpoint), options.passes)
    return report(weights, ram, read, seconds, done, expected)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", type=parse_size, default="64MB", help="of all weights (default: %(default)s)")
    add("--ram", type=parse_size, help="of the service (default: a little more than that)")
    add("--workers", type=int, default=2, help="how many processes (default: %(default)s)")
    add("--passes", type=int, default=4, help="over the model (default: %(default)s)")
    add("--dir", type=Path, help="where the files are (default: temporary)")
    add("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)  # the checkpoint, the socket
    return parser.parse_args()


# --- the service ----------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(directory: Path, ram: int, socket: Path) -> Iterator[None]:
    """Run the service, like `tierstore-serve DIR --ram SIZE --socket PATH`."""
    words = [directory, "--ram", f"{ram}B", "--socket", socket]
    service = subprocess.Popen([sys.executable, "-m", "tierstore.service", *map(str, words)])
    try:
        while not socket.exists():
            if service.poll() is not None:
                raise SystemExit("FAILED: the service has ended")
            time.sleep(0.05)
        yield
    finally:
        service.terminate()
        service.wait()


# --- the workers ----------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Run the model in a worker. Except for `connect`, the code is that of any store."""
    checkpoint, socket = options.worker
    with torch.device("meta"):
        model = model_of(options.size)
    with TierStore.connect(socket, device="cpu") as store:
        load_checkpoint_and_dispatch(model, checkpoint, store)
        result = run(model, options.passes)
        return {"result": result, "used": store.stats().bytes_read}


def start(options: argparse.Namespace, checkpoint: Path, socket: Path) -> subprocess.Popen[str]:
    """Start this file as a worker."""
    words = ["--worker", checkpoint, socket, "--size", f"{options.size}B"]
    words += ["--passes", options.passes]
    command = [sys.executable, os.path.abspath(__file__), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result_of(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a worker and parse its output."""
    output, _ = worker.communicate()
    if worker.returncode:
        raise SystemExit("FAILED: a worker has failed")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


# --- the model ------------------------------------------------------------------------------------


def model_of(size: int) -> nn.Sequential:
    """Build a model of about `size` bytes."""
    width = max(64, round(math.sqrt(size / LAYERS / 4) / 64) * 64)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def save(checkpoint: Path, size: int) -> int:
    """Write the checkpoint and return its size in bytes."""
    torch.manual_seed(0)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    weights = model_of(size).state_dict()
    save_file(weights, checkpoint)
    return sum(weight.nbytes for weight in weights.values())


def plain(checkpoint: Path) -> nn.Module:
    """Load the model into memory, as usual."""
    weights = load_file(checkpoint)
    model = model_of(sum(weight.nbytes for weight in weights.values()))
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def run(model: nn.Sequential, passes: int) -> list[float]:
    """Compute numbers that depend on all weights."""
    x = torch.ones(4, model[0].in_features)
    for _ in range(passes):
        x = nn.functional.normalize(model(x) + 1)
    return [float(value) for value in x.flatten()[:64]]


# --- the table ------------------------------------------------------------------------------------


def report(
    weights: int,
    ram: int,
    read: int,
    seconds: float,
    done: list[dict[str, Any]],
    expected: list[float],
) -> int:
    """Print a table, then whether the example succeeded, and return the exit code."""
    table = Table(title=f"{len(done)} workers, {seconds:.1f} s")
    table.add_column("MB")
    table.add_column("", justify="right")
    rows = {"weights": weights, "memory of the service": ram, "read from disk": read}
    rows["leased by the workers"] = sum(worker["used"] for worker in done)
    for name, nbytes in rows.items():
        table.add_row(name, f"{nbytes / 1e6:,.1f}")
    Console().print(table)
    if any(worker["result"] != expected for worker in done):
        print("FAILED: a worker has another result than the plain model")
    elif read >= rows["leased by the workers"]:
        print("FAILED: the workers shared no reads; use more --ram")
    else:
        print("OK: the results of the plain model, and less was read than was used")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
