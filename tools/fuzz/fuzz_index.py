"""Fuzz the index of a checkpoint of several files

    python tools/fuzz/fuzz_index.py -runs=200000

An input is what `model.safetensors.index.json` holds. It names files of its own directory, or it is
refused with an error that names it. Where it is JSON, all files that it names are found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.fuzz.harness import run, temporary

# isort: split
from tierstore import InvalidHeaderError, TransferError
from tierstore.engine.checkpoints import checkpoint_files

SHARD = "model-00001-of-00002.safetensors"
SEEDS = [
    {"metadata": {"total_size": 64}, "weight_map": {"a.weight": SHARD, "b": SHARD}},
    {"weight_map": {}},
    {"metadata": {"a": [1, {"b": None}], "c": "\u6f22\n"}, "weight_map": {"a": "x"}},
]
PLACE = temporary("index")
INDEX = PLACE / "model.safetensors.index.json"


def check(raw: bytes) -> None:
    INDEX.write_bytes(raw)
    try:
        found = checkpoint_files(INDEX)
    except (InvalidHeaderError, TransferError) as error:
        assert str(INDEX) in str(error)
        return
    assert {Path(path).parent for path in found} == {PLACE}, found
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):  # what nobody asked for is passed over, not understood
        return
    named = set(document["weight_map"].values())
    assert {Path(path).name for path in found} >= named, (found, named)


if __name__ == "__main__":
    run(check, [json.dumps(seed).encode() for seed in SEEDS])
