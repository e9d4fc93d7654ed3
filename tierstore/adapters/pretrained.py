"""Pretrained models and pipelines, loaded by their own library straight into a store.

The library does all of it: it finds and downloads files, renames, converts and ties weights, and
chooses dtypes. Only where the bytes are is different, so that a model of any size can be loaded:
a weight that would be cast, joined or quantised is so once it is in the store, a group at a time
(see `tierstore.adapters.deferred_loading`). What was made of the same files before is found again.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tierstore.adapters.changing import cast_weights
from tierstore.adapters.compat import Library, first_answer
from tierstore.adapters.deferred_loading import intercepted
from tierstore.adapters.group_offload import enable_group_offload
from tierstore.adapters.grouping import sizes_for
from tierstore.adapters.pipelines import models_in
from tierstore.engine.checkpoints import is_url
from tierstore.store import TierStore, check_store, engine_of


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
    mapped = first_answer(Library.read_single_file, os.fspath(source))
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
    models = list(models_in(loaded).values())
    target = min((sizes_for("block_level", store, model).group for model in models), default=1)
    casts = mode.finish(groups, models, target)
    enable_group_offload(loaded, store, **options)
    for model in models:
        cast_weights(model, casts)
    return result
