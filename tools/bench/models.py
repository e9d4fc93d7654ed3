"""Checkpoints with random weights that later runs reuse, and the sizes of models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

RECIPE = "recipe.json"


def kept(shape: Any, directory: Path, write: Callable[[], object]) -> Path:
    """Return `directory`, with a checkpoint of `shape` (a dataclass) that `write` creates.

    A checkpoint of the same shape from an earlier run is reused.
    """
    recipe = directory / RECIPE
    if not recipe.exists() or json.loads(recipe.read_text()) != asdict(shape):
        directory.mkdir(parents=True, exist_ok=True)
        write()
        recipe.write_text(json.dumps(asdict(shape)))
    return directory


def weight_bytes(model: Any) -> int:
    """Return the bytes of all weights."""
    return sum(parameter.nbytes for parameter in model.parameters())
