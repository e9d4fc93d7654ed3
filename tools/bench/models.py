"""Checkpoints with random weights that a later run finds again, and the sizes of models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is built here

RECIPE = "recipe.json"


def kept(shape: Any, directory: Path, write: Callable[[], object]) -> Path:
    """Return `directory`, after `write` made a checkpoint of a shape (a dataclass) in it.

    One from an earlier run with the same shape stays as it is.
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
