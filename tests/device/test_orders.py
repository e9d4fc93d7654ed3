"""Every reader gets the right values, whenever the device does its work.

Two threads, each with its own stream, share a small store. They compute with models in the store,
train, save activations, put groups, change and read them, and wait for nothing. Their actions, the
budgets, and the moments at which the device works are drawn by a seed. The results are compared
with a CPU that computes at once, without a store.

Each control takes one of the waits out of the store. It must be noticed within 50 seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.device import pretend
from tests.lanes import by_lane
from tests.store.helpers import PAGE, run_threads
from tierstore import (
    Access,
    CorruptDataError,
    OffloadModel,
    OffloadOptimizer,
    TierStore,
    disable_offload,
    dispatch_model,
    offload_activations,
)
from tierstore.engine.core import Core
from tierstore.lease import Lease
from tierstore.store import engine_of
from tierstore.tiers.arena import Arena, Slot
from tierstore.tiers.device_tier import DeviceTier
from tierstore.tiers.pinned import RegisteredMemory

pytestmark = pytest.mark.pretend_only("late")

WIDTH = 32  # a square of floats is one page
SHARED = ("shared 0", "shared 1", "shared 2")
SLOWNESS = (0.5, 2, 8, 40, None)
CONTROL_SEEDS = 50


def square(value: int, device: str, pages: int = 1) -> torch.Tensor:
    """Return small whole numbers, exact in float32, made on the device; distinct for each value."""
    numbers = torch.arange(pages * WIDTH * WIDTH, dtype=torch.float32, device=device)
    return ((numbers + value) % 7 - 3).view(-1, WIDTH)


def plain_model(seed: int, layers: int) -> nn.Sequential:
    """Return a model with weights of -1, 0 and 1: sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential()
    for _ in range(layers):
        linear = nn.Linear(WIDTH, WIDTH, bias=False)
        linear.weight.data = torch.randint(-1, 2, (WIDTH, WIDTH), generator=generator).float()
        net.extend([linear, nn.Hardtanh(-8, 8)])
    return net


