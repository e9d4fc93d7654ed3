"""Training with activations, or with parameters, gradients and states, outside the GPU.

Activations: 16 blocks of 4,096 elements per token, 16k tokens, bfloat16. The lower bound of a step
is the longer of forward and copying out, plus the longer of backward and copying back. State: a
model of a billion parameters, 8k tokens, float32 (tensor cores round to TF32), AdamW on the CPU.
Plain training also has its optimizer on the CPU, so that losses can be equal. All lines use
deterministic algorithms, including attention. Figures are medians over steps.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tierstore import OffloadModel, OffloadOptimizer, TierStore, offload_activations
from tools.bench import train_offload
from tools.gpu.bench import Bench, checksum, installed
from tools.gpu.lines import Figures, Goal, Group, Line, Unavailable

NONE = "nothing offloaded"
PLAIN = {True: "plain, fused", False: "plain, not fused"}
LEARNING = {"lr": train_offload.ARGUMENTS["lr"]}
EQUAL = Goal("differing", at_most=0)
WARM_UP = 2
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def deterministic() -> Iterator[None]:
    """In the block, make steps deterministic to the bit; unsupported operations raise RuntimeError.

    The backward pass of cuDNN's attention, which torch prefers on an H100, accumulates in any order
    and ignores torch's setting. Those of flash and of memory-efficient attention (float32) respect
    it, but not with `warn_only`.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # required for determinism of cuBLAS
    fill = torch.utils.deterministic.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time
    torch.set_float32_matmul_precision("high")
    try:
        with sdpa_kernel(ATTENTION):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_float32_matmul_precision(precision)


# Activations --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationCase:
    """Model sizes (see train_offload), and the budgets of a store in bytes."""

    model: train_offload.Case
    ram: int
    device: int
    min_size: int
    dtype: torch.dtype


class Activations:
    """Training steps of a model whose weights and gradients stay on the device."""

    FULL = ActivationCase(
        train_offload.Case(4096, 16, 4, 4096, steps=4),
        60 * 10**9,
        6 * 10**9,
        1 << 20,
        torch.bfloat16,
    )
    SMALL = ActivationCase(
        train_offload.Case(128, 3, 2, 32, steps=2), 40 << 20, 2 << 20, 4096, torch.float32
    )

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.case = self.SMALL if bench.small else self.FULL

    def run(self, around: Callable[[Path, nn.Module], AbstractContextManager[Any]]) -> Figures:
        """Run steps, with each forward pass in a new context of `around`."""
        accelerator, device = self.bench.accelerator, self.bench.device
        model = train_offload.build(self.case.model, str(device)).to(self.case.dtype)
        x, y = (tensor.to(device) for tensor in train_offload.data(self.case.model))
        x = x.to(self.case.dtype)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        times: list[tuple[float, float]] = []
        with deterministic(), self.bench.folder() as place, around(place, model) as enter:
            accelerator.reset()
            base = accelerator.reserved()
            for _ in range(WARM_UP + self.case.model.steps):
                model.zero_grad(set_to_none=False)
                began = time.perf_counter()
                with enter():
                    logits = model(x)
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
                    del logits
                accelerator.synchronize()
                between = time.perf_counter()
                loss.backward()
                accelerator.synchronize()
                times.append((between - began, time.perf_counter() - between))
                del loss
            peak = accelerator.peak_reserved() - base
        forward, backward = (statistics.median(part) for part in zip(*times[WARM_UP:], strict=True))
        found = checksum([p.grad for p in model.parameters() if p.grad is not None])
        accelerator.reset()
        return {
            "seconds": forward + backward,
            "forward_seconds": forward,
            "backward_seconds": backward,
            "peak_reserved_gb": peak / 1e9,
            "checksum": found,
        }

    def beside(
        self, around: Callable[[Path, nn.Module], AbstractContextManager[Any]]
    ) -> dict[str, float]:
        """Run steps, and compare the gradients to those without offloading."""
        figures = dict(self.run(around))
        return figures | {"differing": self.bench.differing(figures["checksum"], NONE)}

    @contextmanager
    def none(self, place: Path, model: nn.Module) -> Iterator[Callable[[], Any]]:
        yield nullcontext

    @contextmanager
    def save_on_cpu(self, place: Path, model: nn.Module) -> Iterator[Callable[[], Any]]:
        yield lambda: save_on_cpu(pin_memory=True, device_type=self.bench.device.type)

    @contextmanager
    def torchtune(self, place: Path, model: nn.Module) -> Iterator[Callable[[], Any]]:
        installed("torchtune")
        from torchtune.training import OffloadActivations

        yield lambda: OffloadActivations(use_pin_memory=True, use_streams=True)

    def ours(self) -> Figures:
        """Use a store that holds everything in RAM."""
        case, stores = self.case, []
        forward, backward = (
            self.bench.figure(NONE, name) for name in ("forward_seconds", "backward_seconds")
        )
        peak = self.bench.figure(NONE, "peak_reserved_gb")

        @contextmanager
        def around(place: Path, model: nn.Module) -> Iterator[Callable[[], Any]]:
            with TierStore(
                case.ram, place / "store", device=self.bench.device, device_budget=case.device
            ) as store:
                stores.append(store)
                offload = offload_activations(store, min_size=case.min_size, model=model)
                yield lambda: offload
                stores.append(store.stats())

        figures = self.beside(around)
        stats, steps = stores[1], WARM_UP + case.model.steps
        away, back = (
            n / steps / self.bench.link_speed for n in (stats.bytes_offloaded, stats.bytes_onloaded)
        )
        bound = max(forward, away) + max(backward, back)
        return figures | {
            "shipped_gb": stats.activations.shipped_bytes / steps / 1e9,
            "bound_seconds": bound,
            "to_bound": figures["seconds"] / bound,
            "peak_to_none": figures["peak_reserved_gb"] / max(peak, 1e-9),
        }

    def group(self) -> Group:
        """Return the lines of activations."""
        return Group(
            "activations",
            [
                Line(NONE, "compute time", lambda: self.run(self.none), seconds=8),
                Line(
                    "offload_activations",
                    f"a store with {self.case.device / 1e9:g} GB of GPU memory",
                    self.ours,
                    [EQUAL, Goal("to_bound", at_most=1.3), Goal("peak_to_none", at_most=1)],
                    seconds=20,
                ),
                Line(
                    "save_on_cpu, pin_memory",
                    "torch's own: copies every saved tensor, and waits for it",
                    lambda: self.beside(self.save_on_cpu),
                    peer=True,
                    seconds=40,
                ),
                Line(
                    "torchtune OffloadActivations",
                    "on streams",
                    lambda: self.beside(self.torchtune),
                    peer=True,
                    seconds=20,
                ),
            ],
        )


