"""Parameters that FSDP2 (`fully_shard`) spreads over processes: here is the shard of one of them.

FSDP2 moves what it needs, and asks for it where it needs it. Two of its ways in are used here, both
made for others' tensors and none private:

- **All-gather.** A local tensor that has `fsdp_pre_all_gather` is asked for what the other
  processes are to be sent, just before they are sent it (torchao's quantised weights use that). So
  a shard may be anywhere else until then, and nothing of it has to come for a module's forward.
- **Reduce-scatter.** Hooks that are registered with `register_post_accumulate_grad_hook` on a
  sharded parameter are called as soon as its gradient is there (optimizers that step in the
  backward pass use that).

What belongs to a group of the store are the local tensors of such parameters. Users, FSDP2 and
checkpoints see DTensors under the parameters' own names, as without a store.

torch.distributed is not imported here: who has a DTensor has done that.
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

ASK, RECEIVE = "fsdp_pre_all_gather", "fsdp_post_all_gather"
"""What FSDP2 looks for on the local tensor of a parameter."""

Read = Callable[[], torch.Tensor]
"""Where the bytes of a shard are now."""


def _class_of(module: str, name: str) -> type | None:
    """A class of torch.distributed; None if nobody has imported it, and so has any."""
    return getattr(sys.modules.get(module), name, None)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a part of one that several processes have together: a DTensor."""
    kind = _class_of("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor: of a DTensor its local tensor, the very object; of any
    other the tensor itself."""
    if not is_distributed(tensor):
        return tensor
    (local,) = WrapperCodec().flatten(tensor).values()
    return local


def distributed_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of `local` that is spread like a parameter (its gradient, say). Of
    a parameter that is not, or of anything of another shape, `local` itself."""
    if not is_distributed(parameter) or local.shape != memory_of(parameter).shape:
        return local
    whole: Any = parameter
    given = local
    if local.device.type != parameter.device.type:
        # It is spread over accelerators, as far as torch is concerned: it would go there. While it
        # is in RAM, that is true of nothing but what it says of itself.
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
    """A tensor with memory of its own: of one that is spread over accelerators, there."""
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
    """The norm of what this process has of a gradient, where it can be put together with others':
    of a sharded parameter a DTensor on the device, of another one a tensor on the CPU."""
    norm: Any = torch.linalg.vector_norm(distributed_like(parameter, gradient), norm_type)
    if not is_distributed(norm):
        return norm.cpu()  # type: ignore[no-any-return]
    made: torch.Tensor = type(norm).from_local(
        memory_of(norm), norm.device_mesh, norm.placements, run_check=False
    )
    return made


def local_part(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What this process has of a value for a parameter, spread like that. All processes call it in
    the same order if values may be spread otherwise.

    Raises ValueError for a whole value of a parameter of which this process has a shard.
    """
    if not is_distributed(parameter):
        return value
    if not is_distributed(value):
        if value.dim() and value.shape != memory_of(parameter).shape:
            raise ValueError(
                f"a tensor of {list(value.shape)} was given for a parameter of which this process "
                f"has {list(memory_of(parameter).shape)}: give a DTensor, as "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict does"
            )
        return value
    spread: Any = value
    whole: Any = parameter
    if (spread.device_mesh, spread.placements) != (whole.device_mesh, whole.placements):
        value = spread.redistribute(whole.device_mesh, whole.placements)
    return memory_of(value)


def has_value(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    """Whether a parameter has this value, as far as this process can tell."""
    if is_distributed(parameter) != is_distributed(value):
        return False
    return torch.equal(memory_of(parameter), local_part(parameter, value))


def sharded_modules(root: nn.Module) -> list[Any]:
    """The modules in it that `fully_shard` was applied to."""
    kind = _class_of("torch.distributed.fsdp", "FSDPModule")
    return [] if kind is None else [m for m in modules_of(root) if isinstance(m, kind)]


class Shard:
    """The shard of one parameter, as FSDP2 asks for it: what `read` returns, or without that what
    the parameter itself shows."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.read: Read | None = None
        self.was_asked = False

    def answer(self) -> None:
        """Have FSDP2 ask here for what the parameter's local tensor shows. FSDP2 gives parameters
        other local tensors when values are loaded: then it is to be called again."""
        local: Any = memory_of(self.parameter)
        setattr(local, ASK, self._sent)
        setattr(local, RECEIVE, _received)

    @property
    def answers(self) -> bool:
        """Whether the local tensor is the one that FSDP2 was told of."""
        return ASK in vars(memory_of(self.parameter))

    def ignore(self) -> None:
        """Have FSDP2 use the local tensor itself, from the next time it looks at the module."""
        for name in (ASK, RECEIVE):
            vars(memory_of(self.parameter)).pop(name, None)

    @torch.no_grad()
    def _sent(
        self, mesh: Any, size: torch.Size, stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        """What this process sends, in the dtype in which it is sent. The size and the stride are
        those of the whole parameter; the shards are padded to be of one size."""
        self.was_asked = True
        shard = memory_of(self.parameter) if self.read is None else self.read()
        if mp_policy.param_dtype is not None and shard.is_floating_point():
            shard = shard.to(mp_policy.param_dtype)
        rows = -(-size[0] // mesh.size())
        if shard.size(0) < rows:
            padded = shard.new_zeros(rows, *shard.shape[1:])
            padded[: shard.size(0)].copy_(shard)
            shard = padded
        return (shard,), None


def _received(
    gathered: tuple[torch.Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Any = None
) -> Any:
    """What all processes have sent is the parameter, in the memory that FSDP2 keeps for it."""
    return None if out is not None else (gathered[0], ())


def shards_of(module: nn.Module) -> dict[int, Shard]:
    """The shards of a module's parameters, by the ids of these. They answer FSDP2 from now on.

    FSDP2 looks at local tensors once, when it gathers for the first time; so everything is gathered
    here, one sharded module after the other. All processes must call it.

    Raises ValueError for a DTensor that FSDP2 does not gather, for a module that has run before, or
    that has a CPUOffloadPolicy; and for shards of unequal sizes where FSDP2 gives these other local
    tensors before it looks (torch 2.8 does).
    """
    parts = sharded_modules(module)
    for part in parts:
        part.reshard()
    shards = {id(p): Shard(p) for p in parameters_of(module) if is_distributed(p)}
    for shard in shards.values():
        shard.answer()
    try:
        for part in parts:
            _gather_once(part)
        names = {id(p): name for name, p in named_parameters_of(module)}
        for number, shard in shards.items():
            if not shard.was_asked:
                raise ValueError(f"{names[number]} {_why_not(shard)}")
    except ValueError:
        for shard in shards.values():
            shard.ignore()
        raise
    return shards


def _gather_once(part: Any) -> None:
    try:
        part.unshard()
    except AttributeError as error:
        # What the extension needs is not there: FSDP2 has looked before there was one, or looks at
        # a copy that has none.
        raise ValueError(
            "the module has run since fully_shard was applied, or was given a CPUOffloadPolicy: "
            "FSDP2 does not ask a store for its shards then; call OffloadModel(module, store) "
            "before it runs, and fully_shard without an offload_policy"
        ) from error
    part.reshard()


def _why_not(shard: Shard) -> str:
    """Why FSDP2 has not asked for a shard."""
    if shard.answers:
        return (
            "is a DTensor that no fully_shard gathers: to train it on a store, apply fully_shard "
            "to the modules that use it; for inference use dispatch_model"
        )
    return (
        f"has shards of unequal sizes, which FSDP2 of torch {torch.__version__} cannot be given "
        "from a store: use a later torch, or sizes that the number of processes divides"
    )


def take_over(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    """Let a parameter show other memory.

    FSDP2 keeps a view of a shard's old memory, which is given back for that.
    """
    local = memory_of(parameter)
    if local is parameter:
        assign(parameter, memory)
    else:
        replace_memory(local, memory)


class PassHooks:
    """Begins and ends the passes of a module that FSDP2 gathers: before it gathers anything.

    `make` returns the context of one forward; `go_back` is called when a backward pass comes to
    what the forward has returned.
    """

    def __init__(
        self, module: nn.Module, make: Callable[[], ForwardContext], go_back: Callable[[], None]
    ) -> None:
        self._make, self._go_back = make, go_back
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
                    leaf.register_hook(lambda _: self._go_back())

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
