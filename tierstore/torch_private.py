"""The private names of torch that this package uses, each behind a function that documents its use.

All of them exist since torch 2.8, the oldest supported version. Tests marked `floor` run with that
version, all others with the newest. If torch drops a name, the function here raises AttributeError
(for pytrees and version counters, importing an adapter raises ImportError), and the tests of that
adapter fail. Unless a docstring names one, there is no fallback. To support another version of
torch, begin with this file.
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

# Intercepts every operation on tensors, below autograd.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Flatten containers to a list of leaves and a structure. Public only in later versions of torch.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

TensorType = TypeVar("TensorType", bound=torch.Tensor)

# Tensors and their memory -------------------------------------------------------------------------


def version_of(tensor: torch.Tensor) -> int:
    """Return how often torch operations wrote to a tensor; 0 for inference tensors."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return `version_of` each tensor. Faster than separate calls, unless any is for inference."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [version_of(tensor) for tensor in tensors]


# These two have no Python wrapper: they run for each tensor of a unit, before and after it.

unchecked_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Like `version_of`, but raises RuntimeError for inference tensors."""

revive_object: Callable[[torch.Tensor], None] = torch.Tensor._fix_weakref  # type: ignore[attr-defined]
"""Make a tensor that came from a weak reference safe to hold, even if only autograd owned it."""


_SWAP = torch.utils.swap_tensors
_SWAP_OF_ANY = types.FunctionType(
    _SWAP.__code__,
    {**_SWAP.__globals__, "weakref": types.SimpleNamespace(getweakrefs=lambda tensor: [])},
    argdefs=_SWAP.__defaults__,
)


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the contents of two tensor objects, including those with weak references.

    `torch.utils.swap_tensors` rejects such tensors, as a weak reference then leads to the other
    contents. Bindings rely on exactly that: they refer to the object.
    """
    _SWAP_OF_ANY(one, other)


def preserve_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Restore the version counter of a tensor at the end of the context."""
    return _unsafe_preserve_version_counter(tensor)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that this one is a view of, or None if it is not a view."""
    return tensor._base


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the negative bit set: elements are negated when they are read."""
    return torch._neg_view(tensor)


def like(tensor: TensorType, memory: torch.Tensor) -> TensorType:
    """Return a tensor over `memory`, with the class (such as Parameter) and attributes of `tensor`.

    The two may be on different devices.
    """
    other = torch.Tensor._make_subclass(type(tensor), memory, tensor.requires_grad)
    other.__dict__.update(tensor.__dict__)
    return other


def current_function_mode() -> object:
    """Return the innermost `TorchFunctionMode` of this thread, or None."""
    return _get_current_function_mode()


def is_conversion(function: Any) -> bool:
    """Return True if an operation copies a tensor to another dtype or device."""
    return function is torch.ops.aten._to_copy.default


def mutates_arguments(function: Any) -> bool:
    """Return True if an operation changes one of its arguments in place."""
    return bool(function._schema.is_mutable)


def is_view(function: Any) -> bool:
    """Return True if results may share memory with arguments, and no argument is changed."""
    return may_share_memory(function) and not mutates_arguments(function)


def may_share_memory(function: Any) -> bool:
    """Return True if a result of an operation may be one of its arguments, or a view of one."""
    return any(value.alias_info is not None for value in function._schema.returns)


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a vmap or grad wrapper, which has no memory itself."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_tracing() -> bool:
    """Return True while TorchScript traces this thread."""
    return torch._C._is_tracing()


def in_functorch_grad() -> bool:
    """Return True inside a differentiating transform of torch.func.

    Such a transform wraps tensors that are created inside it.
    """
    transforms = torch._C._functorch.get_interpreter_stack() or []
    return any(transform.key().name in ("Grad", "Jvp") for transform in transforms)


# The next four have no Python wrapper: they run for each use of weights, or for each tensor.

stream_of_device: Callable[[int], torch.Stream] = torch._C._accelerator_getStream
"""Return the current stream of this thread on an accelerator, by device index."""

storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Return a number that identifies a storage as long as it, or a weak reference to it, is alive.

All Python objects of one storage have the same number."""

storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Return the reference count of a storage, by its `storage_id`.

Counts tensors of every kind, and the Python object of the storage."""

storage_at: Callable[[int, torch.device, int], Any] = torch._C._construct_storage_from_data_pointer
"""Return a storage over memory that it does not own: an address, a device and a number of bytes.

