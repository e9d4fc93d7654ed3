"""A pipeline whose models were offloaded one by one, not through the pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline

from tests.store.helpers import open_store
from tierstore import dispatch_model, enable_group_offload
from tierstore.adapters.components import _convert_what_is_offloaded


class Pipe(DiffusionPipeline):
    def __init__(self, vae: AutoencoderKL, other: AutoencoderKL) -> None:
        super().__init__()
        self.register_modules(vae=vae, other=other)


def small_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=["DownEncoderBlock2D"],
        up_block_types=["UpDecoderBlock2D"],
        latent_channels=4,
    ).eval()


@pytest.fixture
def untouched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which no pipeline was ever given to tierstore."""
    monkeypatch.setattr(DiffusionPipeline, "to", inspect.unwrap(DiffusionPipeline.to))
    _convert_what_is_offloaded.cache_clear()


@pytest.mark.usefixtures("untouched_class")
@pytest.mark.parametrize("offload", [enable_group_offload, dispatch_model])
@torch.no_grad()
def test_pipeline_casts_models_offloaded_one_by_one(
    offload: Callable[..., Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    pipe = Pipe(small_vae(), small_vae())
    x = torch.randn(1, 3, 8, 8)
    with open_store(tmp_path, 1 << 20) as store:
        offload(pipe.vae, store)
        before = pipe.vae(x).sample
        pipe.to(torch.float64)
        assert pipe.vae.dtype is pipe.other.dtype is torch.float64
        read = store.stats().bytes_read
        after = pipe.vae(x.double()).sample
        assert store.stats().bytes_read > read
        assert torch.allclose(after.float(), before, atol=1e-5)
        assert not torch.equal(after, before.double())
