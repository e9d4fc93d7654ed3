"""loralib: low-rank updates that are merged into a layer's weight when it stops training."""

from __future__ import annotations

from torch import nn

from tierstore.adapters.compat import Library


class Loralib(Library):
    """Support for loralib. Recognizes its layers by the attributes of `loralib.LoRALayer`.

    `layer.eval()` adds the update to the weight (`weight.data += B @ A * scaling`), and
    `layer.train()` subtracts it. The update is trained and stays on the device; the weight is
    frozen and may be offloaded.
    """

    name = "loralib"

    def merges(self, module: nn.Module) -> tuple[str, ...]:
        """Return `train`, which `eval` calls as well."""
        is_layer = hasattr(module, "merge_weights") and hasattr(module, "merged")
        return ("train",) if is_layer else ()
