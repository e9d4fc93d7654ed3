"""Several processes with the same model on one machine: one service, or a store for each.

Four processes denoise with the same Flux transformer of 500 MB (float32, which a CPU without
bfloat16 units computes faster), in lockstep, with one thread each. With the service, they share 40
% of the model's bytes; otherwise each has a private store with a quarter of that. One private store
with all of it, in one process, shows the cost of one copy. All processes live through the whole run
and take turns: in each round, every group of processes runs one step, so that external load affects
all alike. The image has 16 tokens, or 64, for which two cores compute longer. "Resident" is a
service that holds all weights, so only computing remains.

Memory is the proportional set size (PSS, in which a page shared by n processes counts 1/n in each)
of a group of processes beyond that before they opened a store, including the service's. Bytes are
those read from disk, as the stores count them.

Then two workers with different models, one twice as slow, run at their own pace, against private
stores with half of the memory each; a third worker with another model joins and is killed. Finally,
the time of an acquire and release of one group.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore, enable_group_offload
from tierstore.wire.status import query_status
from tools.bench import flux
from tools.bench.apart import Apart
from tools.bench.machine import pss
from tools.bench.page import Claim, Page
from tools.bench.runner import Bench, Run, column, interleave, median, ratios

PACKAGES, ROUNDS = ("torch", "diffusers", "msgspec"), 7
WORKERS, SHARE, WARM_UP, HITS = 4, 0.4, 3, 400
TOKENS = (16, 64)
SECONDS = 8.0
"""Seconds per round for which workers at their own pace are timed."""
SHAPES = {True: flux.Shape(2, 2, 4, "float32"), False: flux.Shape(4, 3, 25, "float32")}


def worker(
    checkpoint: Path,
    where: str | tuple[int, Path],
    device: str,
    room: int,
    tokens: int,
    pause: float,
) -> Generator[Any, str, None]:
    """Answer each message with figures. `where` is a socket, or a budget and a directory."""
    if device == "pretend":
        from tests.device import pretend

        pretend.load()
    torch.set_num_threads(1)
    before = pss()
    model = flux.load(checkpoint)
    options: dict[str, Any] = {"device": device}
    if device != "cpu":
        options["device_budget"] = room
    if isinstance(where, str):
        store = TierStore.connect(where, **options)
    else:
        store = TierStore(*where, **options)
    enable_group_offload(model, store)
    steps = flux.denoise(model, 1 << 30, device, tokens)
    answers: dict[str, Callable[[], Run]] = {
        "step": lambda: step(steps, pause),
        "stats": lambda: store.stats().as_dict() | {"pss": pss() - before},
        "kept": lambda: {"seconds": hit_seconds(store, leased=True)},
        "leased": lambda: {"seconds": hit_seconds(store, leased=False)},
    }
    message = yield None
    while True:
        message = yield answers[message]()


def step(steps: Iterator[Any], pause: float) -> Run:
    """Run the next step, then pause for `pause` times its duration."""
    began = time.perf_counter()
    image = next(steps)
    time.sleep(pause * (time.perf_counter() - began))
    return {"seconds": time.perf_counter() - began, "sum": image.double().sum().item()}


def hit_seconds(store: Any, *, leased: bool) -> float:
    """Return the median time of an acquire and release of one group, leased before or not."""
    key, times = min(store.keys(), key=len), []
    for _ in range(HITS):
        if not leased:
            store.offload(key)
        began = time.perf_counter()
        store.acquire(key).release()
        times.append(time.perf_counter() - began)
    return median(times)


def together(group: Sequence[Apart], message: str) -> tuple[float, list[Run]]:
    """Send a message to all. Return the seconds until all have answered, and the answers."""
    began = time.perf_counter()
    for process in group:
        process.send(message)
    answers = [process.answer() for process in group]
    return time.perf_counter() - began, answers


@contextlib.contextmanager
def service(directory: Path, ram: int) -> Iterator[tuple[str, int]]:
    """Start a service. Yield its socket and its PID."""
    place = tempfile.mkdtemp(prefix="tierstore-")  # the path of a socket is limited to 107 bytes
    socket = os.path.join(place, "s")
    command = "from tierstore.service.cli import serve; serve()"
    words = [sys.executable, "-c", command, str(directory / "served")]
    process = subprocess.Popen([*words, "--ram", f"{ram}B", "--socket", socket])
    try:
        while not os.path.exists(socket):
            if process.poll() is not None:
                raise RuntimeError(f"the service ended with status {process.returncode}")
            time.sleep(0.05)
        query_status(socket, 60.0)  # wait until it has loaded its libraries
        yield socket, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        shutil.rmtree(place, ignore_errors=True)


class Workers:
    """Starts workers that end with a part of the benchmark, and waits until they are ready."""

    def __init__(self, stack: contextlib.ExitStack, **options: Any) -> None:
        self._stack = stack
        self._options = {"device": "cpu", "room": 0, "tokens": TOKENS[0], **options}

    def start(self, checkpoint: Path, where: Any, pause: float = 0.0) -> Apart:
        options = self._options
        words = (options["device"], options["room"], options["tokens"], pause)
        process = self._stack.enter_context(Apart(worker, checkpoint, where, *words))
        process.answer()
        return process


# --- four workers, step by step -------------------------------------------------------------------


def in_step(
    bench: Bench, place: Path, checkpoint: Path, nbytes: int, tokens: int
) -> Iterator[Claim]:
    """Compare four workers of one service, four private stores, and one private store."""
    budget, room = int(nbytes * SHARE), max(nbytes // 10, 4 << 20)
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, device=bench.options.device, room=room, tokens=tokens)
        socket, serving = stack.enter_context(service(place / "shared", budget))
        idle = pss(serving)
        roomy, _ = stack.enter_context(service(place / "roomy", 2 * nbytes))
        wheres: dict[str, list[Any]] = {
            "service": [socket] * WORKERS,
            "resident": [roomy] * WORKERS,
            "private": [(budget // WORKERS, place / f"own-{i}") for i in range(WORKERS)],
            "one": [(budget, place / "one")],
        }
        groups = {n: [workers.start(checkpoint, w) for w in each] for n, each in wheres.items()}
        sides = {n: functools.partial(together, group, "step") for n, group in groups.items()}
        for _ in range(WARM_UP):
            for side in sides.values():
                side()
        before = {name: read_bytes(groups[name], wheres[name][0]) for name in groups}
        took = interleave(sides, bench.rounds)
        found: dict[str, Run] = {
            name: {
                "processes": len(group),
                "all": [seconds for seconds, _ in took[name]],
                "sums": {answer["sum"] for answer in took[name][-1][1]},
                "read": (read_bytes(group, wheres[name][0]) - before[name]) / bench.rounds,
                "memory": sum(column(together(group, "stats")[1], "pss")),
            }
            for name, group in groups.items()
        }
        found["service"]["memory"] += pss(serving) - idle
    show(bench.page, found, tokens)
    shared, one, at = found["service"], found["one"], f" ({tokens} tokens)"
    memory = shared["memory"] / one["memory"]
    text = f"memory of four workers and the service / one private store{at}"
    yield Claim(text, memory, at_most=1.15)
    read = shared["read"] / one["read"]
    yield Claim(f"bytes read / one private store{at}", read, at_most=1.2)
    slower = median(ratios(shared["all"], found["private"]["all"]))
    yield Claim(f"seconds per step / four private stores{at}", slower, at_most=0.6)
    images = len(set().union(*column(list(found.values()), "sums")))
    yield Claim(f"number of different images of all workers{at}", images, at_most=1)


def show(page: Page, found: Mapping[str, Run], tokens: int) -> None:
    page.text(f"An image of {tokens} tokens:")
    columns: dict[str, Callable[[Run], object]] = {
        "processes": lambda one: one["processes"],
        "s per step": lambda one: f"{median(one['all']):.3f}",
        "read per step": lambda one: f"{one['read'] / 1e6:.0f} MB",
        "memory": lambda one: f"{one['memory'] / 1e6:.0f} MB",
    }
    page.compare("what", found, columns)


def read_bytes(group: Sequence[Apart], where: Any) -> int:
    """Return the bytes read from disk so far, by a service or by private stores."""
    if isinstance(where, str):
        return int(query_status(where).read_bytes)
    return sum(int(answer["bytes_read"]) for answer in together(group, "stats")[1])


# --- two at their own pace ------------------------------------------------------------------------


def run_unsynchronised(group: Sequence[Apart], seconds: float) -> list[list[float]]:
    """Run steps in all processes independently for `seconds`. Return the step times of each."""
    ends = time.monotonic() + seconds

    def drive(process: Apart) -> list[float]:
        times = []
        while time.monotonic() < ends:
            times.append(float(process.ask("step")["seconds"]))
        return times

    with ThreadPoolExecutor(len(group)) as threads:
        return list(threads.map(drive, group))


def unequal(bench: Bench, place: Path, checkpoints: Sequence[Path], pair: int) -> Iterator[Claim]:
    """Run two workers with different models, one twice as slow; a third joins and is killed."""
    budget, seconds = int(pair * SHARE), 1.0 if bench.small else SECONDS
    with contextlib.ExitStack() as stack:
        workers = Workers(stack)
        socket, _ = stack.enter_context(service(place, budget))
        pairs: dict[str, list[Apart]] = {"service": [], "private": []}
        for number, (checkpoint, pause) in enumerate(zip(checkpoints, (0.0, 1.0), strict=False)):
            pairs["service"].append(workers.start(checkpoint, socket, pause))
            own = budget // 2, place / f"half-{number}"
            pairs["private"].append(workers.start(checkpoint, own, pause))
        times: dict[str, list[list[float]]] = {name: [[], []] for name in pairs}
        for number in range(bench.rounds + 1):
            for name in pairs if number % 2 else reversed(pairs):
                for which, steps in enumerate(run_unsynchronised(pairs[name], seconds)):
                    if number:  # the first one is a warm-up
                        times[name][which] += steps
        third = workers.start(checkpoints[2], socket)
        *during, _ = run_unsynchronised([*pairs["service"], third], seconds)
        third.process.kill()
        third.process.wait()
        after = run_unsynchronised(pairs["service"], seconds * bench.rounds)
    own_half, before = ([*map(median, times[name])] for name in ("private", "service"))
    gone = [median(steps[2:] or steps) for steps in after]
    bench.page.text("Two models at their own pace, s per step:")
    bench.page.table(
        ("worker", "private half", "service", "with a third", "once it was killed"),
        [
            (name, *(f"{s:.3f}" for s in (own_half[i], before[i], median(during[i]), gone[i])))
            for i, name in enumerate(("fast", "slow"))
        ],
    )
    for i, name in enumerate(("fast", "slow")):
        ratio = before[i] / own_half[i]
        yield Claim(f"seconds per step of the {name} worker / its half", ratio, at_most=1.25)
        text = f"{name} worker: seconds two steps after a third was killed / before"
        yield Claim(text, gone[i] / before[i], at_most=1.1)


# --- hits -----------------------------------------------------------------------------------------


def hits(bench: Bench, place: Path, checkpoint: Path, nbytes: int) -> Iterator[Claim]:
    """Measure an acquire and release, and a step, with everything in memory."""
    with contextlib.ExitStack() as stack:
        workers = Workers(stack)
        socket, _ = stack.enter_context(service(place, 2 * nbytes))
        wheres: list[Any] = [socket, (2 * nbytes, place / "own")]
        pair = [workers.start(checkpoint, where) for where in wheres]
        sides = [functools.partial(together, [process], "step") for process in pair]
        took = interleave(dict(enumerate(sides)), WARM_UP + 3 * bench.rounds)
        kept, leased = (
            [process.ask(message)["seconds"] * 1e6 for process in pair]
            for message in ("kept", "leased")
        )
    steps = [[seconds for seconds, _ in took[which][WARM_UP:]] for which in (0, 1)]
    rows = [
        ("resident (a worker: already leased)", *(f"{us:.0f}" for us in kept)),
        ("offloaded before (a worker: leased again)", *(f"{us:.0f}" for us in leased)),
    ]
    bench.page.table(("acquire and release", "worker, us", "private store, us"), rows)
    yield Claim("us of an acquire and release: already leased by the worker", kept[0], at_most=150)
    text = "us of an acquire and release: in the service's memory"
    yield Claim(text, leased[0], at_most=150)
    ratio = median(ratios(*steps))
    yield Claim("step with everything in memory: seconds / private store", ratio, at_most=1.03)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="device: cpu or pretend")


def measure(bench: Bench) -> Iterator[Claim]:
    checkpoints = [
        flux.save(replace(SHAPES[bench.small], seed=seed), bench.kept / f"flux-{seed}")
        for seed in range(3)
    ]
    nbytes = flux.weight_bytes(flux.load(checkpoints[0]))
    bench.page.text(
        f"{nbytes / 1e6:.0f} MB of weights; {bench.rounds} rounds; device {bench.options.device}"
    )
    for tokens in TOKENS:
        yield from in_step(bench, bench.scratch / str(tokens), checkpoints[0], nbytes, tokens)
    if bench.options.device == "cpu":
        yield from unequal(bench, bench.scratch / "pace", checkpoints, 2 * nbytes)
        yield from hits(bench, bench.scratch / "hits", checkpoints[0], nbytes)
