"""Training on disk: a directory with a model, its optimizer, and what belongs to neither.

    path/
      model.safetensors      parameters and buffers under their own names, for any reader
      optimizer.safetensors  tensors of the optimizer's state: `<parameter>.<state>`
      training.json          groups of parameters, other values, `extra`; sizes and checksums

Tensors go to disk a chunk at a time, from wherever they are. The directory is written under another
name and synced, then takes the place of the old one at once: whatever dies in between, `path` leads
to the old one or the new one, and either is whole. The headers of both files hold a checksum of
each tensor, `training.json` holds one of each header, and one of itself: so nothing is loaded that
was not saved, nor together with what was saved at another time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tierstore.adapters.training.directory_swap import SwappedDirectory
from tierstore.adapters.training.documents import (
    FORMAT,
    as_json,
    decoded,
    encoded,
    options_of,
    read_document,
    tensors_in,
    tensors_of_optimizer,
    write_document,
)
from tierstore.adapters.training.optimizer import OffloadOptimizer
from tierstore.adapters.training.saved_files import (
    MODEL,
    OPTIMIZER,
    PARTS,
    TRAINING,
    TensorFile,
    write_tensors,
)
from tierstore.model.errors import CorruptDataError, TransferError
from tierstore.model.sizes import PAGE
from tierstore.system.views import dtype_name


def save_training(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
) -> None:
    """Save a model and its optimizer in the directory `path`, in place of what was saved there.

        random = torch.get_rng_state().tolist()
        save_training("run", model, optimizer, extra={"step": step, "random": random})

    When this returns, it survives a power cut. Whoever is killed before leaves `path` as it was,
    and a hidden directory beside it, which the next save removes. Tied parameters are saved under
    each of their names. Gradients are not saved: save between steps.

    Args:
        path: a directory that is not there yet, is empty, or holds what this function has saved.
        model: an `OffloadModel`, or any other module.
        optimizer: an `OffloadOptimizer`, or one of torch, over parameters of the model.
        extra: what else is needed to go on: text, numbers, lists, tuples, dicts.

    Raises ValueError for a path with other files or an optimizer of other parameters, TypeError for
    what cannot be saved, DiskFullError or TransferError.
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {MODEL: {}}
    document: dict[str, Any] = {"format": FORMAT, "extra": _encoded_extra(extra)}
    document["model"] = _encoded_model(model, tensors[MODEL])
    if optimizer is not None:
        tensors[OPTIMIZER] = {}
        document["optimizer"] = _encoded_optimizer(model, optimizer, tensors[OPTIMIZER])
    as_json(document)  # what cannot be written is known before anything is
    directory = SwappedDirectory(path, PARTS)
    with directory.explained("saving to"), directory.draft() as folder:
        files = {name: write_tensors(folder, name, found) for name, found in tensors.items()}
        write_document(folder, {**document, "files": files})


