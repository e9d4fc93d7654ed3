"""The files of a directory that libraries read."""

from __future__ import annotations

import pytest

from tierstore.model.weight_files import main_file, variants_among

D = "diffusion_pytorch_model"
SHARDS = [f"{D}-{n:05}-of-00002.safetensors" for n in (1, 2)]
INDEX = f"{D}.safetensors.index.json"
FP16_SHARDS = [f"{D}.fp16-{n:05}-of-00002.safetensors" for n in (1, 2)]


@pytest.mark.parametrize(
    ("names", "variant", "chosen"),
    [
        (["config.json"], None, None),
        ([f"{D}.safetensors", "config.json"], None, f"{D}.safetensors"),
        ([*SHARDS, INDEX], None, INDEX),
        ([*SHARDS], None, None),
        ([f"{D}.safetensors", f"{D}.fp16.safetensors"], None, f"{D}.safetensors"),
        ([f"{D}.safetensors", f"{D}.fp16.safetensors"], "fp16", f"{D}.fp16.safetensors"),
        ([f"{D}.fp16.safetensors"], None, f"{D}.fp16.safetensors"),
        ([f"{D}.safetensors"], "fp16", f"{D}.safetensors"),
        (
            [*SHARDS, INDEX, *FP16_SHARDS, f"{D}.safetensors.index.fp16.json"],
            "fp16",
            f"{D}.safetensors.index.fp16.json",
        ),
        ([*SHARDS, INDEX, f"{D}.fp16.safetensors"], None, INDEX),
        (["model.safetensors", "consolidated.safetensors"], None, "model.safetensors"),
        (["sd_xl_base_1.0.safetensors", "sd_xl_base_1.0_0.9vae.safetensors"], None, None),
        (["model_index.json", "flux1-dev.safetensors"], None, None),
        (["model.onnx", "pytorch_model.bin", "models.safetensors"], None, None),
    ],
)
def test_weight_file_is_chosen(names: list[str], variant: str | None, chosen: str | None) -> None:
    for order in (names, names[::-1]):
        assert main_file(order, variant) == chosen


def test_weight_variants_are_found() -> None:
    names = [
        f"{D}.safetensors",
        f"{D}.fp16.safetensors",
        "model.bf16.safetensors",
        "a.b.safetensors",
    ]
    assert variants_among(names) == ["bf16", "fp16"]
