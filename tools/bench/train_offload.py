"""A training step whose state exceeds RAM: tierstore against its alternatives

A transformer, an `nn.Sequential` of 8 blocks in float32 (the only kind that FairScale accepts), is
trained with AdamW (`fused=True`, the fastest) on one batch. Its full state (parameters,
gradients and two optimizer states) has 4 times the bytes of its parameters. The contenders are
plain training with everything in RAM; tierstore with everything in RAM, and with budgets of 0.5 and
0.2 of the full state, the rest on disk; both with `checkpoint_activation`; FairScale's
`OffloadModel`, FSDP2 with CPU offloading (one rank, gloo), and torchao's `CPUOffloadOptimizer`. The
last three keep everything in RAM (without a GPU they move nothing), and do not use a disk.

The peers are not dependencies; a missing one is listed as such. To install them:

    pip install --no-deps fairscale==0.4.13 torchao==0.18.0

Each run is a separate process with a cold page cache and an empty folder; the contenders take
turns. The figure of a run is the median over its steps after the second. Disk bytes are counted by
the system; peaks are anonymous memory above that of the process before it built a model. Every
contender starts with the same parameters, so all losses must be equal.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tierstore
from tools.bench import machine
from tools.bench.anonymous import AnonymousPeak
from tools.bench.apart import apart
from tools.bench.models import weight_bytes
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, median, middle, most, ranged, ratios, spread

PACKAGES, ROUNDS = ("torch", "fairscale", "torchao"), 3
COPIES = 4
"""State bytes per parameter byte: the value, the gradient and two optimizer states."""
WARM_UP = 2
"""Uncounted first steps; the first one creates gradients and states."""
HEAD = 64
CLASSES = 256
PARTS = ("forward", "backward", "optimizer")
ARGUMENTS: dict[str, Any] = {"lr": 1e-4, "fused": True}

PLAIN = "plain"
PLAIN_AGAIN = "plain, checkpointed"
RAM = "tierstore, all in RAM"
OURS = {RAM: 2.0, "tierstore, 0.5 x": 0.5, "tierstore, 0.2 x": 0.2}
AGAIN = ", checkpoint_activation"
OURS_AGAIN = {name + AGAIN: share for name, share in OURS.items() if share != 0.5}
SHARES = {**OURS, **OURS_AGAIN}
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

    @property
    def state(self) -> int:
        """Bytes of the full training state."""
        return COPIES * weight_bytes(build(self, "meta"))


FULL = Case(hidden=640, blocks=8, batch=2, tokens=128, steps=3)
SMALL = Case(hidden=128, blocks=4, batch=2, tokens=32, steps=2)


# --- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block: causal attention and an MLP, each with a residual connection."""

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
    """Return the model, always the same."""
    torch.manual_seed(0)
    with torch.device(device):
        blocks = [Block(case.hidden) for _ in range(case.blocks)]
        return nn.Sequential(*blocks, nn.LayerNorm(case.hidden), nn.Linear(case.hidden, CLASSES))


