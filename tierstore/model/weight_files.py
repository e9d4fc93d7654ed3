"""Selects the weight files that `from_pretrained` reads from a directory, by their names.

Libraries use a few names for the weights of a model: `model.safetensors`, or
`model.safetensors.index.json` for shards. A *variant* may precede the suffix, as in
`model.fp16.safetensors`: the same weights in another dtype.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
USUAL_NAMES = ("model", "diffusion_pytorch_model", "pytorch_lora_weights", "consolidated")
MAX_INDEX_BYTES = 64 << 20

_PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")

_USUAL = re.compile(rf"({'|'.join(USUAL_NAMES)})[.-].*")


def variant_of(name: str) -> str | None:
    """Return the variant of a weight file or index ("" for none), or None for other files.

    >>> variant_of("unet/model.fp16-00001-of-00002.safetensors"), variant_of("model.safetensors")
    ('fp16', '')
    >>> variant_of("model.safetensors.index.fp16.json"), variant_of("config.json")
    ('fp16', None)
    """
    stem, found, rest = os.path.basename(name).partition(SUFFIX)
    if not found:
        return None
    of_index = rest.removeprefix(".index").removesuffix(".json").strip(".")
    return of_index or stem.partition(".")[2].partition("-")[0]


def is_pickle(name: str) -> bool:
    """Return True if a file is a torch pickle, which tierstore does not read.

    >>> is_pickle("unet/diffusion_pytorch_model.bin"), is_pickle("model.safetensors")
    (True, False)
    """
    return os.path.splitext(name)[1] in _PICKLES


def has_weights(names: Collection[str]) -> bool:
    """Return True if a weight file or an index of weight files is among these files."""
    return any(variant_of(name) is not None for name in names)


def main_file(names: Collection[str], variant: str | None = None) -> str | None:
    """Return the weight file or index to read from a directory.

    Prefers `variant`, then files without a variant, then the first of the other variants. Returns
    None if no file has a usual name: then all weight files are to be read.

    >>> main_file(["model.fp16.safetensors", "model.safetensors"], "fp16")
    'model.fp16.safetensors'
    >>> main_file(["model-00001-of-00001.safetensors", "model.safetensors.index.json"])
    'model.safetensors.index.json'
    """
    usual = [name for name in sorted(names) if _USUAL.fullmatch(name)]
    by_variant: dict[str, list[str]] = {}
    for name in usual:
        if (found := variant_of(name)) is not None:
            by_variant.setdefault(found, []).append(name)
    chosen = (
        by_variant.get(variant or "") or by_variant.get("") or next(iter(by_variant.values()), [])
    )
    indexes = [name for name in chosen if name.endswith(".json")]
    whole = [name for name in chosen if name.endswith(SUFFIX) and "-of-" not in name]
    for candidates in (indexes, whole):
        for usual_name in USUAL_NAMES:
            for name in candidates:
                if name.startswith(f"{usual_name}."):
                    return name
    return None


def variants_among(names: Collection[str]) -> list[str]:
    """Return the variants among these files, sorted; files without a variant do not count."""
    return sorted({v for name in names if _USUAL.fullmatch(name) and (v := variant_of(name))})
