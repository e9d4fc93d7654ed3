"""Memory that training takes.

To the byte on a pretend accelerator, and under a limit of the operating system.

On an accelerator, the bound is: two slices (their groups, in whole pages), and the memory that the
same step of a resident plain model takes beside its parameters, if gradients are dropped as they
arrive. That is saved activations, the input, the loss, and the temporaries of a module's backward.
Nothing else is allowed.
"""

from __future__ import annotations

import functools
import gc
import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.accelerator import ACCELERATOR, on_both, pretend
from tests.helpers.processes import results_in, run_python, without_kept_addresses
from tests.helpers.tensors import parameter_bytes
from tests.training import limited
from tierstore import TierStore
from tierstore.adapters.training import OffloadModel, OffloadOptimizer
from tierstore.adapters.training.slices import Slice
from tierstore.adapters.training.state_buffers import packed_bytes
from tierstore.observe.stats import Stats

pytestmark = pytest.mark.full(
    "the model, the optimizer: each has its own part; test_parity.py runs on both devices",
    keep="any device",
)


PAGE = 4096
WIDTHS = (96, 160, 128, 224, 64, 192, 128, 96, 256, 160, 128, 192)
BATCH = 32  # so that activations between blocks fill pages
INPUTS = 96
STEPS = 3
AMPLE = 1 << 30
"""A device budget without effect: only the slices may limit the memory."""


class Block(nn.Module):
    """Two layers with a residual connection; the width between them differs between blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(INPUTS)
        self.up = nn.Linear(INPUTS, width)
        self.down = nn.Linear(width, INPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Listed(nn.Module):
    """Blocks in a list, between two layers outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, INPUTS)
        self.blocks = nn.ModuleList(Block(width) for width in WIDTHS)
        self.last = nn.Linear(INPUTS, INPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def chain() -> nn.Module:
    return nn.Sequential(*(Block(width) for width in WIDTHS))


KINDS: dict[str, Callable[[], nn.Module]] = {"sequential": chain, "listed": Listed}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], step: int) -> torch.Tensor:
    """Return the loss. All inputs move to the device in here, so that they are counted."""
    output = model(batch(step).to(ACCELERATOR))
    return (output - batch(100 + step).to(ACCELERATOR)).square().mean()


def in_use() -> int:
    """Return the bytes on the device, once dropped tensors are freed."""
    gc.collect()
    torch.accelerator.synchronize(ACCELERATOR)
    return pretend.memory_allocated()


class Peaks:
    """The most bytes on the device since `start`, above the bytes in use then.

    `held` includes memory that was freed while another stream still used it.
    """

    def start(self) -> None:
        self._before = in_use()
        pretend.reset_peak_memory_stats()

    @property
    def allocated(self) -> int:
        return pretend.max_memory_allocated() - self._before

    @property
    def held(self) -> int:
        return pretend.max_memory_active() - self._before


def plain_step(kind: str, runs: list[int] | None) -> int:
    """Return the bytes that a step takes beside the parameters of a plain model on the device.

    `runs` lists how many consecutive blocks are recomputed together.
    """
    model = build(kind).to(ACCELERATOR)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop_gradient)
    run = model if runs is None else functools.partial(recomputed, model, runs)
    peaks = Peaks()
    peaks.start()
    loss_of(run, 0).backward()
    return peaks.allocated


def drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None


def recomputed(model: nn.Module, runs: list[int], x: torch.Tensor) -> torch.Tensor:
    """Run the model with torch's own recomputation."""
    listed = isinstance(model, Listed)
    blocks = list(model.blocks if listed else model.children())
    x = model.first(x) if listed else x.requires_grad_()  # torch's needs an input that requires one
    for count in runs:
        run, blocks = blocks[:count], blocks[count:]
        x = checkpoint(nn.Sequential(*run), x, use_reentrant=True)
    return model.last(x) if listed else x


def runs_of(model: OffloadModel) -> list[int]:
    """Return the modules that a model recomputes together: each block of a list, or each slice."""
    if isinstance(model.module, Listed):
        return [1] * len(WIDTHS)
    place = {part: i for i, block in enumerate(model.module) for part in block.modules()}
    ends = [max(place[unit.module] for unit in slice_.units) + 1 for slice_ in model.slices]
    return [stop - start for start, stop in itertools.pairwise([0, *ends]) if stop > start]


def slice_bytes(slice_: Slice) -> int:
    """Return the bytes of a slice's groups: tensors in multiples of 256, groups in whole pages."""
    return sum(packed_bytes(group.tensors) for group in slice_.groups)


@dataclass(frozen=True)
class Taken:
    """The memory that training took, and its bound."""

    slices: list[int]
    groups: list[int]
    bound: int
    allocated: int
    held: int
    pinned: int
    stats: Stats


