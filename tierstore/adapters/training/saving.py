"""Saves a training as a checkpoint of `torch.distributed.checkpoint`, or exports its weights.

    model.<name>                            parameters, buffers, extra state of modules
    optimizer.state.<parameter>.<state>
    optimizer.param_groups.<parameter>.<option>
    tierstore                               ours: what torch has no name for

Names are those of torch's `get_model_state_dict` and `get_optimizer_state_dict`, flattened. torch's
functions for optimizers take a step to make states where there are none. Here, states that do not
exist are not saved.
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
from tierstore.adapters.training.checkpoint_files import CheckpointWriter, Encoded, draft_of
from tierstore.adapters.training.checkpoint_planners import GroupSavePlanner, Places
from tierstore.adapters.training.model import OffloadModel, model_of
from tierstore.adapters.training.optimizer import OffloadOptimizer
from tierstore.adapters.training.state_buffers import StateBuffer
from tierstore.progress import byte_bar
from tierstore.system.files import transfer_errors
from tierstore.system.private import READABLE, deny_others_writing, make_directories
from tierstore.torch_private import all_ranks, qualified_name, save_checkpoint

logger = logging.getLogger("tierstore.adapters")

MODEL, OURS = "model", "tierstore"
OPTIMIZER = ("optimizer", "optim")  # our name, and the one of torch's tutorial
STATE, GROUPS = "state", "param_groups"
FILE_BYTES = 256 << 20
"""Bytes of tensors in one file, unless one tensor is larger. torch makes up a file in memory, which
takes about twice as much."""


def save_training(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
) -> None:
    """Save a model and its optimizer in the directory `path`, in place of the last save there.

        save_training("run", model, optimizer, extra={"step": 3, "rng": torch.get_rng_state()})

    When it returns, the save survives a power cut. A process that is killed before leaves the last
    save as it was. Gradients are not saved: save between steps. Tied parameters are saved under
    each of their names. With `torch.distributed`, every rank calls this with a path to the same
    directory, and writes its part; `extra` is the first rank's.

    Args:
        path: a directory, made if missing. Files of its own in it stay.
        model: an `OffloadModel`, or any other module.
        optimizer: an `OffloadOptimizer`, or one of torch, over parameters of the model.
        extra: what else is needed to go on: tensors, text, numbers, lists, tuples, dicts.

    Raises:
        ValueError: the optimizer has parameters of another model.
        TypeError: `extra` or a state has a value that cannot be loaded again.
        StoreLockedError: another save to `path` is under way.
        DiskFullError: the disk is full.
        TransferError: another error of the disk. After any error, the last save is still there.
    """
    state: dict[str, Any] = {MODEL: model_state(model)}
    ours: dict[str, Any] = {"extra": extra, "model": extra_states(state[MODEL])}
    Encoded(extra, "extra")  # raises TypeError, which names it
    if optimizer is not None:
        state[OPTIMIZER[0]] = optimizer_state(model, optimizer)
        ours["optimizer"] = kind_of(optimizer)
    state[OURS] = Encoded(ours, OURS)
    places = places_of(model, optimizer)
    planner = GroupSavePlanner(state, places)
    where, ranks, began = os.path.realpath(path), all_ranks(), time.monotonic()
    with transfer_errors("saving to", path=where), own_errors(), ExitStack() as draft:
        to = ranks.broadcast("draft", lambda: draft.enter_context(draft_of(where)))
        try:
            save_checkpoint(state, CheckpointWriter(*to), planner)
        finally:
            places.close()
        ranks.broadcast("publish", draft.close)
    logger.info("saved a training in %s in %.1f s", path, time.monotonic() - began)


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise the error of the first rank that failed in place of torch's summary."""
    try:
        yield
    except CheckpointException as failed:
        error = failed.failures[min(failed.failures)][0]
        raise error from error.__cause__


def extra_states(state: dict[str, Any]) -> dict[str, Any]:
    """Return the extra states of modules. torch takes dicts apart and makes their keys text."""
    return {name: each for name, each in state.items() if not isinstance(each, torch.Tensor)}


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return parameters, buffers and extra state by their names in a checkpoint."""
    for each in _models_in(model):
        each.put_away()
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
    """Return a state of the shape of a shard as a DTensor that is sharded like the parameter."""
    is_whole = isinstance(value, DTensor) or not isinstance(value, torch.Tensor) or not value.dim()
    if not isinstance(parameter, DTensor) or is_whole:
        return value
    if value.shape != parameter.to_local().shape:
        return value
    form: Any = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    return DTensor.from_local(value, parameter.device_mesh, parameter.placements, **form)


def places_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Places:
    """Return where in a store the tensors of a training are."""
    groups = [weights for each in _models_in(model) for weights in each.groups]
    buffers = [w.buffer for w in groups if isinstance(w.buffer, StateBuffer)]
    if isinstance(optimizer, OffloadOptimizer):
        buffers += optimizer.state_buffers()
    return Places(buffers, [weights for weights in groups if weights.frozen])


def kind_of(optimizer: torch.optim.Optimizer) -> dict[str, str | None]:
    """Return what two optimizers must have in common for the state of one to fit the other."""
    kind, master = type(optimizer), None
    if isinstance(optimizer, OffloadOptimizer):
        kind, master = optimizer.optimizer_class, optimizer.master_dtype
    return {"class": kind.__name__, "master_dtype": None if master is None else str(master)}


def export_safetensors(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Write the parameters and buffers of a model in safetensors files with an index.

        export_safetensors("exported", model)

    `from_pretrained` and `TierStore.register_checkpoint` read them. A tied parameter is written
    once, under its first name, as `save_pretrained` does. To go on with the training, use
    `save_training`: an export has no optimizer and no checksums, and replaces no other at once.

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
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[tuple[int, torch.Size], str] = {}
    for name, value in model_state(model).items():
        if isinstance(value, torch.Tensor):  # of those that show the same memory, the first
            form = address_of(value), value.shape
            if not value.numel() or seen.setdefault(form, name) == name:
                tensors[name] = value.detach()
    writer = HuggingFaceStorageWriter(where, fqn_to_index_mapping=files_of(tensors, FILE_BYTES))
    nbytes = sum(map(tensor_bytes, tensors.values()))
    with (
        transfer_errors("exporting to", path=where),
        own_errors(),
        byte_bar(f"Exporting to {where}", nbytes) as advance,
    ):
        make_directories(os.path.abspath(where), READABLE)
        planner = _CountingPlanner()
        planner.advance = advance
        save_checkpoint(dict(tensors), writer, planner)
        for name in os.listdir(where):
            if ".safetensors" in name:  # torch's modes follow the umask alone
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
    """Return the number of each tensor's file, from 1 on. A file has up to `file_bytes` of tensors,
    or one larger tensor."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, tensor in tensors.items():
        if filled and filled + tensor_bytes(tensor) > file_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += tensor_bytes(tensor)
    return numbers
