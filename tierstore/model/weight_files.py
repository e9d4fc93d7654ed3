"""Which of a directory's files `from_pretrained` reads, told by their names.

Libraries give a model's weights one of a few names: `model.safetensors`, or
`model.safetensors.index.json` beside shards. Before the ending may stand a *variant*, as in
`model.fp16.safetensors`: the same weights at another dtype.
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
    """Of which variant a file's weights are, or the weights in an index; None for other files.

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
    """Whether a file is one of torch's pickles, which nobody here reads.

    >>> is_pickle("unet/diffusion_pytorch_model.bin"), is_pickle("model.safetensors")
    (True, False)
    """
    return os.path.splitext(name)[1] in _PICKLES


def has_weights(names: Collection[str]) -> bool:
    """Whether there are weights among these files, or an index: then all it lists should be."""
    return any(variant_of(name) is not None for name in names)


def main_file(names: Collection[str], variant: str | None = None) -> str | None:
    """The file, or index of files, that is read of one directory.

    It is of `variant` where there is such a one, and else of none; where there are only others, it
    is of the first of them. None where no file has a usual name: then all of them are meant.

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
    """The variants there are, besides the weights of none."""
    return sorted({v for name in names if _USUAL.fullmatch(name) and (v := variant_of(name))})
