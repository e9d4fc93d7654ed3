"""Blocks with side effects: buffers that they also read, and caches that they fill.

With `checkpoint_activation=True` they run twice. Compared with the plain model, bit for bit.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations

from tests.accelerator import same
from tests.training.conftest import DEVICES
from tierstore import TierStore
from tierstore.adapters.training import OffloadModel

pytestmark = pytest.mark.full(
    "the model, the optimizer: each has its own part; test_parity.py runs on both devices",
    keep="any device",
)

WIDTH, ROWS, BLOCKS = 64, 8, 4
TOKENS = 12
MANY = 1 << 16
"""Elements of a buffer that is only copied if it changes."""

ON_BOTH = pytest.mark.parametrize("device", DEVICES)


def store_on(device: str, disk_dir: Path) -> TierStore:
    return TierStore("64MB", disk_dir, device=device, device_budget=budget_of(device))


def budget_of(device: str) -> str | None:
    return None if device == "cpu" else "64MB"


def assert_same_gradients(found: nn.Module, plain: nn.Module, device: str = "cpu") -> None:
    for name, parameter in plain.named_parameters():
        gradient = found.get_parameter(name).grad
        assert parameter.grad is not None and gradient is not None, name
        assert same(gradient, parameter.grad, device), name


def assert_same_buffers(found: nn.Module, plain: nn.Module, device: str = "cpu") -> None:
    for name, buffer in plain.named_buffers():
        assert same(found.get_buffer(name), buffer, device), name


# Buffers ------------------------------------------------------------------------------------------


class Averaging(nn.Module):
    """Reads a running average of its inputs, and updates it. `how` says in which way."""

    average: Any

    def __init__(self, how: str, elements: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = how
        self.register_buffer("average", None if how == "made" else torch.ones(elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._count_in(x.detach().mean(0))
        found: torch.Tensor = torch.tanh(self.linear(x)) * self.average[:WIDTH].clone()
        return found

    def _count_in(self, mean: torch.Tensor) -> None:
        if self.how == "made":
            self.average = mean if self.average is None else 0.5 * self.average + mean
        elif self.how == "assigned":
            self.average = 0.5 * self.average + mean
        elif self.how == "in place":
            self.average[:WIDTH].mul_(0.5).add_(mean)
        elif self.how == "data":
            self.average.data[:WIDTH].mul_(0.5).add_(mean)


def spectral() -> nn.Module:
    linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(linear, nn.GELU())


BUFFERS: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": spectral,
    "in place": lambda: Averaging("in place"),
    "in place, large": lambda: Averaging("in place", MANY),
    "through data": lambda: Averaging("data"),
    "through data, large": lambda: Averaging("data", MANY),
    "assigned": lambda: Averaging("assigned"),
    "made by the first call": lambda: Averaging("made"),
    "unchanged, large": lambda: Averaging("not", MANY),
}


class Stack(nn.Module):
    """Blocks, each of them called `times` times."""

    def __init__(self, build: Callable[[], nn.Module], times: int = 2) -> None:
        super().__init__()
        self.times = times
        self.blocks = nn.ModuleList(build() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks] * self.times:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", BUFFERS)
@ON_BOTH
def test_recompute_restores_changed_buffers(kind: str, device: str, disk_dir: Path) -> None:
    torch.manual_seed(0)
    # On an accelerator the gradients of one call are added up before those of another, and a
    # spectral norm uses its weight more than once in a call: the last bit would differ.
    once = kind == "spectral norm" and device != "cpu"
    plain = Stack(BUFFERS[kind], 1 if once else 2)
    model = copy.deepcopy(plain)
    with store_on(device, disk_dir) as store:
        offloaded = OffloadModel(model, store, checkpoint_activation=True)
        for seed in range(2):
            torch.manual_seed(seed)
            x = torch.randn(ROWS, WIDTH)
            plain(x).square().sum().backward()
            loss = offloaded(x.to(device)).square().sum()
            assert_same_buffers(model, plain, device)
            loss.backward(retain_graph=True)
            assert_same_buffers(model, plain, device)
            assert_same_gradients(model, plain, device)
            model.zero_grad()
            loss.backward()  # recomputed a second time
            assert_same_buffers(model, plain, device)
            assert_same_gradients(model, plain, device)
            model.zero_grad()
            plain.zero_grad()


def test_recompute_of_overlapping_passes_uses_their_buffers(disk_dir: Path) -> None:
    torch.manual_seed(0)
    plain = Stack(BUFFERS["spectral norm"])
    model = copy.deepcopy(plain)
    batches = [torch.randn(ROWS, WIDTH) for _ in range(2)]
    with store_on("cpu", disk_dir) as store:
        offloaded = OffloadModel(model, store, checkpoint_activation=True)
        for run in (plain, offloaded):
            losses = [run(x).square().sum() for x in batches]
            for loss in losses:
                loss.backward()
        assert_same_buffers(model, plain)
        assert_same_gradients(model, plain)


# Arguments ----------------------------------------------------------------------------------------


class Routed(nn.Module):
    """A block that appends its router's logits to a list in its input, as mixtures do."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, logits: list[torch.Tensor]) -> torch.Tensor:
        logits.append(self.router(x))
        experts = self.experts(x).view(-1, 2, WIDTH)
        return torch.tanh((logits[-1].softmax(-1).unsqueeze(-1) * experts).sum(1))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, logits)
        return x, logits


