"""Invalid arguments raise with advice, and change nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, DEVICE_0, DEVICE_1, needs_accelerator
from tests.helpers.tensors import parameter_bytes
from tests.training import models
from tests.training.conftest import (
    ADAMW,
    ON_BOTH,
    Traffic,
    Trained,
    full_state_bytes,
    offloaded,
    store_for,
    train,
)
from tierstore import (
    TierStore,
    disable_offload,
    dispatch_model,
    enable_group_offload,
    load_checkpoint_and_dispatch,
)
from tierstore.adapters.training import OffloadModel, OffloadOptimizer
from tierstore.errors import BudgetError

AdamW = torch.optim.AdamW


@pytest.fixture
def store(disk_dir: Path) -> Iterator[TierStore]:
    with store_for(models.build("small"), disk_dir, share=0.3) as store:
        yield store


def assert_untouched(module: nn.Module, store: TierStore) -> None:
    """Check that it is unchanged, and can be trained: on this store, and without."""
    built = models.build("small")
    assert not [key for key in store if key.startswith("training/")]
    for found, expected in zip(module.parameters(), built.parameters(), strict=True):
        assert torch.equal(found, expected) and found.device.type == "cpu"
    ordinary = AdamW(module.parameters(), **ADAMW)
    plain = AdamW(built.parameters(), **ADAMW)
    found = train("small", module, ordinary, 1)
    wanted = train("small", built, plain, 1)
    Trained.of(module, ordinary, found).assert_same_as(Trained.of(built, plain, wanted))
    OffloadModel(module, store).disable()


def test_disabled_model_with_an_empty_parameter_trains_again(store: TierStore) -> None:
    """No group holds the empty parameter, such as an empty shard."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module.register_parameter("empty", nn.Parameter(torch.empty(0)))
    first = OffloadModel(module, store)
    first.disable()
    again = OffloadModel(module, store)
    again(torch.ones(2, 8)).sum().backward()
    again.disable()
    assert module[0].weight.grad is not None
    assert first is not again


@pytest.mark.parametrize("name", ("num_slices", "num_microbatches"))
@pytest.mark.parametrize("value", (0, -1, 1.5, "3", "x", True, [2]))
def test_counts_must_be_positive_integers(name: str, value: Any, store: TierStore) -> None:
    module = models.build("small")
    with pytest.raises(ValueError, match=f"{name}=.*positive integer"):
        OffloadModel(module, store, **{name: value})
    assert_untouched(module, store)


def test_model_device_is_the_stores(store: TierStore, disk_dir: Path) -> None:
    module = models.build("small")
    with pytest.raises(ValueError, match=r"open the store with TierStore\(\.\.\., device='cuda'\)"):
        OffloadModel(module, store, device="cuda")
    assert_untouched(module, store)
    for device in ("cpu", torch.device("cpu"), None):
        OffloadModel(module, store, device=device).disable()


@needs_accelerator
def test_device_with_or_without_index_is_accepted(disk_dir: Path) -> None:
    module = models.build("small")
    with store_for(module, disk_dir, ACCELERATOR) as store:
        for device in ("cpu", DEVICE_1):
            with pytest.raises(ValueError, match="open the store with"):
                OffloadModel(module, store, device=device)
        for device in (ACCELERATOR, DEVICE_0):
            OffloadModel(module, store, device=device).disable()


@ON_BOTH
def test_batch_smaller_than_its_microbatches_raises(device: str, disk_dir: Path) -> None:
    module = models.build("small")
    with store_for(module, disk_dir, device, 0.3) as store:
        model = OffloadModel(module, store, num_microbatches=4)
        x = torch.randn(3, models.WIDTH, device=device)
        with pytest.raises(ValueError, match=r"batch of 3 .* 4 microbatches.*lower num_microb"):
            model(x)
        assert model(torch.cat([x, x])).shape == (6, models.WIDTH)


def test_loss_computed_inside_cannot_be_split(disk_dir: Path) -> None:
    module = models.build("llama")
    with store_for(module, disk_dir, share=0.3) as store:
        model = OffloadModel(module, store, num_microbatches=2)
        with pytest.raises(TypeError, match="compute the loss outside"):
            models.loss("llama", model, models.batch("llama"))


def test_module_on_meta_raises(store: TierStore) -> None:
    with torch.device("meta"):
        module = models.build("small")
    with pytest.raises(ValueError, match=r"layers\.0\.weight is on meta.*load them first"):
        OffloadModel(module, store)
    assert not store.keys()


