"""Silent failures of diffusers' own disk offload, each shown in diffusers as well.

Here: which weights run. Values seen from outside are in test_weights_while_away.py, changes of
weights in test_changes.py, damage in test_damage.py. The exhibits run diffusers on the CPU with
`offload_to_disk_path`; where one fails, diffusers has fixed that fault, and the exhibit may be
deleted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import pipelines
from tests.adapters.conftest import (
    DEVICES,
    Checkpoints,
    References,
    a_third_of,
    diffusers_offload,
)
from tests.store.helpers import open_store
from tierstore import enable_group_offload

pytestmark = pytest.mark.full(
    "model and partition are independent; test_parity.py covers both devices",
    keep="a third",
)

KINDS_WITH_TIES = {"flux": "text_encoder_2", "wan": "text_encoder"}


# (1) A directory that another model used before ---------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("adopted", "cast"))
@pytest.mark.parametrize("kind", ("flux", "llama"))
def test_directory_used_by_another_model_runs_the_right_one(
    kind: str, dtype: torch.dtype, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    names = pipelines.components(pipelines.load(kind, checkpoint(kind)))
    directories = (checkpoint(kind), checkpoint(kind, **dict.fromkeys(names, 1)))
    outputs = []
    for directory in directories:
        expected = pipelines.run(kind, pipelines.load(kind, directory, torch_dtype=dtype))
        pipe = pipelines.load(kind, directory, torch_dtype=dtype)
        with (
            a_third_of(pipe, disk_dir, "cpu") as store,
            enable_group_offload(pipe, store),
        ):
            assert torch.equal(pipelines.run(kind, pipe), expected)
            assert (store.stats().bytes_written > 0) == (dtype == torch.float32)
        outputs.append(expected)
    assert not torch.equal(*outputs)


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
@pytest.mark.parametrize("kind", ("flux", "llama"))
def test_diffusers_directory_used_before_runs_the_first_model(
    kind: str, checkpoint: Checkpoints, reference: References, tmp_path: Path
) -> None:
    first = pipelines.load(kind, checkpoint(kind))
    diffusers_offload(first, tmp_path)
    assert torch.equal(pipelines.run(kind, first), reference(kind).output)
    others = dict.fromkeys(pipelines.components(first), 1)
    second = pipelines.load(kind, checkpoint(kind, **others))
    diffusers_offload(second, tmp_path)
    assert torch.equal(pipelines.run(kind, second), reference(kind).output)


# (2) Two components of one class ------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ("wan", "sd3"))
def test_components_of_one_class_keep_their_weights(
    kind: str, device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference(kind, device=device)
    pipe = pipelines.load(kind, checkpoint(kind))
    with (
        a_third_of(pipe, disk_dir, device) as store,
        enable_group_offload(pipe, store) as handle,
    ):
        for _ in range(2):
            assert torch.equal(pipelines.run(kind, pipe, device=device), expected.output)
        assert handle.stats().bytes_read > expected.needed


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
@pytest.mark.parametrize("kind", ("wan", "sd3"))
def test_diffusers_components_of_one_class_mix_weights(
    kind: str, checkpoint: Checkpoints, reference: References, tmp_path: Path
) -> None:
    pipe = pipelines.load(kind, checkpoint(kind))
    diffusers_offload(pipe, tmp_path)
    assert not torch.equal(pipelines.run(kind, pipe), reference(kind).output)


# (3) Parameters tied across groups ----------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS_WITH_TIES)
def test_t5_at_leaf_level_equals_plain(
    kind: str, device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    encoder = text_encoder(kind, checkpoint)
    tokens = torch.arange(3, 99).reshape(2, 48)
    expected = encode(encoder.to(device), tokens, device)
    encoder = text_encoder(kind, checkpoint)
    assert encoder.shared.weight is encoder.get_input_embeddings().weight
    with (
        a_third_of(encoder, disk_dir, device) as store,
        enable_group_offload(encoder, store, offload_type="leaf_level"),
    ):
        for _ in range(2):
            assert torch.equal(encode(encoder, tokens, device), expected)


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
@pytest.mark.parametrize("kind", KINDS_WITH_TIES)
def test_diffusers_t5_at_leaf_level_is_wrong(
    kind: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    tokens = torch.arange(3, 99).reshape(2, 48)
    expected = encode(text_encoder(kind, checkpoint), tokens, "cpu")
    encoder = text_encoder(kind, checkpoint)
    diffusers_offload(encoder, tmp_path, "leaf_level")
    assert not torch.equal(encode(encoder, tokens, "cpu"), expected)


def text_encoder(kind: str, checkpoint: Checkpoints) -> Any:
    return getattr(pipelines.load(kind, checkpoint(kind)), KINDS_WITH_TIES[kind])


@torch.no_grad()
def encode(encoder: nn.Module, tokens: torch.Tensor, device: str) -> torch.Tensor:
    return encoder(tokens.to(device)).last_hidden_state.cpu()


class Tied(nn.Module):
    """Four blocks: the first and the last share a weight, the other two overlapping biases."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight
        together = torch.randn(2, 64)
        self.blocks[1].bias = nn.Parameter(together[0])
        self.blocks[2].bias = nn.Parameter(together.flatten()[32:96])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "cut",
    ({"num_blocks_per_group": 1}, {"offload_type": "leaf_level", "group_size": 1}),
    ids=("block_level", "leaf_level"),
)
@torch.no_grad()
def test_parameters_tied_across_groups_equal_plain(
    cut: dict[str, Any], device: str, disk_dir: Path
) -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(5, 64)
    expected = model.to(device)(x.to(device)).cpu()
    model.to("cpu")
    with (
        open_store(disk_dir, 3 * 24576, device) as store,
        enable_group_offload(model, store, **cut) as handle,
    ):
        assert len(handle.groups) >= 3
        tied = model.blocks[0].weight.data_ptr(), model.blocks[3].weight.data_ptr()
        assert tied[0] == tied[1]
        for _ in range(2):
            assert torch.equal(model(x).cpu(), expected)