The owner must keep the memory alive as long as the storage exists."""


def clear_last_error(cudart: Any) -> None:
    """Clear the last error of this thread in the CUDA runtime, after a call of `cudart` failed.

    Otherwise the next kernel launch on this thread, by any library, would raise that error.
    """
    # A runtime function that fails also leaves its error as the last one. Only cudaGetLastError
    # resets it, and torch 2.8 to 2.13 do not bind it. If a later version does, use its binding.
    reset = getattr(cudart, "cudaGetLastError", None) or _cuda_get_last_error()
    reset()


@functools.cache
def _cuda_get_last_error() -> Callable[[], object]:
    """Return cudaGetLastError of the runtime that torch uses: the one that c10 is linked with."""
    libraries = Path(torch.__file__).parent / "lib"
    for name, function in (
        ("libc10_cuda.so", "cudaGetLastError"),
        ("libc10_hip.so", "hipGetLastError"),
    ):
        with suppress(
            OSError, AttributeError
        ):  # CDLL also searches the libraries that it depends on
            found: Callable[[], object] = getattr(ctypes.CDLL(str(libraries / name)), function)
            return found
    return _launch_empty_kernel


def _launch_empty_kernel() -> None:
    """Launch an empty kernel: torch checks for an error after a launch, and resets it."""
    with suppress(RuntimeError):
        torch.cuda._sleep(0)


def storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage of a weak reference, or None if it was freed."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found


# Autograd -----------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Return True while this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def retains_graph() -> bool:
    """Return True if the running backward pass was called with `retain_graph`."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


def accumulates_all_gradients() -> bool:
    """Return True if the running backward pass stores gradients in all leaves.

    False in `torch.autograd.grad()` and with `inputs=`.
    """
    valid: bool = torch.autograd._is_checkpoint_valid()
    return valid


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward pass, unless the pass raises."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def saved_tensor_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Return the innermost saved-tensor hooks (pack, unpack), or None."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else (hooks[0], hooks[1])


def saved_tensor_hooks_allowed() -> bool:
    """Return True if saved-tensor hooks can be installed and take effect.

    torch.func disables them.
    """
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return message is None and not in_functorch_grad()


# Profilers ----------------------------------------------------------------------------------------


def profiler_enabled() -> bool:
    """Return True if a torch profiler is active, on any thread. Only reads a flag."""
    return profiler._is_profiler_enabled


# Modules ------------------------------------------------------------------------------------------


CALL = "_call_impl"
"""The method that `module(...)` calls unless the module is compiled: hooks, then `forward`."""

COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which `module.compile()` stores the function that `module(...)` then calls."""


def call_uncompiled(module: Any, args: Any, kwargs: Any) -> Any:
    """Call a module with its hooks, as if `compile()` had not been called."""
    return module._call_impl(*args, **kwargs)


def has_forward_hooks(module: Any) -> bool:
    """Return True if a module has forward hooks or forward pre-hooks."""
    return bool(module._forward_hooks) or bool(module._forward_pre_hooks)


def move_state_dict_hook_first(module: Any, hook_id: int) -> None:
    """Make a registered `state_dict` hook run before all others."""
    module._state_dict_hooks.move_to_end(hook_id, last=False)


# Distributed checkpoints --------------------------------------------------------------------------
#
# These functions import lazily: the import takes a second.


def all_ranks() -> Any:
    """Return a wrapper for collectives over all ranks of `torch.distributed`, or for one process.

    If a function that `broadcast` (on rank 0) or `all_gather` (on each rank) calls raises, all
    ranks raise that error.
    """
    from torch.distributed.checkpoint.utils import _DistWrapper

    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return _DistWrapper(None, distributed, 0)


def save_checkpoint(state: dict[str, Any], writer: Any, planner: Any) -> None:
    """Call `torch.distributed.checkpoint.save`, without its warning for a single process."""
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    no_dist = not all_ranks().use_dist
    _save_state_dict(state, writer, None, no_dist=no_dist, planner=planner)


def qualified_name(model: Any, name: str) -> str:
    """Return the name of a parameter in a checkpoint: without the wrappers of its module."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    [found] = _get_fqns(model, name)
    return str(found)


def stored_at(name: str, offset: int, nbytes: int) -> Any:
    """Return the checkpoint metadata for the location of a chunk: file, offset and bytes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, nbytes)


def file_view(file: Any, offset: int, nbytes: int) -> Any:
    """Return a file object over a range of bytes of a file, for `torch.load`."""
    from torch.distributed.checkpoint.utils import _create_file_view

    return _create_file_view(file, offset, nbytes)
