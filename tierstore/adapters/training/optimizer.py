"""The optimizer in RAM, over parameters, gradients and states that need not be there together.

It runs on the CPU, tile by tile: a tile is one group of parameters with their gradients and states.
While one is computed, the next one is read and the one before is written. What is computed is what
torch's own optimizer computes, by running it on the tensors of one tile at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tierstore.adapters.training.elementwise import is_elementwise
from tierstore.adapters.training.model import OffloadModel, model_of
from tierstore.adapters.training.sharded import is_distributed, local_part, memory_of
from tierstore.adapters.training.state_buffers import StateBuffer, packed_bytes, state_budget_of
from tierstore.adapters.training.tiles import Tile, TileGroups
from tierstore.adapters.training.weights import Weights
from tierstore.model.formatting import count, size
from tierstore.model.outline import in_portions
from tierstore.observe.report import Shown, shown_by
from tierstore.store import TierStore, engine_of

AHEAD = 2
"""Tiles that the store is told of in advance."""

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Classes that have a kernel for the CPU that does a whole step at once: torch's usual ones go
through memory for each operation."""

_numbers = itertools.count()


class OffloadOptimizer(torch.optim.Optimizer):
    """An optimizer of torch whose state is in a store, on disk where RAM ends.

        optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, lr=1e-4)

    It runs on the CPU, on one group of parameters after the other. It is used as torch's are:
    schedulers, groups of parameters, `state_dict` and `load_state_dict` in torch's own form, with
    states as CPU tensors that read as what they are. Every step gives what the class would give, to
    the last bit, with the same arguments.

    Adam, AdamW, SGD and Adagrad are `fused`, unless arguments or a group say otherwise (`fused`,
    `foreach`, `capturable`, `differentiable`) or parameters are no real floating-point numbers.
    The group says so: a plain optimizer with `fused=True` gives the same. What is loaded counts
    as it is.

    Args:
        model_or_params: an `OffloadModel`, any other module, or parameters (or groups of them) as
            torch's optimizers take them. Parameters that are not in a store stay where they are;
            their states go to the store all the same.
        store: where states are.
        optimizer_class: a class like `torch.optim.AdamW` that treats every parameter by itself; of
            parameters that `fully_shard` spreads, every number.
        master_dtype: keep every parameter of a lower precision in this one too, and let the
            optimizer work on that (`torch.float32`, for a model in bfloat16). It is a state, called
            "master".
        **kwargs: what the class takes.

    Raises:
        TypeError: the class is no optimizer, or cannot work on one part after the other.
        ValueError: what the class raises for its arguments.
    """

    def __init__(
        self,
        model_or_params: Any,
        store: TierStore,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        master_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_class(optimizer_class)
        self.store = store
        self.master_dtype = master_dtype
        # torch's optimizer itself, which is given the tensors of one tile after the other.
        self._inner, looks = _made(optimizer_class, kwargs)
        self._takes_shards = functools.cache(lambda: is_elementwise(optimizer_class, kwargs))
        self._key = f"optimizer/{next(_numbers)}"
        self._tiles: list[Tile] = []
        params = model_or_params
        if isinstance(model_or_params, nn.Module):
            params = model_or_params.parameters()
        super().__init__(params, dict(self._inner.defaults))
        if looks:  # it raises what it has to say of them
            optimizer_class([_like(group) for group in self.param_groups], **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with arguments of their own.

        Args:
            param_group: `"params"`, and arguments of the class by name.

        Raises:
            TypeError: the class looks at more than single numbers, and the parameters are shards.
            ValueError: a parameter is in another group already.
        """
        super().add_param_group(param_group)
        if any(map(is_distributed, self.param_groups[-1]["params"])) and not self._takes_shards():
            del self.param_groups[-1]
            raise TypeError(
                f"{type(self._inner).__name__} looks at more than single numbers of a parameter, "
                "and each process has only a shard of those that fully_shard spreads: use one that "
                "treats each number by itself, such as torch.optim.AdamW"
            )
        if self._may_fuse(self.param_groups[-1]):
            self.param_groups[-1]["fused"] = True
        known = {id(p) for tile in self._tiles for p in tile.parameters}
        fresh = [p for p in self.param_groups[-1]["params"] if id(p) not in known]
        self._cut(fresh)

    def _may_fuse(self, group: dict[str, Any]) -> bool:
        """Whether nobody has said how a group is to be computed, and one kernel can."""
        return (
            type(self._inner) in FUSED
            and group.get("fused") is None
            and group.get("foreach") is None
            and not group.get("capturable")
            and not group.get("differentiable")
            and all(p.is_floating_point() for p in group["params"])
        )

    def _cut(self, parameters: list[nn.Parameter]) -> None:
        """Put parameters into tiles: those of an offloaded model as they are grouped there."""
        members_of: dict[Weights | None, list[nn.Parameter]] = {}
        for parameter in parameters:
            model = model_of(parameter)
            weights = None if model is None else model.weights_of(parameter)
            members_of.setdefault(weights, []).append(parameter)
        rest = members_of.pop(None, [])
        for weights, members in members_of.items():
            self._add(members, weights)
        budget = state_budget_of(self.store)
        for members in in_portions(rest, lambda p: packed_bytes({"": memory_of(p)}), budget.target):
            budget.expect(packed_bytes({str(i): memory_of(p) for i, p in enumerate(members)}))
            self._add(members, None)

    def _add(self, parameters: list[nn.Parameter], weights: Weights | None) -> None:
        key = f"{self._key}/{len(self._tiles)}"
        self._tiles.append(Tile(self, key, parameters, weights))

    # Steps -------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step. Gradients stay as they are.

        Args:
            closure: computes the loss once more, as for torch's optimizers.

        Returns:
            What `closure` returns; None without one.

        Raises:
            TypeError: the class takes a number from all parameters together, as Prodigy does.
            ClosedError: the store is closed.
            BudgetError: what a group needs at once is larger than a budget.
            DiskFullError: the disk has no room for states.
            TransferError: another error of the disk.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._put_away()
        busy = [tile for tile in self._tiles if tile.has_gradients()]
        groups = TileGroups(self.param_groups)
        passes = engine_of(self.store).passes
        begun = passes.begin(f"{self._key}/{type(self._inner).__name__}", "step")
        try:
            for i, tile in enumerate(busy):
                self._expect(busy[i : i + 1 + AHEAD])
                tile.step(self._inner, groups)
            groups.finish(self._inner)
        finally:
            for tile in busy:
                tile.put_away()
            passes.end(begun)
        return loss

    __repr__, __rich__, _repr_html_ = shown_by(lambda optimizer: _look(optimizer))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a `torch.amp.GradScaler` asks an optimizer before its step.

        It keeps its scale where the loss is. For gradients on the CPU it copies that there without
        waiting, and multiplies at once: by whatever was in that memory.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.store.device.type != "cpu" and any(p.device.type == "cpu" for p in parameters):
            raise RuntimeError(
                "a GradScaler on an accelerator reads its scale too early where gradients are on "
                "the CPU, as they are of an OffloadModel: train in bfloat16, which needs no scale"
            )
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also what a backward pass that failed has left in the store.

        Args:
            set_to_none: as for torch's optimizers.
        """
        self._put_away()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm, taken together, is at most `max_norm`.

        As `torch.nn.utils.clip_grad_norm_` of the parameters in the order of the groups: to the
        last bit, if all of them have one dtype.

        Args:
            max_norm: the largest norm.
            norm_type: which norm; `"inf"` is one, too.
            error_if_nonfinite: whether a norm that is infinite or no number is an error.

        Returns:
            The norm that they had, a tensor without dimensions. Of sharded parameters, it is the
            norm over all processes, which must all call it: an ordinary tensor, the same in each.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
        """
        norm_type = float(norm_type)  # "inf" is one, too
        self._put_away()
        busy = [tile for tile in self._tiles if tile.has_gradients()]
        norms: dict[int, torch.Tensor] = {}
        for tile in busy:
            norms.update(tile.norms(norm_type))
        order = [norms[id(p)] for g in self.param_groups for p in g["params"] if id(p) in norms]
        if not order:
            return torch.tensor(0.0)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(order), norm_type)
        whole: Any = total
        if is_distributed(total):  # over all processes
            total = whole.full_tensor()
        if error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped. To disable this error and scale the "
                "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if scale != 1.0:  # by 1.0 nothing would change
            for tile in busy:
                tile.scale(scale)
        for tile in busy:
            tile.put_away()
        return total

    def _put_away(self) -> None:
        for model in {id(m): m for m in map(_model_of_tile, self._tiles) if m is not None}.values():
            model.put_away()

    def _expect(self, tiles: Iterable[Tile]) -> None:
        buffers = [b for tile in tiles for b in tile.buffers() if not b.host_resident]
        for buffer in buffers:
            buffer.expected()
        if buffers:
            engine_of(self.store).mutable_groups.expect_in_host(buffer.key for buffer in buffers)

    # State -------------------------------------------------------------------------------------

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class of torch's optimizer that does the steps."""
        return type(self._inner)

    def state_buffers(self) -> list[StateBuffer]:
        """The groups that states are in."""
        return [buffer for tile in self._tiles for buffer in tile.state_buffers]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state that an optimizer of torch, or this one, has told.

        Args:
            state_dict: in torch's form, with tensors on any device.

        Raises:
            ValueError: groups do not fit.
        """
        self._load(state_dict, Tile.load)

    def lay_out(self, state_dict: Any) -> None:
        """The same, but that states of one dimension or more have any values afterwards: they are
        going to be written where they are."""
        self._load(state_dict, Tile.lay_out)

    def _load(
        self, state_dict: Any, load: Callable[[Tile, dict[int, dict[str, Any]]], None]
    ) -> None:
        # torch's own way would bring all states to where the parameters compute.
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        loaded = {
            id(parameter): self._as_loaded(state_dict["state"][number], parameter)
            for number, parameter in zip(numbers, ours, strict=True)
            if number in state_dict["state"]
        }
        self.state = defaultdict(dict)
        for tile in self._tiles:
            load(tile, {id(p): loaded[id(p)] for p in tile.parameters if id(p) in loaded})
        for tile in self._tiles:
            tile.put_away()

    def _as_loaded(self, state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        """Values are given the dtype of the parameter, as torch does, unless it has a master."""
        return {
            name: local_part(parameter, value.detach()).to(
                "cpu", self.dtype_of(name, value.dtype, parameter)
            )
            if isinstance(value, torch.Tensor)
            else value
            for name, value in state.items()
        }

    def dtype_of(self, name: str, dtype: torch.dtype, parameter: nn.Parameter) -> torch.dtype:
        """The dtype that a state is loaded in."""
        has_master = self.master_dtype not in (None, parameter.dtype)
        if name == "step" or has_master or not parameter.is_floating_point():
            return dtype
        return parameter.dtype if dtype.is_floating_point else dtype


def _look(optimizer: OffloadOptimizer) -> Shown:
    if "_tiles" not in vars(optimizer) or "param_groups" not in vars(optimizer):
        return Shown("OffloadOptimizer, not made yet")
    groups = optimizer.param_groups
    number = sum(len(group["params"]) for group in groups)
    states = sum(buffer.nbytes for buffer in optimizer.state_buffers())
    options = [
        (f"group {i}", ", ".join(f"{k}={v!r}" for k, v in group.items() if k != "params"))
        for i, group in enumerate(groups)
    ]
    title = (
        f"OffloadOptimizer of {optimizer.optimizer_class.__name__}, "
        f"{count(number, 'parameter')} in {count(len(groups), 'group')}, {size(states)} of states"
    )
    store = engine_of(optimizer.store).reporting.look()
    return Shown(f"{title}; {store.title}", store.stats, rows=tuple(options))


def _model_of_tile(tile: Tile) -> OffloadModel | None:
    return model_of(tile.parameters[0]) if tile.weights is not None else None


def _made(
    optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, Any]
) -> tuple[torch.optim.Optimizer, bool]:
    """An optimizer of nothing, and whether its class looks at its parameters (Muon: matrices)."""
    try:
        return optimizer_class([nn.Parameter(torch.zeros(1))], **kwargs), False
    except ValueError:
        pass  # what it says of arguments that cannot be, it says again
    return optimizer_class([nn.Parameter(torch.zeros(1, 1))], **kwargs), True


def _like(group: dict[str, Any]) -> dict[str, Any]:
    """A group with parameters of the same shapes and dtypes, and without memory."""
    like = [
        nn.Parameter(torch.empty(1, dtype=p.dtype).expand(p.shape), p.requires_grad)
        for p in group["params"]
    ]
    return {**group, "params": like}


def _refuse_class(optimizer_class: Any) -> None:
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            f"{optimizer_class!r} is no class of optimizers: pass one such as torch.optim.AdamW, "
            "and its arguments by name"
        )
    if issubclass(optimizer_class, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise TypeError(
            f"{optimizer_class.__name__} cannot work on one part of the parameters after the other:"
            " use one that treats each parameter by itself, such as torch.optim.AdamW"
        )
