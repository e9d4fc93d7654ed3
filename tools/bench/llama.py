"""A Llama of any size with random weights, and its text generation, token by token.

Its vocabulary is small, so almost all bytes are in its layers.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.models import kept, weight_bytes

__all__ = [
    "VOCABULARY",
    "Shape",
    "Written",
    "empty_for",
    "save",
    "warm_up",
    "weight_bytes",
    "write",
]

import accelerate
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from transformers.generation.streamers import BaseStreamer

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

HEAD = 64
VOCABULARY = 2048
PROMPT = 16


@dataclass(frozen=True)
class Shape:
    """Hidden size, intermediate size and layers. The weights are random float32."""

    hidden: int
    intermediate: int
    layers: int
    shard: str = "200MB"
    seed: int = 0

    def config(self) -> transformers.LlamaConfig:
        """Return the transformers configuration of this model."""
        return transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // HEAD,
            num_key_value_heads=self.hidden // HEAD,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=None,  # never stop early
            dtype="float32",
        )


@torch.no_grad()
def save(shape: Shape, directory: Path) -> Path:
    """Write a sharded checkpoint with random weights, or reuse that of an earlier run."""

    def write() -> None:
        generator = torch.Generator().manual_seed(shape.seed)
        tensors = {}
        for name, weight in empty(shape.config()).state_dict().items():
            if weight.ndim == 1:  # a norm
                tensors[name] = torch.ones(weight.shape)
            else:
                edge = math.sqrt(3 / weight.shape[-1])  # a variance of 1 / fan-in
                made = torch.empty(weight.shape)
                tensors[name] = made.uniform_(-edge, edge, generator=generator)
        save_torch_state_dict(tensors, directory, max_shard_size=shape.shard)
        shape.config().save_pretrained(directory)

    return kept(shape, directory, write)


def empty(config: transformers.LlamaConfig) -> Any:
    """Return the model with its weights on meta; its buffers have values."""
    with accelerate.init_empty_weights():
        return transformers.LlamaForCausalLM(config).eval()


def empty_for(checkpoint: Path) -> Any:
    """Return the model of a checkpoint, with its weights on meta."""
    return empty(transformers.LlamaConfig.from_pretrained(checkpoint))


@dataclass
class Written(BaseStreamer):
    """Generated text: tokens, their logits, and the time of each (seconds)."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None

    def put(self, value: torch.Tensor) -> None:
        """Record a token. transformers calls this with the prompt first."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """End the text. transformers calls this."""


@torch.no_grad()
def write(model: Any, count: int, written: Written | None = None) -> Written:
    """Generate `count` tokens greedily."""
    written = written or Written()
    prompt = torch.arange(1, PROMPT + 1)[None]
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        use_cache=True,
        streamer=written,
        output_logits=True,
        return_dict_in_generate=True,
    )
    written.tokens = found.sequences[0, PROMPT:].tolist()
    written.logits = torch.cat(found.logits).float().cpu()
    return written


def warm_up() -> None:
    """Import lazy modules and start threads, before any measurement."""
    write(transformers.LlamaForCausalLM(Shape(HEAD, HEAD, 1).config()).eval(), 2)
