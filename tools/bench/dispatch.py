"""Text from a model that is dispatched: tierstore against accelerate, with little RAM and with much

    python tools/bench/dispatch.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

A Llama of 2.1 GB (float32, 18 layers, a sharded safetensors checkpoint) writes text, the likeliest
token each time, with a cache of keys and values. Compared are `load_checkpoint_and_dispatch` of
tierstore and of accelerate (`device_map="auto"`, with the same RAM for weights), accelerate's
`disk_offload`, the `device_map` of transformers' `from_pretrained` (accelerate's hooks, and an
index into the checkpoint), and the plain model, whose weights are maps of the files. All on disk,
`device_map={"": "disk"}`, is an error in accelerate with safetensors, and what `disk_offload` does.

Below the working set: a control group of 900 MiB of RAM, where page cache counts and the process
itself takes a third. Where accelerate is killed there, for what glibc keeps of freed memory, it
runs again with a setting of glibc that gives it back at once, and the page says so. Above it: no
limit, a budget in which the model fits; then accelerate's `device_map` puts all on the CPU.

Each run is a process of its own with a cold page cache and an empty folder; the contenders take
turns. The tokens of a run after the third count, by their median; the first, which reads all, is
apart. Bytes are those that the process made the disk read and write.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import accelerate
import torch
import transformers

import tierstore
from tierstore.model.sizes import parse_size
from tools.bench import llama, machine
from tools.bench.anonymous import AnonymousPeak
from tools.bench.memory_group import MemoryGroup
from tools.bench.report import Claim, Page

FIRST_THAT_COUNTS = 3  # tokens before it: the order of use is learned, caches fill
CPU = torch.device("cpu")
BELOW, ABOVE = "below", "above"
OURS, PLAIN, DISK = "tierstore", "plain maps", "accelerate, disk_offload"
SPLIT, INDEXED = "accelerate, load and dispatch", "transformers, device_map"
PEERS = (DISK, SPLIT)


@dataclass(frozen=True)
class Case:
    """What is run: the model, tokens, rounds; budgets and contenders below and above; the limit."""

    shape: llama.Shape
    tokens: int
    rounds: int
    limit: str
    budgets: dict[str, str]
    contenders: dict[str, tuple[str, ...]]
    cold: bool = True


ALL = (OURS, DISK, SPLIT, INDEXED, PLAIN)
FULL = Case(
    llama.Shape(hidden=1536, intermediate=4096, layers=18),
    tokens=16,
    rounds=3,
    limit="900MiB",
    budgets={BELOW: "400MiB", ABOVE: "3GiB"},
    contenders={BELOW: ALL, ABOVE: ALL},
)
SMALL = Case(
    llama.Shape(hidden=256, intermediate=512, layers=6, shard="5MB"),
    tokens=6,
    rounds=1,
    limit="2000MiB",
    budgets={BELOW: "8MiB", ABOVE: "64MiB"},
    contenders={BELOW: (OURS, DISK), ABOVE: (OURS, DISK, PLAIN)},
    cold=False,
)


# --- one run, in a process of its own -------------------------------------------------------------


@contextlib.contextmanager
def by_maps(checkpoint: Path, folder: Path, budget: str) -> Iterator[Any]:
    """`from_pretrained` and nothing else."""
    yield plain(checkpoint)


@contextlib.contextmanager
def by_tierstore(checkpoint: Path, folder: Path, budget: str) -> Iterator[Any]:
    with tierstore.TierStore(budget, folder, device=CPU) as store:
        model = llama.empty_for(checkpoint)
        yield tierstore.load_checkpoint_and_dispatch(model, checkpoint, store)


@contextlib.contextmanager
def by_disk_offload(checkpoint: Path, folder: Path, budget: str) -> Iterator[Any]:
    yield accelerate.disk_offload(plain(checkpoint), folder, execution_device=CPU)


@contextlib.contextmanager
def by_loading_and_dispatching(checkpoint: Path, folder: Path, budget: str) -> Iterator[Any]:
    """The first layers in RAM, as many as fit, and the others in files of accelerate's format."""
    yield accelerate.load_checkpoint_and_dispatch(
        llama.empty_for(checkpoint),
        checkpoint,
        device_map="auto",
        max_memory={"cpu": parse_size(budget)},
        no_split_module_classes=["LlamaDecoderLayer"],
        offload_folder=folder,
    )


@contextlib.contextmanager
def by_transformers(checkpoint: Path, folder: Path, budget: str) -> Iterator[Any]:
    """The same map of devices, but what is on disk is read from the checkpoint."""
    yield plain(
        checkpoint,
        device_map="auto",
        max_memory={"cpu": parse_size(budget)},
        offload_folder=folder,
    )


def plain(checkpoint: Path, **options: Any) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, **options
    ).eval()


