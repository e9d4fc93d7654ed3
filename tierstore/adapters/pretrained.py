"""Load pretrained models and pipelines straight into a store, with their own library.

The library does all the work: it finds and downloads files, renames, converts and ties weights, and
chooses dtypes. Only the location of the bytes differs, which allows models of any size: weights to
be cast, concatenated or quantised are processed in the store, one group at a time (see
`tierstore.adapters.deferred_loading`). Results derived from the same files before are reused.
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
    """Call `cls.from_pretrained` with all weights in `store`, using little memory.

        pipe = from_pretrained(DiffusionPipeline, "a/pipeline", store, dtype=torch.bfloat16)

    Whatever the checkpoint's dtype and size, weights take at most the store's budget, plus twice
    the largest group during a cast. Weights in the checkpoint's own dtype are read from its files;
    cast weights are written to the store once, and reused when the same files are loaded again. The
    same holds for weights that torchao quantises (`quantization_config`), a few layers at a time.

    Args:
        cls: a diffusers pipeline or model class, or a transformers model class, such as
            `DiffusionPipeline` or `AutoModelForCausalLM`.
        pretrained_model_name_or_path: as for `cls.from_pretrained`, or the URL of such a directory
            in an object store (`s3://`, `gs://`, `az://`). Files not downloaded before are
            downloaded to the store's directory; they do not count against the budget.
        store: the store that holds the weights.
        **kwargs: arguments of `enable_group_offload` (`exclude_modules`, `offload_type`) are passed
            to it; all others (`dtype`, `variant`, `subfolder`, `revision`, existing components) to
            `cls.from_pretrained`.

    Returns:
        The result of `cls.from_pretrained`, offloaded. Call `enable_group_offload` on it to get
        the handle.

    Raises:
        TypeError: `device_map` was passed, which the store replaces.
        BudgetError: a group is larger than a budget.
        DiskFullError: the disk is full while weights are cast or downloaded.
        TransferError: a file or URL cannot be read.
        Exception: any error of `cls.from_pretrained`.
    """
    source = pretrained_model_name_or_path
    if is_url(source):
        check_store(store)
        source = engine_of(store).groups.download_mirror(
            source, subfolder=kwargs.get("subfolder") or "", variant=kwargs.get("variant")
        )
    return _load(cls.from_pretrained, source, store, kwargs)


def from_single_file(
    cls: Any,
    pretrained_model_link_or_path: str | os.PathLike[str],
    store: TierStore,
    **kwargs: Any,
) -> Any:
    """Call diffusers' `cls.from_single_file` with all weights in `store`. See `from_pretrained`.

    A local `.gguf` file is not copied: its quantised weights are read in place.

    Args:
        cls: a diffusers model or pipeline class that has this method.
        pretrained_model_link_or_path: as for `cls.from_single_file`.
        store: the store that holds the weights.
        **kwargs: as for `from_pretrained`.

    Returns:
        The result of `cls.from_single_file`, offloaded.

    Raises:
        TypeError: `device_map` was passed, which the store replaces.
        BudgetError: a group is larger than a budget.
        DiskFullError: the disk is full while weights are cast.
        TransferError: a file cannot be read.
        Exception: any error of `cls.from_single_file`.
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
    with intercepted(groups.allocate_file_memory) as mode:
        result = load(source, **kwargs)
    loaded = result[0] if isinstance(result, tuple) else result  # with output_loading_info=True
    models = list(models_in(loaded).values())
    target = min((sizes_for("block_level", store, model).group for model in models), default=1)
    casts = mode.finish(groups, models, target)
    enable_group_offload(loaded, store, **options)
    for model in models:
        cast_weights(model, casts)
    return result
