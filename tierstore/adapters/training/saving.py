"""Training on disk: checkpoints of `torch.distributed.checkpoint`, whole or not there.

    path/
      __0_0.distcp      tensors and other values, of rank 0; `__1_0.distcp` of rank 1, ...
      .metadata         where each of them is
      tierstore.json    sizes and checksums of these files

torch's own tools read and write such a directory: any number of ranks, in a store or not, goes on
with what any other number has saved. Tensors go to disk and come back one group of the store at a
time. The directory is written under another name and synced, then takes the place of the old one at
once: whatever dies in between, `path` leads to the old one or the new one, and either is whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from tierstore.adapters.codecs.memory import address_of
from tierstore.adapters.contents import parameters_of, tensors_of
from tierstore.adapters.training.checkpoint_files import CheckpointFiles, CheckpointWriter, Encoded
from tierstore.adapters.training.checkpoint_names import (
    MODEL,
    OPTIMIZER,
    OURS,
    STATE,
    SavedNames,
    as_part,
    dtype_of,
    inner,
    kind_of,
    like_parameter,
    model_state,
    names_in_groups,
    nested,
    optimizer_state,
    places_of,
)
from tierstore.adapters.training.checkpoint_planners import (
    GroupLoadPlanner,
    GroupSavePlanner,
    local_of,
)
from tierstore.adapters.training.directory_swap import SwappedDirectory
from tierstore.adapters.training.optimizer import OffloadOptimizer
from tierstore.torch_private import all_ranks, save_checkpoint

logger = logging.getLogger("tierstore.adapters")

PARTS = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp|tierstore\.json")
"""The files of a checkpoint."""


def save_training(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
) -> None:
    """Save a model and its optimizer in the directory `path`, in place of what was saved there.

        save_training("run", model, optimizer, extra={"step": 3, "rng": torch.get_rng_state()})

    When this returns, it survives a power cut. Whoever is killed before leaves `path` as it was,
    and a hidden directory beside it, which the next save removes. Tied parameters are saved under
    each of their names. Gradients are not saved: save between steps. It is a checkpoint of
    `torch.distributed.checkpoint`, which torch alone can load.

    With `torch.distributed`, every rank calls this, with a path that leads to the same directory;
    each writes what it has, and the first one `extra`.

    Args:
        path: a directory that is not there yet, is empty, or has a checkpoint.
        model: an `OffloadModel`, or any other module.
        optimizer: an `OffloadOptimizer`, or one of torch, over parameters of the model.
        extra: what else is needed to go on: tensors, text, numbers, lists, tuples, dicts.

    Raises:
        ValueError: the path has other files, or the optimizer other parameters.
        TypeError: `extra` or a state has something that cannot be loaded again.
        DiskFullError: the disk is full.
        TransferError: another error of the disk. Whatever is raised, the last save is still there.
    """
    state: dict[str, Any] = {MODEL: model_state(model)}
    ours: dict[str, Any] = {"extra": extra, "model": _no_tensors(state[MODEL])}
    Encoded(extra, "extra")  # raises TypeError: nothing is written then
    if optimizer is not None:
        state[OPTIMIZER[0]] = optimizer_state(model, optimizer)
        ours["optimizer"] = kind_of(optimizer)
    state[OURS] = Encoded(ours, OURS)
    places = places_of(model, optimizer)
    planner = GroupSavePlanner(state, places)
    directory, ranks, began = SwappedDirectory(path, PARTS), all_ranks(), time.monotonic()
    with directory.explained("saving to"), own_errors(), ExitStack() as draft:
        folder = ranks.broadcast("draft", lambda: draft.enter_context(directory.draft()))
        try:
            save_checkpoint(state, CheckpointWriter(folder), planner)
        finally:
            places.close()
        ranks.broadcast("publish", draft.close)
    logger.info("saved a training in %s in %.1f s", path, time.monotonic() - began)


def load_training(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Any:
    """Load what `save_training` or `torch.distributed.checkpoint` has saved.

        extra = load_training("run", model, optimizer)
        torch.set_rng_state(extra["rng"])

    Either may be in a store or not, on as many ranks as there are, whatever they were when they
    were saved. What others have saved has to have its parts under "model" and "optimizer" (or
    "optim"), by names, as `get_state_dict` gives them; it has no checksums. Files that have
    checksums are read and compared before anything is changed, then read again.

    Args:
        path: the directory.
        model: what its parameters and buffers are loaded into: same names, shapes and dtypes.
        optimizer: what the states are loaded into; None: they are left out.

    Returns:
        `extra`, as it was saved; None of a checkpoint that torch alone has saved.

    Raises:
        CorruptDataError: a file is not as it was saved.
        TruncatedFileError: a file is too short.
        TransferError: a file cannot be read.
        TierStoreError: it is of a newer format.
        ValueError: it was saved of another model or optimizer. Whatever is raised, model and
            optimizer are unchanged.
    """
    directory, ranks, began = SwappedDirectory(path, PARTS), all_ranks(), time.monotonic()
    with directory.explained("loading from"), own_errors(), ExitStack() as stack:
        files = _on_all(ranks, "open", lambda: CheckpointFiles(directory, stack))
        _on_all(ranks, "check", lambda: files.check(ranks.rank, ranks.get_world_size()))
        loading = _on_all(ranks, "match", lambda: _Loading(SavedNames(files), model, optimizer))
        _on_all(ranks, "load", loading.load)
        ours = loading.saved.ours
    logger.info("loaded a training from %s in %.1f s", path, time.monotonic() - began)
    return None if ours is None else ours["extra"]


def _on_all(ranks: Any, step: str, do: Callable[[], Any]) -> Any:
    """Do it on this rank. Raises, on every rank, what it raises on one."""
    if not ranks.use_dist:
        return do()
    done = []
    ranks.all_gather(step, lambda: done.append(do()))
    return done[0]


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise what a rank has raised, and not that some have."""
    try:
        yield
    except CheckpointException as failed:
        error = failed.failures[min(failed.failures)][0]
        raise error from error.__cause__