def data(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one batch, always the same."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(case.batch, case.tokens, case.hidden, generator=generator)
    return x, torch.randint(CLASSES, (case.batch, case.tokens), generator=generator)


# --- contenders -----------------------------------------------------------------------------------


@dataclass
class Training:
    """A model and its optimizer, with the `store` if they use one."""

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


class Nothing:
    """A stream or device context that accepts anything and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@contextlib.contextmanager
def by_fairscale(case: Case, place: Path, again: bool) -> Iterator[Training]:
    """Use FairScale's `OffloadModel`, whose constructor requires CUDA.

    So this process simulates CUDA: streams and devices do nothing, and `cuda()` and `pin_memory()`
    return their argument. FairScale itself is unchanged: it computes slice by slice, but moves
    nothing. Its time is that of its bookkeeping (and of recomputation), and its memory that of a
    model in RAM.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses deprecated names of torch
        from fairscale.experimental.nn.offload import OffloadModel
    for name, value in {
        "is_available": lambda: True,
        "set_device": lambda *args: None,
        "Stream": Nothing,
        "device": Nothing,
        "stream": lambda stream: contextlib.nullcontext(),
    }.items():
        setattr(torch.cuda, name, value)
    for cls, name in ((torch.Tensor, "cuda"), (torch.Tensor, "pin_memory"), (nn.Module, "cuda")):
        setattr(cls, name, lambda self, *args, **kwargs: self)
    cpu = {"device": torch.device("cpu"), "offload_device": torch.device("cpu")}
    model: nn.Module = OffloadModel(
        build(case), num_slices=case.blocks, checkpoint_activation=again, **cpu
    )
    note = "on a CPU it moves nothing"
    yield Training(model, torch.optim.AdamW(model.parameters(), **ARGUMENTS), note=note)


@contextlib.contextmanager
def by_fsdp(
    case: Case, place: Path, kind: str = "cpu", backend: str = "gloo"
) -> Iterator[Training]:
    """Use FSDP2 with one rank, without the offload policy if it rejects a CPU mesh."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(kind, (1,))

        def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
            for block in model:
                if isinstance(block, Block):
                    fully_shard(block, mesh=mesh, **options)
            fully_shard(model, mesh=mesh, **options)
            return model

        options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=kind != "cpu")}
        note = ""
        if kind == "cpu":
            try:  # a small model: some versions only fail when they run
                sharded(build(SMALL), **options)(data(SMALL)[0]).sum().backward()
            except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
                options, note = {}, f"without the policy, which says: {first_line(error)}"
        model = sharded(build(case), **options)
        yield Training(model, torch.optim.AdamW(model.parameters(), **ARGUMENTS), note=note)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def by_torchao(case: Case, place: Path, device: str = "cpu") -> Iterator[Training]:
    from torchao.optim import CPUOffloadOptimizer

    model = build(case).to(device)
    yield Training(model, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **ARGUMENTS))


Start = Callable[[Case, Path], contextlib.AbstractContextManager[Training]]
CONTENDERS: dict[str, Start] = {
    PLAIN: by_torch,
    **{
        name: functools.partial(by_tierstore, share=share, again=False)
        for name, share in OURS.items()
    },
    FAIRSCALE: functools.partial(by_fairscale, again=False),
    FSDP: by_fsdp,
    TORCHAO: by_torchao,
    PLAIN_AGAIN: by_torch_checkpointed,
    **{
        name: functools.partial(by_tierstore, share=share, again=True)
        for name, share in OURS_AGAIN.items()
    },
    FAIRSCALE + AGAIN: functools.partial(by_fairscale, again=True),
}
WITHOUT = ("without recomputing", (PLAIN, *OURS, FAIRSCALE, FSDP, TORCHAO))
WITH = ("with recomputing", (PLAIN_AGAIN, *OURS_AGAIN, FAIRSCALE + AGAIN))


# --- one run, in a separate process ---------------------------------------------------------------


def trained(name: str, case: Case, place: Path) -> Run:
    """Train with a contender. Return medians over steps, or the reason `why` it cannot run."""
    small = build(SMALL)  # imports modules and starts threads before the measurement
    small(data(SMALL)[0]).sum().backward()
    torch.optim.AdamW(small.parameters(), **ARGUMENTS).step()
    try:
        with contextlib.ExitStack() as stack:
            with AnonymousPeak() as peak:
                training = stack.enter_context(CONTENDERS[name](case, place))
            run: Run = {"start": peak.start, "setting_up": peak.gained, "note": training.note}
            with AnonymousPeak() as peak:
                steps = [step(training, case) for _ in range(WARM_UP + case.steps)]
            run["training"] = peak.bytes - run["start"]
            run["tiers"] = training.store.stats().peak_bytes if training.store else {}
    except Exception as error:
        if name in (*OURS, *OURS_AGAIN, PLAIN, PLAIN_AGAIN):
            raise
        return {"why": f"{type(error).__name__}: {first_line(error)}"}
    figures = {n: median(column(steps[WARM_UP:], n)) for n in steps[0]}
    return run | figures | {"losses": column(steps, "loss")}


def step(training: Training, case: Case) -> Run:
    """Run one step. Return its seconds, those of its parts, the disk bytes, and the loss."""
    x, y = data(case)
    before, times = machine.disk_bytes(), [time.perf_counter()]
    loss = F.cross_entropy(training.model(x).flatten(0, 1), y.flatten())
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    training.optimizer.step()
    training.optimizer.zero_grad()
    times.append(time.perf_counter())
    parts = [b - a for a, b in itertools.pairwise(times)]
    disk = [b - a for a, b in zip(before, machine.disk_bytes(), strict=True)]
    figures = zip((*PARTS, "read", "written"), (*parts, *disk), strict=True)
    return {"seconds": sum(parts), "loss": loss.item(), **dict(figures)}


def first_line(error: BaseException) -> str:
    """Return the first line of an error message."""
    text = " ".join(str(error).split())
    return text if len(text) <= 150 else f"{text[:150]}…"


# --- the page -------------------------------------------------------------------------------------


def measure(bench: Bench) -> Iterator[Claim]:
    case, folder = SMALL if bench.small else FULL, bench.scratch / "folder"
    refused: dict[str, Run] = {}

    def run(name: str) -> Run:
        shutil.rmtree(folder, ignore_errors=True)
        found = refused.get(name) or apart(trained, name, case, folder)
        if "why" in found:
            refused[name] = found
        return dict(found)

    found = bench.turns({name: functools.partial(run, name) for name in CONTENDERS}, cold=True)
    start = max(run.get("start", 0) for runs in found.values() for run in runs)
    bench.page.text(
        f"{case.blocks} blocks of {case.hidden} numbers per token, {case.batch} x {case.tokens} "
        f"tokens; {case.state / COPIES / 1e6:,.0f} MB of parameters, {case.state / 1e6:,.0f} MB of "
        f"state. {WARM_UP + case.steps} steps in each run, {bench.rounds} rounds: medians, and "
        f"ranges in parentheses. Before there was a model, processes took up to {start / 1e6:,.0f} "
        "MB. Every contender builds its model in RAM first, which is the peak during setup. "
        "FairScale runs with simulated CUDA (`by_fairscale`)."
    )
    for title, names in (WITHOUT, WITH):
        bench.page.text(f"{title.capitalize()}:")
        show(bench, case, {name: found[name] for name in names}, found[PLAIN][0]["losses"])
    yield from claims(case, found)


def show(bench: Bench, case: Case, found: dict[str, list[Run]], plain: list[float]) -> None:
    """Add a table with a row for each contender. The first is the reference."""
    first = next(iter(found.values()))

    def likeness(runs: list[Run]) -> str:
        """Format the first and last loss, and the difference of all losses to plain training."""
        pairs = itertools.chain(*(zip(run["losses"], plain, strict=True) for run in runs))
        off = max(abs(one - other) for one, other in pairs)
        losses = runs[0]["losses"]
        return f"{losses[0]:.4f}, {losses[-1]:.4f}: {f'off by {off:.0e}' if off else 'equal'}"

    def tiers(runs: list[Run]) -> str:
        return ", ".join(f"{max(r['tiers'][t] for r in runs) / 1e6:,.0f}" for t in runs[0]["tiers"])

    def medians(*names: str, digits: int = 0, scale: float = 1e-6) -> Callable[[Any], str]:
        columns = [middle(name, digits, scale) for name in names]
        return lambda runs: ", ".join(cell(runs) for cell in columns)

    columns: dict[str, Callable[[Any], object]] = {
        "seconds per step": ranged("seconds"),
        "ratio to the first row": lambda r: spread(
            ratios(column(r, "seconds"), column(first, "seconds"))
        ),
        "forward, backward, optimizer": medians(*PARTS, digits=2, scale=1),
        "budget, MB": lambda runs: runs[0]["budget"],
        "peak while set up, MB": most("setting_up", 1e-6),
        "peak in training, MB": most("training", 1e-6),
        "the store's peaks: RAM, disk, MB": tiers,
        "read, written per step, MB": medians("read", "written"),
        "losses": likeness,
    }
    rows = {}
    for name, runs in found.items():
        share = SHARES.get(name)
        runs[0]["budget"] = f"{case.state * share / 1e6:,.0f}" if share else ""
        if why := runs[0].get("why"):
            bench.page.text(f"{name} was not run: {why}.")
        else:
            rows[name + (f" ({runs[0]['note']})" if runs[0]["note"] else "")] = runs
    bench.page.compare("", rows, columns)


def claims(case: Case, found: dict[str, list[Run]]) -> Iterator[Claim]:
    plain = found[PLAIN][0]["losses"]
    same = all(run["losses"] == plain for name in SHARES for run in found[name])
    yield Claim("tierstore's losses are bit-identical to plain training", same, at_least=1)
    slower = median(ratios(*(column(found[name], "seconds") for name in (RAM, PLAIN))))
    yield Claim("all in RAM: time / plain training", slower, at_most=1.15)
    streams = [run for name, share in SHARES.items() if share < 1 for run in found[name]]
    least = min(column(streams, "read")) / 1e6
    yield Claim("with less RAM: least MB read per step", least, at_least=0.001)
    within = max(run["tiers"]["HOST"] for n, s in OURS.items() if s < 1 for run in found[n])
    text = "the store's RAM / its budget (0.5 x)"
    yield Claim(text, within / case.state / 0.5, at_most=1)
