"""Save a training run as a checkpoint of `torch.distributed.checkpoint`, or export its weights.

    model.<name>                            parameters, buffers, extra state of modules
    optimizer.state.<parameter>.<state>
    optimizer.param_groups.<parameter>.<option>
    tierstore                               values for which torch has no name

Names are those of torch's `get_model_state_dict` and `get_optimizer_state_dict`, flattened. torch's
function for optimizers takes a step to create missing states; here, missing states are not saved.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from tierstore.adapters.codecs.memory import address_of, tensor_bytes
from tierstore.adapters.contents import named_parameters_of, parameters_of
from tierstore.adapters.training.checkpoint_files import CheckpointWriter, Encoded, draft_directory
from tierstore.adapters.training.checkpoint_planners import GroupSavePlanner, StorageIndex
from tierstore.adapters.training.model import OffloadModel, model_of
from tierstore.adapters.training.optimizer import OffloadOptimizer
from tierstore.adapters.training.state_buffers import StateBuffer
from tierstore.progress import byte_bar
from tierstore.system.files import transfer_errors
from tierstore.system.private import READABLE, deny_others_writing, make_directories
from tierstore.torch_private import all_ranks, qualified_name, save_checkpoint

logger = logging.getLogger("tierstore.adapters")

MODEL, OURS = "model", "tierstore"
OPTIMIZER = ("optimizer", "optim")  # our name, and the one in torch's tutorial
STATE, GROUPS = "state", "param_groups"
FILE_BYTES = 256 << 20
"""Largest file of an export, in bytes of tensors, unless one tensor is larger.

torch builds each file in memory, which takes about twice as many bytes.
"""


def save_training(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
) -> None:
    """Save a model and its optimizer in the directory `path`, replacing the previous save there.

        save_training("run", model, optimizer, extra={"step": 3, "rng": torch.get_rng_state()})

    The save is atomic and durable: once the function returns, it survives a power cut; if the
    process is killed earlier, the previous save is intact. Gradients are not saved, so save between
    steps. Tied parameters are saved under each of their names. With `torch.distributed`, every rank
    must call this function with a path to the same directory. Each rank writes its part; `extra`
    is taken from the first rank.

    Args:
        path: a directory, created if missing. Unrelated files in it are kept.
        model: an `OffloadModel`, or any other module.
        optimizer: an `OffloadOptimizer` or a torch optimizer over parameters of the model.
        extra: anything else needed to resume: tensors, text, numbers, lists, tuples, dicts.

    Raises:
        ValueError: the optimizer has parameters of another model.
        TypeError: `extra` or a state contains a value that cannot be loaded again.
        StoreLockedError: another save to `path` is in progress.
        DiskFullError: the disk is full.
        TransferError: another disk error. After any error, the previous save is intact.
    """
    state: dict[str, Any] = {MODEL: model_state(model)}
    ours: dict[str, Any] = {"extra": extra, "model": extra_states(state[MODEL])}
    Encoded(extra, "extra")  # raises TypeError, which names it
    if optimizer is not None:
        state[OPTIMIZER[0]] = optimizer_state(model, optimizer)
        ours["optimizer"] = kind_of(optimizer)
    state[OURS] = Encoded(ours, OURS)
    index = storage_index_of(model, optimizer)
    planner = GroupSavePlanner(state, index)
    where, ranks, began = os.path.realpath(path), all_ranks(), time.monotonic()
    with transfer_errors("saving to", path=where), first_rank_error(), ExitStack() as draft:
        to = ranks.broadcast("draft", lambda: draft.enter_context(draft_directory(where)))
        try:
            save_checkpoint(state, CheckpointWriter(*to), planner)
        finally:
            index.close()
        ranks.broadcast("publish", draft.close)
    logger.info("saved a training run in %s in %.1f s", path, time.monotonic() - began)


@contextlib.contextmanager
def first_rank_error() -> Iterator[None]:
    """Raise the error of the first failed rank instead of torch's summary of all errors."""
    try:
        yield
    except CheckpointException as failed:
        error = failed.failures[min(failed.failures)][0]
        raise error from error.__cause__


