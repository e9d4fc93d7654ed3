"""Every private name of torch that this package uses, each behind a function that says what for.

All of them are there from torch 2.8 on, the oldest that is supported; the tests marked `floor` run
with that, all others with the newest. Where a name is missing, what is called here raises
AttributeError (pytrees and version counters: importing an adapter raises ImportError), and the
tests of that adapter fail: without these, nothing could be done in another way, but for what says
so. Who moves to another torch begins here.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.autograd import profiler
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode

# What every operation on tensors passes through, in the innermost place.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Containers of any kind as a list of leaves and a structure. Public only in later versions.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

TensorType = TypeVar("TensorType", bound=torch.Tensor)

# Tensors and their memory -------------------------------------------------------------------------


def version_of(tensor: torch.Tensor) -> int:
    """How often torch operations wrote to a tensor; 0 for inference tensors, which do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`version_of` each. It calls no function for each, where none is an inference tensor."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [version_of(tensor) for tensor in tensors]


# Nothing stands around these two: they are called for each tensor of a unit, before and after.

counted_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""`version_of`, of a tensor that is none of inference; of those, it raises RuntimeError."""

keep_found: Callable[[torch.Tensor], None] = torch.Tensor._fix_weakref  # type: ignore[attr-defined]
"""Let Python keep a tensor that a weak reference has found, also if only autograd had it."""


_SWAP = torch.utils.swap_tensors
_SWAP_OF_ANY = types.FunctionType(
    _SWAP.__code__,
    {**_SWAP.__globals__, "weakref": types.SimpleNamespace(getweakrefs=lambda tensor: [])},
    argdefs=_SWAP.__defaults__,
)


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Let two tensors be each other, also those that something refers to weakly.

    `torch.utils.swap_tensors` refuses them, as such a reference then leads to other contents. That
    is what bindings want: theirs are to the object.
    """
    _SWAP_OF_ANY(one, other)


