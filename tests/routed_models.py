"""Models with experts that a router chooses: those of transformers, and small ones of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

KINDS = ("mixtral", "qwen", "gptoss", "list")
STACKED = KINDS[:3]
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
WIDTH, EXPERTS, TOP = 64, 16, 2

_COMMON = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def build(kind: str, implementation: str = "eager", layers: int = 2) -> Any:
    """Build a model for inference, with the same weights each time."""
    torch.manual_seed(0)
    if kind == "list":
        return Listed(layers).eval()
    common: dict[str, Any] = {**_COMMON, "num_hidden_layers": layers}
    config: Any
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            intermediate_size=96, num_local_experts=16, num_experts_per_tok=2, **common
        )
        cls: Any = transformers.MixtralForCausalLM
    elif kind == "qwen":
        config = transformers.Qwen2MoeConfig(
            intermediate_size=96,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            num_experts=60,
            num_experts_per_tok=4,
            **common,
        )
        cls = transformers.Qwen2MoeForCausalLM
    else:
        config = transformers.GptOssConfig(
            intermediate_size=64, num_local_experts=16, num_experts_per_tok=4, head_dim=16, **common
        )
        cls = transformers.GptOssForCausalLM
    model = cls._from_config(config, experts_implementation=implementation).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks", "router.weight", "gate.weight")):
            # initial values are so small that a lost weight would not show
            parameter.data.normal_()
    return model


def inputs(kind: str) -> torch.Tensor:
    """Return a batch of one sequence of tokens."""
    return torch.arange(1, 6 if kind == "list" else 12)[None]


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of each token."""
    found = model(ids)
    values: torch.Tensor = getattr(found, "logits", found)
    return values


@torch.no_grad()
def generate(model: Any, ids: torch.Tensor, count: int = 6) -> torch.Tensor:
    """Return the sequence, and `count` more tokens by greedy decoding."""
    if isinstance(model, Listed):
        for _ in range(count):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
        return ids
    found: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return found


class MLP(nn.Sequential):
    """One expert."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 96), nn.SiLU(), nn.Linear(96, WIDTH))


class Sparse(nn.Module):
    """Experts in a list, as in remote code."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(MLP() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(TOP, dim=-1)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, at = torch.where(chosen == expert)
            out[rows] += self.experts[expert](x[rows]) * weights[rows, at, None]
        return out


class Listed(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(Sparse() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)[0]
        for layer in self.layers:
            x = x + layer(x)
        found: torch.Tensor = self.head(x)[None]
        return found


Way = Callable[["Stacked", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Stacked(nn.Module):
    """Experts as one stack `w` (experts, out, in). The forward uses it in one `way`."""

    def __init__(self, way: Way, experts: int = EXPERTS, width: int = WIDTH) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.num_experts = experts
        self.w = nn.Parameter(torch.randn(experts, width, width, generator=generator) / width**0.5)
        self.way = way

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self.way(self, hidden_states, top_k_index, top_k_weights)


def one_by_one(
    experts: Stacked, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run the experts as `experts_implementation="eager"` does."""
    out = torch.zeros_like(x)
    for expert in index.unique():
        rows, at = torch.where(index == expert)
        out[rows] += (x[rows] @ experts.w[expert].T) * weights[rows, at, None]
    return out


class Routed(nn.Module):
    """A layer around `Stacked`: the first element of each row chooses its expert."""

    def __init__(self, way: Way = one_by_one, experts: int = EXPERTS) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = Stacked(way, experts)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        index = chosen.to(x.device)
        weights = torch.full(index.shape, 1 / index.shape[1], dtype=x.dtype, device=x.device)
        found: torch.Tensor = x + self.experts(torch.tanh(self.dense(x)), index, weights)
        return found


def rows(count: int = 4) -> torch.Tensor:
    """Return the input of `Routed`."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2))


class Deep(nn.Module):
    """Layers of `Routed`, each with a list of the experts that its rows use."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(layers))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, chosen)
        return x
