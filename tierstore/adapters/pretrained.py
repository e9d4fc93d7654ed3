"""Pretrained models and pipelines, loaded by their own library straight into a store.

The library does all of it: it finds and downloads files, renames, converts and ties weights, and
chooses dtypes. Only where the bytes are is different, so that a model of any size can be loaded:

- A weight that would be cast stays the checkpoint's own bytes, mapped, until it is in a group of
  the store. Then it is cast, group by group; if it was before, it is found again.
- What the library joins of weights (stacks of experts) is joined once, and found again.
- What else it makes of them (a single file's queries, keys and values) lies in files without names
  in the store's directory until it is in the store.
- What a library quantises layer by layer is put off, and done for a few layers at a time.
"""

from __future__ import annotations

import bisect
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tierstore.adapters.changing import cast_weights
from tierstore.adapters.codecs.memory import address_of, has_address, span, tensor_bytes
from tierstore.adapters.codecs.wrapper import is_wrapper
from tierstore.adapters.compat import Deferred, first_answer, loading
from tierstore.adapters.components import models_in
from tierstore.adapters.contents import tensors_of
from tierstore.adapters.group_offload import enable_group_offload
from tierstore.adapters.grouping import sizes_for
from tierstore.adapters.joined import JoinedWeights
from tierstore.engine.checkpoints import is_url
from tierstore.store import TierStore, check_store, engine_of
from tierstore.system.maps import AddressSpace
from tierstore.torch_private import (
    TorchDispatchMode,
    is_conversion,
    is_view,
    may_share_memory,
    tree_map_only,
)

LARGE = 1 << 20
"""Bytes: smaller tensors that a library makes stay in ordinary memory."""


def from_pretrained(
    cls: Any,
    pretrained_model_name_or_path: str | os.PathLike[str],
    store: TierStore,
    **kwargs: Any,
) -> Any:
    """Call `cls.from_pretrained`, with all weights in `store`, in little memory.

        pipe = from_pretrained(DiffusionPipeline, "a/pipeline", store, dtype=torch.bfloat16)

    Whatever the checkpoint's dtype and size, the process takes the store's budget, and the largest
    group twice while it is cast. Weights at the checkpoint's own dtype are read from its files;
    others are written to the store once, and found there when the same files are loaded again. So
    is what torchao makes of them (`quantization_config`), a few layers at a time.

    Args:
        cls: a pipeline or model of diffusers, or a model of transformers, such as
            `DiffusionPipeline` or `AutoModelForCausalLM`.
        pretrained_model_name_or_path: what `cls.from_pretrained` takes, or the URL of such a
            directory in an object store (`s3://`, `gs://`, `az://`). What lies there is downloaded
            to the store's directory, beside its budget, as far as it was not before.
        store: where the weights go.
        **kwargs: what `enable_group_offload` takes goes there (`exclude_modules`, `offload_type`);
            the rest to `cls.from_pretrained` (`dtype`, `variant`, `subfolder`, `revision`,
            components that are there already).

    Returns:
        What `cls.from_pretrained` returns, offloaded. `enable_group_offload` of it gives the
        handle.

    Raises:
        TypeError: `device_map`, which the store replaces.
        BudgetError: a group is larger than a budget.
        DiskFullError: the disk has no room for what is cast or downloaded.
        TransferError: a file or URL cannot be read.
        Exception: what `cls.from_pretrained` raises.
    """
    source = pretrained_model_name_or_path
    if is_url(source):
        check_store(store)
        source = engine_of(store).groups.mirrored(
            source, subfolder=kwargs.get("subfolder") or "", variant=kwargs.get("variant")
        )
    return _load(cls.from_pretrained, source, store, kwargs)


def from_single_file(
    cls: Any,
    pretrained_model_link_or_path: str | os.PathLike[str],
    store: TierStore,
    **kwargs: Any,
) -> Any:
    """Call `cls.from_single_file` of diffusers, with all weights in `store`. See `from_pretrained`.

    A `.gguf` file on this machine is not copied: its quantised weights are read where they lie.

    Args:
        cls: a model or pipeline of diffusers that has the method.
        pretrained_model_link_or_path: what `cls.from_single_file` takes.
        store: where the weights go.
        **kwargs: as for `from_pretrained`.

    Returns:
        What `cls.from_single_file` returns, offloaded.

    Raises:
        TypeError: `device_map`, which the store replaces.
        BudgetError: a group is larger than a budget.
        DiskFullError: the disk has no room for what is cast.
        TransferError: a file cannot be read.
        Exception: what `cls.from_single_file` raises.
    """
    source: Any = pretrained_model_link_or_path
    mapped = first_answer("read_single_file", os.fspath(source))
    return _load(cls.from_single_file, source if mapped is None else mapped, store, kwargs)


