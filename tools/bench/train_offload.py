"""A training step whose state does not fit: tierstore against what else there is

    python tools/bench/train_offload.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

A transformer, an `nn.Sequential` of 8 blocks in float32 (FairScale takes nothing else), is trained
with AdamW (`fused=True`, as it computes the least) on one batch. Its full state is parameters,
gradients and two states of the optimizer, 4 times its parameters. Compared are plain training with
everything in RAM; tierstore with everything in RAM, and with budgets of 0.5 and 0.2 of the full
state, the rest on disk; both with `checkpoint_activation`; FairScale's `OffloadModel`, FSDP2 with
its offloading to the CPU (one rank, gloo), and torchao's `CPUOffloadOptimizer`. The last three keep
everything in RAM (where there is no GPU, they have nothing to move): they have no disk.

The peers are no dependencies; one that is missing is a row that says so. To install them:

    pip install --no-deps fairscale==0.4.13 torchao==0.18.0

Each run is a process of its own with a cold page cache and an empty folder; the contenders take
turns. The figure of a run is the median of its steps after the second. Bytes of the disk are those
that the system counted; peaks are anonymous memory over that of the process before there was a
model, with glibc told to give freed memory back at once (all of them pay for that in page faults).
Every contender begins with the same parameters, so all losses must be the same.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.nn.functional as F
from torch import nn

import tierstore
from tools.bench import fairscale_peer, machine
from tools.bench.anonymous import AnonymousPeak
from tools.bench.report import Claim, Page

COPIES = 4
"""Of each parameter: its value, its gradient, two states of the optimizer."""
WARM_UP = 2
"""Steps before the first that counts: the first one makes gradients and states."""
HEAD = 64
CLASSES = 256
MARK = "BENCH "
ARGUMENTS: dict[str, Any] = {"lr": 1e-4, "fused": True}

PLAIN = "plain"
PLAIN_AGAIN = "plain, checkpointed"
RAM = "tierstore, all in RAM"
OURS = {RAM: 2.0, "tierstore, 0.5 x": 0.5, "tierstore, 0.2 x": 0.2}
AGAIN = ", checkpoint_activation"
OURS_AGAIN = {name + AGAIN: share for name, share in OURS.items() if share != 0.5}
FAIRSCALE = "FairScale OffloadModel"
FSDP = "FSDP2, CPUOffloadPolicy"
TORCHAO = "torchao CPUOffloadOptimizer"


@dataclass(frozen=True)
class Case:
    hidden: int
    blocks: int
    batch: int
    tokens: int
    steps: int
    rounds: int

    @property
    def state(self) -> int:
        """Bytes of everything that is trained."""
        return COPIES * sum(p.nbytes for p in build(self, "meta").parameters())


FULL = Case(hidden=640, blocks=8, batch=2, tokens=128, steps=3, rounds=3)
SMALL = Case(hidden=128, blocks=4, batch=2, tokens=32, steps=2, rounds=1)


# --- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to what came before, and two layers with something between, both around a sum."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(hidden)
        self.attention = nn.Linear(hidden, 3 * hidden)
        self.attended = nn.Linear(hidden, hidden)
        self.before_wide = nn.LayerNorm(hidden)
        self.wide = nn.Linear(hidden, 4 * hidden)
        self.narrow = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        heads = self.attention(self.before_attention(x))
        query, key, value = (
            part.view(batch, tokens, -1, HEAD).transpose(1, 2) for part in heads.chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.narrow(F.gelu(self.wide(self.before_wide(x))))


def build(case: Case, device: str = "cpu") -> nn.Sequential:
    """The model, always the same."""
    torch.manual_seed(0)
    with torch.device(device):
        blocks = [Block(case.hidden) for _ in range(case.blocks)]
        return nn.Sequential(*blocks, nn.LayerNorm(case.hidden), nn.Linear(case.hidden, CLASSES))


def data(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch, always the same."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(case.batch, case.tokens, case.hidden, generator=generator)
    return x, torch.randint(CLASSES, (case.batch, case.tokens), generator=generator)


# --- contenders -----------------------------------------------------------------------------------


class NotHereError(Exception):
    """A contender cannot run; the text says why."""


@dataclass
class Training:
    """A model and its optimizer. `store` is there if it is ours."""

    model: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    store: tierstore.TierStore | None = None
    note: str = ""


@contextlib.contextmanager
def by_torch(case: Case, place: Path) -> Iterator[Training]:
    model = build(case)
    yield Training(model, torch.optim.AdamW(model.parameters(), **ARGUMENTS))


@contextlib.contextmanager
def by_torch_checkpointed(case: Case, place: Path) -> Iterator[Training]:
    from torch.utils.checkpoint import checkpoint_sequential

    model = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), **ARGUMENTS)

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(model, case.blocks, x.requires_grad_(), use_reentrant=True)

    yield Training(run, optimizer)


@contextlib.contextmanager
def by_tierstore(case: Case, place: Path, share: float, again: bool) -> Iterator[Training]:
    with tierstore.TierStore(int(case.state * share), place, device="cpu") as store:
        slices = case.blocks if again else None
        model = tierstore.OffloadModel(
            build(case), store, num_slices=slices, checkpoint_activation=again
        )
        optimizer = tierstore.OffloadOptimizer(model, store, torch.optim.AdamW, **ARGUMENTS)
        yield Training(model, optimizer, store)


@contextlib.contextmanager
def by_fairscale(case: Case, place: Path, again: bool) -> Iterator[Training]:
    model = fairscale_peer.offloaded(build(case), case.blocks, again)
    note = "on a CPU it moves nothing"
    yield Training(model, torch.optim.AdamW(model.parameters(), **ARGUMENTS), note=note)


@contextlib.contextmanager
def by_fsdp(case: Case, place: Path) -> Iterator[Training]:
    """One rank. Where the policy refuses a mesh of CPUs, without it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    where = dist.HashStore()
    dist.init_process_group("gloo", store=where, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
            for block in model:
                if isinstance(block, Block):
                    fully_shard(block, mesh=mesh, **options)
            fully_shard(model, mesh=mesh, **options)
            return model

        options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        note = ""
        try:  # a small one: some refuse only when they run
            sharded(build(SMALL), **options)(data(SMALL)[0]).sum().backward()
        except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
            options, note = {}, f"without the policy, which says: {first_line(error)}"
        model = sharded(build(case), **options)
        yield Training(model, torch.optim.AdamW(model.parameters(), **ARGUMENTS), note=note)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def by_torchao(case: Case, place: Path) -> Iterator[Training]:
    from torchao.optim import CPUOffloadOptimizer

    model = build(case)
    yield Training(model, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **ARGUMENTS))


