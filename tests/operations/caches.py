"""Caches of diffusers, which reuse outputs of blocks from earlier steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers

from tests.operations.actions import Actions
from tests.operations.loras import lora_file
from tests.operations.operation import Table

CACHES = Table("Caches of diffusers")

STEPS = 3
ALL_STEPS = (-1, 1001)
LAST_STEP = (-1, 700)
"""Times of steps in which cached outputs may be reused: the first step has time 1000."""


def first_block(pipe: Any) -> Any:
    return diffusers.FirstBlockCacheConfig(threshold=1000)


def mag(pipe: Any) -> Any:
    return diffusers.MagCacheConfig(
        threshold=10, retention_ratio=0, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS
    )


def pyramid(pipe: Any) -> Any:
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=ALL_STEPS,
        current_timestep_callback=lambda: pipe.current_timestep,
    )


def faster(pipe: Any) -> Any:
    return diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=3,
        spatial_attention_timestep_skip_range=LAST_STEP,
        attention_weight_callback=lambda _: 0.3,
        current_timestep_callback=lambda: pipe.current_timestep,
        is_guidance_distilled=True,
        tensor_format="BCHW",
    )


def taylor(pipe: Any) -> Any:
    return diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1)


def switch_on_and_off(actions: Actions, config: Callable[[Any], Any]) -> None:
    """Switch a cache on and off while the pipeline is offloaded."""
    pipe = actions.load("flux")
    actions.offload(pipe)
    pipe.transformer.enable_cache(config(pipe))
    actions.run("flux", pipe, steps=STEPS)
    pipe.transformer.disable_cache()
    actions.run("flux", pipe, steps=STEPS)
    actions.check_that_it_changed()


@CACHES.row("`enable_cache(FirstBlockCacheConfig(...))` and `disable_cache` while offloaded")
def a_first_block_cache(actions: Actions) -> None:
    switch_on_and_off(actions, first_block)


@CACHES.row("`enable_cache` before offloading, `disable_cache` while offloaded")
def a_cache_from_before(actions: Actions) -> None:
    pipe = actions.load("flux")
    pipe.transformer.enable_cache(first_block(pipe))
    actions.offload(pipe)
    actions.run("flux", pipe, steps=STEPS)
    pipe.transformer.disable_cache()
    actions.run("flux", pipe, steps=STEPS)
    actions.check_that_it_changed()


@CACHES.row("`MagCacheConfig`")
def a_mag_cache(actions: Actions) -> None:
    switch_on_and_off(actions, mag)


@CACHES.row("`PyramidAttentionBroadcastConfig`")
def a_pyramid_attention_broadcast(actions: Actions) -> None:
    switch_on_and_off(actions, pyramid)


@CACHES.row("`FasterCacheConfig`")
def a_faster_cache(actions: Actions) -> None:
    switch_on_and_off(actions, faster)


@CACHES.row("`TaylorSeerCacheConfig`")
def a_taylor_seer_cache(actions: Actions) -> None:
    switch_on_and_off(actions, taylor)


@CACHES.row("a LoRA loaded and unloaded while a cache is on")
def a_lora_with_a_cache(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    pipe.transformer.enable_cache(first_block(pipe))
    actions.run("flux", pipe, steps=STEPS)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    actions.run("flux", pipe, steps=STEPS)
    actions.check_that_it_changed()
    pipe.transformer.disable_cache()
    actions.run("flux", pipe, steps=STEPS)
    actions.check_that_it_changed()
    pipe.unload_lora_weights()
    actions.run("flux", pipe, steps=STEPS)
    actions.check_that_it_changed()