def train(kind: str, num_slices: int, place: Path, ram: int, *, recompute: bool) -> Taken:
    """Train a few steps on the device, including the construction of the model."""
    peaks, already = Peaks(), pretend.pinned_bytes()
    peaks.start()
    pretend.reset_peak_pinned()
    with TierStore(ram, place, device=ACCELERATOR, device_budget=AMPLE) as store:
        model = OffloadModel(
            build(kind), store, num_slices=num_slices, checkpoint_activation=recompute
        )
        optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, lr=1e-3)
        for step in range(STEPS):
            loss_of(model, step).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        allocated, held = peaks.allocated, peaks.held
        pinned = pretend.peak_pinned_bytes() - already
        slices = [slice_bytes(slice_) for slice_ in model.slices]
        groups = [packed_bytes(g.tensors) for slice_ in model.slices for g in slice_.groups]
        runs = runs_of(model) if recompute else None
        stats = store.stats()
    bound = sum(sorted(slices)[-2:]) + plain_step(kind, runs)
    return Taken(slices, groups, bound, allocated, held, pinned, stats)


@pytest.mark.pretend_only("bytes")
@pytest.mark.parametrize("num_slices", [3, 4, 8])
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_device_holds_two_slices_and_the_activations(
    kind: str, recompute: bool, num_slices: int, disk_dir: Path
) -> None:
    ram = parameter_bytes(build(kind))  # a quarter of the state: the rest is on disk
    taken = train(kind, num_slices, disk_dir, ram, recompute=recompute)
    assert len(taken.slices) == num_slices
    # Gradients of one group may be kept until they are copied to the host.
    assert taken.allocated <= taken.bound + max(taken.groups)
    # Gradients of two groups may be on their way to the host: their memory is freed after that.
    assert taken.held <= taken.bound + sum(sorted(taken.groups)[-2:])
    assert taken.pinned <= ram
    assert taken.stats.peak_bytes["HOST"] <= ram
    # The forward loads everything; the backward all but the groups that the forward left there.
    brought = 2 * parameter_bytes(build(kind)) - sum(sorted(taken.slices)[-2:])
    assert taken.stats.bytes_onloaded >= STEPS * brought
    assert taken.stats.bytes_written > 0, "nothing was written to disk"


@pytest.mark.pretend_only("bytes")
def test_larger_slices_take_more_memory(disk_dir: Path) -> None:
    """The control of the measurement: it counts the slices' memory."""
    ram = parameter_bytes(build("listed"))
    few = train("listed", 3, disk_dir / "few", ram, recompute=False)
    many = train("listed", 8, disk_dir / "many", ram, recompute=False)
    assert few.allocated > many.bound


@on_both
def test_disabled_model_kept_alive_holds_no_memory(device: str, disk_dir: Path) -> None:
    """The wrapper may be kept while another model is trained in the same store."""
    with TierStore("16MB", disk_dir, device=device) as store:
        model = OffloadModel(nn.Sequential(*(Block(width) for width in WIDTHS)), store)
        optimizer = OffloadOptimizer(model, store, torch.optim.SGD, lr=0.1)
        model(torch.randn(BATCH, INPUTS, device=store.device)).square().mean().backward()
        optimizer.step()
        del optimizer
        assert store.stats().used_bytes["HOST"] > 0
        module = model.disable()
        gc.collect()
        assert store.stats().used_bytes["HOST"] == 0
        assert parameter_bytes(module) > 0 and model.module is module


@pytest.mark.pretend_only("bytes")
def test_dropped_model_returns_its_memory(disk_dir: Path) -> None:
    """Drop the model without `disable`: both it and the store are garbage."""
    before = in_use(), pretend.pinned_bytes()
    ram = parameter_bytes(build("listed"))
    taken = train("listed", 4, disk_dir, ram, recompute=False)
    assert taken.pinned > ram // 2, "there was no memory to return"
    assert (in_use(), pretend.pinned_bytes()) == before


# Under a limit of the operating system -----------------------------------------------------------

needs_the_limit = pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="only Linux counts private memory for RLIMIT_DATA",
)


def run(how: str, place: Path) -> subprocess.CompletedProcess[str]:
    words = ["-m", "tests.training.limited", how, place / how]
    return run_python(*words, environment=without_kept_addresses(), timeout=600)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = results_in(done.stdout)
    return found


@pytest.mark.full("a process that trains for long; tests/activations/test_memory_limit.py has one")
@needs_the_limit
def test_training_at_four_times_memory_is_bit_exact(tmp_path: Path) -> None:
    state = limited.COPIES * limited.PARAMETERS
    assert state > 1.2e9 > 3.8 * limited.HEADROOM
    result = result_of(run("store", tmp_path))
    assert result["told"] == result_of(run("unlimited", tmp_path))["told"]
    assert len(set(result["told"][: limited.STEPS])) == limited.STEPS, "the loss did not change"
    assert result["peak"] <= limited.BUDGET
    # The budget holds this much of the state between steps: the rest is written each time.
    assert result["written"] >= limited.STEPS * (state - limited.BUDGET)


@pytest.mark.full("the control of a process that trains for long")
@needs_the_limit
def test_plain_training_exceeds_that_limit(tmp_path: Path) -> None:
    """The control."""
    done = run("plain", tmp_path)
    assert done.returncode == 1
    assert "RESULT" not in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(("RuntimeError", "MemoryError")), done.stderr[-3000:]
    assert "memory" in last.lower()