def load_training(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Any:
    """Load what `save_training` has saved into a model and its optimizer; returns `extra`.

        extra = load_training("run", model, optimizer)
        torch.set_rng_state(torch.tensor(extra["random"], dtype=torch.uint8))

    Either may be in a store or not, whatever they were when they were saved. Without an optimizer,
    only the model is loaded. Everything is read and compared before anything is changed, then read
    again, a tensor at a time.

    Raises CorruptDataError, InvalidHeaderError or TruncatedFileError for what is not as it was
    saved, TransferError for what cannot be read, TierStoreError for a newer format, ValueError for
    what was saved of another model or optimizer. The model and the optimizer are unchanged then.
    """
    directory = SwappedDirectory(path, PARTS)
    with directory.explained("loading from"), ExitStack() as stack:
        saved = _Saved(directory, stack)
        saved.refuse_other_model(model)
        if optimizer is not None:
            saved.refuse_other_optimizer(model, optimizer)
        used = [MODEL] if optimizer is None else [MODEL, OPTIMIZER]
        for name in used:
            saved.files[name].check()
        model.load_state_dict(saved.model_state())
        if optimizer is not None:
            optimizer.load_state_dict(saved.optimizer_state(model, optimizer))
        return decoded(saved.document["extra"], "extra", str)  # there are no tensors in it


# What is saved ------------------------------------------------------------------------------------


def _encoded_extra(extra: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    found = encoded(extra, "extra", tensors)
    if tensors:
        raise TypeError(f"{min(tensors)!r} is a tensor: save it as a list, by its tolist()")
    return found


def _encoded_model(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Adds the tensors of a model. Returns what else is part of its state."""
    rest = {}
    for name, value in model.state_dict().items():
        found = encoded(value, name, tensors)
        if not isinstance(value, torch.Tensor):
            rest[name] = found
    return rest


def _encoded_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Adds the tensors of an optimizer's state. Returns the rest, under the parameters' names."""
    names = _names_in_groups(model, optimizer)
    state = optimizer.state_dict()
    numbered: dict[Any, str] = {}
    groups = []
    for i, (group, members) in enumerate(zip(state["param_groups"], names, strict=True)):
        numbered.update(zip(group["params"], members, strict=True))
        options = {key: value for key, value in group.items() if key != "params"}
        found = encoded(options, f"param_groups.{i}", tensors)
        groups.append({"params": members, "options": found})
    states = {
        numbered[number]: encoded(kept, numbered[number], tensors)
        for number, kept in state["state"].items()
    }
    return {**_kind_of(optimizer), "param_groups": groups, "state": states}


def _names_in_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters in each group of an optimizer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not have: pass the model that the optimizer trains"
                )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _kind_of(optimizer: torch.optim.Optimizer) -> dict[str, str | None]:
    """What has to be the same for a state to be of use."""
    kind, master = type(optimizer), None
    if isinstance(optimizer, OffloadOptimizer):
        kind, master = type(optimizer._inner), optimizer.master_dtype
    return {"class": kind.__name__, "master_dtype": None if master is None else str(master)}


# What is loaded ----------------------------------------------------------------------------------


class _Saved:
    """One save: its document and its files, compared with their checksums but for their data."""

    def __init__(self, directory: SwappedDirectory, stack: ExitStack) -> None:
        self.path = directory.path
        found = directory.open(stack)
        if TRAINING not in found:
            raise self._missing(TRAINING)
        self.document = read_document(found[TRAINING], os.path.join(self.path, TRAINING))
        self.files: dict[str, TensorFile] = {}
        for name, expected in self.document["files"].items():
            if name not in found:
                raise self._missing(name)
            path = os.path.join(self.path, name)
            self.files[name] = TensorFile(found[name], path, expected)
        self._refuse_other_tensors(MODEL, tensors_in(self.document["model"]), {})
        if OPTIMIZER in self.files:
            named = tensors_of_optimizer(self.document["optimizer"])
            self._refuse_other_tensors(OPTIMIZER, named, self.files[OPTIMIZER].specs())

    def _refuse_other_tensors(self, name: str, named: set[str], wanted: Iterable[str]) -> None:
        """Raise CorruptDataError unless what is named is there, and what is wanted is named."""
        file = self.files[name]
        if differing := (named - file.specs().keys()) | (set(wanted) - named):
            raise CorruptDataError(
                f"{file.path} and the {TRAINING} beside it do not name the same tensors, such as "
                f"{_some(differing)}: restore both, or load another save",
                path=file.path,
            )

    def _missing(self, name: str) -> TransferError:
        path = os.path.join(self.path, name)
        return TransferError(
            f"{path} is missing: restore it, or pass a directory that save_training has saved",
            path=path,
        )

    def refuse_other_model(self, model: nn.Module) -> None:
        """Raise ValueError if it is not a model like this one that was saved."""
        specs, others = self.files[MODEL].specs(), self.document["model"]
        inner = tensors_in(others)
        known = (specs.keys() - inner) | others.keys()
        state = model.state_dict()
        for what, names in (("lacks", state.keys() - known), ("has", known - state.keys())):
            if names:
                raise ValueError(
                    f"{self.path} was saved of another model: it {what} {_some(names)}; load it "
                    "into one like that it was saved of"
                )
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or name in others:
                continue
            found, expected = specs[name], (dtype_name(value, name), tuple(value.shape))
            if (found.dtype, found.shape) != expected:
                raise ValueError(
                    f"{self.path} was saved of another model: {name!r} is {found.dtype} "
                    f"{list(found.shape)} there, and {expected[0]} {list(expected[1])} in the "
                    "model; load it into one like that it was saved of"
                )

    def refuse_other_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if it is not an optimizer like this one that was saved."""
        names = _names_in_groups(model, optimizer)
        saved = self.document.get("optimizer")
        if saved is None:
            raise ValueError(f"{self.path} was saved without an optimizer: load the model only")
        for what, value in _kind_of(optimizer).items():
            if saved[what] != value:
                raise ValueError(
                    f"{self.path} was saved of an optimizer whose {what} is {saved[what]}, and "
                    f"this one's is {value}: load it into one like that it was saved of"
                )
        groups = [group["params"] for group in saved["param_groups"]]
        if [sorted(group) for group in groups] != [sorted(group) for group in names]:
            differing = {n for g in groups for n in g} ^ {n for g in names for n in g}
            why = f"not in both: {_some(differing)}" if differing else "they are grouped otherwise"
            raise ValueError(
                f"{self.path} was saved of an optimizer of other groups of parameters ({why}): "
                "make the optimizer with the same groups"
            )

    def model_state(self) -> dict[str, Any]:
        """What the model's `load_state_dict` takes."""
        file, others = self.files[MODEL], self.document["model"]
        inner = tensors_in(others)
        state = {name: file.tensor(name) for name in file.specs() if name not in inner}
        return state | {name: decoded(value, name, file.tensor) for name, value in others.items()}

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What the optimizer's `load_state_dict` takes: with the order of its own parameters."""
        saved = self.document["optimizer"]
        parameters = dict(model.named_parameters())
        in_store = isinstance(optimizer, OffloadOptimizer)

        def tensor_for(parameter: torch.Tensor | None, name: str) -> torch.Tensor:
            found = self.files[OPTIMIZER].tensor(name)
            copied = in_store or (parameter is not None and parameter.device.type != "cpu")
            # Torch's own keep what they are given, where it is on the device of the parameter.
            return found if copied and found.nbytes > PAGE else found.clone()

        members = _names_in_groups(model, optimizer)
        numbers = {name: i for i, name in enumerate(name for group in members for name in group)}
        return {
            "state": {
                numbers[name]: decoded(kept, name, functools.partial(tensor_for, parameters[name]))
                for name, kept in saved["state"].items()
            },
            "param_groups": [
                {
                    **decoded(options, place, functools.partial(tensor_for, None)),
                    "params": [numbers[name] for name in names],
                }
                for (place, options), names in zip(options_of(saved).items(), members, strict=True)
            ],
        }


def _some(names: Iterable[str]) -> str:
    """A few names, for a message."""
    found = sorted(names)
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(map(repr, found[:3])) + more
