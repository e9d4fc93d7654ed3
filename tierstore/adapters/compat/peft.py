"""peft: adapters that train beside frozen weights."""

from __future__ import annotations

from torch import nn

from tierstore.adapters.compat import Library
from tierstore.adapters.forward import has_method


class Peft(Library):
    """Support for peft. Recognizes an adapter layer by its `base_layer`."""

    name = "peft"

    def uses_weights_of_parts(self, module: nn.Module) -> bool:
        """Return whether a module is an adapter layer.

        It may use its base layer's weight without calling the base layer, as DoRA does.
        """
        return hasattr(module, "base_layer") and hasattr(module, "active_adapters")

    def merges(self, module: nn.Module) -> tuple[str, ...]:
        """Return `merge`, which adds an adapter to its base layer's weight."""
        return ("merge",) if has_method(module, "merge") else ()