@ON_BOTH
def test_recompute_leaves_the_callers_list_alone(device: str, disk_dir: Path) -> None:
    torch.manual_seed(0)
    plain = Mixture()
    model = copy.deepcopy(plain)
    x = torch.randn(ROWS, WIDTH)

    def loss_of(run: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result, logits = run(x)
        assert len(logits) == BLOCKS
        loss: torch.Tensor = result.square().sum() + sum(each.square().sum() for each in logits)
        return loss

    loss_of(plain, x).backward()
    with store_on(device, disk_dir) as store:
        offloaded = OffloadModel(model, store, checkpoint_activation=True)
        loss_of(offloaded, x.to(device)).backward()
        assert_same_gradients(model, plain, device)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.relu(x))


@ON_BOTH
def test_recompute_of_in_place_input_changes_works(device: str, disk_dir: Path) -> None:
    torch.manual_seed(0)
    plain = Stack(ChangesItsInput, 1)
    model = copy.deepcopy(plain)
    x = torch.randn(ROWS, WIDTH)
    plain(x.clone()).square().sum().backward()
    with store_on(device, disk_dir) as store:
        offloaded = OffloadModel(model, store, checkpoint_activation=True)
        loss = offloaded(x.to(device)).square().sum()
        loss.backward(retain_graph=True)
        assert_same_gradients(model, plain, device)
        model.zero_grad()
        loss.backward()
        assert_same_gradients(model, plain, device)


# Caches -------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {"vocab_size": 100, "pad_token_id": 0}


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1, **SHAPE
    )
    return transformers.GPT2LMHeadModel(config)


def bloom() -> Any:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **SHAPE)
    )


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **SHAPE,
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, **SHAPE
    )
    return transformers.T5ForConditionalGeneration(config)


WITH_CACHES = pytest.mark.parametrize("build", [gpt2, bloom, llama, t5], ids=lambda b: b.__name__)


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 99, (2, TOKENS))
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :4] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """Build in training mode, but without dropout, whose numbers depend on the device."""
    torch.manual_seed(0)
    model = build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.__dict__["dropout"] = 0.0
    return model


@WITH_CACHES
@ON_BOTH
def test_recompute_fills_a_cache_once(
    build: Callable[[], nn.Module], device: str, disk_dir: Path
) -> None:
    plain = built(build)
    model = copy.deepcopy(plain)
    batch = tokens()
    expected = plain(**batch)
    expected.loss.backward()
    with store_on(device, disk_dir) as store:
        offloaded = OffloadModel(model, store, checkpoint_activation=True)
        found = offloaded(**{name: each.to(device) for name, each in batch.items()})
        found.loss.backward(retain_graph=True)
        assert same(found.loss, expected.loss, device)
        assert_same_gradients(model, plain, device)
        model.zero_grad()
        found.loss.backward()
        assert_same_gradients(model, plain, device)
        assert found.past_key_values.get_seq_length() == TOKENS


def test_recompute_uses_a_filled_cache(disk_dir: Path) -> None:
    plain = built(llama)
    model = copy.deepcopy(plain)
    batch = tokens()
    with torch.no_grad():
        before = plain(input_ids=batch["input_ids"]).past_key_values
    inputs = {name: batch[name] for name in ("input_ids", "labels")}
    expected = plain(**inputs, past_key_values=copy.deepcopy(before))
    expected.loss.backward()
    with store_on("cpu", disk_dir) as store:
        offloaded = OffloadModel(model, store, checkpoint_activation=True)
        found = offloaded(**inputs, past_key_values=before)
        found.loss.backward()
        assert torch.equal(found.loss, expected.loss)
        assert_same_gradients(model, plain)
        assert found.past_key_values.get_seq_length() == 2 * TOKENS


def test_recompute_with_a_cache_needs_no_backward(disk_dir: Path) -> None:
    with store_on("cpu", disk_dir) as store:
        offloaded = OffloadModel(built(llama), store, checkpoint_activation=True)
        found = offloaded(**tokens())
        keys = [StorageWeakRef(x.keys.untyped_storage()) for x in found.past_key_values.layers]
        assert keys
        del found
        gc.collect()
        assert all(key.expired() for key in keys)