def loss_of(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = (x @ weight).clamp(-8, 8)
    return x.square().sum()


class Actor:
    """One of the threads, with its actions and their expected results."""

    def __init__(self, number: int, seed: int, store: TierStore) -> None:
        self.random = random.Random(2 * seed + number)
        self.store = store
        self.stream = torch.Stream("pretend:0")
        self.got: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # action, found, expected
        self.groups: dict[str, torch.Tensor] = {}  # groups that only this thread changes
        for i in range(3):
            self._put(f"{number}.{i}", "cpu")
        self.plain, self.net = plain_model(seed + number, 4), plain_model(seed + number, 4)
        dispatch_model(self.net, store)
        self.trainer = Trainer(seed, store) if number == 0 else None

    def run(self) -> None:
        """Do a few random actions; collect their results at the end."""
        actions: list[Callable[[], None]] = [
            self.read, self.read, self.read_two, self.change, self.put, self.get,
            self.infer, self.infer, self.save_activations,
        ]  # fmt: skip
        if self.trainer is not None:
            actions += [self.train, self.train]
        with self.stream:
            for _ in range(8):
                self.random.choice(actions)()
            if self.trainer is not None:
                self.got += self.trainer.parameters()
            for key in self.groups:
                self.got.append((f"{key} at the end", self.store.get(key), self.groups[key]))

    def wrong(self) -> list[str]:
        """Return the actions with wrong results."""
        with self.stream:
            return [
                what
                for what, found, wanted in self.got
                if not torch.allclose(found.detach().cpu(), wanted, rtol=1e-4, atol=1e-4)
            ]

    def read(self) -> None:
        key = self.random.choice([*self.groups, *SHARED])
        with self.store.acquire(key) as lease:
            self.got.append((f"read {key}", lease.tensor * 2 + 1, self._value(key) * 2 + 1))

    def read_two(self) -> None:
        one, other = self.random.sample([*self.groups, *SHARED], 2)
        with self.store.acquire(one) as lease:
            total = lease.tensor.sum()
            with self.store.acquire(other) as second:
                total = total + second.tensor.sum()
        wanted = self._value(one).sum() + self._value(other).sum()
        self.got.append((f"read {one} and {other}", total, wanted))

    def change(self) -> None:
        key, number = self.random.choice(list(self.groups)), self.random.randrange(1, 9)
        with self.store.acquire(key, Access.UPDATE) as lease:
            lease.tensor.add_(number)
        self.groups[key] = self.groups[key] + number

    def put(self) -> None:
        self._put(self.random.choice(list(self.groups)), "pretend")

    def _put(self, key: str, device: str) -> None:
        value, pages = self.random.randrange(99), self.random.choice((1, 1, 2))
        tensor = square(value, device, pages) * 3
        self.store.put(key, tensor, durable=self.random.random() < 0.3)
        tensor.fill_(-99)  # the tensor belongs to the caller
        self.groups[key] = square(value, "cpu", pages) * 3

    def get(self) -> None:
        key = self.random.choice([*self.groups, *SHARED])
        self.got.append((f"get {key}", self.store.get(key), self._value(key)))

    @torch.no_grad()
    def infer(self) -> None:
        value = self.random.randrange(99)
        found = self.net(square(value, "pretend"))
        self.got.append(("infer", found, self.plain(square(value, "cpu"))))

    def save_activations(self) -> None:
        values = [self.random.randrange(99) for _ in range(4)]
        wanted, found = (
            [square(v, to).requires_grad_() for v in values] for to in ("cpu", "pretend")
        )
        loss_of(wanted[0], wanted[1:]).backward()
        with offload_activations(self.store, min_size=256):
            loss = loss_of(found[0], found[1:])
        loss.backward()
        for one, other in zip(found, wanted, strict=True):
            assert one.grad is not None and other.grad is not None
            self.got.append(("activations", one.grad, other.grad))

    def train(self) -> None:
        assert self.trainer is not None
        self.got += self.trainer.step(self.random.randrange(99))

    def _value(self, key: str) -> torch.Tensor:
        return square(SHARED.index(key), "cpu", 2) if key in SHARED else self.groups[key]


class Trainer:
    """A model in training, and the same one on the CPU."""

    def __init__(self, seed: int, store: TierStore) -> None:
        self.plain, self.net = plain_model(seed, 3), plain_model(seed, 3)
        self.usual = torch.optim.SGD(self.plain.parameters(), lr=1e-3, momentum=0.5)
        self.ours = OffloadModel(self.net, store, num_slices=3)
        self.optimizer = OffloadOptimizer(self.ours, store, torch.optim.SGD, lr=1e-3, momentum=0.5)

    def step(self, value: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        wanted = self.plain(square(value, "cpu")).square().mean()
        wanted.backward()
        self.usual.step()
        self.usual.zero_grad()
        found = self.ours(square(value, "pretend")).square().mean()
        found.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [("loss", found, wanted.detach())]

    def parameters(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        pairs = zip(self.ours.parameters(), self.plain.parameters(), strict=True)
        return [("parameter", ours.detach().clone(), plain.detach()) for ours, plain in pairs]


def play(seed: int, place: Path) -> list[str]:
    """Return the wrong results in the history of a seed. Raises the store's errors."""
    choose = random.Random(seed)
    device_pages, host_pages = choose.choice((12, 16, 32)), choose.choice((32, 48, 96))
    pretend.seed(seed)
    pretend.set_slowness(choose.choice(SLOWNESS))
    with TierStore(
        host_pages * PAGE, place / str(seed), device="pretend", device_budget=device_pages * PAGE
    ) as store:
        for i, key in enumerate(SHARED):
            store.put(key, square(i, "cpu", 2))
        actors = [Actor(number, seed, store) for number in range(2)]
        errors = run_threads([actor.run for actor in actors])
        wrong = [f"seed {seed}: {what}" for actor in actors for what in actor.wrong()]
        for actor in actors:
            disable_offload(actor.net)
            if actor.trainer is not None:
                actor.trainer.ours.disable()
    if errors:
        raise errors[0]
    return wrong


@pytest.mark.timeout(3600)
def test_values_are_right_whenever_the_device_works(tmp_path: Path) -> None:
    for seed in range(by_lane(6, 100, 2000)):
        assert play(seed, tmp_path) == []


def release_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Reuse memory at once, without waiting for the event recorded at its release."""
    take = Arena.take

    def hasty(arena: Arena, nbytes: int) -> Slot:
        slot = take(arena, nbytes)
        slot.pending.clear()
        return slot

    patch.setattr(Arena, "take", hasty)


def arrival_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Do not let a lease's user wait for the copy that brings the group."""
    patch.setattr(Core, "order_after_arrival", lambda core, entry, stream: None)


def use_is_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """Do not record how long a lease's user needs the memory."""
    patch.setattr(DeviceTier, "used_on", lambda tier, entry, event: None)


def slot_is_released_early(patch: pytest.MonkeyPatch) -> None:
    """End a lease as it begins, with the event of that moment; its tensors are still used."""
    acquire = TierStore.acquire

    def early(store: TierStore, *arguments: Any, **options: Any) -> Lease:
        lease = acquire(store, *arguments, **options)
        engine_of(store).lease_table.release(lease._record)
        return lease

    patch.setattr(TierStore, "acquire", early)


CONTROLS = (
    release_is_not_waited_for,
    arrival_is_not_waited_for,
    use_is_not_recorded,
    slot_is_released_early,
)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_missing_wait_is_detected(
    control: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control(monkeypatch)
    assert any(play(seed, tmp_path) for seed in range(CONTROL_SEEDS))


# Copies queued when a store closes ---------------------------------------------------------------


def closes_with_copies_queued(seed: int, place: Path) -> int:
    """Return how often the store frees memory in use by a copy when it closes.

    The store has saved activations, and is closed at once.
    """
    choose = random.Random(seed)
    pretend.reset_counters()
    pretend.seed(seed)
    pretend.set_slowness(choose.choice(SLOWNESS))
    x, *weights = [square(i, "pretend").requires_grad_() for i in range(9)]
    ram = choose.choice((8, 32)) * PAGE
    with TierStore(ram, place / str(seed), device="pretend", device_budget=32 * PAGE) as store:
        with offload_activations(store, min_size=256):
            loss = loss_of(x, weights)
        if choose.random() < 0.5:
            loss.backward()
        if choose.random() < 0.5:
            del loss
    assert pretend.registrations() > 0
    assert pretend.registered_bytes() == 0
    return pretend.unregistered_in_use()


def test_closing_store_waits_for_its_copies(tmp_path: Path) -> None:
    for seed in range(by_lane(10, 100)):
        assert closes_with_copies_queued(seed, tmp_path) == 0


def test_closing_store_without_waits_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control for the test above: neither the slot nor the memory's owner waits."""
    monkeypatch.setattr(Slot, "wait", lambda slot: None)
    monkeypatch.setattr(RegisteredMemory, "track_user", lambda *arguments: None)
    noticed = 0
    for seed in range(CONTROL_SEEDS):
        with suppress(CorruptDataError):  # it was read before it had arrived from disk
            noticed += closes_with_copies_queued(seed, tmp_path)
        if noticed:
            break
    assert noticed
