"""Run something with a dispatched Llama in a process with little memory.

    python -m tests.dispatch.limited '{"how": ..., "checkpoint": ..., "place": ..., "budget": ...}'

Prints a line of JSON. Only anonymous memory counts: a map of a file belongs to the page cache.
Before the first measurement, a tiny model has run, so that threads and lazily imported code do not
count.
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
    """Limit the growth of this process from now on, in bytes."""
    limit = data_bytes() + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def into_memory(checkpoint: Path) -> Any:
    """Return the usual model, with its weights copied into memory."""
    model = llama.empty_for(checkpoint)
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            weights = {name: shard.get_tensor(name).clone() for name in shard.keys()}  # noqa: SIM118
        model.load_state_dict(weights, strict=False, assign=True)
    return model


def weights_of(checkpoint: str) -> dict[str, torch.Tensor]:
    """Return a state dict whose tensors are maps of the checkpoint's files."""
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def do(model: Any, options: dict[str, Any]) -> None:
    """Run the requested operation before the model generates."""
    if options["how"] == "limit":
        only(options["budget"] + MARGIN)
    elif options["how"] == "save":
        model.save_pretrained(options["target"], max_shard_size=SHARD)
    elif options["how"] == "load":
        model.load_state_dict(weights_of(options["target"]))
    elif options["how"] == "halve":
        model.to(torch.bfloat16)


def dispatched(options: dict[str, Any]) -> dict[str, Any]:
    """Run with a store."""
    checkpoint, place = Path(options["checkpoint"]), Path(options["place"])
    dtype = torch.bfloat16 if options["how"] == "cast" else None
    with AnonymousPeak() as peak, TierStore(options["budget"], place, device="cpu") as store:
        model = load_checkpoint_and_dispatch(
            llama.empty_for(checkpoint), checkpoint, store, dtype=dtype
        )
        do(model, options)
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


def usual(options: dict[str, Any]) -> dict[str, Any]:
    """Run the control: without a store."""
    if options["how"] == "usual, limit":
        only(options["budget"] + MARGIN)
    return {"tokens": llama.write(into_memory(Path(options["checkpoint"])), TOKENS).tokens}


def main(options: dict[str, Any]) -> None:
    llama.warm_up()
    result = (usual if options["how"].startswith("usual") else dispatched)(options)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
