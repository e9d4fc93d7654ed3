"""Unusual uses of models, besides calling them, give the same results as plain torch.

The reference is the same model, used in the same way, without a store.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.conftest import DEVICES
from tests.adapters.models import BLOCK_BYTES, WIDTH, Tower, given
from tests.store.helpers import open_store
from tierstore import TierStore, disable_offload, dispatch_model, enable_group_offload

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="any device",
)

Offload = Callable[[nn.Module], object]
THREADS = 4


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(device: str, disk_dir: Path) -> Iterator[TierStore]:
    """Return a store that holds three of the layers."""
    with open_store(disk_dir, 3 * BLOCK_BYTES, device) as opened:
        yield opened


CUTS: dict[str, dict[str, Any]] = {
    "block by block": {"num_blocks_per_group": 1},
    "leaf by leaf": {"offload_type": "leaf_level"},
}


@pytest.fixture(params=["dispatched", *CUTS])
def offload(request: pytest.FixtureRequest, store: TierStore) -> Iterator[Offload]:
    """Return a function that offloads a model in one of the ways."""
    handles = []

    def by(model: nn.Module) -> None:
        if request.param in CUTS:
            handles.append(enable_group_offload(model, store, **CUTS[request.param]))
        else:
            dispatch_model(model, store)

    yield by
    for handle in handles:
        disable_offload(handle)


def assert_moved(store: TierStore) -> None:
    assert store.stats().bytes_read > 3 * BLOCK_BYTES, "all of it fitted"


# Outputs of modules -------------------------------------------------------------------------------


class Table(nn.Module):
    """As large as a layer. Returns parts of its weight in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH + 1, WIDTH))

    def forward(self) -> dict[str, Any]:
        whole = self.weight
        return {"whole": whole, "rows": whole[2:], "more": [whole.t(), (whole[:1].expand(5, -1),)]}


class WithTable(nn.Module):
    """Reads its table before its layers run, and returns the parts afterwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = Table()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        taken = self.table()
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x, taken


def parts(taken: dict[str, Any]) -> list[torch.Tensor]:
    transposed, (expanded,) = taken["more"]
    return [taken["whole"], taken["rows"], transposed, expanded]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parts_of_weights_in_outputs_keep_their_values(
    mode: Callable[[], Any], device: str, store: TierStore, offload: Offload
) -> None:
    model = WithTable()
    with mode():
        expected = [part.clone() for part in parts(model(given())[1])]
        offload(model)
        kept = []
        for _ in range(4):
            kept += [model(given().to(device))[1], model.table()]
        for taken in kept:
            for part, value in zip(parts(taken), expected, strict=True):
                assert torch.equal(part.cpu(), value)
    assert_moved(store)


# Changes, and calls of parts ----------------------------------------------------------------------


class TwoTowers(nn.Module):
    """Is entered through other methods, as encoders and decoders are."""

    def __init__(self) -> None:
        super().__init__()
        self.text = Tower(3)
        self.image = Tower(4)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.image(self.text(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x)


def uncounted(model: Any) -> None:
    """Change data as a PEFT merge does: torch's version counter does not count it."""
    model.text.blocks[1].weight.data.mul_(3)


def transposed(model: Any) -> None:
    """Put the same bytes in another order."""
    weight = model.image.head.weight
    weight.data = weight.data.t()


def another_layer(model: Any) -> None:
    model.text.blocks[0] = Tower(1).head


WAYS_IN: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "forward": lambda model, x: model(x),
    "a method of its own": lambda model, x: model.features(x),
    "its parts": lambda model, x: model.image(model.text(x)),
    "parts of its parts": lambda model, x: model.image.head(
        model.text.blocks[1](model.text.blocks[0](x))
    ),
}


CASES = [
    (change, way_in)
    for change in (uncounted, transposed, another_layer)
    for way_in in WAYS_IN
    # A new layer that is called before any part of the model was never offloaded.
    if (change, way_in) != (another_layer, "parts of its parts")
]


@pytest.mark.parametrize(("change", "way_in"), CASES)
def test_change_takes_effect_through_any_entry(
    change: Callable[[Any], None], way_in: str, device: str, store: TierStore, offload: Offload
) -> None:
    model, enter = TwoTowers().requires_grad_(False), WAYS_IN[way_in]
    plain = copy.deepcopy(model).to(device)
    x = given().to(device)
    offload(model)
    before = enter(model, x)
    assert torch.equal(before, enter(plain, x))
    for changed in (model, plain):
        change(changed)
    plain.to(device)
    found = enter(model, x)
    assert torch.equal(found, enter(plain, x))
    assert not torch.equal(found, before)


def test_change_takes_effect_in_a_sharing_model(device: str, store: TierStore) -> None:
    shared = Tower().requires_grad_(False)
    one, other = nn.Sequential(shared), nn.Sequential(shared, nn.Tanh())
    x = given().to(device)
    dispatch_model(one, store)
    dispatch_model(other, store)
    for _ in range(2):
        shared.blocks[2].weight.data.mul_(2)
        plain = copy.deepcopy(other).to(device)
        assert torch.equal(other(x), plain(x))
    disable_offload(one)
    disable_offload(other)


