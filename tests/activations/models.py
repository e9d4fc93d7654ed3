"""One training step of each of five small real models: the loss, and how to checkpoint it.

The models are those of `tests.pipelines` at size tiny, in float32, with larger inputs: most of what
a step holds is activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierstore
from tests import pipelines

TOKENS = 32  # of a prompt
LATENTS = 32  # latents are 32x32, of which a patch is 2x2


@dataclass
class Trained:
    """A model and a batch for it."""

    kind: str
    model: Any
    inputs: dict[str, Any]

    def loss(self) -> torch.Tensor:
        """Return the loss of one forward, with the same random numbers every time."""
        torch.manual_seed(0)
        output = self.model(**self.inputs, return_dict=False)[0]
        return output.float().square().mean()

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors that have a gradient."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def parameters(self) -> list[torch.Tensor]:
        """Return the tensors that are on the device in any case."""
        return [*self.model.parameters(), *self.model.buffers()]

    def checkpoint(self, how: str) -> None:
        """Apply `"none"`, `"theirs"` (the library's) or `"ours"` (`checkpoint_activations`)."""
        if self.kind == "llama":
            self.model.gradient_checkpointing_disable()
        else:
            self.model.disable_gradient_checkpointing()
        if how == "none":
            return
        if self.kind == "llama":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            if how == "ours":
                self.model._set_gradient_checkpointing(True, tierstore.checkpoint_activations)
        else:
            ours = _checkpointed if how == "ours" else None
            self.model.enable_gradient_checkpointing(ours)


def _checkpointed(module: nn.Module, *args: Any) -> Any:
    return tierstore.checkpoint_activations(module.__call__, *args)


def trained(kind: str, directory: Path, device: str) -> Trained:
    """Load the model from a checkpoint of `tests.pipelines`, in training mode."""
    pipe = pipelines.load(kind, directory)
    model = {
        "llama": lambda: pipe,
        "sdxl": lambda: pipe.unet,
    }.get(kind, lambda: pipe.transformer)()
    model = model.float().train().to(device)
    random = functools.partial(torch.randn, generator=torch.Generator().manual_seed(3))
    made = INPUTS[kind](model.config, random)
    return Trained(kind, model, _moved(made, device))


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    return value.to(device)


Random = Callable[..., torch.Tensor]


def _flux(config: Any, random: Random) -> dict[str, Any]:
    side = LATENTS // 2
    places = torch.stack(
        [
            torch.zeros(side, side),
            torch.arange(side).float()[:, None].expand(side, side),
            torch.arange(side).float()[None].expand(side, side),
        ],
        dim=-1,
    )
    return {
        "hidden_states": random(1, side * side, config.in_channels),
        "encoder_hidden_states": random(1, TOKENS, config.joint_attention_dim),
        "pooled_projections": random(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": places.reshape(side * side, 3),
        "txt_ids": torch.zeros(TOKENS, 3),
    }


def _sd3(config: Any, random: Random) -> dict[str, Any]:
    return {
        "hidden_states": random(1, config.in_channels, LATENTS, LATENTS),
        "encoder_hidden_states": random(1, TOKENS, config.joint_attention_dim),
        "pooled_projections": random(1, config.pooled_projection_dim),
        "timestep": torch.tensor([500.0]),
    }


def _sdxl(config: Any, random: Random) -> dict[str, Any]:
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {
        "sample": random(1, config.in_channels, LATENTS, LATENTS),
        "encoder_hidden_states": random(1, TOKENS, config.cross_attention_dim),
        "timestep": torch.tensor([500.0]),
        "added_cond_kwargs": {
            "text_embeds": random(1, pooled),
            "time_ids": torch.tensor([[32.0, 32.0, 0.0, 0.0, 32.0, 32.0]]),
        },
    }


def _wan(config: Any, random: Random) -> dict[str, Any]:
    return {
        "hidden_states": random(1, config.in_channels, 2, LATENTS, LATENTS),
        "encoder_hidden_states": random(1, TOKENS, config.text_dim),
        "timestep": torch.tensor([500]),
    }


def _llama(config: Any, random: Random) -> dict[str, Any]:
    tokens = torch.randint(3, config.vocab_size, (4, 100), generator=random.keywords["generator"])
    return {"input_ids": tokens, "labels": tokens}


INPUTS: dict[str, Callable[[Any, Random], dict[str, Any]]] = {
    "flux": _flux,
    "sd3": _sd3,
    "sdxl": _sdxl,
    "wan": _wan,
    "llama": _llama,
}