Start = Callable[[Case, Path], contextlib.AbstractContextManager[Training]]


def _ours(share: float, again: bool) -> Start:
    return lambda case, place: by_tierstore(case, place, share, again)


def _fairscale(again: bool) -> Start:
    return lambda case, place: by_fairscale(case, place, again)


CONTENDERS: dict[str, Start] = {
    PLAIN: by_torch,
    **{name: _ours(share, False) for name, share in OURS.items()},
    FAIRSCALE: _fairscale(False),
    FSDP: by_fsdp,
    TORCHAO: by_torchao,
    PLAIN_AGAIN: by_torch_checkpointed,
    **{name: _ours(share, True) for name, share in OURS_AGAIN.items()},
    FAIRSCALE + AGAIN: _fairscale(True),
}
WITHOUT = ("without recomputing", (PLAIN, *OURS, FAIRSCALE, FSDP, TORCHAO))
WITH = ("with recomputing", (PLAIN_AGAIN, *OURS_AGAIN, FAIRSCALE + AGAIN))


# --- one run, in a process of its own -------------------------------------------------------------


@dataclass
class Run:
    """One run. `why` tells why there was none. Seconds and bytes of the disk are by step; `parts`
    are seconds of forward, backward and the optimizer's step. `setting_up` and `training` are
    peaks of anonymous memory over the start, `tiers` are the store's own peaks, in bytes."""

    why: str = ""
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    parts: list[list[float]] = field(default_factory=list)
    disk: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    setting_up: int = 0
    training: int = 0
    start: int = 0
    tiers: dict[str, int] = field(default_factory=dict)

    def second(self) -> float:
        return machine.median(self.seconds[WARM_UP:])

    def part(self, number: int) -> float:
        return machine.median(each[number] for each in self.parts[WARM_UP:])

    def bytes_of_disk(self, way: int) -> float:
        return machine.median(each[way] for each in self.disk[WARM_UP:])


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process made the disk read, by page faults too, and write so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def run_here(name: str, case: Case, place: Path) -> Run:
    """Train as contender `name`."""
    warm_up()
    run = Run()
    try:
        with contextlib.ExitStack() as stack:
            with AnonymousPeak() as peak:
                training = stack.enter_context(CONTENDERS[name](case, place))
            run.start, run.setting_up, run.note = peak.start, peak.gained, training.note
            with AnonymousPeak() as peak:
                for _ in range(WARM_UP + case.steps):
                    step(training, case, run)
            run.training = peak.bytes - run.start
            if training.store is not None:
                run.tiers = training.store.stats().peak_bytes
    except Exception as error:
        if name in OURS or name in OURS_AGAIN or name in (PLAIN, PLAIN_AGAIN):
            raise
        return Run(why=f"{type(error).__name__}: {first_line(error)}")
    return run