def uncounted(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """At its end, the version counter of a tensor is set back to what it was."""
    return _unsafe_preserve_version_counter(tensor)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that this one is a view of; None if it is no view."""
    return tensor._base


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view with the bit set that says that the elements are to be negated when they are read."""
    return torch._neg_view(tensor)


def like(tensor: TensorType, memory: torch.Tensor) -> TensorType:
    """Another tensor of the class of `tensor` (a Parameter for instance) and with its attributes,
    over the memory of `memory`, on whatever device."""
    other = torch.Tensor._make_subclass(type(tensor), memory, tensor.requires_grad)
    other.__dict__.update(tensor.__dict__)
    return other


def innermost_function_mode() -> object:
    """The mode for operations on tensors that was begun last on this thread; None without any."""
    return _get_current_function_mode()


def is_conversion(function: Any) -> bool:
    """Whether an operation is the one that copies a tensor to another dtype or device."""
    return function is torch.ops.aten._to_copy.default


def changes_arguments(function: Any) -> bool:
    """Whether an operation changes one of its arguments in place."""
    return bool(function._schema.is_mutable)


def is_view(function: Any) -> bool:
    """Whether what an operation returns may show an argument's memory, and nothing is changed."""
    return may_share_memory(function) and not changes_arguments(function)


def may_share_memory(function: Any) -> bool:
    """Whether what an operation returns may be one of its arguments, or a view of one."""
    return any(value.alias_info is not None for value in function._schema.returns)


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for others in vmap or grad: it has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def in_trace() -> bool:
    """Whether TorchScript records what runs now."""
    return torch._C._is_tracing()


def in_derivative() -> bool:
    """Whether a transform of torch.func differentiates what runs now: it takes tensors that are
    made meanwhile for its own."""
    transforms = torch._C._functorch.get_interpreter_stack() or []
    return any(transform.key().name in ("Grad", "Jvp") for transform in transforms)


# Nothing stands around the next four: they are called for each use of weights, or each tensor.

stream_of_device: Callable[[int], torch.Stream] = torch._C._accelerator_getStream
"""The stream of an accelerator, by its number, that is current on this thread."""

storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""A number that no other storage has as long as this one, or a weak reference to it, is there.

All Python objects of one storage have the same."""

uses_of_storage: Callable[[int], int] = torch._C._storage_Use_Count
"""How often a storage is referred to, by its number: by tensors of whatever kind, and by itself as
an object of Python."""

storage_at: Callable[[int, torch.device, int], Any] = torch._C._construct_storage_from_data_pointer
"""A storage over memory that is somebody else's, who must keep it for as long: made of an address,
a device and a number of bytes."""


def forget_last_error(cudart: Any) -> None:
    """Have the CUDA runtime forget the last error of this thread, after a call of `cudart` failed.

    Otherwise the next launch of a kernel by this thread, by any library, would raise that error.
    """
    # What torch 2.8 to 2.13 bind of the runtime returns an error and leaves it the last one. Only
    # cudaGetLastError resets it, which they do not bind. Should a later torch, that one is called.
    reset = getattr(cudart, "cudaGetLastError", None) or _cuda_get_last_error()
    reset()


@functools.cache
def _cuda_get_last_error() -> Callable[[], object]:
    """cudaGetLastError of the runtime that torch itself calls: that which c10 is linked with."""
    libraries = Path(torch.__file__).parent / "lib"
    for name, function in (
        ("libc10_cuda.so", "cudaGetLastError"),
        ("libc10_hip.so", "hipGetLastError"),
    ):
        with suppress(OSError, AttributeError):  # symbols are also looked for in what it needs
            found: Callable[[], object] = getattr(ctypes.CDLL(str(libraries / name)), function)
            return found
    return _launch_in_vain


def _launch_in_vain() -> None:
    """torch resets the last error when it finds one after it has launched a kernel."""
    with suppress(RuntimeError):
        torch.cuda._sleep(0)


def storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference, if anybody still holds it."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found


# Autograd -----------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def keeps_graph() -> bool:
    """In a backward pass: whether it was called with `retain_graph`."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


def fills_all_gradients() -> bool:
    """In a backward pass: whether it leaves gradients in all leaves, as `backward()` does. False in
    `torch.autograd.grad()` and with `inputs=`."""
    valid: bool = torch.autograd._is_checkpoint_valid()
    return valid


def after_backward(callback: Callable[[], None]) -> None:
    """In a backward pass: have `callback` called when that is over, unless it raises."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def saved_tensor_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The innermost hooks that are on for what autograd saves: (pack, unpack); None without any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else (hooks[0], hooks[1])


def hooks_are_allowed() -> bool:
    """Whether hooks may be put on for what autograd saves, and see it: torch.func has ways of its
    own."""
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return message is None and not in_derivative()


# Profilers ----------------------------------------------------------------------------------------


def is_profiled() -> bool:
    """Whether a profiler of torch is on, on any thread. What it asks is kept for such questions."""
    return profiler._is_profiler_enabled


# Modules ------------------------------------------------------------------------------------------


CALL = "_call_impl"
"""The method that calls of a module call, unless it is compiled: hooks, and then `forward`."""

COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which `module.compile()` leaves what calls of the module call from then on."""


def call_uncompiled(module: Any, args: Any, kwargs: Any) -> Any:
    """Call a module, hooks and all, as if `compile()` had not been called."""
    return module._call_impl(*args, **kwargs)


def has_forward_hooks(module: Any) -> bool:
    """Whether anything is registered to be called before or after a module's forward."""
    return bool(module._forward_hooks) or bool(module._forward_pre_hooks)


def call_first_of_state_dict_hooks(module: Any, hook_id: int) -> None:
    """Have a hook that is registered for after `state_dict` called before all others."""
    module._state_dict_hooks.move_to_end(hook_id, last=False)


# Distributed checkpoints --------------------------------------------------------------------------
#
# What these import takes a second, which nobody pays who saves nothing.


def all_ranks() -> Any:
    """All processes of `torch.distributed`, or this one if it is alone. A function that `broadcast`
    (of the first rank) or `all_gather` (of each) calls may raise: then all ranks raise that."""
    from torch.distributed.checkpoint.utils import _DistWrapper

    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return _DistWrapper(None, distributed, 0)


def save_checkpoint(state: dict[str, Any], writer: Any, planner: Any) -> None:
    """`torch.distributed.checkpoint.save` without its warning that a process is alone."""
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    no_dist = not all_ranks().use_dist
    _save_state_dict(state, writer, None, no_dist=no_dist, planner=planner)


def qualified_name(model: Any, name: str) -> str:
    """What a checkpoint calls a parameter: without what wraps its module."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    [found] = _get_fqns(model, name)
    return str(found)


def stored_at(name: str, offset: int, nbytes: int) -> Any:
    """What the metadata of a checkpoint says of where a chunk is."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, nbytes)


def file_view(file: Any, offset: int, nbytes: int) -> Any:
    """A part of a file as a file, for `torch.load`."""
    from torch.distributed.checkpoint.utils import _create_file_view

    return _create_file_view(file, offset, nbytes)