class Growing(nn.Module):
    """Gives its weight other memory whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight * 2
        return x @ self.weight


def test_memory_replaced_by_a_forward_is_kept(
    device: str, store: TierStore, offload: Offload
) -> None:
    model = nn.Sequential(Growing(), *(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    model.requires_grad_(False)
    plain = copy.deepcopy(model).to(device)
    offload(model)
    for _ in range(3):
        assert torch.equal(model(given().to(device)), plain(given().to(device)))
    assert torch.equal(model[0].weight, plain[0].weight.cpu())


def test_conjugated_weight_keeps_its_value(disk_dir: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)).requires_grad_(False)
    model[0].weight.data = model[0].weight.data.conj()
    x = torch.randn(3, WIDTH, dtype=torch.complex64)
    with TierStore("1MB", disk_dir, device="cpu") as store:
        expected = model(x)
        dispatch_model(model, store)
        assert torch.equal(model(x), expected)
        model[0].weight.data = model[0].weight.data.conj()
        plain = copy.deepcopy(model)
        assert torch.equal(model(x), plain(x))
        assert not torch.equal(model(x), expected)
        disable_offload(model)


# Gradients ----------------------------------------------------------------------------------------


class Force(nn.Module):
    """Enables gradients itself, as models of energies do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    @torch.enable_grad()  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        return torch.tanh(self.layer(x)), x


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Force() for _ in range(6))

    def forward(self, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [block(x) for block in self.blocks]


@pytest.mark.parametrize("caller", [torch.no_grad, torch.enable_grad])
def test_forward_that_enables_gradients_raises_or_is_right(
    caller: Callable[[], Any], device: str, offload: Offload
) -> None:
    """It raises if gradients are off when the unit is entered, and on inside it."""
    model = Forces().requires_grad_(False)
    plain = [
        torch.autograd.grad(energy.sum(), position)[0]
        for energy, position in copy.deepcopy(model).to(device)(given().to(device))
    ]
    offload(model)
    with caller():
        results = model(given().to(device))
    refused = 0
    for (energy, position), expected in zip(results, plain, strict=True):
        try:
            (gradient,) = torch.autograd.grad(energy.sum(), position)
        except RuntimeError as error:
            assert "weights that have left the device" in str(error)
            refused += 1
        else:
            assert torch.equal(gradient, expected)
    assert refused in (0, len(plain))
    assert caller is torch.no_grad or not refused


class Passing(nn.Module):
    """Returns its input beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.layer(x.detach())


def test_gradient_through_a_passed_on_input_is_right(device: str, offload: Offload) -> None:
    model = Passing().requires_grad_(False)
    offload(model)
    start = given().to(device).requires_grad_()
    passed, _ = model(start * 3)
    (gradient,) = torch.autograd.grad(passed.sum(), start)
    assert torch.equal(gradient.cpu(), torch.full((3, WIDTH), 3.0))


# Models that are built in unusual ways ------------------------------------------------------------


class Coder(nn.Module):
    """Has parts with the names of methods."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.decode = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.relu(self.encode(x)))


class Empty(nn.Module):
    """Begins with a buffer of no bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.empty(0))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Siblings(nn.Module):
    """Has two parts; one's name is the other's with a number appended."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({f"a~{n}": nn.Linear(WIDTH, WIDTH) for n in range(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = torch.tanh(part(x))
        return x


@pytest.mark.parametrize("kind", [Coder, Empty, Siblings])
def test_unusually_built_model_runs_and_changes_like_plain(
    kind: Callable[[], nn.Module], device: str, offload: Offload
) -> None:
    model = kind().requires_grad_(False)
    plain = copy.deepcopy(model).to(device)
    offload(model)
    for _ in range(3):
        assert torch.equal(model(given().to(device)), plain(given().to(device)))
        for weights in (model, plain):
            next(weights.parameters()).data.mul_(2)


def test_cast_under_a_default_device_works(device: str, store: TierStore, offload: Offload) -> None:
    model = Tower()
    plain = copy.deepcopy(model).to(device, torch.bfloat16)
    offload(model)
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        model.to(torch.bfloat16)
        x = given().to(device, torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
    finally:
        torch.set_default_device(before)


# Several threads ----------------------------------------------------------------------------------


@pytest.mark.full("test_models_on_threads.py has threads", keep="a third")
def test_repartitioned_model_runs_in_several_threads(
    device: str, store: TierStore, offload: Offload
) -> None:
    model = Tower(8).requires_grad_(False)
    offload(model)
    x = given()
    for block in range(5):
        model.blocks[block] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        plain = copy.deepcopy(model).to(device)
        expected = plain(x.to(device))
        together = threading.Barrier(THREADS)

        def run(_: int) -> list[torch.Tensor]:
            together.wait()  # noqa: B023 - it is used in this round
            return [model(x.to(device)) for _ in range(3)]

        with ThreadPoolExecutor(THREADS) as pool:
            for outputs in pool.map(run, range(THREADS)):
                for output in outputs:
                    assert torch.equal(output, expected)