def test_module_already_in_training_raises(store: TierStore) -> None:
    module = models.build("small")
    model = OffloadModel(module, store)
    for again in (module, model, nn.Sequential(module), module.layers):
        with pytest.raises(ValueError, match=r"an OffloadModel: .*call (its )?disable\(\)"):
            OffloadModel(again, store)
    model.disable()
    OffloadModel(module, store).disable()


def leaf() -> nn.Module:
    return nn.Linear(8, 8)


def pair() -> nn.Module:
    return nn.Sequential(leaf(), leaf())


IN_TRAINING = {
    "itself": (lambda model, _: model, "^this module is already an OffloadModel: use it as it is"),
    "around it": (
        lambda model, _: nn.Sequential(model, leaf()),
        r"Sequential contains an OffloadModel: call disable\(\)",
    ),
    "its module": (lambda _, module: module, "is already in an OffloadModel: use that"),
    "around its module": (
        lambda _, module: nn.Sequential(leaf(), module),
        "in Sequential is already in an OffloadModel: use that",
    ),
}
TAKERS: dict[str, Any] = {
    "OffloadModel": OffloadModel,
    "dispatch_model": dispatch_model,
    "enable_group_offload": enable_group_offload,
    "load_checkpoint_and_dispatch": lambda model, store: load_checkpoint_and_dispatch(
        model, "nowhere.safetensors", store
    ),
}


