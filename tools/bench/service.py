"""Several processes with the same model on one machine: one service, or a store for each.

Four processes denoise with the same Flux transformer of 500 MB (float32, which a CPU without units
for bfloat16 computes faster), step by step together, one thread each. With the service they share
40 % of the model's bytes; else each has a store of its own with a quarter of that. One private
store with all of it, in one process, is what one copy costs. All processes live through the whole
run and take turns: in each round every group of them does one step, so that a load from outside
meets all alike. This is done for an image of 16 tokens, and for one of 64, where two cores have
more to compute: "resident" is a service that has room for all weights, which leaves computing.

Memory is what a group of processes has beyond what the same processes had before they opened a
store: proportional set sizes (PSS, where a page that n processes share counts 1/n in each), with
the service's own. Bytes are those that left the disk, as the stores count them.

Then two workers with models of their own, one of which takes twice as long, at their own pace,
against private stores with half of the memory each; a third worker with a model of its own comes
and is killed. And the time of an acquire and release of one group.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore, enable_group_offload
from tierstore.wire.asking import report_of
from tools.bench import flux
from tools.bench.apart import Apart
from tools.bench.machine import pss
from tools.bench.page import Claim, Page
from tools.bench.runner import Bench, Run, column, interleave, median, ratios

PACKAGES, ROUNDS = ("torch", "diffusers", "msgspec"), 7
WORKERS, SHARE, WARM_UP, HITS = 4, 0.4, 3, 400
TOKENS = (16, 64)
SECONDS = 8.0
"""For which workers at their own pace are timed, in each round."""
SHAPES = {True: flux.Shape(2, 2, 4, "float32"), False: flux.Shape(4, 3, 25, "float32")}


def worker(
    checkpoint: Path,
    where: str | tuple[int, Path],
    device: str,
    room: int,
    tokens: int,
    pause: float,
) -> Generator[Any, str, None]:
    """Answer each message with figures. `where` is a socket, or a budget and a folder."""
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
        "kept": lambda: {"seconds": seconds_of_a_hit(store, leased=True)},
        "leased": lambda: {"seconds": seconds_of_a_hit(store, leased=False)},
    }
    message = yield None
    while True:
        message = yield answers[message]()


def step(steps: Iterator[Any], pause: float) -> Run:
    """Take the next step, and pause for so many times as long."""
    began = time.perf_counter()
    image = next(steps)
    time.sleep(pause * (time.perf_counter() - began))
    return {"seconds": time.perf_counter() - began, "sum": image.double().sum().item()}


def seconds_of_a_hit(store: Any, *, leased: bool) -> float:
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
    """Ask all at once. Returns the seconds until all have answered, and the answers."""
    began = time.perf_counter()
    for process in group:
        process.send(message)
    answers = [process.answer() for process in group]
    return time.perf_counter() - began, answers


@contextlib.contextmanager
def service(directory: Path, ram: int) -> Iterator[tuple[str, int]]:
    """Start a service. Yields its socket and its process's number."""
    place = directory / "socket"
    place.mkdir(mode=0o700, parents=True)
    socket = str(place / "s")
    command = "from tierstore.service.cli import serve; serve()"
    words = [sys.executable, "-c", command, str(directory / "served")]
    process = subprocess.Popen([*words, "--ram", f"{ram}B", "--socket", socket])
    try:
        while not os.path.exists(socket):
            time.sleep(0.05)
        report_of(socket, 60.0)  # it has loaded its libraries
        yield socket, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Workers:
    """Starts workers that end with a benchmark's part, and waits until they are ready."""

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
    """Four workers of one service, four private stores, and one; for an image of so many tokens."""
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
    text = f"memory of four workers and the service, of one private store{at}"
    yield Claim(text, memory, at_most=1.15)
    read = shared["read"] / one["read"]
    yield Claim(f"bytes read, of one private store{at}", read, at_most=1.2)
    slower = median(ratios(shared["all"], found["private"]["all"]))
    yield Claim(f"seconds per step, of four private stores{at}", slower, at_most=0.6)
    images = len(set().union(*column(list(found.values()), "sums")))
    yield Claim(f"all denoise the same image (different ones{at})", images, at_most=1)


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
    """Return the bytes that have left the disk so far, for a service or for private stores."""
    if isinstance(where, str):
        return int(report_of(where).read_bytes)
    return sum(int(answer["bytes_read"]) for answer in together(group, "stats")[1])


# --- two at their own pace ------------------------------------------------------------------------


def at_own_pace(group: Sequence[Apart], seconds: float) -> list[list[float]]:
    """Have all step for so long, none waiting for another. Returns the seconds of steps of each."""
    ends = time.monotonic() + seconds

    def drive(process: Apart) -> list[float]:
        times = []
        while time.monotonic() < ends:
            times.append(float(process.ask("step")["seconds"]))
        return times

    with ThreadPoolExecutor(len(group)) as threads:
        return list(threads.map(drive, group))


def unequal(bench: Bench, place: Path, checkpoints: Sequence[Path], pair: int) -> Iterator[Claim]:
    """Two workers with models of their own, one twice as slow; a third comes, and is killed."""
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
                for which, steps in enumerate(at_own_pace(pairs[name], seconds)):
                    if number:  # the first one is to warm up
                        times[name][which] += steps
        third = workers.start(checkpoints[2], socket)
        *during, _ = at_own_pace([*pairs["service"], third], seconds)
        third.process.kill()
        third.process.wait()
        after = at_own_pace(pairs["service"], seconds * bench.rounds)
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
        yield Claim(f"s per step of the {name} worker, of its half", ratio, at_most=1.25)
        text = f"{name} worker two steps after a third was killed, of before"
        yield Claim(text, gone[i] / before[i], at_most=1.1)


# --- hits -----------------------------------------------------------------------------------------


def hits(bench: Bench, place: Path, checkpoint: Path, nbytes: int) -> Iterator[Claim]:
    """All in memory: the time of an acquire and release, and of a step."""
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
        ("the store has it (a worker: leased already)", *(f"{us:.0f}" for us in kept)),
        ("given up before (a worker: leased anew)", *(f"{us:.0f}" for us in leased)),
    ]
    bench.page.table(("acquire and release", "worker, us", "private store, us"), rows)
    yield Claim("us for a group that a worker leases already", kept[0], at_most=150)
    text = "us for a group in the service's memory, leased anew"
    yield Claim(text, leased[0], at_most=150)
    ratio = median(ratios(*steps))
    yield Claim("a step with all in memory, of the private store's", ratio, at_most=1.03)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="or: pretend")


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
