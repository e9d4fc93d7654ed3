"""Several processes with the same model on one machine: one service, or a store for each.

    python tools/bench/service.py [--small] [--rounds N] --dir DIR [--markdown FILE]

Four processes denoise with the same Flux transformer of 500 MB (float32, which a CPU without units
for bfloat16 computes faster), step by step together, one thread each. With the service they share
40 % of the model's bytes; else each has a store of its own with a quarter of that. One private
store with all of it, in one process, is what one copy costs. All processes live through the whole
run and take turns: in each round every group of them does one step, so that a load from outside
meets all alike. This is done for an image of 16 tokens, and for one of 64, where two cores have
more to compute: what they compute alone is in the table as "resident", a service that has room for
all weights.

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
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tierstore.wire.asking import report_of
from tools.bench.report import Claim, Page

WORKERS = 4
SHARE = 0.4
TOKENS = (16, 64)
WARM_UP = 3
HITS = 400
SECONDS = 8.0
"""For which workers at their own pace are timed, in each round."""


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
    steps = flux.denoise(model, 1 << 30, arguments.device, arguments.tokens)
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


def weights(checkpoint: Path) -> int:
    """Bytes of a checkpoint."""
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


def service_pss(process: subprocess.Popen[bytes]) -> int:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


# --- what is compared -----------------------------------------------------------------------------


def in_step(
    page: Page, place: Path, checkpoint: Path, nbytes: int, options: Any, tokens: int
) -> list[Claim]:
    """Four workers of one service, four private stores, and one; for an image of so many tokens."""
    budget = int(nbytes * SHARE)
    device = {"device": options.device, "tokens": tokens}
    if options.device != "cpu":
        device["device_budget"] = str(max(nbytes // 10, 4 << 20))
    with contextlib.ExitStack() as stack:
        socket, serving = stack.enter_context(service(place, budget))
        idle = service_pss(serving)
        roomy, _ = stack.enter_context(service(place / "roomy", 2 * nbytes))
        groups = {
            "service": [Process.start(checkpoint, socket=socket, **device) for _ in range(WORKERS)],
            "resident": [Process.start(checkpoint, socket=roomy, **device) for _ in range(WORKERS)],
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
        sockets = {"service": socket, "resident": roomy}
        before = {name: read_bytes(group, sockets.get(name)) for name, group in groups.items()}
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        sums: dict[str, set[float]] = {name: set() for name in groups}
        for number in range(options.rounds):
            order = list(groups) if number % 2 else list(groups)[::-1]
            for name in order:
                took, answers = together(groups[name], "step")
                seconds[name].append(took)
                sums[name] = {answer["sum"] for answer in answers}
        read = {
            name: (read_bytes(group, sockets.get(name)) - before[name]) / options.rounds
            for name, group in groups.items()
        }
        memory = {
            name: sum(answer["pss"] for answer in together(group, "stats")[1])
            for name, group in groups.items()
        }
        memory["service"] += service_pss(serving) - idle
        del memory["resident"]  # as much as the model has
    median = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [
        (
            name,
            len(group),
            f"{median[name]:.3f}",
            f"{read[name] / 1e6:.0f} MB",
            f"{memory[name] / 1e6:.0f} MB" if name in memory else "",
        )
        for name, group in groups.items()
    ]
    page.text(f"An image of {tokens} tokens:")
    page.table(("what", "processes", "s per step", "read per step", "memory"), rows)
    at = f" ({tokens} tokens)"
    return [
        Claim(
            f"memory of four workers and the service, of one private store{at}",
            memory["service"] / memory["one"],
            at_most=1.15,
        ),
        Claim(f"bytes read, of one private store{at}", read["service"] / read["one"], at_most=1.2),
        Claim(
            f"seconds per step, of four private stores{at}",
            statistics.median(
                a / b for a, b in zip(seconds["service"], seconds["private"], strict=True)
            ),
            at_most=0.6,
        ),
        Claim(
            f"all denoise the same image (different ones{at})",
            len(set().union(*sums.values())),
            at_most=1,
        ),
    ]


def read_bytes(group: Sequence[Process], socket: str | None) -> int:
    """What has left the disk so far, for a service or for private stores."""
    if socket is not None:
        return int(report_of(socket).read_bytes)
    return sum(int(answer["bytes_read"]) for answer in together(group, "stats")[1])


# --- two at their own pace ------------------------------------------------------------------------


def at_own_pace(group: Sequence[Process], seconds: float) -> list[list[float]]:
    """Have all step for so long, none waiting for another. The seconds of each one's steps."""
    ends = time.monotonic() + seconds

    def drive(process: Process) -> list[float]:
        times = []
        while time.monotonic() < ends:
            process.ask("step")
            times.append(float(process.answer()["seconds"]))
        return times

    with ThreadPoolExecutor(len(group)) as threads:
        return list(threads.map(drive, group))