@pytest.mark.parametrize("build", (leaf, pair))
@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("what", IN_TRAINING)
def test_model_in_training_nested_raises_at_construction(
    what: str, taker: str, build: Any, store: TierStore
) -> None:
    module = build()
    model = OffloadModel(module, store)
    wrap, match = IN_TRAINING[what]
    with pytest.raises(ValueError, match=match):
        TAKERS[taker](wrap(model, module), store)
    with pytest.raises(ValueError, match=r"undone with its own method: .*\.disable\(\)"):
        disable_offload(model)
    model(torch.ones(2, 8)).sum().backward()
    model.disable()
    OffloadModel(wrap(module, module), store)(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("build", (leaf, pair))
@pytest.mark.parametrize("offload", (dispatch_model, enable_group_offload))
def test_part_of_an_offloaded_model_in_training_raises(
    offload: Any, build: Any, store: TierStore
) -> None:
    part = build()
    whole = nn.Sequential(part, leaf())
    offload(part, store)
    with pytest.raises(ValueError, match="already offloaded"):
        OffloadModel(whole, store)
    disable_offload(part)
    offload(whole, store)
    with pytest.raises(ValueError, match="already offloaded"):
        OffloadModel(part, store)


def test_parameter_of_another_model_in_training_raises(store: TierStore) -> None:
    first, second = leaf(), leaf()
    second.weight = first.weight
    model = OffloadModel(first, store)
    with pytest.raises(ValueError, match="weight is already trained by another OffloadModel"):
        OffloadModel(second, store)
    model.disable()
    dispatch_model(first, store)
    with pytest.raises(ValueError, match="weight of Linear is also a weight of a model"):
        OffloadModel(second, store)


def test_backward_error_of_a_dispatched_model_tells_how_to_train(store: TierStore) -> None:
    model, x = pair(), torch.ones(2, 8)
    dispatch_model(model, store)
    with pytest.raises(RuntimeError, match=r"a TierStore holds them.*then OffloadModel") as error:
        model(x).sum().backward()
    assert "call tierstore.disable_offload(model), then OffloadModel(model, store)" in str(
        error.value
    )
    OffloadModel(disable_offload(model), store)(x).sum().backward()


def test_small_ram_budget_logs_a_warning_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The budget that the warning names suffices: then nothing is logged."""

    def warnings(budget: str) -> list[str]:
        caplog.clear()
        module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        with TierStore(budget, tmp_path / budget, device="cpu") as store:
            model = OffloadModel(module, store)
            for _ in range(2):
                model(torch.ones(2, 512)).sum().backward()
            resident = store.stats().used_bytes["HOST"]
        found = [r.getMessage() for r in caplog.records if "ram_budget" in r.getMessage()]
        assert bool(found) == (resident == 0)
        return found

    (message,) = warnings("1MB")
    assert "ram_budget 999.4 KB keeps no group of this model" in message
    assert "the largest needs 1,052,672 bytes" in message
    enough = re.search(r"at least (\S+) keeps some groups", message)
    assert enough is not None
    assert not warnings(enough[1])
    assert not warnings("64MB")


def test_module_already_dispatched_raises(store: TierStore) -> None:
    module = models.build("small")
    dispatch_model(module, store)
    with pytest.raises(ValueError, match=r"offload|dispatch"):
        OffloadModel(module, store)


def test_module_with_offloaded_blocks_raises(store: TierStore) -> None:
    module = models.build("flux")
    enable_group_offload(module, store)
    with pytest.raises(ValueError, match="offload"):
        OffloadModel(module, store)


def test_module_in_training_cannot_be_dispatched(store: TierStore) -> None:
    module = models.build("small")
    model, optimizer = offloaded(module, store)
    for target in (module, model):
        with pytest.raises(ValueError, match=r"already (in )?an OffloadModel"):
            dispatch_model(target, store)
    train("small", model, optimizer, 1)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        (torch.optim.LBFGS, "LBFGS cannot step parameters in parts.*AdamW"),
        (torch.optim.SparseAdam, "SparseAdam cannot step parameters in parts.*AdamW"),
        ("AdamW", r"not an optimizer class: pass one such as torch\.optim\.AdamW"),
        (torch.optim, "not an optimizer class"),
        (nn.Linear, "not an optimizer class"),
        (None, "not an optimizer class"),
    ],
)
def test_unsupported_optimizer_raises(what: Any, match: str, store: TierStore) -> None:
    model = OffloadModel(models.build("small"), store)
    with pytest.raises(TypeError, match=match):
        OffloadOptimizer(model, store, what)


def test_optimizer_instance_instead_of_class_raises(store: TierStore) -> None:
    model = OffloadModel(models.build("small"), store)
    with pytest.raises(TypeError, match="and its arguments by name"):
        OffloadOptimizer(model, store, AdamW(model.parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", ({"lr": -1.0}, {"betas": (2.0, 0.9)}, {"no_such": 1}))
def test_optimizer_arguments_invalid_raise_from_its_class(
    options: dict[str, Any], store: TierStore
) -> None:
    module = models.build("small")
    with pytest.raises((ValueError, TypeError)) as expected:
        AdamW(module.parameters(), **options)
    model = OffloadModel(module, store)
    with pytest.raises(expected.type) as found:
        OffloadOptimizer(model, store, AdamW, **options)
    assert str(found.value) == str(expected.value)


def test_optimizer_without_parameters_raises(store: TierStore) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        OffloadOptimizer([], store, AdamW)


@pytest.mark.parametrize("given", ("module", "parameters", "groups"))
def test_ordinary_modules_states_are_in_the_store(given: str, disk_dir: Path) -> None:
    plain = models.build("small")
    by_itself = AdamW(plain.parameters(), **ADAMW)
    wanted = train("small", plain, by_itself, 3, max_norm=0.1)
    module = models.build("small")
    states = 2 * parameter_bytes(module)
    with store_for(int(states / 2), disk_dir, share=1) as store:
        what = {
            "module": module,
            "parameters": module.parameters(),
            "groups": [{"params": list(module.parameters())}],
        }[given]
        optimizer = OffloadOptimizer(what, store, AdamW, **ADAMW)
        traffic = Traffic(store)
        found = train("small", module, optimizer, 3, max_norm=0.1)
        Trained.of(module, optimizer, found).assert_same_as(Trained.of(plain, by_itself, wanted))
        # Each step changes all states, of which half can stay.
        assert traffic.read >= 2 * states / 2
        assert traffic.written >= 2 * states / 2
        assert sum(group.nbytes for group in store.snapshot().groups) >= states


@needs_accelerator
@pytest.mark.parametrize("what", ("device_budget", "ram_budget"))
def test_parameter_larger_than_a_budget_raises(what: str, disk_dir: Path) -> None:
    module = models.build("small")
    largest = max(parameter.nbytes for parameter in module.parameters())
    budgets = {"ram_budget": 1 << 20, "device_budget": 1 << 20, what: largest // 2}
    with (
        TierStore(disk_dir=disk_dir, device=ACCELERATOR, **budgets) as store,
        pytest.raises(BudgetError, match=r"raise|larger"),
    ):
        model, optimizer = offloaded(module, store)
        train("small", model, optimizer, 1, device=ACCELERATOR)


def test_cpu_parameter_larger_than_the_budget_is_accepted(disk_dir: Path) -> None:
    """It is used in its place on disk."""
    plain = models.build("small")
    by_itself = AdamW(plain.parameters(), **ADAMW)
    wanted = train("small", plain, by_itself, 2)
    module = models.build("small")
    largest = max(parameter.nbytes for parameter in module.parameters())
    assert full_state_bytes(module, AdamW) > largest
    with TierStore(largest // 2, disk_dir, device="cpu") as store:
        model, optimizer = offloaded(module, store)
        found = train("small", model, optimizer, 2)
        Trained.of(model, optimizer, found).assert_same_as(Trained.of(plain, by_itself, wanted))
        assert store.stats().peak_bytes["HOST"] <= largest // 2