CONTENDERS: dict[str, Callable[..., contextlib.AbstractContextManager[Any]]] = {
    OURS: by_tierstore,
    DISK: by_disk_offload,
    SPLIT: by_loading_and_dispatching,
    INDEXED: by_transformers,
    PLAIN: by_maps,
}


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process made the disk read, by page faults too, and write so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


class Watched(llama.Written):
    """Notes the bytes read at each token as well."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self.read.append(disk_bytes()[0])


def run_here(name: str, checkpoint: Path, folder: Path, budget: str, tokens: int) -> dict[str, Any]:
    """Write text as contender `name`. Gives what it took."""
    llama.warm_up()
    _, written_before = disk_bytes()
    with AnonymousPeak() as peak:
        started = time.perf_counter()
        with CONTENDERS[name](checkpoint, folder, budget) as model:
            load = time.perf_counter() - started
            text = llama.write(model, tokens, watched := Watched())
            weights = llama.weight_bytes(model)
    return {
        "load": load,
        "seconds": differences(text.times),
        "read": differences(watched.read),
        "written": disk_bytes()[1] - written_before,
        "start": peak.start,
        "gained": peak.gained,
        "weights": weights,
        "tokens": text.tokens,
        "logits": text.logits,
    }


def differences(values: list[Any]) -> list[Any]:
    return [after - before for before, after in itertools.pairwise(values)]


# --- all runs -------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run. Seconds and bytes read, for a token, are medians over the tokens that count.

    Anonymous memory in bytes: `start` is before there was a model, `gained` the most over it.
    """

    load: float
    first: float
    seconds: float
    read: float
    written: int
    start: int
    gained: int
    weights: int
    tokens: list[int]
    logits: torch.Tensor

    @classmethod
    def of(cls, found: dict[str, Any]) -> Run:
        each = {name: found[name] for name in ("seconds", "read")}
        medians = {name: machine.median(v[FIRST_THAT_COUNTS:]) for name, v in each.items()}
        return cls(**{**found, **medians, "first": each["seconds"][0]})


class KilledError(Exception):
    """The system ended a run that took too much memory."""


