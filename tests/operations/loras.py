"""LoRAs of diffusers pipelines."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch

from tests.operations.actions import Actions
from tests.operations.operation import Table

LORAS = Table("LoRAs")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def lora_file(
    pipe: Any,
    path: Path,
    component: str = "transformer",
    rank: int = 4,
    targets: list[str] = TARGETS,
    **config: Any,
) -> Path:
    """Save a LoRA for a pipeline as trainers do, with random weights that its path seeds."""
    root: Any = getattr(pipe, component)
    with torch.device("meta"):
        twin = type(root).from_config(root.config)
    adapted = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, **config)
    twin.add_adapter(adapted)
    state = peft.get_peft_model_state_dict(twin)
    generator = torch.Generator().manual_seed(zlib.crc32(path.name.encode()))
    drawn: Mapping[str, torch.Tensor] = {
        name: 0.3 * torch.randn(weight.shape, generator=generator).bfloat16()
        for name, weight in state.items()
    }
    type(pipe).save_lora_weights(path, **{f"{component}_lora_layers": drawn})
    return path


@LORAS.row("`load_lora_weights` before offloading")
def load_a_lora_before(actions: Actions) -> None:
    pipe = actions.load("flux")
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    actions.offload(pipe)
    actions.run("flux", pipe)


@LORAS.row("`load_lora_weights` and `unload_lora_weights` while offloaded")
def load_and_unload_a_lora(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    actions.run("flux", pipe)
    actions.check_that_it_changed()
    pipe.unload_lora_weights()
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@LORAS.row("`fuse_lora` and `unfuse_lora`", note="computed on the CPU")
def fuse_and_unfuse_a_lora(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    with actions.on_the_cpu(pipe):
        pipe.fuse_lora(lora_scale=0.7)
    actions.run("flux", pipe)
    with actions.on_the_cpu(pipe):
        pipe.unfuse_lora()
    pipe.disable_lora()
    actions.run("flux", pipe)
    actions.check_that_it_changed()