def extra_states(state: dict[str, Any]) -> dict[str, Any]:
    """Return the extra states of modules. torch would flatten dicts and turn keys into text."""
    return {name: each for name, each in state.items() if not isinstance(each, torch.Tensor)}


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return parameters, buffers and extra state by their names in a checkpoint."""
    for each in _models_in(model):
        each.flush()
    return dict(get_model_state_dict(model))


def _models_in(model: nn.Module) -> list[OffloadModel]:
    found = (model_of(parameter) for parameter in parameters_of(model))
    return list({id(each): each for each in found if each is not None}.values())


def names_in_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer.

    Raises ValueError for parameters of another model.
    """
    names = {id(p): qualified_name(model, name) for name, p in named_parameters_of(model)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not have: pass the model that the optimizer trains"
                )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return states and options of each parameter by their names in a checkpoint."""
    found: dict[str, Any] = {}
    names = names_in_groups(model, optimizer)
    for group, members in zip(optimizer.param_groups, names, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter, name in zip(group["params"], members, strict=True):
            found |= {f"{GROUPS}.{name}.{key}": value for key, value in options.items()}
            for key, value in _flat(optimizer.state.get(parameter, {})):
                found[f"{STATE}.{name}.{key}"] = sharded_like(parameter, value)
    return found


def _flat(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping) and value:
            yield from ((f"{key}.{inner}", each) for inner, each in _flat(value))
        else:
            yield str(key), value


def sharded_like(parameter: torch.Tensor, value: Any) -> Any:
    """Return a state that has the shape of a shard as a DTensor sharded like the parameter.

    Return any other state unchanged.
    """
    is_whole = isinstance(value, DTensor) or not isinstance(value, torch.Tensor) or not value.dim()
    if not isinstance(parameter, DTensor) or is_whole:
        return value
    if value.shape != parameter.to_local().shape:
        return value
    form: Any = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    return DTensor.from_local(value, parameter.device_mesh, parameter.placements, **form)


def storage_index_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> StorageIndex:
    """Return an index of the stored tensors of a model and its optimizer."""
    groups = [weights for each in _models_in(model) for weights in each.groups]
    buffers = [w.buffer for w in groups if isinstance(w.buffer, StateBuffer)]
    if isinstance(optimizer, OffloadOptimizer):
        buffers += optimizer.state_buffers()
    return StorageIndex(buffers, [weights for weights in groups if weights.frozen])


def kind_of(optimizer: torch.optim.Optimizer) -> dict[str, str | None]:
    """Return the properties that two optimizers must share to exchange states."""
    kind, master = type(optimizer), None
    if isinstance(optimizer, OffloadOptimizer):
        kind, master = optimizer.optimizer_class, optimizer.master_dtype
    return {"class": kind.__name__, "master_dtype": None if master is None else str(master)}


def export_safetensors(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Write the parameters and buffers of a model to safetensors files with an index.

        export_safetensors("exported", model)

    `from_pretrained` and `TierStore.register_checkpoint` can read the files. A tied parameter is
    written once, under its first name, as `save_pretrained` does. To resume training, use
    `save_training` instead: an export has no optimizer state and no checksums, and is not atomic.

    Args:
        path: a directory without safetensors files, created if missing.
        model: an `OffloadModel`, or any other module.

    Raises:
        ValueError: the directory already contains safetensors files.
        RuntimeError: there are several ranks. Use `save_training`, then `load_training` and
            `export_safetensors` in one process.
        DiskFullError: the disk is full.
        TransferError: another disk error.
    """
    if all_ranks().get_world_size() > 1:
        raise RuntimeError(
            "no rank has the whole model: save it with save_training, load it in one process "
            "with load_training, and export it there"
        )
    where = os.fspath(path)
    if os.path.isdir(where) and any(n.endswith(".safetensors") for n in os.listdir(where)):
        raise ValueError(
            f"{where} already contains safetensors files, which readers would take for parts of "
            "this model: choose another directory"
        )
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[tuple[int, torch.Size], str] = {}
    for name, value in model_state(model).items():
        if isinstance(value, torch.Tensor):  # write tied tensors once, under the first name
            form = address_of(value), value.shape
            if not value.numel() or seen.setdefault(form, name) == name:
                tensors[name] = value.detach()
    writer = HuggingFaceStorageWriter(where, fqn_to_index_mapping=files_of(tensors, FILE_BYTES))
    nbytes = sum(map(tensor_bytes, tensors.values()))
    with (
        transfer_errors("exporting to", path=where),
        first_rank_error(),
        byte_bar(f"Exporting to {where}", nbytes) as advance,
    ):
        make_directories(os.path.abspath(where), READABLE)
        planner = _CountingPlanner()
        planner.advance = advance
        save_checkpoint(dict(tensors), writer, planner)
        for name in os.listdir(where):
            if ".safetensors" in name:  # torch sets file modes by the umask alone
                deny_others_writing(os.path.join(where, name))
    logger.info("exported %d tensors, %d bytes, to %s", len(tensors), nbytes, where)


class _CountingPlanner(DefaultSavePlanner):
    """Counts the bytes of each tensor that is written."""

    advance: Callable[[int], None]

    def resolve_data(self, write_item: Any) -> Any:
        """Return the tensor of an item."""
        found: Any = super().resolve_data(write_item)
        self.advance(tensor_bytes(found))
        return found


def files_of(tensors: dict[str, torch.Tensor], file_bytes: int) -> dict[str, int]:
    """Return the file number of each tensor, from 1 on.

    Each file has up to `file_bytes` bytes of tensors, or one larger tensor.
    """
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, tensor in tensors.items():
        if filled and filled + tensor_bytes(tensor) > file_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += tensor_bytes(tensor)
    return numbers
