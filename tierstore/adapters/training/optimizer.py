"""Optimizer steps on the CPU, tile by tile, for state that exceeds RAM.

A tile is one group of parameters with their gradients and states. While one tile is computed, the
next is read and the previous one is written. The computation itself is torch's own optimizer, run
on the tensors of one tile at a time.
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
from tierstore.observe.report import Description, display_methods
from tierstore.store import TierStore, engine_of

AHEAD = 2
"""Number of tiles to prefetch."""

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Classes with a fused CPU kernel: one sweep over memory per step, not one per operation."""

_numbers = itertools.count()


class OffloadOptimizer(torch.optim.Optimizer):
    """Runs any per-parameter torch optimizer with its state in a store, in RAM or on disk.

        optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, lr=1e-4)

    Steps run on the CPU, one group of parameters at a time. Use it like any torch optimizer:
    learning-rate schedulers, parameter groups, `state_dict` and `load_state_dict` (in torch's
    format) work as usual, and states read as CPU tensors with their true values. Every step is
    bit-identical to a step of `optimizer_class` with the same arguments.

    Adam, AdamW, SGD and Adagrad use torch's fused CPU kernel, unless an argument or parameter
    group sets `fused`, `foreach`, `capturable` or `differentiable`, or a parameter is not a real
    floating-point tensor. The parameter group then contains `fused=True`; compare with a plain
    optimizer that has the same setting. `load_state_dict` keeps the loaded value.

    Args:
        model_or_params: an `OffloadModel`, any other module, or an iterable of parameters or
            parameter groups. Parameters outside a store stay where they are; their states are
            still stored.
        store: the store for the states.
        optimizer_class: a class that updates each parameter independently, such as
            `torch.optim.AdamW`. For parameters sharded by `fully_shard`, it must be element-wise.
        master_dtype: keep a master copy of each lower-precision parameter in this dtype, and let
            the optimizer update that copy (`torch.float32` for a model in bfloat16). The copy is
            a state named "master".
        **kwargs: arguments of `optimizer_class`.

    Raises:
        TypeError: `optimizer_class` is not an optimizer class, or cannot step parameters in parts.
        ValueError: `optimizer_class` rejects its arguments.
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
        _check_optimizer_class(optimizer_class)
        self.store = store
        self.master_dtype = master_dtype
        # torch's optimizer, which steps the tensors of one tile at a time.
        self._inner, checks_parameters = _create_inner(optimizer_class, kwargs)
        self._takes_shards = functools.cache(lambda: is_elementwise(optimizer_class, kwargs))
        self._key = f"optimizer/{next(_numbers)}"
        self._tiles: list[Tile] = []
        params = model_or_params
        if isinstance(model_or_params, nn.Module):
            params = model_or_params.parameters()
        super().__init__(params, dict(self._inner.defaults))
        if checks_parameters:  # raises its own error for parameters that it rejects
            optimizer_class([_like(group) for group in self.param_groups], **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Args:
            param_group: `"params"`, and arguments of the optimizer class by name.

        Raises:
            TypeError: the class is not element-wise, and the parameters are shards.
            ValueError: a parameter is already in another group.
        """
        super().add_param_group(param_group)
        if any(map(is_distributed, self.param_groups[-1]["params"])) and not self._takes_shards():
            del self.param_groups[-1]
            raise TypeError(
                f"{type(self._inner).__name__} is not element-wise, so it cannot step parameters "
                "sharded by fully_shard, of which each process has only a shard: use an "
                "element-wise optimizer, such as torch.optim.AdamW"
            )
        if self._may_fuse(self.param_groups[-1]):
            self.param_groups[-1]["fused"] = True
        known = {id(p) for tile in self._tiles for p in tile.parameters}
        fresh = [p for p in self.param_groups[-1]["params"] if id(p) not in known]
        self._add_tiles(fresh)

    def _may_fuse(self, group: dict[str, Any]) -> bool:
        """Return True if a group leaves the implementation open and a fused kernel can step it."""
        return (
            type(self._inner) in FUSED
            and group.get("fused") is None
            and group.get("foreach") is None
            and not group.get("capturable")
            and not group.get("differentiable")
            and all(p.is_floating_point() for p in group["params"])
        )

    def _add_tiles(self, parameters: list[nn.Parameter]) -> None:
        """Create tiles for parameters: those of an OffloadModel by its groups, others by size."""
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
            budget.count_group(packed_bytes({str(i): memory_of(p) for i, p in enumerate(members)}))
            self._add(members, None)

    def _add(self, parameters: list[nn.Parameter], weights: Weights | None) -> None:
        key = f"{self._key}/{len(self._tiles)}"
        self._tiles.append(Tile(self, key, parameters, weights))

    # Steps -------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step. Gradients are kept.

        Args:
            closure: reevaluates the model and returns the loss, as for torch's optimizers.

        Returns:
            The result of `closure`, or None without one.

        Raises:
            TypeError: the class computes a value over all parameters, as Prodigy does.
            ClosedError: the store is closed.
            BudgetError: the tensors of one group exceed a budget.
            DiskFullError: the states do not fit on the disk.
            TransferError: the disk cannot be read or written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._flush()
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
                tile.flush()
            passes.end(begun)
        return loss

    __repr__, __rich__, _repr_html_ = display_methods(lambda optimizer: _display(optimizer))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Attribute that `torch.amp.GradScaler` reads before a step.

        GradScaler keeps its scale on the loss's device. For gradients on the CPU, it copies the
        scale without waiting, and multiplies immediately, by uninitialized memory. This property
        raises RuntimeError instead.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.store.device.type != "cpu" and any(p.device.type == "cpu" for p in parameters):
            raise RuntimeError(
                "a GradScaler on an accelerator reads its scale too early if gradients are on the "
                "CPU, as those of an OffloadModel are: train in bfloat16, which needs no scaling"
            )
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those that a failed backward pass left in the store.

        Args:
            set_to_none: as for torch's optimizers.
        """
        self._flush()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most `max_norm`.

        Equivalent to `torch.nn.utils.clip_grad_norm_` of the parameters in group order, and
        bit-identical if all of them have one dtype.

        Args:
            max_norm: the largest total norm.
            norm_type: order of the norm; `"inf"` for the maximum norm.
            error_if_nonfinite: True to raise an error if the total norm is infinite or NaN.

        Returns:
            The total norm before scaling, as a zero-dimensional tensor. For sharded parameters, all
            processes must call this method, and each gets the norm over all processes as an
            ordinary tensor.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
        """
        norm_type = float(norm_type)
        self._flush()
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
        if scale != 1.0:
            for tile in busy:
                tile.scale(scale)
        for tile in busy:
            tile.flush()
        return total

    def _flush(self) -> None:
        for model in {id(m): m for m in map(_model_of_tile, self._tiles) if m is not None}.values():
            model.flush()

    def _expect(self, tiles: Iterable[Tile]) -> None:
        buffers = [b for tile in tiles for b in tile.buffers() if not b.host_resident]
        for buffer in buffers:
            buffer.mark_expected()
        if buffers:
            engine_of(self.store).mutable_groups.prefetch_to_host(buffer.key for buffer in buffers)

    # State -------------------------------------------------------------------------------------

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The torch optimizer class that computes the steps."""
        return type(self._inner)

    def state_buffers(self) -> list[StateBuffer]:
        """Return the groups that hold states."""
        return [buffer for tile in self._tiles for buffer in tile.state_buffers]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state dict of an OffloadOptimizer or of a torch optimizer.

        Args:
            state_dict: a state dict in torch's format, with tensors on any device.

        Raises:
            ValueError: the parameter groups do not match.
        """
        self._load(state_dict, Tile.load)

    def allocate_state(self, state_dict: Any) -> None:
        """Load a state dict, but only allocate states of one dimension or more.

        Their values are undefined until the caller writes them in place.
        """
        self._load(state_dict, Tile.allocate_state)

    def _load(
        self, state_dict: Any, load: Callable[[Tile, dict[int, dict[str, Any]]], None]
    ) -> None:
        # torch's own implementation would move all states to the parameters' device.
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
            tile.flush()

    def _as_loaded(self, state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        """Cast states to the parameter's dtype, as torch does, unless it has a master copy."""
        return {
            name: local_part(parameter, value.detach()).to(
                "cpu", self.dtype_of(name, value.dtype, parameter)
            )
            if isinstance(value, torch.Tensor)
            else value
            for name, value in state.items()
        }

    def dtype_of(self, name: str, dtype: torch.dtype, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which a state is loaded."""
        has_master = self.master_dtype not in (None, parameter.dtype)
        if name == "step" or has_master or not parameter.is_floating_point():
            return dtype
        return parameter.dtype if dtype.is_floating_point else dtype


def _display(optimizer: OffloadOptimizer) -> Description:
    if "_tiles" not in vars(optimizer) or "param_groups" not in vars(optimizer):
        return Description("OffloadOptimizer, not initialised yet")
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
    store = engine_of(optimizer.store).reporting.overview()
    return Description(f"{title}; {store.title}", store.stats, rows=tuple(options))


def _model_of_tile(tile: Tile) -> OffloadModel | None:
    return model_of(tile.parameters[0]) if tile.weights is not None else None


def _create_inner(
    optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, Any]
) -> tuple[torch.optim.Optimizer, bool]:
    """Return an optimizer of a placeholder parameter, and True if its class checks shapes.

    Muon, for example, accepts matrices only.
    """
    try:
        return optimizer_class([nn.Parameter(torch.zeros(1))], **kwargs), False
    except ValueError:
        pass  # if the arguments are invalid, the next line raises the same error
    return optimizer_class([nn.Parameter(torch.zeros(1, 1))], **kwargs), True


def _like(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group whose parameters have the same shapes and dtypes, but no memory."""
    like = [
        nn.Parameter(torch.empty(1, dtype=p.dtype).expand(p.shape), p.requires_grad)
        for p in group["params"]
    ]
    return {**group, "params": like}


def _check_optimizer_class(optimizer_class: Any) -> None:
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            f"{optimizer_class!r} is not an optimizer class: pass one such as torch.optim.AdamW, "
            "and its arguments by name"
        )
    if issubclass(optimizer_class, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise TypeError(
            f"{optimizer_class.__name__} cannot step parameters in parts: use an optimizer that "
            "updates each parameter independently, such as torch.optim.AdamW"
        )
