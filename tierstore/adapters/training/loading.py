"""Load a training run from a checkpoint of `torch.distributed.checkpoint`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from tierstore.adapters.codecs.memory import address_of, span
from tierstore.adapters.contents import parameters_of, tensors_of
from tierstore.adapters.training import saving
from tierstore.adapters.training.checkpoint_files import CheckpointFiles
from tierstore.adapters.training.checkpoint_planners import GroupLoadPlanner, local_of
from tierstore.adapters.training.optimizer import OffloadOptimizer
from tierstore.adapters.training.saving import GROUPS, MODEL, OPTIMIZER, OURS, STATE
from tierstore.system.files import transfer_errors
from tierstore.torch_private import all_ranks

logger = logging.getLogger("tierstore.adapters")


def load_training(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Any:
    """Load a checkpoint written by `save_training` or by `torch.distributed.checkpoint`.

        extra = load_training("run", model, optimizer)
        torch.set_rng_state(extra["rng"])

    The model and optimizer may be in a store or not, on any number of ranks, independently of how
    they were saved. Checksums are verified before anything is changed. A checkpoint written by
    torch alone has no checksums; its parts must be named "model" and "optimizer" (or "optim"), and
    hold what `get_state_dict` returns.

    Args:
        path: the checkpoint directory.
        model: a model with the same parameter and buffer names, shapes and dtypes.
        optimizer: the optimizer to load states into, or None to load the model only.

    Returns:
        The saved `extra`; None for a checkpoint written by torch alone.

    Raises:
        CorruptDataError: a file differs from what was saved.
        TruncatedFileError: a file is too short.
        TransferError: a file cannot be read.
        TierStoreError: the checkpoint has a newer format.
        ValueError: the checkpoint is of another model or optimizer. After any error, the model and
            optimizer are unchanged.
    """
    where, ranks, began = os.path.realpath(path), all_ranks(), time.monotonic()
    with (
        transfer_errors("loading from", path=where),
        saving.first_rank_error(),
        ExitStack() as stack,
    ):
        files = _on_all(ranks, "open", lambda: CheckpointFiles(where, stack))
        _on_all(ranks, "check", lambda: files.check(ranks.rank, ranks.get_world_size()))
        loading = _on_all(ranks, "match", lambda: _Loading(files, model, optimizer))
        _on_all(ranks, "load", loading.load)
    logger.info("loaded a training run from %s in %.1f s", path, time.monotonic() - began)
    return None if loading.ours is None else loading.ours["extra"]


def _on_all(ranks: Any, step: str, do: Callable[[], Any]) -> Any:
    """Call `do` on every rank and return its result. Raises the error of any rank on all ranks."""
    done: list[Any] = []
    ranks.all_gather(step, lambda: done.append(do()))
    return done[0]


class _Loading:
    """A checkpoint that matches a model and an optimizer.

    The constructor raises ValueError if it does not match. It changes nothing.
    """

    def __init__(
        self, files: CheckpointFiles, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._files = files
        self._items = files.metadata.state_dict_metadata
        self._model = model
        self._optimizer = optimizer
        self.ours: dict[str, Any] | None = None
        if OURS in self._items:
            files.check_has_sums()
            self.ours = self._value(OURS)
        self._state = saving.model_state(model)
        self._check_model()
        if optimizer is not None:
            self._prepare(optimizer)

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        self._names = saving.names_in_groups(self._model, optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = [name for of_group in self._names for name in of_group]
        self._parameters: dict[str, torch.Tensor] = dict(zip(names, parameters, strict=True))
        self._prefix = next((name for name in OPTIMIZER if self._names_below(name)), "")
        if not self._prefix:
            path = self._files.path
            raise ValueError(f"{path} was saved without an optimizer: pass optimizer=None")
        kind = saving.kind_of(optimizer)
        for what, saved in (kind if self.ours is None else self.ours["optimizer"]).items():
            if saved != kind[what]:
                raise self._mismatch(f"an optimizer whose {what} is {saved}, not {kind[what]}")
        self._options = self._checked_options(optimizer)
        self._states = self._saved_states()
        if unknown := self._states.keys() - self._parameters.keys():
            states = _first_names(self._states[next(iter(unknown))])
            raise self._mismatch(f"an optimizer with states of other parameters: {states}")

    def _value(self, name: str) -> Any:
        """Load a value that is not a tensor, or a tensor of one chunk."""
        found = self._items[name]
        if isinstance(found, TensorStorageMetadata):
            return self._files.value(MetadataIndex(name, found.chunks[0].offsets))
        return self._files.value(MetadataIndex(name))

    def _names_below(self, prefix: str) -> list[str]:
        start = f"{prefix}."
        return [name.removeprefix(start) for name in self._items if name.startswith(start)]

    def _extra_state(self, name: str) -> Any:
        if self.ours is not None:
            return self.ours["model"][name]
        whole = f"{MODEL}.{name}"
        if whole in self._items:
            return self._value(whole)
        return _nested({key: self._value(f"{whole}.{key}") for key in self._names_below(whole)})

    def _saved_options(self) -> dict[str, dict[str, Any]]:
        """Load the optimizer options of each parameter, by parameter name."""
        prefix = f"{self._prefix}.{GROUPS}"
        by_group = f"{prefix}.0.params" in self._items  # not flattened
        found: dict[str, dict[str, Any]] = {}
        for name in self._names_below(prefix):
            whose, _, option = name.partition(".") if by_group else name.rpartition(".")
            found.setdefault(whose, {})[option] = self._value(f"{prefix}.{name}")
        if not by_group:
            return found
        by_parameter: dict[str, dict[str, Any]] = {}
        for options in found.values():
            names = options.pop("params", None)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(
                    f"{self._files.path} has an optimizer state without parameter names: save the "
                    "result of get_state_dict(model, optimizer)"
                )
            by_parameter |= dict.fromkeys(names, options)
        return by_parameter

    def _saved_states(self) -> dict[str, dict[str, Any]]:
        """Return the metadata of all states, by parameter name and state name."""
        found: dict[str, dict[str, Any]] = {}
        for name in self._names_below(f"{self._prefix}.{STATE}"):
            parameter = name
            while parameter and parameter not in self._parameters:
                parameter = parameter.rpartition(".")[0]
            key = name.removeprefix(f"{parameter}.") if parameter else name
            found.setdefault(parameter, {})[key] = self._items[f"{self._prefix}.{STATE}.{name}"]
        return found

    def _mismatch(self, saved: str) -> ValueError:
        return ValueError(
            f"{self._files.path} was saved from {saved}: load it into the same kind of model and "
            "optimizer"
        )

    def _saved_names(self) -> set[str]:
        known = set(self._names_below(MODEL))
        ours = {} if self.ours is None else self.ours["model"]
        for name in saving.extra_states(self._state):  # may be saved in parts, or be empty
            parts = {each for each in known if f"{each}.".startswith(f"{name}.")}
            known -= parts
            if parts or name in ours:
                known.add(name)
        return known

    def _check_model(self) -> None:
        known = self._saved_names()
        if lacking := self._state.keys() - known:
            raise self._mismatch(f"a different model: it has no {_first_names(lacking)}")
        if more := known - self._state.keys():
            raise self._mismatch(
                f"a different model: it also has {_first_names(more)}, which this model lacks"
            )
        for name, tensor in self._state.items():
            if isinstance(tensor, torch.Tensor):
                found, there = self._items.get(f"{MODEL}.{name}"), "no tensor"
                if isinstance(found, TensorStorageMetadata):
                    there = _describe(found.properties.dtype, found.size)
                if there != (here := _describe(tensor.dtype, tensor.shape)):
                    raise self._mismatch(
                        f"a different model: {name!r} is {there} there, and {here} in the model"
                    )

    def _checked_options(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Return the options that each group of the optimizer will have after loading."""
        saved = self._saved_options()
        if differing := saved.keys() ^ self._parameters.keys():
            raise self._mismatch(
                f"different groups of parameters, not in both: {_first_names(differing)}"
            )
        found = []
        for group, names in zip(optimizer.param_groups, self._names, strict=True):
            options = [saved[name] for name in names] or [group]
            if any(not _same(each, options[0]) for each in options):
                raise self._mismatch("different groups of parameters")
            lacking = optimizer.defaults.keys() - options[0].keys()
            if lacking and self.ours is None:
                raise self._mismatch(
                    f"a different optimizer: it has no {_first_names(lacking)} in param_groups"
                )
            found.append({**group, **options[0]})
        return found

    @torch.no_grad()
    def load(self) -> None:
        """Load the checkpoint into the model and the optimizer."""
        own = {address_of(local_of(t)) for t in tensors_of(self._model)}
        targets: dict[str, torch.Tensor] = {}  # to fill in place
        assigned: dict[str, Any] = {}  # extra states, and tensors that state-dict hooks created
        for name, value in self._state.items():
            if not isinstance(value, torch.Tensor):
                assigned[name] = self._extra_state(name)
                continue
            if address_of(local_of(value)) not in own:
                value = assigned[name] = torch.empty_like(value)
            targets[f"{MODEL}.{name}"] = value
        if self._optimizer is not None:
            targets |= self._optimizer_targets(self._optimizer)
        index = saving.storage_index_of(self._model, self._optimizer)
        GroupLoadPlanner(index).read(targets, self._files)
        if assigned:
            set_model_state_dict(self._model, assigned, options=StateDictOptions(strict=False))
        for parameter in parameters_of(self._model):
            if index.of(parameter) is not None:  # written without a version change
                torch.autograd.graph.increment_version(parameter)

    def _optimizer_targets(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Create the saved states in the optimizer. Return the tensors to fill, by saved name."""
        states = {
            name: {key: self._new_state(name, key, each) for key, each in of_one.items()}
            for name, of_one in self._states.items()
        }
        numbers = {name: i for i, name in enumerate(self._parameters)}
        groups = zip(self._options, self._names, strict=True)
        state_dict = {
            "state": {numbers[name]: _nested(each) for name, each in states.items()},
            "param_groups": [{**o, "params": [numbers[n] for n in names]} for o, names in groups],
        }
        if isinstance(optimizer, OffloadOptimizer):
            optimizer.allocate_state(state_dict)
        else:
            before = optimizer.state, optimizer.param_groups
            try:
                optimizer.load_state_dict(state_dict)
            except Exception as error:  # any class-specific error for unknown states
                optimizer.state, optimizer.param_groups = before
                kind = type(optimizer).__name__
                raise self._mismatch(f"an optimizer other than {kind} ({error!r:.200})") from error
        found = {}
        for name, of_one in states.items():
            for key, made in of_one.items():
                if isinstance(made, torch.Tensor) and made.dim():
                    state: Any = optimizer.state[self._parameters[name]]
                    for each in key.split("."):
                        state = state[each]
                    whole = f"{self._prefix}.{STATE}.{name}.{key}"
                    found[whole] = saving.sharded_like(self._parameters[name], state)
        return found

    def _new_state(self, name: str, key: str, saved: Any) -> Any:
        """Return the value of a state, or a tensor to fill.

        For an `OffloadOptimizer`, the tensor only conveys the shape and dtype of this rank's part:
        it is never written, so it takes no memory.
        """
        if not isinstance(saved, TensorStorageMetadata) or not saved.size:
            return self._value(f"{self._prefix}.{STATE}.{name}.{key}")
        parameter, dtype, size = self._parameters[name], saved.properties.dtype, saved.size
        if not isinstance(self._optimizer, OffloadOptimizer):
            if size == parameter.shape:
                return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            return torch.empty(size, dtype=dtype, device=parameter.device)
        dtype = self._optimizer.dtype_of(key, dtype, parameter)  # type: ignore[arg-type]
        like = local_of(parameter)
        if isinstance(parameter, DTensor) and size == parameter.shape:
            size = like.shape
        if size == like.shape and span(like) == like.nbytes:
            return torch.empty_strided(size, like.stride(), dtype=dtype)
        return torch.empty(size, dtype=dtype)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return nested dicts for dotted names."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = found
        for each in path:
            place = place.setdefault(each, {})
        place[last] = value
    return found


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = ((one[key], other[key]) for key in one.keys() & other.keys())
    return one.keys() == other.keys() and all(torch.as_tensor(a == b).all() for a, b in pairs)


def _first_names(names: Iterable[str]) -> str:
    """Format up to three names for a message."""
    found = sorted(names)
    return ", ".join(map(repr, found[:3])) + (f" and {len(found) - 3} more" if found[3:] else "")