def unequal(page: Page, place: Path, checkpoints: Sequence[Path], options: Any) -> list[Claim]:
    """Two workers with models of their own, one twice as slow; a third comes, and is killed."""
    pair_bytes = sum(weights(checkpoint) for checkpoint in checkpoints[:2])
    budget, paces = int(pair_bytes * SHARE), (0.0, 1.0)
    image = {"device": "cpu", "tokens": TOKENS[0]}
    with contextlib.ExitStack() as stack:
        socket, _ = stack.enter_context(service(place, budget))
        pairs: dict[str, list[Process]] = {"service": [], "private": []}
        for number, (checkpoint, pause) in enumerate(zip(checkpoints, paces, strict=False)):
            pairs["service"].append(Process.start(checkpoint, socket=socket, pause=pause, **image))
            own = {"budget": budget // 2, "store": place / f"half-{number}"}
            pairs["private"].append(Process.start(checkpoint, pause=pause, **own, **image))
        for process in (process for pair in pairs.values() for process in pair):
            stack.callback(process.stop)
            process.answer()
        times: dict[str, list[list[float]]] = {name: [[], []] for name in pairs}
        for number in range(options.rounds + 1):
            for name in pairs if number % 2 else reversed(pairs):
                for which, steps in enumerate(at_own_pace(pairs[name], SECONDS)):
                    if number:  # the first one is to warm up
                        times[name][which] += steps
        before = [statistics.median(steps) for steps in times["service"]]
        third = Process.start(checkpoints[2], socket=socket, **image)
        stack.callback(third.stop)
        third.answer()
        *during, _ = at_own_pace([*pairs["service"], third], SECONDS)
        third.stop()
        after = at_own_pace(pairs["service"], SECONDS * options.rounds)
    own = [statistics.median(steps) for steps in times["private"]]
    gone = [statistics.median(steps[2:]) for steps in after]
    rows = [
        (
            name,
            f"{own[which]:.3f}",
            f"{before[which]:.3f}",
            f"{statistics.median(during[which]):.3f}",
            f"{gone[which]:.3f}",
        )
        for which, name in enumerate(("fast", "slow"))
    ]
    page.text("Two models at their own pace, s per step:")
    page.table(("worker", "private half", "service", "with a third", "once it was killed"), rows)
    return [
        *(
            Claim(f"s per step of the {name} worker, of its half", before[i] / own[i], at_most=1.25)
            for i, name in enumerate(("fast", "slow"))
        ),
        *(
            Claim(
                f"{name} worker two steps after a third was killed, of before",
                gone[i] / before[i],
                at_most=1.1,
            )
            for i, name in enumerate(("fast", "slow"))
        ),
    ]


# --- hits -----------------------------------------------------------------------------------------


def hits(page: Page, place: Path, checkpoint: Path, nbytes: int, options: Any) -> list[Claim]:
    """All in memory: the time of an acquire and release, and of a step."""
    device = {"device": "cpu", "tokens": TOKENS[0]}
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

    small = options.small
    place = Path(options.dir).resolve()
    checkpoints = []
    for seed in range(3):
        shape = flux.Shape(2 if small else 4, 2 if small else 3, 4 if small else 25, "float32")
        checkpoints.append(place / f"flux-{seed}")
        checkpoints[-1].mkdir(parents=True, exist_ok=True)
        flux.save(replace(shape, seed=seed), checkpoints[-1])
    (place / "roomy").mkdir(exist_ok=True)
    first, nbytes = checkpoints[0], weights(checkpoints[0])
    page = Page(__doc__ or "", place, ("torch", "diffusers", "msgspec"))
    page.text(f"{nbytes / 1e6:.0f} MB of weights; {options.rounds} rounds; device {options.device}")
    claims = []
    for tokens in TOKENS:
        claims += in_step(page, place, first, nbytes, options, tokens)
    if options.device == "cpu":
        claims += unequal(page, place, checkpoints, options)
        claims += hits(page, place, first, nbytes, options)
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
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
