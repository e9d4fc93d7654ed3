"""Support for parameters sharded by FSDP2 (`fully_shard`): the shards of this process.

FSDP2 gathers parameters and reduces gradients itself. This module uses two of its public extension
points for foreign tensors:

- **All-gather.** FSDP2 calls `fsdp_pre_all_gather` of a local tensor for the bytes to send, just
  before it sends them (torchao's quantised weights use this). Until then the shard may be anywhere,
  and a module's forward needs no lease on it.
- **Reduce-scatter.** FSDP2 runs hooks registered with `register_post_accumulate_grad_hook` on a
  sharded parameter as soon as its gradient is reduced (optimizers that step in the backward pass
  use this).

A group of the store holds the local tensors of such parameters. Users, FSDP2 and checkpoints see
DTensors under the parameters' own names, as without a store.

torch.distributed is not imported here: if there is a DTensor, it has been imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tierstore.adapters.codecs.plain import assign, replace_memory
from tierstore.adapters.codecs.wrapper import WrapperCodec
from tierstore.adapters.contents import modules_of, named_parameters_of, parameters_of
from tierstore.adapters.forward import ForwardContext
from tierstore.torch_private import in_backward, tree_flatten

PRE_ALL_GATHER, POST_ALL_GATHER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
"""Names of the methods that FSDP2 looks up on the local tensor of a parameter."""

Read = Callable[[], torch.Tensor]
"""Returns the current tensor of a shard."""


def _class_of(module: str, name: str) -> type | None:
    """Return a class of torch.distributed; None if its module is not imported."""
    return getattr(sys.modules.get(module), name, None)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a DTensor."""
    kind = _class_of("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor (the object itself), or any other tensor unchanged."""
    if not is_distributed(tensor):
        return tensor
    (local,) = WrapperCodec().flatten(tensor).values()
    return local


def distributed_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as a DTensor that is sharded like `parameter` and shares `local`'s memory.

    Returns `local` itself if the parameter is not sharded or its shard has another shape.
    """
    if not is_distributed(parameter) or local.shape != memory_of(parameter).shape:
        return local
    whole: Any = parameter
    given = local
    if local.device.type != parameter.device.type:
        # from_local would move `local` to the mesh's accelerator. So build the DTensor around a
        # placeholder there, and replace its local tensor by the one in RAM.
        given = torch.empty(1, dtype=local.dtype, device=parameter.device).expand(local.shape)
    made: torch.Tensor = type(whole).from_local(
        given,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.size(),
        stride=whole.stride(),
    )
    if given is not local:
        assign(memory_of(made), local)
    return made


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor; the copy of a DTensor has its local tensor on the same device."""
    if not is_distributed(tensor):
        return tensor.clone()
    whole: Any = tensor
    made: torch.Tensor = type(whole).from_local(
        memory_of(tensor).clone(),
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.size(),
        stride=whole.stride(),
    )
    return made


def norm_of(parameter: torch.Tensor, gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm of this process's part of a gradient.

    For a sharded parameter, it is a DTensor on the device, which can be reduced over processes; for
    any other, a tensor on the CPU.
    """
    norm: Any = torch.linalg.vector_norm(distributed_like(parameter, gradient), norm_type)
    if not is_distributed(norm):
        return norm.cpu()  # type: ignore[no-any-return]
    made: torch.Tensor = type(norm).from_local(
        memory_of(norm), norm.device_mesh, norm.placements, run_check=False
    )
    return made


def local_part(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a value for a parameter, in the parameter's sharding.

    A DTensor with another sharding is redistributed, so all processes must call this function in
    the same order. Raises ValueError if the parameter is sharded and `value` is a full tensor.
    """
    if not is_distributed(parameter):
        return value
    if not is_distributed(value):
        if value.dim() and value.shape != memory_of(parameter).shape:
            raise ValueError(
                f"got a tensor of shape {list(value.shape)} for a parameter whose shard in this "
                f"process has shape {list(memory_of(parameter).shape)}: pass a DTensor, as "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict does"
            )
        return value
    sharded: Any = value
    whole: Any = parameter
    if (sharded.device_mesh, sharded.placements) != (whole.device_mesh, whole.placements):
        value = sharded.redistribute(whole.device_mesh, whole.placements)
    return memory_of(value)


def has_value(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    """Return True if this process's part of a parameter has the given value."""
    if is_distributed(parameter) != is_distributed(value):
        return False
    return torch.equal(memory_of(parameter), local_part(parameter, value))


def sharded_modules(root: nn.Module) -> list[Any]:
    """Return the modules below `root` to which `fully_shard` was applied."""
    kind = _class_of("torch.distributed.fsdp", "FSDPModule")
    return [] if kind is None else [m for m in modules_of(root) if isinstance(m, kind)]


class Shard:
    """Supplies FSDP2's all-gather with the shard of one parameter.

    The shard is the result of `read`; without `read`, it is the parameter's local tensor.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.read: Read | None = None
        self.was_gathered = False

    def install(self) -> None:
        """Install the all-gather methods on the parameter's local tensor.

        Call this again after values are loaded, because FSDP2 then replaces the local tensor.
        """
        local: Any = memory_of(self.parameter)
        setattr(local, PRE_ALL_GATHER, self._pre_all_gather)
        setattr(local, POST_ALL_GATHER, _post_all_gather)

    @property
    def installed(self) -> bool:
        """True if the current local tensor has the all-gather methods."""
        return PRE_ALL_GATHER in vars(memory_of(self.parameter))

    def uninstall(self) -> None:
        """Remove the methods. FSDP2 uses the local tensor itself once it re-reads the module."""
        for name in (PRE_ALL_GATHER, POST_ALL_GATHER):
            vars(memory_of(self.parameter)).pop(name, None)

    @torch.no_grad()
    def _pre_all_gather(
        self, mesh: Any, size: torch.Size, stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        """Return the tensor to send, in the all-gather dtype.

        `size` and `stride` are those of the whole parameter. Shards are padded to equal sizes.
        """
        self.was_gathered = True
        shard = memory_of(self.parameter) if self.read is None else self.read()
        if mp_policy.param_dtype is not None and shard.is_floating_point():
            shard = shard.to(mp_policy.param_dtype)
        rows = -(-size[0] // mesh.size())
        if shard.size(0) < rows:
            padded = shard.new_zeros(rows, *shard.shape[1:])
            padded[: shard.size(0)].copy_(shard)
            shard = padded
        return (shard,), None


def _post_all_gather(
    gathered: tuple[torch.Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Any = None
) -> Any:
    """Return the gathered parameter, or None if FSDP2 already keeps it in `out`."""
    return None if out is not None else (gathered[0], ())


def shards_of(module: nn.Module) -> dict[int, Shard]:
    """Install a `Shard` for each sharded parameter of a module. Return them by parameter id.

    FSDP2 looks up the methods of a local tensor once, at its first all-gather. So this function
    gathers all sharded modules, one after the other, and all processes must call it.

    Raises ValueError for a DTensor that FSDP2 does not gather, for a module that has run before or
    has a CPUOffloadPolicy, and for shards of unequal sizes if this torch version replaces their
    local tensors before the lookup (as torch 2.8 does).
    """
    parts = sharded_modules(module)
    for part in parts:
        part.reshard()
    shards = {id(p): Shard(p) for p in parameters_of(module) if is_distributed(p)}
    for shard in shards.values():
        shard.install()
    try:
        for part in parts:
            _gather_once(part)
        names = {id(p): name for name, p in named_parameters_of(module)}
        for number, shard in shards.items():
            if not shard.was_gathered:
                raise ValueError(f"{names[number]} {_explain_ungathered(shard)}")
    except ValueError:
        for shard in shards.values():
            shard.uninstall()
        raise
    return shards


def _gather_once(part: Any) -> None:
    try:
        part.unshard()
    except AttributeError as error:
        # FSDP2 looked up the methods before they were installed, or on a copy without them.
        raise ValueError(
            "the module has run since fully_shard was applied, or has a CPUOffloadPolicy, so FSDP2 "
            "cannot read its shards from a store: call OffloadModel(module, store) before the "
            "module runs, and fully_shard without an offload_policy"
        ) from error
    part.reshard()


def _explain_ungathered(shard: Shard) -> str:
    """Return why FSDP2 did not read a shard, for an error message."""
    if shard.installed:
        return (
            "is a DTensor that no fully_shard gathers: to train it on a store, apply fully_shard "
            "to the modules that use it; for inference use dispatch_model"
        )
    return (
        f"has shards of unequal sizes, which FSDP2 of torch {torch.__version__} cannot read "
        "from a store: use a later torch, or sizes that the number of processes divides"
    )


def rebind(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    """Point a parameter at other memory.

    FSDP2 keeps a view of a shard's old memory, so that memory is freed explicitly.
    """
    local = memory_of(parameter)
    if local is parameter:
        assign(parameter, memory)
    else:
        replace_memory(local, memory)


class PassHooks:
    """Begins and ends the passes of a module that FSDP2 gathers, before the first all-gather.

    `make` returns the context of one forward. `begin_backward` is called when a backward pass
    reaches the outputs of the forward.
    """

    def __init__(
        self,
        module: nn.Module,
        make: Callable[[], ForwardContext],
        begin_backward: Callable[[], None],
    ) -> None:
        self._make, self._begin_backward = make, begin_backward
        self._contexts: list[ForwardContext] = []
        self._handles = [
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any) -> None:
        self._contexts.append(self._make())
        self._contexts[-1].begin()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        self._contexts.pop().finish(result, (args, {}))
        if torch.is_grad_enabled() and not in_backward():
            leaves, _ = tree_flatten(result)
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: self._begin_backward())

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
