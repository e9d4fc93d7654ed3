"""Load a model in one of the usual ways, put it on a store, and print how much memory that takes.

    python -m tests.budget.enabled MODEL WAY CHECKPOINT DISK_DIR RAM_BUDGET

The allocator is as users have it. Only anonymous memory counts, above the process's before there
was a model: a map of a file belongs to the page cache. `python -m tests.budget.enabled save MODEL
CHECKPOINT` writes the checkpoint, in float32.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
import transformers
from torch import nn

from tierstore import (
    TierStore,
    disable_offload,
    dispatch_model,
    enable_group_offload,
    load_checkpoint_and_dispatch,
)
from tools.bench.anonymous import anonymous_memory

ROTARY = (16, 56, 56)


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=8,
        num_attention_heads=6,
        joint_attention_dim=256,
        pooled_projection_dim=128,
        axes_dims_rope=ROTARY,
    )


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=32,
        num_layers=6,
        num_attention_heads=12,
        attention_head_dim=64,
        joint_attention_dim=256,
        caption_projection_dim=768,
        pooled_projection_dim=256,
        pos_embed_max_size=16,
    )


def sdxl() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128, 512),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 3),
        attention_head_dim=(2, 4, 8),
        cross_attention_dim=512,
        use_linear_projection=True,
    )


def wan() -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=6,
        ffn_dim=3072,
        num_layers=6,
        in_channels=16,
        out_channels=16,
        text_dim=256,
        freq_dim=64,
    )


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "flux": flux,
    "sd3": sd3,
    "sdxl": sdxl,
    "wan": wan,
    "llama": llama,
}


def loaded(build: Callable[[], nn.Module], way: str, checkpoint: Path) -> Any:
    """Return the model, not yet on a store."""
    if way == "in memory":
        return build()
    if way.startswith("dispatched"):
        with accelerate.init_empty_weights(include_buffers=False):
            return build()
    with torch.device("meta"):
        kind: Any = type(build())
    dtype = {"as is": torch.float32, "cast": torch.bfloat16}[way]
    name = "dtype" if issubclass(kind, transformers.PreTrainedModel) else "torch_dtype"
    return kind.from_pretrained(checkpoint, **{name: dtype})


def offloaded(model: Any, way: str, checkpoint: Path, store: TierStore) -> Callable[[], Any]:
    """Put the model on the store. Return a function that undoes it."""
    if way.startswith("dispatched"):
        dtype = torch.bfloat16 if way == "dispatched, cast" else None
        load_checkpoint_and_dispatch(model, checkpoint, store, dtype=dtype)
        return lambda: disable_offload(model)
    if isinstance(model, diffusers.ModelMixin):
        handle = enable_group_offload(model, store)
        return lambda: disable_offload(handle)
    dispatch_model(model, store)
    return lambda: disable_offload(model)


class Excess:
    """The peak of anonymous memory plus the bytes written until then.

    The sum stays constant while weights leave memory for the disk.
    """

    def __init__(self, store: TierStore) -> None:
        self.nbytes = 0
        self._store = store
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._done.wait(0.005):
            written = self._store.stats().bytes_written  # first: memory may fall in between
            self.nbytes = max(self.nbytes, written + anonymous_memory())

    def __enter__(self) -> Excess:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def main(name: str, way: str, checkpoint: str, disk_dir: str, budget: str) -> None:
    with torch.device("meta"):
        MODELS[name]()  # imports its libraries
    start = anonymous_memory()
    with TierStore(budget, Path(disk_dir), device="cpu") as store:
        model = loaded(MODELS[name], way, Path(checkpoint))
        before = anonymous_memory()
        with Excess(store) as excess:
            undo = offloaded(model, way, Path(checkpoint), store)
        enabled = anonymous_memory()
        undo()
        undone = anonymous_memory()
        stats = store.stats()
    result = {
        "written": stats.bytes_written,
        "loaded": before - start,
        "enabled": enabled - start,
        "undone": undone - start,
        "excess": excess.nbytes - before,
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "save":
        torch.manual_seed(0)
        MODELS[sys.argv[2]]().save_pretrained(sys.argv[3], max_shard_size="100MB")
    else:
        main(*sys.argv[1:])
