"""Functions of other libraries that are replaced, and why no hook of the library serves.

| library | replaced | why |
|---|---|---|
| accelerate | `AlignDevicesHook.init_hook`, `CpuOffload.init_hook` | both attach to a model without asking anybody: two owners of one weight are wrong without an error |
| diffusers | `group_offloading._apply_group_offloading` | the same; and it is applied anew after a LoRA was loaded |
| diffusers | `DiffusionPipeline.to` and the methods in `Diffusers.changes_weights`, on their classes | a pipeline may be made before or after its models are offloaded, and has no hook for either |
| diffusers | `HookRegistry.hooks` of one model, by a dict that has one entry more | `register_hook` would wrap `forward`, and a deep copy of the model would run this one's weights |
| torchao | `quantization.quantize_`, while a model is loaded | it quantises each layer in memory as soon as it is loaded |
| transformers | the variable `HF_DEACTIVATE_ASYNC_LOAD`, while a model is loaded | other threads would cast weights where no dispatch mode sees it |
"""  # noqa: E501 - a table

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from tierstore.adapters.contents import modules_of
from tierstore.adapters.owners import is_claimed, owner_of


class OffloadingByUs:
    """What stands for our offloading among a library's settings: not to be applied by it."""


@functools.cache
def refuse_models_in_stores(
    holder: object, name: str, before: Callable[[nn.Module], None] | None = None
) -> None:
    """Replace a function of a library by one that raises ValueError for a model in a store.

    `before` is called with such a model first.
    """
    original: Callable[..., Any] = getattr(holder, name)

    @functools.wraps(original)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if any(isinstance(each, OffloadingByUs) for each in given):
            return None  # ours sees changes by itself, and stays
        for each in given:
            if isinstance(each, nn.Module):
                _check_not_in_store(each, before)
        return original(*args, **kwargs)

    setattr(holder, name, refusing)


def _check_not_in_store(module: nn.Module, before: Callable[[nn.Module], None] | None) -> None:
    parts = [p for p in modules_of(module) if owner_of(p) is not None or is_claimed(p)]
    if not parts:
        return
    if before is not None:
        before(module)
    name, part = type(module).__name__, type(parts[0]).__name__
    whole = name if parts[0] is module else f"{part} in {name}"
    raise ValueError(
        f"{whole} is on a tierstore, which brings its weights to where it runs: leave other "
        "offloading out, or undo this one first (tierstore.disable_offload(model), or "
        "disable() of an OffloadModel)"
    )
