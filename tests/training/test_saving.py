"""Training that is saved and resumed elsewhere, with and without a store."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import tierstore
from tests.helpers.files import flip_bit, largest_file
from tests.helpers.processes import output_of, results_in, with_the_usual_allocator
from tests.helpers.system_calls import Call, system_call
from tests.helpers.tensors import assert_same
from tests.training import models
from tests.training.conftest import (
    ADAMW,
    LARGE,
    ON_BOTH,
    SMALL,
    Moved,
    Traffic,
    Trained,
    clip,
    copied,
    full_state_bytes,
    offloaded,
    store_for,
)
from tests.training.saving_limited import GROUP, NBYTES, STATE_BYTES
from tierstore import OffloadModel, OffloadOptimizer, load_training, save_training
from tierstore.adapters.training.checkpoint_files import FileSum, seal_metadata
from tierstore.errors import (
    CorruptDataError,
    DiskFullError,
    StoreLockedError,
    TierStoreError,
    TransferError,
    TruncatedFileError,
)
from tierstore.model.header import digest

pytestmark = [
    pytest.mark.full(
        "the model, the optimizer: each has its own part; test_parity.py runs on both devices",
        keep="a third",
    ),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

KIND = "mlp-dropout"
HALF = 3
PARTS = [".metadata", "__0_0.distcp"]

Pair = tuple[nn.Module, torch.optim.Optimizer]


# Ways to save -------------------------------------------------------------------------------------


class Ours:
    """`save_training` and `load_training`."""

    def save(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        save_training(path / "run", model, optimizer)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        load_training(path / "run", model, optimizer)


class Torch:
    """`torch.save` and `torch.load`."""

    def save(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path / "run.pt")

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = torch.load(path / "run.pt", map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class Safetensors:
    """`save_file` and `load_file`, with other values in a JSON file."""

    def save(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        safetensors.torch.save_file(model.state_dict(), path / "model.safetensors")
        state = optimizer.state_dict()
        flat = {f"{n}.{k}": t for n, kept in state["state"].items() for k, t in kept.items()}
        safetensors.torch.save_file(flat, path / "optimizer.safetensors")
        (path / "groups.json").write_text(json.dumps(state["param_groups"]))

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict(load_file(path / "model.safetensors"))
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in load_file(path / "optimizer.safetensors").items():
            number, key = name.split(".")
            state.setdefault(int(number), {})[key] = tensor
        groups = json.loads((path / "groups.json").read_text())
        for group, now in zip(groups, optimizer.param_groups, strict=True):
            group["betas"] = tuple(group["betas"])
            assert group.keys() == now.keys()
        optimizer.load_state_dict({"state": state, "param_groups": groups})


class Distributed:
    """`torch.distributed.checkpoint`, whose `load` fills the tensors of an existing state."""

    def save(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        dcp.save(self.state(model, optimizer), checkpoint_id=path / "dcp", no_dist=True)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        a_step_elsewhere(model, optimizer)
        state = self.state(model, optimizer)
        dcp.load(state, checkpoint_id=path / "dcp", no_dist=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    @staticmethod
    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


class Named:
    """The same, with `get_state_dict` and `set_state_dict`: by the parameters' names."""

    def save(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        dcp.save(self.state(model, optimizer), checkpoint_id=path / "dcp", no_dist=True)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = self.state(model, optimizer)
        dcp.load(state, checkpoint_id=path / "dcp", no_dist=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    @staticmethod
    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


WAYS = {
    "save_training": Ours,
    "torch.save": Torch,
    "safetensors": Safetensors,
    "dcp": Distributed,
    "dcp by name": Named,
}


# Trainings that are saved in the middle -----------------------------------------------------------


def go_on(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int,
    steps: int = HALF,
    *,
    device: str = "cpu",
    kind: str = KIND,
) -> list[torch.Tensor]:
    """Run steps whose dropout depends on all random numbers drawn before."""
    found = []
    for step in range(first, first + steps):
        loss = models.loss(kind, model, models.batch(kind, step).to(device))
        loss.backward()
        found += [loss.detach().cpu(), clip(model, optimizer, 0.1).cpu()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def a_step_elsewhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make a step with another batch, so that a state with other values exists."""
    device = "cpu"
    if isinstance(model, OffloadModel):
        device = model.store.device.type
    elif next(model.parameters()).device.type != "cpu":
        device = next(model.parameters()).device.type
    go_on(model, optimizer, 100, 1, device=device)


def plain(device: str = "cpu", seed: int = 0, kind: str = KIND) -> Pair:
    model = models.build(kind, seed).to(device)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


@contextmanager
def on_store(
    where: Path, share: float, device: str = "cpu", seed: int = 0, kind: str = KIND
) -> Iterator[tuple[OffloadModel, OffloadOptimizer]]:
    module = models.build(kind, seed)
    with store_for(module, where, device, share) as store:
        yield offloaded(module, store)


def drawing(device: str) -> Any:
    """Return the module with the random-number functions of a device."""
    return torch.random if device == "cpu" else torch.get_device_module(device)


def random_state(device: str) -> dict[str, torch.Tensor]:
    return {each: drawing(each).get_rng_state() for each in {"cpu", device}}


@functools.cache
def uninterrupted(device: str) -> tuple[Trained, Trained]:
    """A plain model's training, in the middle and at the end."""
    seed_all(device)
    model, optimizer = plain(device)
    middle = Trained.of(model, optimizer, go_on(model, optimizer, 0, device=device))
    end = Trained.of(model, optimizer, go_on(model, optimizer, HALF, device=device))
    return middle, end


def seed_all(device: str, seed: int = 5) -> None:
    for each in {"cpu", device}:
        drawing(each).manual_seed(seed)


def first_half(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    middle, _ = uninterrupted(device)
    seed_all(device)
    found = go_on(model, optimizer, 0, device=device)
    Trained.of(model, optimizer, found).assert_same_as(middle)


def second_half(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: str,
    states: dict[str, torch.Tensor],
) -> None:
    middle, end = uninterrupted(device)
    Trained.of(model, optimizer, middle.found).assert_same_as(middle)
    seed_all(device, 77)
    for each, state in states.items():
        drawing(each).set_rng_state(state)
    found = go_on(model, optimizer, HALF, device=device)
    Trained.of(model, optimizer, found).assert_same_as(end)


ON_ALL = pytest.mark.parametrize("name", WAYS)
FROM_AND_TO = pytest.mark.parametrize(
    ("share", "other"), [(SMALL, LARGE), (LARGE, SMALL)], ids=["0.2 to 2", "2 to 0.2"]
)


@ON_BOTH
@FROM_AND_TO
@ON_ALL
def test_training_resumes_bit_exactly_in_another_store(
    name: str, share: float, other: float, device: str, tmp_path: Path
) -> None:
    way = WAYS[name]()
    with on_store(tmp_path / "one", share, device) as (model, optimizer):
        traffic = Traffic(model.store)
        first_half(model, optimizer, device)
        assert_moved(traffic, model, share)
        way.save(tmp_path, model, optimizer)
        states = random_state(device)
    with on_store(tmp_path / "two", other, device, seed=1) as (model, optimizer):
        way.load(tmp_path, model, optimizer)
        traffic = Traffic(model.store)
        second_half(model, optimizer, device, states)
        assert_moved(traffic, model, other)


def assert_moved(traffic: Traffic, model: OffloadModel, share: float) -> None:
    if share == SMALL:
        budget = int(full_state_bytes(model.module, torch.optim.AdamW) * share)
        moved = Moved.at_least(model.module, budget, torch.optim.AdamW)
        traffic.assert_at_least(moved, HALF - 1)


@ON_BOTH
@pytest.mark.parametrize("share", [SMALL, LARGE])
@ON_ALL
def test_training_resumes_bit_exactly_without_a_store(
    name: str, share: float, device: str, tmp_path: Path
) -> None:
    way = WAYS[name]()
    with on_store(tmp_path / "one", share, device) as (model, optimizer):
        first_half(model, optimizer, device)
        way.save(tmp_path, model, optimizer)
        states = random_state(device)
    model, optimizer = plain(device, seed=1)
    way.load(tmp_path, model, optimizer)
    second_half(model, optimizer, device, states)


@ON_BOTH
@pytest.mark.parametrize("share", [SMALL, LARGE])
@ON_ALL
def test_plain_training_resumes_bit_exactly_in_a_store(
    name: str, share: float, device: str, tmp_path: Path
) -> None:
    way = WAYS[name]()
    model, optimizer = plain(device)
    first_half(model, optimizer, device)
    way.save(tmp_path, model, optimizer)
    states = random_state(device)
    with on_store(tmp_path / "two", share, device, seed=1) as (model, optimizer):
        way.load(tmp_path, model, optimizer)
        second_half(model, optimizer, device, states)


def test_training_resumed_without_random_state_diverges(tmp_path: Path) -> None:
    with on_store(tmp_path / "one", SMALL) as (model, optimizer):
        first_half(model, optimizer, "cpu")
        save_training(tmp_path / "run", model, optimizer)
    model, optimizer = plain(seed=1)
    load_training(tmp_path / "run", model, optimizer)
    seed_all("cpu", 77)

    found = go_on(model, optimizer, HALF)

    assert not torch.equal(found[0], uninterrupted("cpu")[1].found[0])


def test_random_state_may_be_saved_as_extra(tmp_path: Path) -> None:
    with on_store(tmp_path / "one", SMALL) as (model, optimizer):
        first_half(model, optimizer, "cpu")
        extra = {"step": HALF, "random": torch.get_rng_state().tolist()}
        save_training(tmp_path / "run", model, optimizer, extra=extra)
    with on_store(tmp_path / "two", LARGE, seed=1) as (model, optimizer):
        found = load_training(tmp_path / "run", model, optimizer)
        assert found == extra
        state = torch.tensor(found["random"], dtype=torch.uint8)
        second_half(model, optimizer, "cpu", {"cpu": state})


# The format of a save -----------------------------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("kind", ["resnet", "llama-tied"])
def test_saved_state_has_the_keys_and_form_of_torchs(
    kind: str, device: str, tmp_path: Path
) -> None:
    plain_model, plain_optimizer = plain(device, kind=kind)
    go_on(plain_model, plain_optimizer, 0, 1, device=device, kind=kind)
    with on_store(tmp_path / "store", SMALL, device, kind=kind) as (model, optimizer):
        go_on(model, optimizer, 0, 1, device=device, kind=kind)

        assert list(model.state_dict()) == list(plain_model.state_dict())
        assert_same(copied(dict(model.state_dict())), copied(dict(plain_model.state_dict())))
        assert_same(copied(optimizer.state_dict()), copied(plain_optimizer.state_dict()))

        save_training(tmp_path / "run", model, optimizer)
        assert sorted(p.name for p in (tmp_path / "run").iterdir()) == PARTS
    saved = in_memory(tmp_path / "run", tmp_path / "run.pt")
    assert saved.keys() == {"model", "optimizer", "tierstore"}
    assert_same(saved["model"], copied(get_model_state_dict(plain_model)))
    models.build(kind, 1).load_state_dict(saved["model"])  # strict
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    expected = get_optimizer_state_dict(plain_model, plain_optimizer, options=flat)
    assert saved["optimizer"].keys() == expected.keys()
    assert_same(saved["optimizer"], copied(expected))


def in_memory(checkpoint: Path, target: Path) -> dict[str, Any]:
    """Read all of a checkpoint by torch's own converter."""
    dcp_to_torch_save(checkpoint, target)
    return torch.load(target, map_location="cpu")


class Odd(nn.Module):
    """A module with parameters and buffers of all shapes, and extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        rows = (8 << 20) // 4 + 1000
        self.long = nn.Parameter(torch.rand(3 * rows))
        self.turned = nn.Parameter(torch.rand(rows, 3).t())
        self.far = nn.Parameter(torch.rand(2, 2 * rows + 1, 2).permute(2, 0, 1))
        self.images = nn.Parameter(torch.rand(4, 3, 5, 5).to(memory_format=torch.channels_last))
        self.short = nn.Parameter(torch.rand(7).to(torch.bfloat16))
        self.none = nn.Parameter(torch.rand(0, 4))
        self.scalar = nn.Parameter(torch.rand(()))
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("unsaved", torch.rand(3), persistent=False)
        self.inner = Remembering(seed)

    def forward(self) -> torch.Tensor:
        return sum(p.double().square().sum() for p in self.parameters())


class Remembering(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"names": [f"a{seed}", None], "at": torch.arange(seed)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = {**state, "at": state["at"].clone()}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    own = [model.long, model.short]
    rest = [p for p in model.parameters() if all(p is not each for each in own)]
    return [{"params": own, "lr": torch.tensor(0.125)}, {"params": rest, "betas": (0.5, 0.75)}]


@pytest.mark.full("saves hundreds of values")
def test_tensors_and_values_of_every_kind_are_saved(tmp_path: Path) -> None:
    def trained(seed: int) -> Pair:
        model = Odd(seed)
        return model, torch.optim.AdamW(groups_of(model), foreach=False)

    one, two = trained(3), trained(4)
    one[0]().backward()
    one[1].step()
    assert any(not p.is_contiguous() for p in one[0].parameters())
    save_training(tmp_path / "run", *one, extra={"best": float("inf"), "of": ["ä", None, 0.1]})

    assert load_training(tmp_path / "run", *two) == {"best": float("inf"), "of": ["ä", None, 0.1]}

    assert_same(copied(dict(two[0].state_dict())), copied(dict(one[0].state_dict())))
    assert_same(copied(two[1].state_dict()), copied(one[1].state_dict()))


def test_loaded_training_is_independent_of_its_files(tmp_path: Path) -> None:
    one, two = plain(), plain(seed=1)
    go_on(*one, 0)
    save_training(tmp_path / "run", *one)
    load_training(tmp_path / "run", *two)
    with on_store(tmp_path / "store", LARGE, seed=1) as three:
        load_training(tmp_path / "run", *three)
        module = models.build(KIND, 1)
        four = (module, OffloadOptimizer(module, three[0].store, torch.optim.AdamW, **ADAMW))
        load_training(tmp_path / "run", *four)
        for name in PARTS:
            path = tmp_path / "run" / name
            path.write_bytes(bytes(path.stat().st_size))

        for pair in (two, three, four):
            Trained.of(*pair).assert_same_as(Trained.of(*one))


def test_scheduler_and_reordered_groups_are_resumed(tmp_path: Path) -> None:
    def groups(model: nn.Module, turned: bool) -> list[dict[str, Any]]:
        biases = [p for p in model.parameters() if p.dim() == 1]
        weights = [p for p in model.parameters() if p.dim() > 1]
        if turned:
            biases, weights = biases[::-1], weights[::-1]
        return [{"params": weights, "lr": 1e-2}, {"params": biases, "weight_decay": 0.0}]

    def go(pair: Pair, schedule: Any, first: int) -> list[torch.Tensor]:
        found = []
        for step in range(first, first + HALF):
            loss = models.loss("mlp", pair[0], models.batch("mlp", step))
            loss.backward()
            found.append(loss.detach())
            pair[1].step()
            pair[1].zero_grad()
            schedule.step()
        return found

    plain_model = models.build("mlp")
    expected = (plain_model, torch.optim.AdamW(groups(plain_model, False), fused=True))
    schedule = torch.optim.lr_scheduler.ExponentialLR(expected[1], 0.5)
    module = models.build("mlp")
    with store_for(module, tmp_path / "one") as store:
        model = OffloadModel(module, store)
        pair = (model, OffloadOptimizer(groups(model, False), store, torch.optim.AdamW))
        ours = torch.optim.lr_scheduler.ExponentialLR(pair[1], 0.5)
        assert_same(go(pair, ours, 0), go(expected, schedule, 0))
        save_training(tmp_path / "run", *pair, extra=ours.state_dict())
    module = models.build("mlp", 1)
    with store_for(module, tmp_path / "two", share=LARGE) as store:
        model = OffloadModel(module, store)
        pair = (model, OffloadOptimizer(groups(model, True), store, torch.optim.AdamW))
        ours = torch.optim.lr_scheduler.ExponentialLR(pair[1], 0.5)
        ours.load_state_dict(load_training(tmp_path / "run", *pair))
        assert_same(go(pair, ours, HALF), go(expected, schedule, HALF))
        assert_same(
            Trained.of(*pair).parameters,
            Trained.of(*expected).parameters,
        )


@pytest.mark.parametrize("way", [Ours, Torch])
def test_higher_precision_parameters_are_resumed(way: Any, tmp_path: Path) -> None:
    def build(seed: int) -> nn.Module:
        return models.build("mlp", seed).to(torch.bfloat16)

    def go(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[torch.Tensor]:
        found = []
        for step in range(first, first + HALF):
            given = models.batch("mlp", step)
            loss = (model(given.args[0].bfloat16()) - given.target).square().mean()
            loss.backward()
            found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return found

    def on(store: Any, seed: int) -> Pair:
        model = OffloadModel(build(seed), store)
        how = {"master_dtype": torch.float32, **ADAMW}
        return model, OffloadOptimizer(model, store, torch.optim.AdamW, **how)

    size = 4 * full_state_bytes(build(0), torch.optim.AdamW)
    with store_for(size, tmp_path / "one", share=LARGE) as store:
        one = on(store, 0)
        go(*one, 0)
        way().save(tmp_path, *one)
        with store_for(size, tmp_path / "two", share=SMALL / 2) as store:
            two = on(store, 1)
            way().load(tmp_path, *two)
            state = two[1].state_dict()["state"][0]
            assert {k: t.dtype for k, t in state.items()} == dict.fromkeys(
                ("step", "exp_avg", "exp_avg_sq", "master"), torch.float32
            )
            assert_same(go(*two, HALF), go(*one, HALF))
            Trained.of(*two).assert_same_as(Trained.of(*one))
        if way is Ours:
            plainly = build(1)
            optimizer = torch.optim.AdamW(plainly.parameters(), **ADAMW)
            with pytest.raises(ValueError, match=r"whose master_dtype is torch\.float32"):
                load_training(tmp_path / "run", plainly, optimizer)
            load_training(tmp_path / "run", plainly)  # the model alone


def test_save_before_the_first_step_replaces_a_later_state(tmp_path: Path) -> None:
    with on_store(tmp_path / "store", SMALL) as pair:
        before = Trained.of(*pair)
        save_training(tmp_path / "run", *pair)
        go_on(*pair, 0)
        load_training(tmp_path / "run", *pair)

        assert pair[1].state_dict()["state"] == {}
        Trained.of(*pair).assert_same_as(before)
        seed_all("cpu")
        found = go_on(*pair, 0)
        Trained.of(*pair, found).assert_same_as(uninterrupted("cpu")[0])


def test_model_loads_without_optimizer_but_not_vice_versa(
    tmp_path: Path,
) -> None:
    one, two = plain(), plain(seed=1)
    go_on(*one, 0)
    save_training(tmp_path / "both", *one)
    save_training(tmp_path / "model", one[0])
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == PARTS

    with unchanged(*two), pytest.raises(ValueError, match="without an optimizer"):
        load_training(tmp_path / "model", *two)
    load_training(tmp_path / "both", two[0])
    assert_same(dict(two[0].state_dict()), dict(one[0].state_dict()))
    assert two[1].state_dict()["state"] == {}


# Errors -------------------------------------------------------------------------------------------


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before = Trained.of(model, optimizer)
    yield
    Trained.of(model, optimizer).assert_same_as(before)


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two saves of one training, one step apart."""
    place = tmp_path_factory.mktemp("saves")
    pair = plain()
    for number, name in enumerate(("one", "two")):
        go_on(*pair, number, 1)
        save_training(place / name, *pair, extra=number)
    return place / "one", place / "two"


@pytest.fixture(params=["store", "plain"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Train another model of the same kind, into which a save is loaded."""
    if request.param == "plain":
        pair = plain(seed=1)
        go_on(*pair, 50, 2)
        yield pair
        return
    with on_store(tmp_path / "store", SMALL, seed=1) as pair:
        go_on(*pair, 50, 2)
        yield pair


@pytest.mark.parametrize("name", PARTS)
def test_flipped_bit_raises_and_changes_nothing(
    name: str, saves: tuple[Path, Path], target: Pair, tmp_path: Path
) -> None:
    run = shutil.copytree(saves[0], tmp_path / "run")
    path = run / name
    bits = path.stat().st_size * 8
    chosen = random.Random(name)
    head = range(64 * 8)
    anywhere = [chosen.randrange(bits) for _ in range(30)]
    with unchanged(*target):
        for bit in [*chosen.sample(head, 10), *anywhere, bits - 1]:
            flip_bit(path, *divmod(bit, 8))
            with pytest.raises((CorruptDataError, TruncatedFileError)) as caught:
                load_training(run, *target)
            assert str(path) in str(caught.value)
            flip_bit(path, *divmod(bit, 8))
    load_training(run, *target)  # the control: only the flipped bit failed


def test_other_libraries_accept_a_flipped_bit(saves: tuple[Path, Path], tmp_path: Path) -> None:
    run = shutil.copytree(saves[0], tmp_path / "run")
    before = in_memory(run, tmp_path / "before.pt")["model"]
    reader = dcp.FileSystemReader(run)
    places = reader.read_metadata().storage_data.items()
    [place] = [place for index, place in places if index.fqn == "model.layers.0.weight"]
    flip_bit(run / PARTS[1], place.offset + place.length // 2, 6)

    found = in_memory(run, tmp_path / "after.pt")["model"]

    assert any(not torch.equal(found[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("name", PARTS)
def test_truncated_or_missing_file_raises_and_changes_nothing(
    name: str, saves: tuple[Path, Path], target: Pair, tmp_path: Path
) -> None:
    run = shutil.copytree(saves[0], tmp_path / "run")
    path = run / name
    data = path.read_bytes()
    with unchanged(*target):
        for length in (0, 4, min(4096, len(data) - 1), len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            with pytest.raises((CorruptDataError, TruncatedFileError), match=name):
                load_training(run, *target)
        path.write_bytes(data + b"\0")
        with pytest.raises(CorruptDataError, match=name):
            load_training(run, *target)
        path.unlink()
        with pytest.raises(TransferError, match=f"{name} is missing"):
            load_training(run, *target)


@pytest.mark.parametrize("name", PARTS)
def test_mixed_files_of_two_saves_raise_and_change_nothing(
    name: str, saves: tuple[Path, Path], target: Pair, tmp_path: Path
) -> None:
    run = shutil.copytree(saves[0], tmp_path / "run")
    shutil.copy(saves[1] / name, run / name)

    with (
        unchanged(*target),
        pytest.raises(CorruptDataError, match="is not the file that was saved"),
    ):
        load_training(run, *target)


def with_sums_that_fit(run: Path, name: str, content: bytes) -> None:
    """Give a file other content that matches its checksum."""
    pickled, said, _ = (run / PARTS[0]).read_bytes().rsplit(b"\n", 2)
    sums = {each: FileSum(*found) for each, found in json.loads(said)["files"].items()}
    if name == PARTS[0]:
        pickled = content
    else:
        (run / name).write_bytes(content)
        sums[name] = FileSum(len(content), digest(content))
    (run / PARTS[0]).write_bytes(seal_metadata(pickled, sums))


class Planted:
    """A pickle that runs code when loaded unchecked."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_planted_pickle_runs_nothing(
    saves: tuple[Path, Path], target: Pair, tmp_path: Path
) -> None:
    run = shutil.copytree(saves[0], tmp_path / "run")
    planted = pickle.dumps(Planted(tmp_path / "planted"))
    with_sums_that_fit(run, PARTS[0], planted)
    with unchanged(*target), pytest.raises(CorruptDataError, match="is not a Metadata"):
        load_training(run, *target)

    whole = (saves[0] / PARTS[0]).read_bytes()
    metadata = pickle.loads(whole)
    index = next(index for index in metadata.storage_data if index.fqn == "tierstore")
    place = metadata.storage_data[index]
    value = io.BytesIO()
    torch.save(Planted(tmp_path / "planted"), value)
    data = (saves[0] / PARTS[1]).read_bytes()
    place.offset, place.length = len(data), len(value.getvalue())
    with_sums_that_fit(run, PARTS[1], data + value.getvalue())
    with_sums_that_fit(run, PARTS[0], pickle.dumps(metadata))
    with (
        unchanged(*target),
        pytest.raises(CorruptDataError, match="is not a valid checkpoint file"),
    ):
        load_training(run, *target)

    assert not (tmp_path / "planted").exists()
    pickle.loads(planted)  # the control: unpickled, it runs
    assert (tmp_path / "planted").exists()


def test_newer_format_raises(saves: tuple[Path, Path], tmp_path: Path) -> None:
    run = shutil.copytree(saves[0], tmp_path / "run")
    body = (run / PARTS[0]).read_bytes().rpartition(b"\n")[0]
    body = body.replace(b'"format":1', b'"format":2') + b"\n"
    (run / PARTS[0]).write_bytes(body + digest(body).encode())

    with pytest.raises(TierStoreError, match="upgrade tierstore"):
        load_training(run, *plain())


def changed(change: Callable[[Any], Any]) -> nn.Module:
    model = models.build(KIND, 1)
    return change(model) or model


def with_head(head: nn.Module) -> nn.Module:
    return changed(lambda model: setattr(model, "head", head))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "larger": (
        lambda: with_head(nn.Linear(models.WIDTH, 128)),
        adamw,
        r"'head\.\w+' is float32 \[64.*\] there, and float32 \[128.*\]",
    ),
    "more": (
        lambda: changed(lambda model: setattr(model, "tail", nn.Linear(1, 1))),
        adamw,
        r"from a different model: it has no 'tail\.bias', 'tail\.weight'",
    ),
    "fewer": (
        lambda: with_head(nn.Identity()),
        adamw,
        r"it also has 'head\.bias', 'head\.weight', which this model lacks",
    ),
    "of another dtype": (lambda: changed(nn.Module.double), adamw, "float32 .* there, and float64"),
    "fewer trained": (
        lambda: changed(nn.Module.train),
        lambda model: torch.optim.AdamW(list(model.parameters())[1:]),
        r"not in both: 'layers\.0\.weight'",
    ),
    "another class": (
        lambda: changed(nn.Module.train),
        lambda model: torch.optim.SGD(model.parameters()),
        "whose class is AdamW, not SGD",
    ),
    "of another model": (
        lambda: changed(nn.Module.train),
        lambda _: adamw(models.build(KIND)),
        "that the model does not have",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_model_or_optimizer_raises_and_is_unchanged(
    other: str, saves: tuple[Path, Path]
) -> None:
    build, optimized, message = OTHERS[other]
    model = build()
    optimizer = optimized(model)
    with unchanged(model, optimizer), pytest.raises(ValueError, match=message):
        load_training(saves[0], model, optimizer)


def test_missing_save_raises(tmp_path: Path) -> None:
    passed = "pass the path that you gave to save_training"
    with pytest.raises(TransferError, match=rf"there is no directory \S+nowhere: {passed}"):
        load_training(tmp_path / "nowhere", *plain())
    with pytest.raises(TransferError, match=rf"^{tmp_path} has no saved training: {passed}"):
        load_training(tmp_path, *plain())
    (tmp_path / "file").touch()
    with pytest.raises(TransferError, match=rf"file is not a directory: {passed}"):
        load_training(tmp_path / "file", *plain())


# Replacing the last save --------------------------------------------------------------------------


def names_in(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_save_training_again_replaces_the_last_save(tmp_path: Path) -> None:
    one, two = plain(), plain(seed=1)
    run = tmp_path / "deep" / "er" / "run"
    (tmp_path / "link").symlink_to(run)
    for number in range(3):
        go_on(*one, number, 1)
        save_training(tmp_path / "link", *one, extra=number)

        assert load_training(run, *two) == number
        assert_same(copied(two[1].state_dict()), copied(one[1].state_dict()))
        assert names_in(run) == [".metadata", f"__0_{number}.distcp"]
    assert (tmp_path / "link").is_symlink()


def test_save_training_beside_other_files_leaves_them(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    pair = plain()
    with pytest.raises(TransferError):
        save_training(tmp_path / "notes.txt", *pair)
    save_training(tmp_path, *pair)
    save_training(tmp_path, *pair, extra="second")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert names_in(tmp_path) == [".metadata", "__0_1.distcp", "notes.txt"]
    assert load_training(tmp_path, *pair) == "second"


def test_save_training_removes_orphans_of_killed_saves(tmp_path: Path) -> None:
    pair = plain()
    save_training(tmp_path / "run", *pair)
    draft = tmp_path / "run" / ".saving-dead"
    draft.mkdir()
    (draft / "__0_1.distcp").write_bytes(bytes(9))
    shutil.copy(tmp_path / "run" / PARTS[1], tmp_path / "run" / "__1_7.distcp")  # moved already
    assert load_training(tmp_path / "run", *pair) is None
    save_training(tmp_path / "run", *pair)
    assert names_in(tmp_path / "run") == [".metadata", "__0_8.distcp"]


def test_save_failure_leaves_the_last_save_only(tmp_path: Path) -> None:
    pair, other = plain(), plain(seed=1)
    save_training(tmp_path / "run", *pair, extra="old")
    go_on(*pair, 0, 1)

    with pytest.raises(TypeError):
        save_training(tmp_path / "run", *pair, extra={"model": nn.Linear(1, 1)})
    other[1].param_groups[0]["note"] = object()
    with pytest.raises(
        TypeError, match=r"\.note is of type object, .* what recreates it as `extra`"
    ):
        save_training(tmp_path / "run", *other)
    with largest_file(200_000), pytest.raises(DiskFullError):
        save_training(tmp_path / "run", *pair)
    with pytest.raises(ValueError, match="that the model does not have"):
        save_training(tmp_path / "run", pair[0], other[1])

    assert names_in(tmp_path / "run") == PARTS
    assert load_training(tmp_path / "run", *pair) == "old"


def filled(value: float) -> nn.Module:
    model = nn.Linear(40, 40)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save_often(path: Path, value: int, times: int = 15) -> int:
    """Return how many saves were made: the others found one already running."""
    model, saved = filled(value), 0
    for _ in range(times):
        with contextlib.suppress(StoreLockedError):
            save_training(path, model, extra=value)
            saved += 1
    return saved


def load_often(path: Path) -> None:
    model = filled(-1)
    for _ in range(60):
        value = load_training(path, model)
        assert all(bool((p == value).all()) for p in model.parameters())


def test_concurrent_saves_and_loads_are_each_whole(tmp_path: Path) -> None:
    path = tmp_path / "run"
    save_often(path, 0, 1)
    with ThreadPoolExecutor() as threads:
        jobs = [threads.submit(save_often, path, value) for value in (1, 2)]
        jobs.append(threads.submit(load_often, path))
        assert sum(job.result() or 0 for job in jobs) > 0
    save_often(path, 3, 1)

    assert len(names_in(path)) == 2
    assert load_training(path, filled(-1)) == 3


def test_save_training_during_another_save_raises(tmp_path: Path) -> None:
    path, caught = tmp_path / "run", []

    def save_within(call: Call) -> Any:
        with pytest.raises(StoreLockedError, match=f"another save to {path} is in progress"):
            save_training(path, filled(2), extra=2)
        caught.append(call)
        return call.go_on()

    with system_call("pwrite", answer=save_within, at=1):
        save_training(path, filled(1), extra=1)
    assert caught
    assert load_training(path, filled(-1)) == 1


# Memory -------------------------------------------------------------------------------------------


def limited(how: str, place: Path) -> dict[str, int]:
    words = ["-m", "tests.training.saving_limited", how, place]
    return results_in(output_of(*words, environment=with_the_usual_allocator()))[0]


@pytest.mark.full("measures separate processes")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux reports this memory")
def test_save_and_load_use_memory_of_two_groups(tmp_path: Path) -> None:
    found = limited("streaming", tmp_path / "ours")

    assert found["right"] == 1
    assert found["nbytes"] > NBYTES + STATE_BYTES
    assert found["saving"] < 2 * GROUP
    assert found["loading"] < 2 * GROUP
    control = limited("copying", tmp_path / "copied")
    assert control["saving"] > STATE_BYTES


def test_save_and_load_are_public_names() -> None:
    assert {"save_training", "load_training"} <= set(tierstore.__all__)
    assert tierstore.save_training is save_training
