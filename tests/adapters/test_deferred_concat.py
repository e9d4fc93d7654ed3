"""Weights that a library concatenates from a checkpoint: done once, cached, and correct."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.tensors import assert_same
from tests.store.helpers import open_store
from tierstore import from_pretrained

SIDE = 192
BUDGET = 4 << 20


class Counting(TorchDispatchMode):
    """Counts the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.done[str(function)] += 1
        return function(*args, **(kwargs or {}))

    @property
    def joins(self) -> int:
        return sum(self.done[f"aten.{name}.out"] for name in ("stack", "cat"))


class Experts(nn.Module):
    """Its weights are concatenated from those of its checkpoint, in ways that libraries use."""

    def __init__(self, tensors: dict[str, torch.Tensor], aside: object) -> None:
        super().__init__()
        self.aside = aside
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.parameters():
            x = torch.tanh(x @ weight.reshape(-1, SIDE).T[:, :SIDE])
        return x

    @classmethod
    @torch.no_grad()
    def from_pretrained(cls, path: str, *, dtype: torch.dtype) -> Experts:
        held = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
        gates, ups = (torch.stack([held[f"{n}.{i}"] for i in range(4)]) for n in ("gate", "up"))
        changed = torch.cat([held["gate.0"], held["up.0"]])
        changed[0] += 1
        halves = torch.cat([held["gate.1"], held["up.1"]]).chunk(2)
        return cls(
            {
                "both": torch.cat([gates, ups], dim=1),
                "gates": gates,
                "changed": changed,
                "part": halves[1],
                "doubled": torch.stack([held["up.2"], held["up.3"]]) * 2,
                "turned": torch.stack([held["up.2"].T, held["up.3"].T]),
                "mixed": torch.cat([held["up.3"].double(), held["gate.3"].double()]),
            },
            {"somewhere": torch.stack([held["up.0"], held["up.1"]])},
        )


@pytest.fixture
def path(tmp_path: Path) -> str:
    generator = torch.Generator().manual_seed(0)
    names = [f"{name}.{i}" for name in ("gate", "up") for i in range(4)]
    found = str(tmp_path / "model.safetensors")
    save_file({n: torch.randn(SIDE, SIDE, generator=generator) / SIDE**0.5 for n in names}, found)
    return found


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_concatenated_weights_are_right_and_made_once(
    dtype: torch.dtype, path: str, disk_dir: Path
) -> None:
    plain = Experts.from_pretrained(path, dtype=dtype)
    joins = []
    for start in ("first", "second"):
        with open_store(disk_dir, BUDGET) as store:
            with Counting() as counting:
                model = from_pretrained(Experts, path, store, dtype=dtype)
            joins.append(counting.joins)
            assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))
            assert torch.equal(model.aside["somewhere"], plain.aside["somewhere"])
            assert (store.stats().bytes_written > 0) == (start == "first")
    # The second load joins only the changed weight, the one whose half is a weight, the doubled
    # one, and the one in `aside`.
    assert joins[1] < joins[0]


def test_changed_file_is_concatenated_again(path: str, disk_dir: Path) -> None:
    with open_store(disk_dir, BUDGET) as store:
        from_pretrained(Experts, path, store, dtype=torch.float32)
    tensors = load_file(path)
    save_file({name: tensor.clone() + 1 for name, tensor in tensors.items()}, path)
    plain = Experts.from_pretrained(path, dtype=torch.float32)
    with open_store(disk_dir, BUDGET) as store:
        model = from_pretrained(Experts, path, store, dtype=torch.float32)
        assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_experts_of_transformers_are_stacked_once(tmp_path: Path, disk_dir: Path) -> None:
    config = transformers.Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=16,
        num_experts_per_tok=2,
    )
    kind = transformers.Qwen2MoeForCausalLM
    kind(config).save_pretrained(tmp_path / "model")
    plain = kind.from_pretrained(tmp_path / "model").eval()
    tokens = torch.arange(8)[None]
    joins = []
    for start in ("first", "second"):
        with open_store(disk_dir, 400_000) as store:
            with Counting() as counting:
                model = from_pretrained(kind, tmp_path / "model", store).eval()
            joins.append(counting.joins)
            with torch.no_grad():
                assert torch.equal(model(tokens).logits, plain(tokens).logits)
            assert store.stats().bytes_read > 0
            assert (store.stats().bytes_written > 0) == (start == "first")
    assert joins[0] > 0
    assert joins[1] == 0
