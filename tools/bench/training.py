"""One contender of `activations.py`, in a process of its own: a model that takes a step when told.

    python tools/bench/training.py '{"name": ..., "small": ..., "device": ..., ...}'

Each line of input is answered by a line of JSON behind a mark.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import tierstore
from tools.bench import flux

MARK = "BENCH "
PLAIN, KEPT, COPIED = "no hooks", "save_on_cpu", "save_on_cpu, pin_memory"
OURS = {f"tierstore, {share:g} x": share for share in (2.0, 0.5, 0.1)}


@dataclass(frozen=True)
class Case:
    shape: flux.Shape
    image_tokens: int
    text_tokens: int
    min_size: int
    rounds: int


FULL = Case(flux.Shape(heads=4, double=2, single=8, dtype="float32"), 512, 128, 1_000_000, 7)
SMALL = Case(
    flux.Shape(heads=4, double=2, single=4, dtype="float32", head_dim=16), 256, 32, 16_384, 2
)


@dataclass
class Turn:
    """One step. Peaks are bytes over what was there before the first; the others are of this step.

    `copied` was copied away in the forward pass, `device` is on the accelerator at most.
    """

    seconds: float
    gradients: str
    copied: int
    written: int
    read: int
    host: int
    device: int
    store: int


@dataclass
class Saved:
    """What autograd saves in a step: `tensors` are bytes of all of them, `pieces` the bytes of the
    memory they look at, by address, but for that of weights."""

    weights: set[int]
    tensors: int = 0
    pieces: dict[int, int] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The graph keeps what this returns, so that no address comes twice."""
        storage = tensor.untyped_storage()
        self.tensors += tensor.nbytes
        if storage.data_ptr() not in self.weights:
            self.pieces[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()


class Contender:
    """A model, a batch for it, and something around its forward passes."""

    def __init__(self, name: str, case: Case, device: str, budgets: list[int], place: Path) -> None:
        self.device = device
        torch.manual_seed(0)
        self.model = case.shape.build().train().to(device)
        self._batch = functools.partial(batch, self.model.config, device)
        self._tokens = case.image_tokens, case.text_tokens
        self.loss(4, 4).backward()  # there are gradients from now on
        self._start = anonymous_memory(), device_memory(device)
        self._copied = 0
        self._stack = ExitStack()
        self.store: tierstore.TierStore | None = None
        if name in OURS:
            host, there = budgets
            options = {} if device == "cpu" else {"device_budget": there}
            self.store = tierstore.TierStore(host, place, device=device, **options)
            self._stack.enter_context(self.store)
        self._around = self._found(name, case)

    def _found(self, name: str, case: Case) -> Callable[[], AbstractContextManager[Any]]:
        if self.store is not None:
            offload = tierstore.offload_activations(
                self.store, min_size=case.min_size, model=self.model
            )
            return lambda: offload
        if name == PLAIN:
            return nullcontext
        return functools.partial(self._counted_save_on_cpu, pin_memory=name == COPIED)

    def _counted_save_on_cpu(self, pin_memory: bool) -> AbstractContextManager[Any]:
        hooks = save_on_cpu(pin_memory, "cuda" if self.device == "cpu" else self.device)
        pack = hooks.pack_hook

        def counted(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            if packed[1].data_ptr() != tensor.data_ptr():
                self._copied += packed[1].nbytes
            return packed

        hooks.pack_hook = counted
        return hooks

    def loss(self, image: int, text: int) -> torch.Tensor:
        result = self.model(**self._batch(image, text), return_dict=False)[0]
        return result.float().square().mean()

    def saved(self) -> Saved:
        """What a step saves."""
        held = [*self.model.parameters(), *self.model.buffers()]
        saved = Saved({tensor.untyped_storage().data_ptr() for tensor in held})
        with saved_tensors_hooks(saved.add, lambda tensor: tensor):
            self.loss(*self._tokens)
        return saved

    def turn(self) -> Turn:
        """One step."""
        self.model.zero_grad(set_to_none=False)
        before, self._copied = self._moved(), 0
        with peak_memory(self.device) as peaks:
            started = time.perf_counter()
            with self._around():
                loss = self.loss(*self._tokens)
            loss.backward()
            synchronize(self.device)
            seconds = time.perf_counter() - started
        copied, written, read = (a - b for a, b in zip(self._moved(), before, strict=True))
        host, device = (a - b for a, b in zip(peaks, self._start, strict=True))
        held = 0 if self.store is None else self.store.stats().peak_bytes["HOST"]
        copied += self._copied
        return Turn(seconds, self._digest(), copied, written, read, host, device, held)

    def _moved(self) -> tuple[int, int, int]:
        """Bytes so far: copied, written, read."""
        if self.store is None:
            return 0, 0, 0
        stats = self.store.stats()
        on_cpu = self.device == "cpu"
        copied = stats.activations.shipped_bytes if on_cpu else stats.bytes_offloaded
        return copied, stats.bytes_written, stats.bytes_read

    def _digest(self) -> str:
        digest = hashlib.blake2b()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                digest.update(parameter.grad.cpu().numpy())
        return digest.hexdigest()

    def close(self) -> None:
        self._stack.close()


def batch(config: Any, device: str, image: int, text: int) -> dict[str, Any]:
    """Random inputs of so many tokens, always the same."""
    random = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    places = torch.zeros(image, 3)
    places[:, 2] = torch.arange(image)
    made = {
        "hidden_states": random(1, image, config.in_channels),
        "encoder_hidden_states": random(1, text, config.joint_attention_dim),
        "pooled_projections": random(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": places,
        "txt_ids": torch.zeros(text, 3),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def anonymous_memory() -> int:
    """Bytes in RAM of this process that are not those of a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def device_memory(device: str) -> int:
    return 0 if device == "cpu" else torch.accelerator.memory_allocated()


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


@contextmanager
def peak_memory(device: str) -> Iterator[list[int]]:
    """The peaks of anonymous memory (looked at every 5 ms) and of device memory, at the end."""
    found = [anonymous_memory()]
    peaks: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            found[0] = max(found[0], anonymous_memory())

    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peaks
    finally:
        done.set()
        sampler.join()
        peaks += [*found, 0 if device == "cpu" else torch.accelerator.max_memory_allocated()]


def work(told: dict[str, Any]) -> None:
    """Be a contender: answer each line of input with a line of JSON."""
    if told["device"] == "pretend":
        from tests.device import pretend

        pretend.load()  # before the first backward pass
    case = SMALL if told["small"] else FULL
    place = Path(told["place"])
    contender = Contender(told["name"], case, told["device"], told["budgets"], place)
    if told["name"] == PLAIN:
        saved = contender.saved()
        answer(tensors=saved.tensors, pieces=list(saved.pieces.values()))
    contender.turn()  # warms up
    answer(ready=True)
    for _ in sys.stdin:
        answer(**asdict(contender.turn()))
    contender.close()


def answer(**values: Any) -> None:
    print(MARK + json.dumps(values), flush=True)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
