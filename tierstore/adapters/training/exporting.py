"""The weights of a training as others take them: files of safetensors, as Hugging Face has them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from tierstore.adapters.codecs.memory import address_of, tensor_bytes
from tierstore.adapters.training.checkpoint_names import model_state
from tierstore.adapters.training.saving import own_errors
from tierstore.progress import byte_bar
from tierstore.system.files import transfer_errors
from tierstore.system.private import READABLE, deny_others_writing, make_directories
from tierstore.torch_private import all_ranks, save_checkpoint

logger = logging.getLogger("tierstore.adapters")

FILE_BYTES = 256 << 20
"""Bytes of tensors in one file, unless one of them is larger. torch puts a file together in memory,
and needs about twice as much for that."""


def export_safetensors(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Write the parameters and buffers of a model in safetensors files with an index.

        export_safetensors("exported", model)

    `from_pretrained` and `TierStore.register_checkpoint` read them. Of tied parameters the first
    name is written, as `save_pretrained` does. torch's `HuggingFaceStorageWriter` writes.
    To go on with the training, use `save_training`: this has no optimizer, no checksums, and does
    not replace what is there at once.

    Args:
        path: a directory without safetensors files, made if missing.
        model: an `OffloadModel`, or any other module.

    Raises:
        ValueError: the directory has safetensors files already.
        RuntimeError: there are several ranks: load in one process what they saved, and export it.
        DiskFullError: the disk is full.
        TransferError: another error of the disk.
    """
    if all_ranks().get_world_size() > 1:
        raise RuntimeError(
            "no rank has the whole model: save it with save_training, load that in one process "
            "with load_training, and export it there"
        )
    where = os.fspath(path)
    if os.path.isdir(where) and any(n.endswith(".safetensors") for n in os.listdir(where)):
        raise ValueError(
            f"{where} has safetensors files already: choose a directory of its own, so that none "
            "of them is taken for a part of this model"
        )
    tensors = _each_once(model_state(model))
    writer = HuggingFaceStorageWriter(where, fqn_to_index_mapping=files_of(tensors, FILE_BYTES))
    nbytes = sum(map(tensor_bytes, tensors.values()))
    with (
        transfer_errors("exporting to", path=where),
        own_errors(),
        byte_bar(f"Exporting to {where}", nbytes) as advance,
    ):
        make_directories(os.path.abspath(where), READABLE)
        save_checkpoint(dict(tensors), writer, _Telling(advance))
        for name in os.listdir(where):
            if ".safetensors" in name:  # torch makes them by the umask alone
                deny_others_writing(os.path.join(where, name))
    logger.info("exported %d tensors, %d bytes, to %s", len(tensors), nbytes, where)


class _Telling(DefaultSavePlanner):
    """Tells of the bytes of each tensor that is written."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        super().__init__()
        self._advance = advance

    def resolve_data(self, write_item: Any) -> Any:
        """The value of an item."""
        found = super().resolve_data(write_item)
        if isinstance(found, torch.Tensor):
            self._advance(tensor_bytes(found))
        return found


def _each_once(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state; of those that show the same memory, the first one."""
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            where = address_of(value), value.shape
            if where not in seen or not value.numel():
                seen.add(where)
                found[name] = value.detach()
    return found


def files_of(tensors: dict[str, torch.Tensor], file_bytes: int) -> dict[str, int]:
    """The number of the file that each tensor goes to, from 1 on. Each has up to `file_bytes` of
    tensors, or one larger tensor."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if filled and filled + nbytes > file_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += nbytes
    return numbers
