"""A Llama of any size with random weights, and the text that it writes, token by token.

Its vocabulary is small, so that all its bytes are in its layers.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is built here

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
RECIPE = "recipe.json"


@dataclass(frozen=True)
class Shape:
    """Numbers per token, in the block between, and layers. Its weights are random float32."""

    hidden: int
    intermediate: int
    layers: int
    shard: str = "200MB"
    seed: int = 0

    def config(self) -> transformers.LlamaConfig:
        """What transformers calls this model."""
        return transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // HEAD,
            num_key_value_heads=self.hidden // HEAD,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=None,  # it never ends by itself
            dtype="float32",
        )


@torch.no_grad()
def save(shape: Shape, directory: Path) -> Path:
    """A sharded checkpoint with random weights. One that is there from an earlier run is kept."""
    recipe = directory / RECIPE
    if recipe.exists() and json.loads(recipe.read_text()) == asdict(shape):
        return directory
    generator = torch.Generator().manual_seed(shape.seed)
    tensors = {}
    for name, weight in empty(shape.config()).state_dict().items():
        if weight.ndim == 1:  # a norm
            tensors[name] = torch.ones(weight.shape)
        else:
            edge = math.sqrt(3 / weight.shape[-1])  # a variance of 1 / numbers that are added up
            made = torch.empty(weight.shape)
            tensors[name] = made.uniform_(-edge, edge, generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, directory, max_shard_size=shape.shard)
    shape.config().save_pretrained(directory)
    recipe.write_text(json.dumps(asdict(shape)))
    return directory


def empty(config: transformers.LlamaConfig) -> Any:
    """The model with its weights on meta; its buffers are there."""
    with accelerate.init_empty_weights():
        return transformers.LlamaForCausalLM(config).eval()


def empty_for(checkpoint: Path) -> Any:
    """The model of a checkpoint, with its weights on meta."""
    return empty(transformers.LlamaConfig.from_pretrained(checkpoint))


def weight_bytes(model: Any) -> int:
    """Bytes of all weights."""
    return sum(parameter.nbytes for parameter in model.parameters())


@dataclass
class Written(BaseStreamer):
    """What a model has written: tokens, their logits, and when each was there (seconds)."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None

    def put(self, value: torch.Tensor) -> None:
        """Called by transformers, with the prompt first."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called by transformers."""


@torch.no_grad()
def write(model: Any, count: int, written: Written | None = None) -> Written:
    """Have a model write `count` tokens, the likeliest each time."""
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
    """Import what is imported late, and start the threads: no part of any model's cost."""
    write(transformers.LlamaForCausalLM(Shape(HEAD, HEAD, 1).config()).eval(), 2)
