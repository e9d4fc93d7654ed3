"""A GGUF file is read in place: its quantised weights are neither written nor kept in memory.

Weights that are not quantised there (norms and biases, float32) are cast to the pipeline's dtype
and written once, as any cast is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

from tests import pipelines
from tests.adapters.conftest import Checkpoints, checkpoint
from tests.quantised.gguf_files import TYPES, write_gguf
from tests.quantised.kinds import weights_of
from tests.store.helpers import on_both, open_store
from tierstore import enable_group_offload, from_single_file
from tierstore.adapters.codecs import weight_bytes

__all__ = ["checkpoint"]

PAGE = 4096


@pytest.fixture(scope="module")
def flux(checkpoint: Checkpoints) -> Path:
    return checkpoint("flux")


def arguments(flux: Path) -> dict[str, Any]:
    return {
        "quantization_config": GGUFQuantizationConfig(compute_dtype=pipelines.DTYPE),
        "config": str(flux / "transformer"),
        "torch_dtype": pipelines.DTYPE,
    }


def pipeline_of(flux: Path, transformer: Any) -> Any:
    pipe = pipelines.load("flux", flux)
    pipe.transformer = transformer
    return pipelines.quiet(pipe)


@on_both
@pytest.mark.parametrize("kind", TYPES)
def test_gguf_file_is_read_in_place(
    kind: str, device: str, flux: Path, tmp_path: Path, disk_dir: Path
) -> None:
    path = tmp_path / f"{kind}.gguf"
    write_gguf(pipelines.load("flux", flux).transformer, path, kind)
    plain = FluxTransformer2DModel.from_single_file(path, **arguments(flux))
    pipe = pipeline_of(flux, plain).to(device)
    expected = pipelines.run("flux", pipe, device=device)
    nbytes = weight_bytes(weights_of(pipe))
    with open_store(disk_dir, int(0.3 * nbytes), device) as store:
        model = from_single_file(FluxTransformer2DModel, path, store, **arguments(flux))
        quantised = {p.quant_type for p in model.parameters() if hasattr(p, "quant_type")}
        assert kind in {each.name for each in quantised}
        pipe = pipeline_of(flux, model)
        enable_group_offload(pipe, store)
        for _ in range(2):
            assert torch.equal(pipelines.run("flux", pipe, device=device), expected)
        stats = store.stats()
        cast = sum(p.nbytes for p in model.parameters() if not hasattr(p, "quant_type"))
        written = stats.bytes_written - cast
        assert 0 <= written <= PAGE * len(store.snapshot().groups)  # whole pages for each file
        assert stats.bytes_read > path.stat().st_size
        assert stats.peak_bytes["HOST"] <= int(0.3 * nbytes)


def test_file_that_is_no_gguf_raises(flux: Path, tmp_path: Path, disk_dir: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUX" * 64)
    with open_store(disk_dir) as store, pytest.raises(ValueError, match="GGUF magic"):
        from_single_file(FluxTransformer2DModel, path, store, **arguments(flux))