def _load(
    load: Callable[..., Any],
    source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    store: TierStore,
    kwargs: dict[str, Any],
) -> Any:
    check_store(store)
    if kwargs.get("device_map") is not None:
        raise TypeError(
            "device_map is replaced by the store, which decides between device, RAM and disk by "
            "its budgets; leave it out"
        )
    known = inspect.signature(enable_group_offload).parameters.values()
    named = {each.name for each in known if each.kind is each.KEYWORD_ONLY}
    options = {name: kwargs.pop(name) for name in named & kwargs.keys()}
    groups = engine_of(store).groups
    with intercepted(groups.file_memory) as mode:
        result = load(source, **kwargs)
    loaded = result[0] if isinstance(result, tuple) else result  # with output_loading_info=True
    mode.joined.finish(groups, list(models_in(loaded).values()))
    pending = {name: mode.pending(model) for name, model in models_in(loaded).items()}
    if mode.deferred:
        dtypes = {number: dtype for each in pending.values() for number, dtype in each.items()}
        models = models_in(loaded).values()
        sizes = [sizes_for("block_level", store, model).group for model in models]
        for deferred in mode.deferred:
            deferred.finish(groups, dtypes, min(sizes, default=1))
    enable_group_offload(loaded, store, **options)
    for name, model in models_in(loaded).items():
        cast_weights(model, pending[name])
    return result


@contextmanager
def intercepted(file_memory: Callable[[int], memoryview]) -> Iterator[LoadingMode]:
    """A context in which libraries load as `LoadingMode` says, on the calling thread alone."""
    with loading() as deferred, LoadingMode(file_memory) as mode:
        mode.deferred = deferred
        yield mode


class LoadingMode(TorchDispatchMode):
    """Inside, on this thread, casts of a file's bytes are put off, and large results go to files.

    Whatever is computed from a tensor whose cast was put off is computed from what it was cast to.
    `file_memory` makes memory of so many bytes in a file. `deferred` is what libraries put off.
    """

    def __init__(self, file_memory: Callable[[int], memoryview]) -> None:
        super().__init__()
        self.deferred: list[Deferred] = []
        self._file_memory = file_memory
        self._space: AddressSpace | None = None
        self.joined = JoinedWeights(file_memory, self._dtype_of)
        self._starts: list[int] = []  # addresses of what is to be cast
        self._casts: dict[int, tuple[int, torch.dtype]] = {}  # by start: where it ends, and to what

    def pending(self, model: nn.Module) -> dict[int, torch.dtype]:
        """The dtypes that parameters and buffers (by id) are to be cast to."""
        tensors = tensors_of(model)
        found = {id(tensor): self._dtype_of(tensor) for tensor in tensors}
        return {number: dtype for number, dtype in found.items() if dtype is not None}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if is_conversion(function) and self._put_off(*args, **kwargs):
            return args[0].detach()
        if (joined := self.joined.join(function, *args, **kwargs)) is not None:
            return joined
        if is_view(function):
            return function(*args, **kwargs)
        self.joined.fill_for(function, args, kwargs)
        if may_share_memory(function):  # changed in place
            return function(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        return tree_map_only(torch.Tensor, self._moved, function(*args, **kwargs))

    def _put_off(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **options: Any,
    ) -> bool:
        """Whether this is no more than a cast of a file's bytes: then it is noted."""
        if dtype is None or not dtype.is_floating_point or not tensor.is_floating_point():
            return False
        if (device is not None and torch.device(device).type != "cpu") or not _is_plain(tensor):
            return False
        if not tensor.is_contiguous() or any(options.get(n) for n in ("pin_memory", "layout")):
            return False
        if (before := self._dtype_of(tensor)) is not None:
            return before is dtype  # it is asked again, as it does not look like that yet
        if not self._is_in_file(tensor):
            return False
        start = address_of(tensor)
        bisect.insort(self._starts, start)
        self._casts[start] = start + tensor_bytes(tensor), dtype
        return True

    def _is_in_file(self, tensor: torch.Tensor) -> bool:
        where = address_of(tensor), tensor_bytes(tensor)
        if self._space is not None and self._space.extent_at(*where) is not None:
            return True
        self._space = AddressSpace()  # files may have been mapped since
        return self._space.extent_at(*where) is not None

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype | None:
        """What a tensor is to be cast to; None if it is what it should be."""
        if not self._starts or not _is_plain(tensor):
            return None
        at = bisect.bisect_right(self._starts, address_of(tensor)) - 1
        end, dtype = self._casts[self._starts[at]] if at >= 0 else (0, tensor.dtype)
        return dtype if address_of(tensor) < end and dtype is not tensor.dtype else None

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype_of(tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """What was just made, in a file if it is large."""
        nbytes = tensor_bytes(tensor) if _is_plain(tensor) else 0
        if nbytes < LARGE or span(tensor) != nbytes:
            return tensor
        memory = torch.frombuffer(self._file_memory(nbytes), dtype=torch.uint8)
        return memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride()).copy_(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and has_address(tensor)
        and not is_wrapper(tensor)
        and tensor.numel() > 0
    )
