"""Operations that raise while a model is offloaded."""

from __future__ import annotations

import accelerate
import torch

from tests.accelerator import ACCELERATOR
from tests.operations.actions import Actions
from tests.operations.operation import Refusal, Table

REFUSED = Table("Refused")

MARKED = Refusal(
    ValueError,
    "group offloading enabled",
    "leave it out, or `disable_offload(handle)` first",
)
GUARDED = Refusal(
    ValueError,
    "in a tierstore.*do not offload it again",
    "leave it out, or `disable_offload(handle)` first",
)


@REFUSED.row("`pipe.enable_model_cpu_offload()`", refusal=MARKED, devices=(ACCELERATOR,))
def model_cpu_offload(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    pipe.enable_model_cpu_offload(device=actions.device)


@REFUSED.row("`pipe.enable_sequential_cpu_offload()`", refusal=MARKED, devices=(ACCELERATOR,))
def sequential_cpu_offload(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    pipe.enable_sequential_cpu_offload(device=actions.device)


@REFUSED.row("`pipe.enable_group_offload(...)`", refusal=GUARDED)
def group_offload(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    pipe.enable_group_offload(torch.device(actions.device), offload_type="leaf_level")


@REFUSED.row("`pipe.transformer.enable_group_offload(...)`", refusal=GUARDED)
def group_offload_of_a_component(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    pipe.transformer.enable_group_offload(
        torch.device(actions.device), offload_type="block_level", num_blocks_per_group=1
    )


@REFUSED.row("`accelerate.cpu_offload(pipe.transformer)` and the like", refusal=GUARDED)
def cpu_offload_of_accelerate(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    accelerate.cpu_offload(pipe.transformer, torch.device(actions.device))


@REFUSED.row(
    "`dispatch_model(pipe.transformer, store)`",
    refusal=Refusal(
        ValueError, "already offloaded to a store", "leave it out: it is on the store already"
    ),
)
def dispatch_a_component(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    actions.dispatch(pipe.transformer)


@REFUSED.row(
    '`pipe.text_encoder.to("cuda")`',
    refusal=Refusal(RuntimeError, "cannot be moved.*Do not move it", "leave it out"),
    devices=(ACCELERATOR,),
)
def move_a_text_encoder(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    pipe.text_encoder.to(actions.device)


@REFUSED.row(
    "a backward through weights that are not frozen",
    refusal=Refusal(
        RuntimeError,
        "backward needs weights that have left.*a TierStore holds them.*then OffloadModel",
        "`torch.no_grad()`; to train a few weights, [freeze the others](fine-tuning.md); to train "
        "all, [`OffloadModel`](training.md)",
    ),
)
def go_backward(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    given = latents.to(actions.device, pipe.vae.dtype)
    actions.run("flux", pipe)
    pipe.vae.decode(given, return_dict=False)[0].sum().backward()
