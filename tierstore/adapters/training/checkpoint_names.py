"""What a checkpoint calls the parts of a training: as torch's own `get_model_state_dict` and
`get_optimizer_state_dict`, with the optimizer's state flattened.

    model.<name>                            parameters and buffers, and what modules add
    optimizer.state.<parameter>.<state>     what the optimizer keeps of each parameter
    optimizer.param_groups.<parameter>.<option>
    tierstore                               ours: what is needed to load all of it as it was

torch's functions for optimizers make states where there are none, by a step. Here what is not there
is not saved, and what a checkpoint has is made.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from tierstore.adapters.codecs.memory import span
from tierstore.adapters.contents import named_parameters_of, parameters_of
from tierstore.adapters.training.checkpoint_files import CheckpointFiles
from tierstore.adapters.training.checkpoint_planners import Places
from tierstore.adapters.training.model import OffloadModel, model_of
from tierstore.adapters.training.optimizer import OffloadOptimizer
from tierstore.adapters.training.state_buffers import StateBuffer
from tierstore.torch_private import qualified_name

MODEL, OURS = "model", "tierstore"
OPTIMIZER = ("optimizer", "optim")
"""As we call it, and as torch's tutorial does."""
STATE, GROUPS = "state", "param_groups"


def dtype_of(tensor: Any) -> str:
    """A dtype, for a message."""
    return str(tensor.dtype).removeprefix("torch.")


# What there is ------------------------------------------------------------------------------------


def model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and what modules add, by the names that a checkpoint has."""
    for each in _models_in(model):
        each.put_away()
    return dict(get_model_state_dict(model))


def _models_in(model: nn.Module) -> list[OffloadModel]:
    found = (model_of(parameter) for parameter in parameters_of(model))
    return list({id(each): each for each in found if each is not None}.values())


def names_in_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters in each group of an optimizer. Raises ValueError for parameters
    of another model."""
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
    """States and options of each parameter, by the names that a checkpoint has."""
    found: dict[str, Any] = {}
    names = names_in_groups(model, optimizer)
    for group, members in zip(optimizer.param_groups, names, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter, name in zip(group["params"], members, strict=True):
            found |= {f"{GROUPS}.{name}.{key}": value for key, value in options.items()}
            for key, value in _flat(optimizer.state.get(parameter, {})):
                found[f"{STATE}.{name}.{key}"] = as_part(value, parameter)
    return found


def _flat(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping) and value:
            yield from ((f"{key}.{inner}", each) for inner, each in _flat(value))
        else:
            yield str(key), value


def as_part(value: Any, parameter: torch.Tensor) -> Any:
    """A state of what this rank has of a parameter is what it has of a larger one, too."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    local = parameter.to_local()
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != local.shape:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def places_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Places:
    """Where in a store the tensors of a training are."""
    groups = [weights for each in _models_in(model) for weights in each.groups]
    buffers = [w.buffer for w in groups if isinstance(w.buffer, StateBuffer)]
    if isinstance(optimizer, OffloadOptimizer):
        buffers += optimizer.state_buffers()
    return Places(buffers, [weights for weights in groups if weights.frozen])


def kind_of(optimizer: torch.optim.Optimizer) -> dict[str, str | None]:
    """What has to be the same for a state to be of use."""
    kind, master = type(optimizer), None
    if isinstance(optimizer, OffloadOptimizer):
        kind, master = optimizer.optimizer_class, optimizer.master_dtype
    return {"class": kind.__name__, "master_dtype": None if master is None else str(master)}


# What was saved -----------------------------------------------------------------------------------


class SavedNames:
    """What a checkpoint has, by names: of the model, and of the optimizer if there is one."""

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self.items: dict[str, Any] = files.metadata.state_dict_metadata
        self.model = _below(MODEL, self.items)
        self.optimizer = next((each for each in OPTIMIZER if _below(each, self.items)), None)
        self.ours: dict[str, Any] | None = None
        if OURS in self.items:
            if not files.sums:
                raise files.missing_sums()
            self.ours = self.value(OURS)

    def value(self, name: str) -> Any:
        """What is no tensor, or a small one."""
        found = self.items[name]
        if isinstance(found, TensorStorageMetadata):
            return self.files.value(MetadataIndex(name, found.chunks[0].offsets))
        return self.files.value(MetadataIndex(name))

    def added(self, name: str) -> Any:
        """What a module has added to the model's state."""
        if self.ours is not None:
            return self.ours["model"][name]
        whole = f"{MODEL}.{name}"
        if whole in self.items:
            return self.value(whole)
        return nested({key: self.value(f"{whole}.{key}") for key in _below(whole, self.items)})

    def options(self) -> dict[str, dict[str, Any]]:
        """What each parameter's group says, by the parameter's name and the option's."""
        assert self.optimizer is not None
        prefix = f"{self.optimizer}.{GROUPS}"
        by_group = f"{prefix}.0.params" in self.items  # not flattened
        found: dict[str, dict[str, Any]] = {}
        for name in _below(prefix, self.items):
            whose, _, option = name.partition(".") if by_group else name.rpartition(".")
            found.setdefault(whose, {})[option] = self.value(f"{prefix}.{name}")
        return self._by_parameter(found) if by_group else found

    def _by_parameter(self, groups: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for options in groups.values():
            names = options.pop("params", None)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(
                    f"{self.files.path} was saved of an optimizer whose parameters have no names: "
                    "save what get_state_dict(model, optimizer) returns"
                )
            found |= dict.fromkeys(names, options)
        return found

    def states(self, parameters: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The metadata of each parameter's states, by the parameter's name and the state's."""
        known = set(parameters)
        found: dict[str, dict[str, Any]] = {}
        prefix = f"{self.optimizer}.{STATE}"
        for name in _below(prefix, self.items):
            parameter = name
            while parameter and parameter not in known:
                parameter = parameter.rpartition(".")[0]
            key = name[len(parameter) + 1 :] if parameter else name
            found.setdefault(parameter, {})[key] = self.items[f"{prefix}.{name}"]
        return found


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Dicts in dicts, of names that tell where their values are."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = found
        for each in path:
            place = place.setdefault(each, {})
        place[last] = value
    return found


def inner(values: Any, name: str) -> Any:
    """The value that has this name in dicts in dicts."""
    for each in name.split("."):
        values = values[each]
    return values


def _below(prefix: str, names: Iterable[str]) -> list[str]:
    start = f"{prefix}."
    return [name[len(start) :] for name in names if name.startswith(start)]


def like_parameter(
    parameter: torch.Tensor, size: torch.Size, dtype: torch.dtype, *, lazily: bool
) -> torch.Tensor:
    """A tensor for a state of a parameter. `lazily`: of what this rank has, on the CPU, of zeros
    that take no memory before somebody writes to them."""
    if not lazily:
        if size == parameter.shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(size, dtype=dtype, device=parameter.device)
    like = parameter
    if isinstance(parameter, DTensor) and size == parameter.shape:
        like, size = parameter.to_local(), parameter.to_local().shape
    stride = torch.empty(size, device="meta").stride()
    if size == like.shape and span(like) == like.nbytes:
        stride = like.stride()
    nbytes = size.numel() * dtype.itemsize
    if not nbytes:
        return torch.empty(size, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).as_strided(size, stride)
