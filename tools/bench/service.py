"""Several processes with the same model on one machine: one service, or a store for each.

    python tools/bench/service.py [--small] [--rounds N] --dir DIR [--markdown FILE]

Four processes denoise with the same Flux transformer of 500 MB (bfloat16, 64 image tokens), step by
step together, one thread each. With the service they share 40 % of the model's bytes; else each has
a store of its own with a quarter of that. One private store with all of it, in one process, is what
one copy costs. All processes live through the whole run and take turns: in each round every group
of them does one step, so that a load from outside meets all alike.

Memory is what a group of processes has beyond what the same processes had before they opened a
store: proportional set sizes (PSS, where a page that n processes share counts 1/n in each), with
the service's own. Bytes are those that left the disk, as the stores count them.

Then two workers with models of their own, one of which computes twice as long, first alone and then
together, against private stores with half of the memory each; a third worker with a model of its
own comes and is killed. And the time of an acquire and release of one group.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tierstore.wire.asking import report_of
from tools.bench.report import Claim, Page

WORKERS = 4
SHARE = 0.4
WARM_UP = 3
HITS = 400


# --- one worker, in a process of its own ----------------------------------------------------------


def pss() -> int:
    """The proportional set size of this process, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def work(arguments: argparse.Namespace) -> None:
    """Do what lines of the input ask for, and answer each with a line of JSON."""
    import torch

    from tierstore import TierStore, enable_group_offload
    from tools.bench import flux

    if arguments.device == "pretend":
        from tests.device import pretend

        pretend.load()
    torch.set_num_threads(1)
    before = pss()
    model = flux.load(Path(arguments.checkpoint))
    device: dict[str, Any] = {"device": arguments.device}
    if arguments.device != "cpu":
        device["device_budget"] = arguments.device_budget
    if arguments.socket:
        store = TierStore.connect(arguments.socket, **device)
    else:
        store = TierStore(arguments.budget, arguments.store, **device)
    enable_group_offload(model, store)
    steps = flux.denoise(model, 1 << 30, arguments.device)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    asked = {
        "step": lambda: step(steps, arguments.pause),
        "stats": lambda: store.stats().as_dict() | {"pss": pss() - before},
        "kept": lambda: {"seconds": seconds_of_a_hit(store, leased=True)},
        "leased": lambda: {"seconds": seconds_of_a_hit(store, leased=False)},
    }
    for line in sys.stdin:
        print(json.dumps(asked[line.strip()]()), flush=True)


def step(steps: Iterator[Any], pause: float) -> dict[str, float]:
    """The next step, and a pause of so many times as long."""
    began = time.perf_counter()
    image = next(steps)
    time.sleep(pause * (time.perf_counter() - began))
    return {"seconds": time.perf_counter() - began, "sum": image.double().sum().item()}


def seconds_of_a_hit(store: Any, *, leased: bool) -> float:
    """The median time of an acquire and release of one group, which the store has or has not."""
    key, times = min(store.keys(), key=len), []
    for _ in range(HITS):
        if not leased:
            store.offload(key)
        began = time.perf_counter()
        store.acquire(key).release()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@dataclass
class Process:
    """A worker, and how to ask it."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, checkpoint: Path, **options: object) -> Process:
        words = [sys.executable, __file__, "--dir", "-", "--checkpoint", str(checkpoint)]
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        environment = {n: v for n, v in os.environ.items() if not n.startswith("MALLOC_")}
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return cls(process)

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self.process.wait()}")
        return dict(json.loads(line))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def together(group: Sequence[Process], line: str) -> tuple[float, list[dict[str, Any]]]:
    """Ask all at once. The seconds until all have answered, and the answers."""
    began = time.perf_counter()
    for process in group:
        process.ask(line)
    answers = [process.answer() for process in group]
    return time.perf_counter() - began, answers


@contextlib.contextmanager
def service(directory: Path, ram: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A service, and its socket."""
    place = directory / "socket"
    place.mkdir(mode=0o700, exist_ok=True)
    socket = str(place / "s")
    command = "from tierstore.service.cli import serve; serve()"
    words = [sys.executable, "-c", command, str(directory / "served")]
    process = subprocess.Popen([*words, "--ram", f"{ram}B", "--socket", socket])
    try:
        while not os.path.exists(socket):
            time.sleep(0.05)
        report_of(socket, 60.0)  # it has loaded its libraries
        yield socket, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def service_pss(process: subprocess.Popen[bytes]) -> int:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


# --- what is compared -----------------------------------------------------------------------------