def step(training: Training, case: Case, run: Run) -> None:
    """One step, noted in `run`."""
    x, y = data(case)
    before, times = disk_bytes(), [time.perf_counter()]
    logits = training.model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    training.optimizer.step()
    training.optimizer.zero_grad()
    times.append(time.perf_counter())
    run.seconds.append(times[-1] - times[0])
    run.parts.append([b - a for a, b in itertools.pairwise(times)])
    run.disk.append([b - a for a, b in zip(before, disk_bytes(), strict=True)])
    run.losses.append(loss.item())


def warm_up() -> None:
    """Start threads, and import what is imported late: no part of any contender's cost."""
    model = build(SMALL)
    x, y = data(SMALL)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    torch.optim.AdamW(model.parameters(), **ARGUMENTS).step()


def first_line(error: BaseException) -> str:
    """Of what an error says, the first sentence or so."""
    text = " ".join(str(error).split())
    return text if len(text) <= 150 else f"{text[:150]}…"


# --- all runs -------------------------------------------------------------------------------------


def run_apart(name: str, small: bool, case: Case, place: Path) -> Run:
    """One run, in a process of its own."""
    folder = place / "folder"
    words = [sys.executable, str(Path(__file__).resolve()), "--run", name, "--dir", str(folder)]
    words += ["--steps", str(case.steps)] + ["--small"] * small
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)
    told = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not told:
        how = f"the run of {name!r} ended with {done.returncode}"
        raise SystemExit(f"{how}:\n{done.stderr[-4000:]}")
    return Run(**json.loads(told[-1].removeprefix(MARK)))


# --- the page -------------------------------------------------------------------------------------

Found = dict[str, list[Run]]


def times(found: Found, name: str, to: str) -> list[float]:
    """Seconds per step of a contender to those of another, round by round."""
    one, other = ([run.second() for run in found[each]] for each in (name, to))
    return machine.ratios(one, other)


def rows(found: Found, names: tuple[str, ...], case: Case) -> Iterator[list[str]]:
    for name in names:
        runs = found[name]
        if runs[0].why:
            yield [name, f"not run: {runs[0].why}", *[""] * 8]
            continue
        share = {**OURS, **OURS_AGAIN}.get(name)
        marked = name + (f" ({runs[0].note})" if runs[0].note else "")
        peaks = {t: max(run.tiers.get(t, 0) for run in runs) for t in runs[0].tiers}
        yield [
            marked,
            machine.spread([run.second() for run in runs]),
            machine.spread(times(found, name, names[0])),
            ", ".join(f"{machine.median(run.part(n) for run in runs):.2f}" for n in range(3)),
            f"{case.state * share / 1e6:,.0f}" if share else "",
            f"{max(run.setting_up for run in runs) / 1e6:,.0f}",
            f"{max(run.training for run in runs) / 1e6:,.0f}",
            ", ".join(f"{nbytes / 1e6:,.0f}" for nbytes in peaks.values()),
            ", ".join(
                f"{machine.median(run.bytes_of_disk(way) for run in runs) / 1e6:,.0f}"
                for way in range(2)
            ),
            likeness(runs, found[PLAIN][0]),
        ]