def _no_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """What modules add to their state: torch takes their dicts apart, and makes keys to text."""
    return {name: each for name, each in state.items() if not isinstance(each, torch.Tensor)}


class _Loading:
    """What is loaded into a model and an optimizer. Made, it has refused what does not fit them,
    and nothing is changed."""

    def __init__(
        self, saved: SavedNames, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.saved = saved
        self._path = saved.files.path
        self._model = model
        self._optimizer = optimizer
        self._state = model_state(model)
        self._refuse_other_model()
        if optimizer is not None:
            self._names = names_in_groups(model, optimizer)
            self._parameters = {
                name: parameter
                for group, names in zip(optimizer.param_groups, self._names, strict=True)
                for parameter, name in zip(group["params"], names, strict=True)
            }
            if saved.optimizer is None:
                raise ValueError(
                    f"{self._path} was saved without an optimizer: load the model only"
                )
            self._refuse_other_kind(optimizer)
            self._options = self._checked_options(optimizer)
            self._saved_states = self._checked_states()

    def _refuse_other_model(self) -> None:
        known = self._known_to_the_model()
        lacking, more = self._state.keys() - known, known - self._state.keys()
        for what, names in (("lacks", lacking), ("has", more)):
            if names:
                raise self._other_model(f"it {what} {_some(names)}")
        for name, tensor in self._state.items():
            found = self.saved.items.get(f"{MODEL}.{name}")
            if not isinstance(tensor, torch.Tensor):
                continue
            if not isinstance(found, TensorStorageMetadata):
                raise self._other_model(f"{name!r} is no tensor there")
            if found.size != tensor.shape or found.properties.dtype is not tensor.dtype:
                raise self._other_model(
                    f"{name!r} is {dtype_of(found.properties)} {list(found.size)} there, and "
                    f"{dtype_of(tensor)} {list(tensor.shape)} in the model"
                )

    def _known_to_the_model(self) -> set[str]:
        """What was saved of the model. What a module adds may be saved in parts, or have none."""
        known = set(self.saved.model)
        ours = {} if self.saved.ours is None else self.saved.ours["model"]
        for name in _no_tensors(self._state):
            parts = {each for each in known if f"{each}.".startswith(f"{name}.")}
            known -= parts
            if parts or name in ours:
                known.add(name)
        return known

    def _other_model(self, why: str) -> ValueError:
        return ValueError(
            f"{self._path} was saved of another model: {why}; load it into one like that it was "
            "saved of"
        )

    def _refuse_other_kind(self, optimizer: torch.optim.Optimizer) -> None:
        if self.saved.ours is None:
            return
        for what, value in kind_of(optimizer).items():
            found = self.saved.ours["optimizer"][what]
            if found != value:
                raise ValueError(
                    f"{self._path} was saved of an optimizer whose {what} is {found}, and this "
                    f"one's is {value}: load it into one like that it was saved of"
                )

    def _checked_options(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """What each group of the optimizer will say."""
        saved = self.saved.options()
        if differing := saved.keys() ^ self._parameters.keys():
            raise self._other_groups(f"not in both: {_some(differing)}")
        found = []
        for group, names in zip(optimizer.param_groups, self._names, strict=True):
            options = [saved[name] for name in names]
            if any(not _same(each, options[0]) for each in options):
                raise self._other_groups("they are grouped otherwise")
            lacking = optimizer.defaults.keys() - (options or [group])[0].keys()
            if lacking and self.saved.ours is None:
                raise ValueError(
                    f"{self._path} was saved of another optimizer: it lacks {_some(lacking)} in "
                    "param_groups; load it into one like that it was saved of"
                )
            found.append({**group, **(options or [{}])[0]})
        return found

    def _other_groups(self, why: str) -> ValueError:
        return ValueError(
            f"{self._path} was saved of an optimizer of other groups of parameters ({why}): make "
            "the optimizer with the same groups"
        )

    def _checked_states(self) -> dict[str, dict[str, Any]]:
        found = self.saved.states(self._parameters)
        if unknown := found.keys() - self._parameters.keys():
            names = _some(found[next(iter(unknown))])
            raise self._other_groups(f"there are states of other parameters: {names}")
        return found

    # Doing it ----------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self) -> None:
        """Change the model and the optimizer."""
        targets: dict[str, torch.Tensor] = {}
        given = self._model_targets(targets)
        if self._optimizer is not None:
            targets |= self._optimizer_targets(self._optimizer)
        places = places_of(self._model, self._optimizer)
        GroupLoadPlanner(places).read(targets, self.saved.files)
        if given:
            set_model_state_dict(self._model, given, options=StateDictOptions(strict=False))
        for parameter in parameters_of(self._model):
            if places.of(parameter) is not None:  # it was written without torch's knowing of it
                torch.autograd.graph.increment_version(parameter)

    def _model_targets(self, targets: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Add the tensors that are written where they are. Returns what the model has to be given:
        what it adds to its state, and tensors that are none of its own."""
        own = {address_of(local_of(t)) for t in tensors_of(self._model)}
        given: dict[str, Any] = {}
        for name, value in self._state.items():
            if not isinstance(value, torch.Tensor):
                given[name] = self.saved.added(name)
                continue
            if address_of(local_of(value)) not in own:
                value = given[name] = torch.empty_like(value)
            targets[f"{MODEL}.{name}"] = value
        return given

    def _optimizer_targets(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """See that the optimizer has the states that were saved, and return those that are written
        where they are."""
        lazily = isinstance(optimizer, OffloadOptimizer)
        states = {
            name: {key: self._made(name, key, each, lazily) for key, each in of_one.items()}
            for name, of_one in self._saved_states.items()
        }
        if isinstance(optimizer, OffloadOptimizer):
            optimizer.lay_out(self._state_dict(states))
        else:
            self._lay_out(optimizer, self._state_dict(states))
        return {
            f"{self.saved.optimizer}.{STATE}.{name}.{key}": as_part(
                inner(optimizer.state[self._parameters[name]], key), self._parameters[name]
            )
            for name, of_one in states.items()
            for key, made in of_one.items()
            if isinstance(made, torch.Tensor) and made.dim()
        }

    def _lay_out(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        before = optimizer.state, optimizer.param_groups
        try:
            optimizer.load_state_dict(state)
        except Exception as error:  # whatever a class has to say of states that it does not know
            optimizer.state, optimizer.param_groups = before
            raise ValueError(
                f"{self._path} was saved of another optimizer than {type(optimizer).__name__} "
                f"({error!r:.200}): load it into one like that it was saved of"
            ) from error

    def _made(self, name: str, key: str, saved: Any, lazily: bool) -> Any:
        """A state: its value, or what is to have it."""
        if not isinstance(saved, TensorStorageMetadata) or not saved.size:
            return self.saved.value(f"{self.saved.optimizer}.{STATE}.{name}.{key}")
        parameter, dtype = self._parameters[name], saved.properties.dtype
        if isinstance(self._optimizer, OffloadOptimizer):
            dtype = self._optimizer.dtype_of(key, dtype, parameter)
        return like_parameter(parameter, saved.size, dtype, lazily=lazily)

    def _state_dict(self, states: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What an optimizer's `load_state_dict` takes."""
        numbers = {name: i for i, name in enumerate(self._parameters)}
        groups = zip(self._options, self._names, strict=True)
        return {
            "state": {numbers[name]: nested(each) for name, each in states.items()},
            "param_groups": [{**o, "params": [numbers[n] for n in names]} for o, names in groups],
        }


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return torch.equal(a, b) if tensors else bool(a == b)

    return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)


def _some(names: Iterable[str]) -> str:
    """A few names, for a message."""
    found = sorted(names)
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(map(repr, found[:3])) + more
