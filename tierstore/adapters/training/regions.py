"""Parts of a model that are computed again in the backward pass, and batches cut into small ones.

Of a *region* only what it was given is kept. The backward pass computes it again, with the state of
the random generators and of autocast that it had, on copies of its buffers (statistics are updated
once), and goes back through it at once: so of all regions, one has its activations in memory. This
is what `torch.utils.checkpoint` calls reentrant. What it calls non-reentrant keeps what was
computed again until all of it was used; then the weights in it could not go as others come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tierstore.adapters.training.gradients import Shipping

Call = Callable[..., Any]


class Region:
    """Modules that are computed again together. `run` computes them."""

    def __init__(self, modules: list[nn.Module], run: Call, shipping: Shipping) -> None:
        self.modules = modules
        self.run = run
        self.shipping = shipping

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        trained = any(p.requires_grad for m in self.modules for p in m.parameters())
        if not trained and not any(tensor.requires_grad for tensor in tensors):
            return self.run(*args, **kwargs)
        if any(_changes_its_input(module) for module in self.modules):
            leaves = [_untouched(leaf) for leaf in leaves]
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        versions = [tensor._version for tensor in tensors]
        call = _Call(self, leaves, structure)
        # The first one sees to it that there is a way back even if no input has one.
        outputs = _Again.apply(torch.empty(0, requires_grad=True), call, *tensors)
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    "a module changes its input in place, and it is to be computed again from that "
                    f"input: {', '.join(type(m).__name__ for m in self.modules)}. Let it work on a "
                    "copy, or use checkpoint_activation=False"
                )
        return call.result(outputs)

    @contextlib.contextmanager
    def buffers_apart(self) -> Iterator[None]:
        """Let changes of buffers be for nothing, inside of it."""
        held = [
            (module._buffers, name, buffer)
            for part in self.modules
            for module in part.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        for buffers, name, buffer in held:
            buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for buffers, name, buffer in held:
                buffers[name] = buffer


def _changes_its_input(module: nn.Module) -> bool:
    return any(getattr(part, "inplace", False) for part in module.modules())


def _untouched(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class _Place(int):
    """Where in a list a tensor is."""


class _Call:
    """One call of a region: what it was given, and in what state the world was."""

    def __init__(self, region: Region, leaves: list[Any], structure: Any) -> None:
        self.region = region
        self._structure = structure
        count = iter(range(len(leaves)))
        self._leaves = [
            _Place(next(count)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._given = tensors
        devices = {t.device for t in tensors} | {
            p.device for m in region.modules for p in m.parameters()
        }
        self._random = random_states(devices)
        self._autocast = _autocast_states({device.type for device in devices})
        self._shape: Any = None
        self._found: list[Any] = []

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Call it. Returns the tensors of the result that are new."""
        leaves = [tensors[leaf] if isinstance(leaf, _Place) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)
        found, self._shape = tree_flatten(self.region.run(*args, **kwargs))
        given = {id(tensor): place for place, tensor in enumerate(tensors)}
        new: list[torch.Tensor] = []
        self._found = []
        for leaf in found:
            if id(leaf) in given:
                self._found.append(("given", given[id(leaf)]))
            elif isinstance(leaf, torch.Tensor):
                self._found.append(("new", len(new)))
                new.append(leaf)
            else:
                self._found.append(("plain", leaf))
        return new

    def result(self, new: tuple[torch.Tensor, ...]) -> Any:
        """The result, once autograd knows its tensors."""
        given, self._given = self._given, []
        kinds = {"given": given, "new": new}
        leaves = [kinds[kind][what] if kind in kinds else what for kind, what in self._found]
        self._found = []
        return tree_unflatten(leaves, self._shape)

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """The state of the random generators and of autocast in the forward pass."""
        now = random_states(self._random)
        with contextlib.ExitStack() as stack:
            stack.callback(set_random_states, now)
            set_random_states(self._random)
            for state in self._autocast:
                stack.enter_context(torch.autocast(**state))
            stack.enter_context(self.region.buffers_apart())
            yield


def random_states(devices: Iterable[torch.device]) -> dict[torch.device, torch.Tensor]:
    """The state of the random generators of devices, and of the CPU's."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    for device in devices:
        module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        if hasattr(module, "get_rng_state"):
            states[device] = module.get_rng_state(device)
    return states


def set_random_states(states: dict[torch.device, torch.Tensor]) -> None:
    """Let them be as they were."""
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def _autocast_states(kinds: set[str]) -> list[dict[str, Any]]:
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in sorted(kinds - {"meta"})
        if torch.amp.is_autocast_available(kind)
    ]


class _Again(torch.autograd.Function):
    """Computes a region, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, way_back: torch.Tensor, call: _Call, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        ctx.wanted = [tensor.requires_grad for tensor in tensors]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # where there is no gradient, there must be none
        new = call.run(list(tensors))
        plain = [t for t in new if not (t.is_floating_point() or t.is_complex())]
        ctx.mark_non_differentiable(*plain)
        return tuple(new)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "what is computed again cannot be differentiated by torch.autograd.grad() or with "
                "inputs=: use loss.backward(), or checkpoint_activation=False"
            )
        call: _Call = ctx.call
        call.region.shipping.begin()
        tensors = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
        ]
        with call.as_it_was(), torch.enable_grad():
            new = call.run(tensors)
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(new, gradients, strict=True)
            if tensor.requires_grad and gradient is not None
        ]
        del new
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return (None, None, *(tensor.grad for tensor in tensors))