FRUGAL = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""What glibc goes by, as environment: freed blocks over 128 KiB go back to the system."""


class Runner:
    """Starts runs in processes of their own, below in a group with little RAM if it may."""

    def __init__(self, case: Case, place: Path) -> None:
        self.case = case
        self.place = place
        self.killed: dict[str, int] = {}
        self.why_unlimited = ""
        try:
            with MemoryGroup(parse_size(case.limit)):
                pass
        except OSError as error:
            self.why_unlimited = f"RAM was not limited ({error})."

    def run(self, regime: str, name: str) -> Run:
        """One run as it is. If accelerate is killed in it, it runs again, with `FRUGAL`."""
        try:
            return self._limited(regime, name, {})
        except KilledError:
            self.killed[name] = self.killed.get(name, 0) + 1
            machine.drop_page_cache()
            return self._limited(regime, name, FRUGAL)

    def _limited(self, regime: str, name: str, more: dict[str, str]) -> Run:
        if regime == ABOVE or self.why_unlimited:
            return self._start(regime, name, lambda words: words, more)
        with MemoryGroup(parse_size(self.case.limit)) as group:
            return self._start(regime, name, group.command, more)

    def _start(
        self,
        regime: str,
        name: str,
        wrapped: Callable[[list[str]], list[str]],
        more: dict[str, str],
    ) -> Run:
        folder = self.place / "folder"
        folder.mkdir()
        words = [sys.executable, str(Path(__file__).resolve()), "--run", name]
        words += ["--dir", str(self.place), "--budget", self.case.budgets[regime]]
        words += ["--tokens", str(self.case.tokens)]
        environment = {**os.environ, **more}
        done = subprocess.run(
            wrapped(words), capture_output=True, text=True, env=environment, check=False
        )
        shutil.rmtree(folder)
        if done.returncode == -signal.SIGKILL and name in PEERS and not more:
            raise KilledError(name)
        if done.returncode:
            how = f"the run of {name!r} {regime} the working set ended with {done.returncode}"
            raise SystemExit(f"{how}:\n{done.stderr[-4000:]}")
        return Run.of(torch.load(self.place / "result.pt"))


# --- the page -------------------------------------------------------------------------------------

Found = dict[tuple[str, str], list[Run]]


def rows(found: Found, regime: str) -> Iterator[list[str]]:
    reference = found[ABOVE, PLAIN][0]
    for (where, name), runs in found.items():
        if where != regime:
            continue
        yield [
            name,
            machine.spread([run.seconds for run in runs], 3),
            machine.spread(times(found, regime, name)),
            f"{machine.median(run.first for run in runs):.2f}",
            f"{machine.median(run.load for run in runs):.2f}",
            f"{machine.median(run.read for run in runs) / 1e6:,.0f}",
            f"{max(run.written for run in runs) / 1e6:,.0f}",
            f"{max(run.gained for run in runs) / 2**20:,.0f}",
            likeness(runs, reference),
        ]


def times(found: Found, regime: str, name: str, to: str = OURS) -> list[float]:
    """Seconds per token of a contender to those of another, round by round."""
    one, other = ([run.seconds for run in found[regime, each]] for each in (name, to))
    return machine.ratios(one, other)


def likeness(runs: list[Run], reference: Run) -> str:
    """How text and logits compare with those of the plain model that has all the RAM it wants."""
    if any(run.tokens != reference.tokens for run in runs):
        return "DIFFERENT TEXT"
    differs = max((run.logits - reference.logits).abs().max().item() for run in runs)
    return f"same, logits differ by {differs:.1e}" if differs else "same, logits equal"


def report(page: Page, runner: Runner, found: Found) -> Iterator[Claim]:
    case = runner.case
    columns = (
        "",
        "seconds per token",
        "to tierstore",
        "first token, s",
        "loading, s",
        "MB read per token",
        "MB written",
        "peak MiB",
        "text",
    )
    start = max(run.start for runs in found.values() for run in runs)
    weights = found[BELOW, OURS][0].weights
    for regime in (BELOW, ABOVE):
        limit = f"in {case.limit}" if regime == BELOW else "RAM without a limit"
        page.text(
            f"{regime.capitalize()} the working set: {weights / 1e6:,.0f} MB of weights, {limit}, "
            f"a budget of {case.budgets[regime]}. {runner.why_unlimited * (regime == BELOW)}"
        )
        page.table(columns, rows(found, regime))
    for name, times_killed in runner.killed.items():
        page.text(
            f"The system killed {name} in {times_killed} of {case.rounds} runs below the working "
            f"set, as glibc keeps what is freed. It then ran with `{'='.join(*FRUGAL.items())}`."
        )
    to_plain = machine.spread(times(found, ABOVE, OURS, to=PLAIN))
    page.text(
        "The peak is anonymous memory over that of the process before there was a model "
        f"({start / 2**20:,.0f} MiB). MB written are those of loading and of all {case.tokens} "
        f"tokens. Above the working set, tierstore to the plain model: {to_plain}. {case.rounds} "
        "rounds; medians, and ranges in parentheses."
    )
    for peer in (p for p in PEERS if (BELOW, p) in found):
        slower = machine.median(times(found, BELOW, peer))
        yield Claim(f"below, {peer} takes at least 1.8 times as long", slower, at_least=1.8)
    slower = machine.median(times(found, ABOVE, OURS, to=DISK))
    yield Claim(f"above, no slower than {DISK} (time to time)", slower, at_most=1.0)
    mine = found[BELOW, OURS] + found[ABOVE, OURS]
    same = all(run.tokens == found[ABOVE, PLAIN][0].tokens for run in mine)
    yield Claim("the text is that of the plain model", float(same), at_least=1)
    written = max(run.written for run in mine) / 1e6
    yield Claim("tierstore writes next to nothing, MB", written, at_most=0.1)
    over = max(run.gained for run in found[BELOW, OURS]) - parse_size(case.budgets[BELOW])
    yield Claim("below, its peak is at most 64 MiB over the budget", over / 2**20, at_most=64)


def measure(case: Case, place: Path, page: Page) -> list[Claim]:
    llama.save(case.shape, place / "checkpoint")
    runner = Runner(case, place)
    runs: dict[Any, Callable[[], Run]] = {
        (regime, name): (lambda regime=regime, name=name: runner.run(regime, name))
        for regime, names in case.contenders.items()
        for name in names
    }
    before = machine.drop_page_cache if case.cold else lambda: None
    found = machine.interleave(runs, case.rounds, before=before, doing="Writing")
    return list(report(page, runner, found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model, once: does it run?")
    parser.add_argument("--rounds", type=int, help="how often each contender runs")
    parser.add_argument("--dir", type=Path, help="where the checkpoint is kept")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    parser.add_argument("--run", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--budget", help=argparse.SUPPRESS)
    options = parser.parse_args()
    place = options.dir
    if options.run:
        told = place / "checkpoint", place / "folder", options.budget, options.tokens
        torch.save(run_here(options.run, *told), place / "result.pt")
        return 0
    case = SMALL if options.small else FULL
    if options.rounds:
        case = dataclasses.replace(case, rounds=options.rounds)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as scratch:
        place = (place or Path(scratch)) / ("small" if options.small else "full")
        place.mkdir(parents=True, exist_ok=True)
        page = Page(__doc__, place, ("torch", "transformers", "accelerate"))
        page.claims(measure(case, place, page))
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
