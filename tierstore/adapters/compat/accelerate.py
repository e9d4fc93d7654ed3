"""accelerate: models that it offloads, and forwards marked for its hooks."""

from __future__ import annotations

from typing import Any

from torch import nn

from tierstore.adapters.compat import Library
from tierstore.adapters.other_offloading import install_model_check


class Accelerate(Library):
    """Support for accelerate. Recognizes its hooks by the attribute `_hf_hook` of a module."""

    name = "accelerate"

    def uses_weights_of_parts(self, module: nn.Module) -> bool:
        """Return whether a forward is marked with transformers' `force_accelerate_hooks`.

        Such a forward (of Mamba and related models) uses weights of children without calling them.
        """
        forward: Any = getattr(type(module), "forward", None)  # TorchScript modules have none
        while forward is not None:
            code = getattr(forward, "__code__", None)
            if code is not None and code.co_qualname.startswith("force_accelerate_hooks."):
                return True
            forward = getattr(forward, "__wrapped__", None)
        return False

    def other_offloading(self, module: nn.Module) -> str | None:
        """Return how to undo accelerate's offloading."""
        if not hasattr(module, "_hf_hook"):
            return None
        return (
            "by accelerate: undo that first with pipe.remove_all_hooks() or "
            "accelerate.hooks.remove_hook_from_module"
        )

    def guard(self) -> None:
        """Make accelerate's hooks raise for models that are in a store."""
        from accelerate import hooks

        install_model_check(hooks.AlignDevicesHook, "init_hook", _forget_forward)
        install_model_check(hooks.CpuOffload, "init_hook", _forget_forward)


def _forget_forward(module: nn.Module) -> None:
    """Delete the forward that accelerate saved on a module before it called the hook."""
    if not hasattr(module, "_hf_hook"):
        module.__dict__.pop("_old_forward", None)
