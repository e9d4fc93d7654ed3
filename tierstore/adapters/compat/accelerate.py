"""accelerate: models that it offloads, and forwards that are marked for it."""

from __future__ import annotations

from typing import Any

from torch import nn

from tierstore.adapters.compat import Library
from tierstore.adapters.other_offloading import refuse_models_in_stores


class Accelerate(Library):
    """Knows its hooks by the attribute `_hf_hook` that they leave on each module."""

    name = "accelerate"

    def uses_weights_of_parts(self, module: nn.Module) -> bool:
        """Whether a forward is marked with transformers' `force_accelerate_hooks`: it uses weights
        of children that it does not call (Mamba and its relatives do)."""
        forward: Any = getattr(type(module), "forward", None)  # TorchScript says that it has none
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
            "by accelerate already: undo that first with pipe.remove_all_hooks() or "
            "accelerate.hooks.remove_hook_from_module"
        )

    def guard(self) -> None:
        """Have its hooks refuse models that are in a store."""
        from accelerate import hooks

        refuse_models_in_stores(hooks.AlignDevicesHook, "init_hook", _forget_forward)
        refuse_models_in_stores(hooks.CpuOffload, "init_hook", _forget_forward)


def _forget_forward(module: nn.Module) -> None:
    """accelerate notes a module's forward before it asks its hook."""
    if not hasattr(module, "_hf_hook"):
        module.__dict__.pop("_old_forward", None)