def in_step(page: Page, place: Path, checkpoint: Path, nbytes: int, options: Any) -> list[Claim]:
    """Four workers of one service, four private stores, and one."""
    budget = int(nbytes * SHARE)
    device = {"device": options.device}
    if options.device != "cpu":
        device["device_budget"] = str(max(nbytes // 10, 4 << 20))
    with contextlib.ExitStack() as stack:
        socket, serving = stack.enter_context(service(place, budget))
        idle = service_pss(serving)
        groups = {
            "service": [Process.start(checkpoint, socket=socket, **device) for _ in range(WORKERS)],
            "private": [
                Process.start(
                    checkpoint, budget=budget // WORKERS, store=place / f"own-{i}", **device
                )
                for i in range(WORKERS)
            ],
            "one": [Process.start(checkpoint, budget=budget, store=place / "one", **device)],
        }
        for process in (process for group in groups.values() for process in group):
            stack.callback(process.stop)
            process.answer()
        for _ in range(WARM_UP):
            for group in groups.values():
                together(group, "step")
        before = {name: read_bytes(name, group, socket) for name, group in groups.items()}
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        sums: dict[str, set[float]] = {name: set() for name in groups}
        for number in range(options.rounds):
            order = list(groups) if number % 2 else list(groups)[::-1]
            for name in order:
                took, answers = together(groups[name], "step")
                seconds[name].append(took)
                sums[name] = {answer["sum"] for answer in answers}
        read = {
            name: (read_bytes(name, group, socket) - before[name]) / options.rounds
            for name, group in groups.items()
        }
        memory = {
            name: sum(answer["pss"] for answer in together(group, "stats")[1])
            for name, group in groups.items()
        }
        memory["service"] += service_pss(serving) - idle
    median = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [
        (
            name,
            len(group),
            f"{median[name]:.3f}",
            f"{read[name] / 1e6:.0f} MB",
            f"{memory[name] / 1e6:.0f} MB",
        )
        for name, group in groups.items()
    ]
    page.table(("what", "processes", "s per step", "read per step", "memory"), rows)
    return [
        Claim(
            "memory of four workers and the service, of one private store",
            memory["service"] / memory["one"],
            at_most=1.15,
        ),
        Claim("bytes read, of one private store", read["service"] / read["one"], at_most=1.2),
        Claim(
            "seconds per step, of four private stores",
            statistics.median(
                a / b for a, b in zip(seconds["service"], seconds["private"], strict=True)
            ),
            at_most=0.6,
        ),
        Claim(
            "all denoise the same image (different ones)",
            len(sums["service"] | sums["private"] | sums["one"]),
            at_most=1,
        ),
    ]


def read_bytes(name: str, group: Sequence[Process], socket: str) -> int:
    """What has left the disk so far."""
    if name == "service":
        return int(report_of(socket).read_bytes)
    return sum(int(answer["bytes_read"]) for answer in together(group, "stats")[1])


def hits(page: Page, place: Path, checkpoint: Path, nbytes: int, options: Any) -> list[Claim]:
    """All in memory: the time of an acquire and release, and of a step."""
    device = {"device": "cpu"}
    with contextlib.ExitStack() as stack:
        socket, _ = stack.enter_context(service(place, 2 * nbytes))
        pair = [
            Process.start(checkpoint, socket=socket, **device),
            Process.start(checkpoint, budget=2 * nbytes, store=place / "own", **device),
        ]
        for process in pair:
            stack.callback(process.stop)
            process.answer()
        steps: list[list[float]] = [[], []]
        for number in range(WARM_UP + 3 * options.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                took, _ = together([pair[which]], "step")
                if number >= WARM_UP:
                    steps[which].append(took)
        kept = [together([process], "kept")[1][0]["seconds"] for process in pair]
        leased = [together([process], "leased")[1][0]["seconds"] for process in pair]
    ratio = statistics.median(a / b for a, b in zip(*steps, strict=True))
    rows = [
        ("the store has it (a worker: leased already)", *(f"{t * 1e6:.0f}" for t in kept)),
        ("given up before (a worker: leased anew)", *(f"{t * 1e6:.0f}" for t in leased)),
    ]
    page.table(("acquire and release", "worker, us", "private store, us"), rows)
    return [
        Claim("us for a group that a worker leases already", kept[0] * 1e6, at_most=150),
        Claim("us for a group in the service's memory, leased anew", leased[0] * 1e6, at_most=150),
        Claim("a step with all in memory, of the private store's", ratio, at_most=1.03),
    ]


def main() -> None:
    options = parse()
    if options.checkpoint:
        work(options)
        return
    from tools.bench import flux

    shape = flux.Shape(4, 2, 4) if options.small else flux.Shape(9, 3, 14)
    place = Path(options.dir).resolve()
    checkpoint = place / "flux"
    checkpoint.mkdir(parents=True, exist_ok=True)
    flux.save(shape, checkpoint)
    nbytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    page = Page(__doc__ or "", place, ("torch", "diffusers", "msgspec"))
    page.text(f"{nbytes / 1e6:.0f} MB of weights; {options.rounds} rounds; device {options.device}")
    claims = in_step(page, place, checkpoint, nbytes, options)
    if options.device == "cpu":
        claims += hits(page, place, checkpoint, nbytes, options)
    page.claims(claims)
    page.write(options.markdown)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--device", default="cpu")
    for name in ("--checkpoint", "--socket", "--store"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--device-budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