# Parameters, gradients and states -----------------------------------------------------------------


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Trains on one batch, and returns its loss."""


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class States:
    """Training steps with the training state outside the device."""

    FULL = train_offload.Case(2048, 20, 4, 2048, steps=3)
    SMALL = train_offload.Case(128, 3, 2, 16, steps=2)

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.case = self.SMALL if bench.small else self.FULL

    def run(self, start: Callable[[Path], AbstractContextManager[Step]]) -> Figures:
        """Run training steps."""
        accelerator, device = self.bench.accelerator, self.bench.device
        x, y = (tensor.to(device) for tensor in train_offload.data(self.case))
        seconds, losses = [], []
        with deterministic(), self.bench.folder() as place:
            accelerator.reset()
            base = accelerator.reserved()
            with start(place) as step:
                for _ in range(WARM_UP + self.case.steps):
                    began = time.perf_counter()
                    losses.append(step(x, y).item())
                    accelerator.synchronize()
                    seconds.append(time.perf_counter() - began)
                peak = accelerator.peak_reserved() - base
            accelerator.reset()
        return {
            "seconds": statistics.median(seconds[WARM_UP:]),
            "peak_reserved_gb": peak / 1e9,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "checksum": checksum([torch.tensor(losses, dtype=torch.float64)]),
        }

    def beside(
        self, start: Callable[[Path], AbstractContextManager[Step]], fused: bool = True
    ) -> dict[str, float]:
        """Run training steps, and compare the losses to plain training."""
        plain = self.bench.figure(PLAIN[fused], "seconds")
        figures = dict(self.run(start))
        return figures | {
            "differing": self.bench.differing(figures["checksum"], PLAIN[fused]),
            "to_plain": figures["seconds"] / plain,
        }

    def plain(self, fused: bool) -> Callable[[Path], AbstractContextManager[Step]]:
        """Keep the model on the device and its optimizer on the CPU: no overlap, no budget."""

        @contextmanager
        def start(place: Path) -> Iterator[Step]:
            model = train_offload.build(self.case).to(self.bench.device)
            away = [nn.Parameter(p.detach().cpu()) for p in model.parameters()]
            optimizer = torch.optim.AdamW(away, fused=fused, **LEARNING)

            def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                loss = loss_of(model, x, y)
                loss.backward()
                for there, here in zip(model.parameters(), away, strict=True):
                    assert there.grad is not None
                    here.grad, there.grad = there.grad.cpu(), None
                optimizer.step()
                with torch.no_grad():
                    for there, here in zip(model.parameters(), away, strict=True):
                        there.copy_(here)
                return loss.detach()

            yield step

        return start

    def ours(self, share: float, fused: bool) -> Figures:
        """Use a store with RAM for `share` of the state."""
        stats: list[Any] = []

        @contextmanager
        def start(place: Path) -> Iterator[Step]:
            with TierStore(
                int(share * self.case.state),
                place / "store",
                device=self.bench.device,
                device_budget=self.case.state // 8,
            ) as store:
                model = OffloadModel(train_offload.build(self.case), store)
                optimizer = OffloadOptimizer(
                    model, store, torch.optim.AdamW, fused=fused, **LEARNING
                )
                yield stepping(model, optimizer)
                stats.append(store.stats())

        figures = self.beside(start, fused)
        budgets = stats[0].budget_bytes
        return figures | {
            "read_gb": stats[0].bytes_read / (WARM_UP + self.case.steps) / 1e9,
            "written_gb": stats[0].bytes_written / (WARM_UP + self.case.steps) / 1e9,
            "budgets_taken": max(
                stats[0].peak_bytes[tier] / budgets[tier] for tier in ("DEVICE", "HOST")
            ),
        }

    @contextmanager
    def fsdp(self, place: Path) -> Iterator[Step]:
        """FSDP2 with one rank."""
        kind = self.bench.device.type
        if kind != "cuda":
            raise Unavailable("FSDP2 needs a CUDA device to offload from")
        with train_offload.by_fsdp(self.case, place, kind, f"cpu:gloo,{kind}:nccl") as training:
            yield stepping(training.model, training.optimizer)

    @contextmanager
    def torchao(self, place: Path) -> Iterator[Step]:
        installed("torchao")
        with train_offload.by_torchao(self.case, place, str(self.bench.device)) as training:
            yield stepping(training.model, training.optimizer)

    @contextmanager
    def deepspeed(self, place: Path) -> Iterator[Step]:
        installed("deepspeed")
        import deepspeed

        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        model = train_offload.build(self.case)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": self.case.batch,
                "optimizer": {"type": "AdamW", "params": dict(LEARNING)},
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "pin_memory": True},
                },
            },
        )

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = loss_of(engine, x, y)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        yield step

    def group(self) -> Group:
        """Return the lines of states, the most important first."""
        fused, not_fused = (
            Line(
                name,
                "the model on the GPU, AdamW on the CPU",
                lambda fused=fused: self.run(self.plain(fused)),
                seconds=25,
            )
            for fused, name in PLAIN.items()
        )
        ours = [
            Line(
                f"OffloadModel, RAM for {share:g} x, {'fused' if fused else 'not fused'}",
                "with OffloadOptimizer; an eighth of the state on the GPU",
                lambda share=share, fused=fused: self.ours(share, fused),
                [EQUAL, Goal("budgets_taken", at_most=1)],
                seconds=40,
            )
            for share, fused in ((2.0, True), (0.5, True), (2.0, False))
        ]
        peers: dict[str, Callable[[Path], AbstractContextManager[Step]]] = {
            "FSDP2, CPUOffloadPolicy": self.fsdp,
            "torchao CPUOffloadOptimizer": self.torchao,
            "DeepSpeed, ZeRO-Offload": self.deepspeed,
        }
        theirs = [
            Line(name, "fused", lambda start=start: self.beside(start), peer=True, seconds=30)
            for name, start in peers.items()
        ]
        return Group("states", [fused, *ours[:2], *theirs, not_fused, *ours[2:]])


def stepping(
    model: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer
) -> Step:
    """Return an ordinary training step."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def activations(bench: Bench) -> Sequence[Group]:
    """Return the lines of the part `activations`."""
    return [Activations(bench).group()]


def states(bench: Bench) -> Sequence[Group]:
    """Return the lines of the part `training`."""
    return [States(bench).group()]
