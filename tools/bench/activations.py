"""A training step whose activations exceed their budget

The same step of a Flux transformer in float32, forward and backward: without offloading, with
torch's `save_on_cpu`, and with `tierstore.offload_activations` at three RAM budgets. Each contender
is a separate process that lives until the end, so that peaks are its own, and contenders take turns
step by step. Weights and gradients exist before the measurement.

On a CPU, `save_on_cpu(pin_memory=False)` keeps each tensor and copies nothing; `pin_memory=True`
copies every saved tensor, including weights, into memory that is not pinned. On the pretend
accelerator of the tests, bytes and peaks are those of a real one; speeds are not.

torchtune's `OffloadActivations` is omitted: its constructor requests CUDA streams even with
`use_streams=False`, and raises without CUDA (torchtune 0.6.1). It copies every saved tensor that is
not an `nn.Parameter`, and has neither a budget nor a disk.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import tierstore
from tierstore.model.sizes import PAGE, round_up
from tools.bench import flux
from tools.bench.anonymous import AnonymousPeak, anonymous_memory
from tools.bench.apart import Apart
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, interleave, median, ranged, ratios, spread

PACKAGES, ROUNDS = ("torch", "diffusers"), 7
PLAIN, KEPT, COPIED = "no hooks", "save_on_cpu", "save_on_cpu, pin_memory"
OURS = {f"tierstore, {share:g} x": share for share in (2.0, 0.5, 0.1)}


@dataclass(frozen=True)
class Case:
    shape: flux.Shape
    image_tokens: int
    text_tokens: int
    min_size: int


FULL = Case(flux.Shape(heads=4, double=2, single=8, dtype="float32"), 512, 128, 1_000_000)
SMALL = Case(flux.Shape(heads=4, double=2, single=4, dtype="float32", head_dim=16), 256, 32, 16_384)


@dataclass
class Saved:
    """Bytes that autograd saves in a step.

    `tensors` counts all saved tensors; `pieces` are the bytes of their storages, by address,
    without those of weights.
    """

    weights: set[int]
    tensors: int = 0
    pieces: dict[int, int] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor. The graph keeps it alive, so addresses are unique."""
        storage = tensor.untyped_storage()
        self.tensors += tensor.nbytes
        if storage.data_ptr() not in self.weights:
            self.pieces[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()


def contender(
    name: str, case: Case, device: str, budgets: list[int], place: Path
) -> Generator[Any, None, None]:
    """Yield the bytes that a step saves (without hooks), then the figures of each step."""
    if device != "cpu":
        from tests.device import pretend

        pretend.load()  # before the first backward pass
    with ExitStack() as stack:
        one = Contender(name, case, device, budgets, place, stack)
        yield one.saved() if name == PLAIN else None
        one.step()  # warms up
        while True:
            yield one.step()


class Contender:
    """A model, its batch, and the context of its forward passes."""

    def __init__(
        self, name: str, case: Case, device: str, budgets: list[int], place: Path, stack: ExitStack
    ) -> None:
        self._device, self._copied = device, 0
        torch.manual_seed(0)
        self._model = case.shape.build().train().to(device)
        self._tokens = case.image_tokens, case.text_tokens
        self._loss(4, 4).backward()  # creates the gradients
        self._start = anonymous_memory(), self._on_device("memory_allocated")
        self._store: tierstore.TierStore | None = None
        self._around: Callable[[], AbstractContextManager[Any]] = nullcontext
        if name in OURS:
            options = {} if device == "cpu" else {"device_budget": budgets[1]}
            store = tierstore.TierStore(budgets[0], place, device=device, **options)
            self._store = stack.enter_context(store)
            offload = tierstore.offload_activations(
                store, min_size=case.min_size, model=self._model
            )
            self._around = lambda: offload
        elif name != PLAIN:
            self._around = functools.partial(self._save_on_cpu, pin_memory=name == COPIED)

    def _loss(self, image: int, text: int) -> torch.Tensor:
        result: torch.Tensor = self._model(**flux.inputs(self._device, image, text))[0]
        return result.float().square().mean()

    def _save_on_cpu(self, pin_memory: bool) -> AbstractContextManager[Any]:
        hooks = save_on_cpu(pin_memory, "cuda" if self._device == "cpu" else self._device)
        pack = hooks.pack_hook

        def counted(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            if packed[1].data_ptr() != tensor.data_ptr():
                self._copied += packed[1].nbytes
            return packed

        hooks.pack_hook = counted
        return hooks

    def _on_device(self, figure: str) -> int:
        return 0 if self._device == "cpu" else int(getattr(torch.accelerator, figure)())

    def _moved(self) -> list[int]:
        if self._store is None:
            return [self._copied, 0, 0]
        stats, on_cpu = self._store.stats(), self._device == "cpu"
        shipped = stats.activations.shipped_bytes if on_cpu else stats.bytes_offloaded
        return [shipped, stats.bytes_written, stats.bytes_read]

    def saved(self) -> tuple[int, list[int]]:
        """Return the bytes that a step saves: the total, and those of each storage."""
        held = (*self._model.parameters(), *self._model.buffers())
        saved = Saved({tensor.untyped_storage().data_ptr() for tensor in held})
        with saved_tensors_hooks(saved.add, lambda tensor: tensor):
            self._loss(*self._tokens)
        return saved.tensors, list(saved.pieces.values())

    def step(self) -> Run:
        """Run one step. Peaks are in bytes, relative to the memory before the first step."""
        self._model.zero_grad(set_to_none=False)
        before = self._moved()
        if self._device != "cpu":
            torch.accelerator.reset_peak_memory_stats()
        with AnonymousPeak() as peak:
            began = time.perf_counter()
            with self._around():
                loss = self._loss(*self._tokens)
            loss.backward()
            if self._device != "cpu":
                torch.accelerator.synchronize()
            seconds = time.perf_counter() - began
        digest = hashlib.blake2b()
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                digest.update(parameter.grad.cpu().numpy())
        moved = [after - b for after, b in zip(self._moved(), before, strict=True)]
        run: Run = dict(zip(("copied", "written", "read"), moved, strict=True))
        run |= {"seconds": seconds, "gradients": digest.hexdigest()}
        run["host"] = peak.bytes - self._start[0]
        run["device"] = self._on_device("max_memory_allocated") - self._start[1]
        return run | {"store": self._store.stats().peak_bytes["HOST"] if self._store else 0}


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f}" if nbytes >= 1e7 else f"{nbytes / 1e6:,.1f}"


def on(device: str, case: Case, rounds: int, bench: Bench) -> Iterator[Claim]:
    """Measure all contenders on a device."""
    page = bench.page
    with ExitStack() as stack:
        workers: dict[str, Apart] = {}

        def start(name: str, *budgets: int) -> Any:
            place = bench.scratch / f"{device}-{len(workers)}"
            worker = Apart(contender, name, case, device, list(budgets), place)
            workers[name] = stack.enter_context(worker)
            return worker.answer()

        tensors, pieces = start(PLAIN)
        saved, largest = sum(pieces), round_up(max(pieces), PAGE)
        budgets = {name: max(int(saved * share), largest) for name, share in OURS.items()}
        for name in (KEPT, COPIED):
            start(name)
        for name, budget in budgets.items():
            start(name, budget, 4 * largest)
        found = interleave({name: worker.ask for name, worker in workers.items()}, rounds)
    plain = found[PLAIN][0]["gradients"]
    copied = column(found[COPIED], "seconds")

    def to_copied(runs: list[Run]) -> list[float]:
        return ratios(column(runs, "seconds"), copied)

    def equal(runs: list[Run]) -> bool:
        return all(run["gradients"] == plain for run in runs)

    page.text(
        f"A step saves {megabytes(tensors)} MB of tensors, including weights. Counting each piece "
        f"of memory once, without weights, it saves {megabytes(saved)} MB in {len(pieces)} "
        "pieces. Budgets are shares of the latter. All bytes below are in MB."
    )
    columns: dict[str, Callable[[Any], object]] = {
        "copied": lambda one: megabytes(median(column(one[1], "copied"))),
        "written": lambda one: megabytes(median(column(one[1], "written"))),
    }
    if device == "cpu":
        budget = {"budget": lambda one: megabytes(budgets[one[0]]) if one[0] in budgets else "none"}
        columns = budget | columns
        columns |= {
            "read back": lambda one: megabytes(median(column(one[1], "read"))),
            "peak RAM": lambda one: megabytes(max(column(one[1], "host"))),
            "seconds per step": lambda one: ranged("seconds")(one[1]),
            f"to `{COPIED}`": lambda one: spread(to_copied(one[1])),
        }
    else:
        columns["device peak"] = lambda one: megabytes(max(column(one[1], "device")))
    columns["gradients"] = lambda one: "equal" if equal(one[1]) else "DIFFER"
    page.compare("contender", {name: (name, runs) for name, runs in found.items()}, columns)
    page.text("Peak RAM is anonymous memory above that of weights and gradients.")
    same = all(equal(found[name]) for name in OURS)
    yield Claim(f"{device}: tierstore's gradients are bit-identical", same, at_least=1)
    within = max(max(column(found[n], "store")) / budget for n, budget in budgets.items())
    yield Claim(f"{device}: peak memory of the store / its budget", within, at_most=1)
    most = max(max(column(found[name], "copied")) for name in OURS) / saved
    text = f"{device}: bytes copied / bytes saved"
    yield Claim(text, most, at_most=1)
    if device == "cpu":
        slower = median(to_copied(found[next(iter(OURS))]))
        yield Claim(f"everything fits: time / time of `{COPIED}`", slower, at_most=1)


def measure(bench: Bench) -> Iterator[Claim]:
    from tests.device import pretend

    yield from on("cpu", SMALL if bench.small else FULL, bench.rounds, bench)
    if reason := pretend.available():
        bench.page.text(f"Not run on the pretend accelerator: {reason}.")
        return
    bench.page.text("On the pretend accelerator, with a small model:")
    yield from on("pretend", SMALL, 1, bench)