class Microbatches:
    """Calls a model on parts of a batch, one after the other, and goes back in the same order.

    So gradients are added up as a loop over the parts would: forward and backward for each.
    """

    def __init__(self, run: Call, count: int, shipping: Shipping) -> None:
        self._run = run
        self._count = count
        self.shipping = shipping

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        batch = next((x.size(0) for x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
        if batch < self._count:
            raise ValueError(
                f"a batch of {batch} cannot be cut into {self._count} microbatches: give a tensor "
                "whose first dimension is the batch, or lower num_microbatches"
            )
        cut = [_is_batched(leaf, batch) for leaf in leaves]
        parts = [
            leaf.tensor_split(self._count) if whole else [leaf] * self._count
            for leaf, whole in zip(leaves, cut, strict=True)
        ]
        calls = [
            _Part(self._run, [part[i] for part in parts], structure) for i in range(self._count)
        ]
        if not torch.is_grad_enabled():
            return joined([call.run(call.leaves) for call in calls])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        way_back = torch.empty(0, requires_grad=True)
        outputs = _InParts.apply(way_back, self, calls, leaves, cut, *tensors)
        return tree_unflatten(list(outputs), calls[0].shape)


def _is_batched(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.size(0) == batch


class _Part:
    """The call for one part of the batch."""

    def __init__(self, run: Call, leaves: list[Any], structure: Any) -> None:
        self._run = run
        self.leaves = leaves
        self._structure = structure
        self.shape: Any = None
        self.found: list[Any] = []

    def run(self, leaves: list[Any]) -> Any:
        """Call the model."""
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self._run(*args, **kwargs)


def joined(results: list[Any]) -> Any:
    """The results of parts of a batch as that of the whole batch."""
    flat = [tree_flatten(result) for result in results]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_joined(column) for column in columns], flat[0][1])


def _joined(column: tuple[Any, ...]) -> Any:
    first = column[0]
    if not isinstance(first, torch.Tensor):
        return first
    if not first.dim():
        raise TypeError(
            "with num_microbatches, every tensor that a model returns must have the batch as its "
            "first dimension; this one returns a single number: compute the loss outside of it"
        )
    return torch.cat(column)


class _InParts(torch.autograd.Function):
    """Runs the parts, each with a graph of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        way_back: torch.Tensor,
        whole: Microbatches,
        calls: list[_Part],
        leaves: list[Any],
        cut: list[bool],
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.whole, ctx.calls = whole, calls
        ctx.cut = [c for c, leaf in zip(cut, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
        wanted = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        ctx.set_materialize_grads(False)
        for call in calls:
            call.leaves = [
                leaf.detach().requires_grad_(wants) if isinstance(leaf, torch.Tensor) else leaf
                for leaf, wants in zip(call.leaves, wanted, strict=True)
            ]
            with torch.enable_grad():
                call.found, call.shape = tree_flatten(call.run(call.leaves))
        columns = list(zip(*(call.found for call in calls), strict=True))
        results = tuple(_joined(column) for column in columns)
        plain = [
            t
            for t, column in zip(results, columns, strict=True)
            if isinstance(t, torch.Tensor) and not column[0].requires_grad
        ]
        ctx.mark_non_differentiable(*plain)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "microbatches cannot be differentiated by torch.autograd.grad() or with inputs=: "
                "use loss.backward(), or num_microbatches=1"
            )
        ctx.whole.shipping.begin()
        before = [0] * len(gradients)
        for call in ctx.calls:
            pairs = []
            for i, (tensor, gradient) in enumerate(zip(call.found, gradients, strict=True)):
                if not isinstance(tensor, torch.Tensor):
                    continue
                start, before[i] = before[i], before[i] + tensor.size(0)
                if gradient is not None and tensor.requires_grad:
                    pairs.append((tensor, gradient[start : before[i]]))
            call.found = []
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        rows = [[x.grad for x in c.leaves if isinstance(x, torch.Tensor)] for c in ctx.calls]
        found = [
            _input_gradient(list(column), cut)
            for column, cut in zip(zip(*rows, strict=True), ctx.cut, strict=True)
        ]
        return (None, None, None, None, None, *found)


def _input_gradient(parts: list[torch.Tensor | None], cut: bool) -> torch.Tensor | None:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    if cut:
        return torch.cat(found)
    total = found[0]
    for part in found[1:]:
        total = total + part
    return total
