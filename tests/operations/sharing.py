"""Several pipelines that share models or run side by side, and pipelines with replaced parts."""

from __future__ import annotations

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import diffusers
import torch

from tests import pipelines
from tests.operations import parts
from tests.operations.actions import Actions
from tests.operations.operation import Table

SHARING = Table("Several pipelines, and other parts")


def image_to_image(actions: Actions, pipe: Any, **arguments: Any) -> None:
    """Compute an image from another one."""
    call: dict[str, Any] = {
        "prompt": pipelines.PROMPT,
        "image": parts.image().to(actions.device),
        "strength": 0.7,
        "num_inference_steps": 3,
        "output_type": "pt",
        "return_dict": False,
        **arguments,
    }
    actions.compute(lambda: pipe(**call, generator=torch.Generator().manual_seed(0))[0])


@SHARING.row("image to image by `from_pipe(pipe, torch_dtype=pipe.dtype)`")
def image_to_image_by_from_pipe(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    other = diffusers.FluxImg2ImgPipeline.from_pipe(pipe, torch_dtype=pipe.dtype)
    size = {"height": parts.IMAGE_SIZE, "width": parts.IMAGE_SIZE, "max_sequence_length": 32}
    image_to_image(actions, pipelines.quiet(other), **size)
    actions.run("flux", pipe)


@SHARING.row(
    "`from_pipe(pipe)`",
    note="diffusers casts the models to float32, for both pipelines: say `torch_dtype`",
)
def from_pipe_without_a_dtype(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    other = diffusers.FluxImg2ImgPipeline.from_pipe(pipe)
    size = {"height": parts.IMAGE_SIZE, "width": parts.IMAGE_SIZE, "max_sequence_length": 32}
    image_to_image(actions, pipelines.quiet(other), **size)


@SHARING.row("inpainting by the other pipeline's `components`")
def inpainting_by_components(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    other = diffusers.StableDiffusionXLInpaintPipeline(**pipe.components, add_watermarker=False)
    mask = torch.zeros(1, 1, parts.IMAGE_SIZE, parts.IMAGE_SIZE)
    mask[..., 4:12, 4:12] = 1
    size = {"height": parts.IMAGE_SIZE, "width": parts.IMAGE_SIZE}
    image_to_image(actions, pipelines.quiet(other), mask_image=mask.to(actions.device), **size)
    actions.run("sdxl", pipe)


@SHARING.row("`AutoPipelineForImage2Image.from_pipe`", note="keeps the models as they are")
def an_auto_pipeline(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    other = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    image_to_image(actions, pipelines.quiet(other))
    actions.run("sdxl", pipe)


@SHARING.row("two pipelines, alternately")
def two_pipelines(actions: Actions) -> None:
    flux, sd3 = actions.load("flux"), actions.load("sd3")
    actions.offload(flux)
    actions.offload(sd3)
    for _ in range(2):
        actions.run("flux", flux)
        actions.run("sd3", sd3)


@SHARING.row("two pipelines, on two threads")
def two_pipelines_on_two_threads(actions: Actions) -> None:
    pipes = {kind: actions.load(kind) for kind in ("flux", "sd3")}
    for pipe in pipes.values():
        actions.offload(pipe)

    def run(kind: str) -> torch.Tensor:
        return pipelines.run(kind, pipes[kind], steps=2, device=actions.device).flatten()

    def both() -> torch.Tensor:
        with ThreadPoolExecutor(2) as threads:
            return torch.cat(list(threads.map(run, pipes)))

    actions.compute(both)


@SHARING.row(
    "two pipelines of the same models, on two threads",
    note="each with a scheduler and tokenizers of its own: those cannot be shared by threads",
)
def the_same_models_on_two_threads(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    own = {n: copy.deepcopy(getattr(pipe, n)) for n in ("scheduler", "tokenizer", "tokenizer_2")}
    other = pipelines.quiet(diffusers.FluxPipeline(**{**pipe.components, **own}))

    def run(seed: int, each: Any) -> torch.Tensor:
        return pipelines.run("flux", each, steps=2, seed=seed, device=actions.device)

    def both() -> torch.Tensor:
        with ThreadPoolExecutor(2) as threads:
            return torch.cat(list(threads.map(run, (0, 1), (pipe, other))))

    actions.compute(both)


@SHARING.row("one pipeline, called by two threads one after the other")
def one_pipeline_on_two_threads(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(actions.run, "flux", pipe).result()
    actions.run("flux", pipe)


@SHARING.row("another component, then `enable_group_offload` again: `pipe.vae = ...`")
def another_component(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    pipe.vae = another_vae(actions)
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()


def another_vae(actions: Actions) -> Any:
    model: Any = diffusers.AutoencoderKL
    folder = actions.checkpoint("another vae")
    return model.from_pretrained(folder, torch_dtype=pipelines.DTYPE)


@SHARING.row("a component that is not offloaded: `exclude_modules`")
def an_excluded_component(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe, exclude_modules="vae")
    actions.run("sdxl", pipe)


@SHARING.row("one component only, the others moved to the device as usual")
def one_component_only(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe.unet)
    for name, component in pipelines.components(pipe).items():
        if name != "unet":
            component.to(actions.device)
    actions.run("sdxl", pipe)


@SHARING.row("`enable_group_offload` again, with other arguments")
def offload_again(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    actions.offload(pipe, offload_type="leaf_level")
    actions.run("flux", pipe)


@SHARING.row("one module replaced: `pipe.transformer.proj_out = nn.Linear(...)`")
def another_module(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    old = pipe.transformer.proj_out
    new = torch.nn.Linear(old.in_features, old.out_features, dtype=pipelines.DTYPE)
    generator = torch.Generator().manual_seed(0)
    state = {n: torch.randn(t.shape, generator=generator) for n, t in new.state_dict().items()}
    new.load_state_dict(state)
    with actions.on_the_cpu(pipe):
        pipe.transformer.proj_out = new
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@SHARING.row("another call while one is going on, from its callback")
def a_call_within_a_call(actions: Actions) -> None:
    flux, sd3 = actions.load("flux"), actions.load("sd3")
    actions.offload(flux)
    actions.offload(sd3)
    inner: list[torch.Tensor] = []
    run = functools.partial(pipelines.run, "sd3", sd3, steps=1, device=actions.device)

    def preview(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        inner.append(run())
        return {}

    actions.run("flux", flux, callback_on_step_end=preview)
    actions.outputs += inner
    assert len(inner) == 2