def likeness(runs: list[Run], reference: Run) -> str:
    """The first and the last loss, and how all of them compare with plain training's."""
    first, last = runs[0].losses[0], runs[0].losses[-1]
    differs = max(
        abs(one - other)
        for run in runs
        for one, other in zip(run.losses, reference.losses, strict=True)
    )
    same = "equal" if not differs else f"off by {differs:.0e}"
    return f"{first:.4f}, {last:.4f}: {same}"


COLUMNS = (
    "",
    "seconds per step",
    "to the first row",
    "forward, backward, optimizer",
    "budget, MB",
    "peak while set up, MB",
    "peak in training, MB",
    "the store's peaks: RAM, disk, MB",
    "read, written per step, MB",
    "losses",
)


def report(page: Page, case: Case, found: Found) -> Iterator[Claim]:
    page.text(
        f"{case.blocks} blocks of {case.hidden} numbers per token, {case.batch} x {case.tokens} "
        f"tokens; {case.state / COPIES / 1e6:,.0f} MB of parameters, {case.state / 1e6:,.0f} MB of "
        f"state. {WARM_UP + case.steps} steps in each run, {len(found[PLAIN])} rounds: medians, and"
        " ranges in parentheses. Before there was a model, processes took up to "
        f"{max(run.start for runs in found.values() for run in runs) / 1e6:,.0f} MB."
    )
    for title, names in (WITHOUT, WITH):
        page.text(f"{title.capitalize()}:")
        page.table(COLUMNS, rows(found, names, case))
    page.text(
        "Everybody's model is built in RAM first, which is the peak while it is set up. FairScale "
        "was told that there is CUDA (`tools/bench/fairscale_peer.py`)."
    )
    same = all(
        run.losses == found[PLAIN][0].losses for name in (*OURS, *OURS_AGAIN) for run in found[name]
    )
    yield Claim("tierstore's losses are those of plain training, bit for bit", same, at_least=1)
    slower = machine.median(times(found, RAM, PLAIN))
    yield Claim("with all in RAM, at most 1.15 times plain training's time", slower, at_most=1.15)
    streams = [n for n, share in {**OURS, **OURS_AGAIN}.items() if share < 1]
    least = min(run.bytes_of_disk(0) for name in streams for run in found[name])
    yield Claim("with less RAM, every step reads the disk (MB)", least / 1e6, at_least=0.001)
    within = max(run.tiers["HOST"] for name in OURS for run in found[name] if OURS[name] < 1)
    yield Claim(
        "the store's RAM is within its budget (share of 0.5 x)",
        within / case.state / 0.5,
        at_most=1,
    )


def installed(names: tuple[str, ...]) -> list[str]:
    """Those of these packages that are here."""
    found = []
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(name)
            found.append(name)
    return found


def train_all(options: argparse.Namespace, case: Case, place: Path) -> Found:
    """All contenders in turns. Who has said that it cannot run is not asked again."""
    refused: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name in refused:
            return refused[name]
        found = run_apart(name, options.small, case, place)
        if found.why:
            refused[name] = found
        return found

    before: Callable[[], object] = (lambda: None) if options.small else machine.drop_page_cache
    runs = {name: functools.partial(run, name) for name in CONTENDERS}
    return machine.interleave(runs, options.rounds or case.rounds, before=before, doing="Training")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model, once: does it run?")
    parser.add_argument("--rounds", type=int, help="how often each contender runs")
    parser.add_argument("--dir", type=Path, help="where the stores have their files")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    parser.add_argument("--run", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    case = SMALL if options.small else FULL
    if options.steps:
        case = dataclasses.replace(case, steps=options.steps)
    if options.run:
        print(MARK + json.dumps(asdict(run_here(options.run, case, options.dir))), flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.dir) as scratch:
        place = Path(scratch)
        page = Page(__doc__, place, ("torch", *installed(("fairscale", "torchao"))))
        found = train_all(options, case, place)
        page.claims(report(page, case, found))
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
