"""A process with little memory, which does something with a dispatched Llama.

    python -m tests.dispatch.limited '{"how": ..., "checkpoint": ..., "place": ..., "budget": ...}'

Prints a line of JSON. The memory that counts is anonymous: a map of a file is the page cache's.
Before it is first looked at, a tiny model has run, so that threads and code that is imported late
are no part of what is measured.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, safe_open

from tests.helpers.processes import data_bytes
from tierstore import TierStore, load_checkpoint_and_dispatch
from tools.bench import llama
from tools.bench.anonymous import AnonymousPeak

MIB = 1 << 20
MARGIN = 64 * MIB
TOKENS = 6
SHARD = 50_000_000


def only(more: int) -> None:
    """From now on this process may take so many bytes more."""
    limit = data_bytes() + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def into_memory(checkpoint: Path) -> Any:
    """The usual model, its weights copied into memory."""
    model = llama.empty_for(checkpoint)
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            weights = {name: shard.get_tensor(name).clone() for name in shard.keys()}  # noqa: SIM118
        model.load_state_dict(weights, strict=False, assign=True)
    return model


def weights_of(checkpoint: str) -> dict[str, torch.Tensor]:
    """A state dict whose tensors are maps of the checkpoint's files."""
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def do(model: Any, told: dict[str, Any]) -> None:
    """What is asked for, before the model writes."""
    if told["how"] == "limit":
        only(told["budget"] + MARGIN)
    elif told["how"] == "save":
        model.save_pretrained(told["target"], max_shard_size=SHARD)
    elif told["how"] == "load":
        model.load_state_dict(weights_of(told["target"]))
    elif told["how"] == "halve":
        model.to(torch.bfloat16)


def dispatched(told: dict[str, Any]) -> dict[str, Any]:
    """With a store."""
    checkpoint, place = Path(told["checkpoint"]), Path(told["place"])
    dtype = torch.bfloat16 if told["how"] == "cast" else None
    with AnonymousPeak() as peak, TierStore(told["budget"], place, device="cpu") as store:
        model = load_checkpoint_and_dispatch(
            llama.empty_for(checkpoint), checkpoint, store, dtype=dtype
        )
        do(model, told)
        text = llama.write(model, TOKENS)
        stats = store.stats()
        files = {str(f.relative_to(place)): f.stat().st_size for f in place.rglob("*")}
    return {
        "tokens": text.tokens,
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "start": peak.start,
        "peak": peak.bytes,
        "peak_of_store": stats.peak_bytes["HOST"],
        "read": stats.bytes_read,
        "written": stats.bytes_written,
        "files": files,
    }


def usual(told: dict[str, Any]) -> dict[str, Any]:
    """The control: without a store."""
    if told["how"] == "usual, limit":
        only(told["budget"] + MARGIN)
    return {"tokens": llama.write(into_memory(Path(told["checkpoint"])), TOKENS).tokens}


def main(told: dict[str, Any]) -> None:
    llama.warm_up()
    result = (usual if told["how"].startswith("usual") else dispatched)(told)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
