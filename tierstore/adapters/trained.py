"""Which parameters of an offloaded model are trained: they stay on the device.

Whoever fine-tunes a model freezes most of it. So parameters that require grad are taken to be
trained where frozen ones have more bytes. In a model that was only loaded everything requires grad,
but for what cannot (quantised weights) and a table here and there: all of it is offloaded.
"""

from __future__ import annotations

import torch
from torch import nn

from tierstore.adapters.codecs import is_movable, weight_bytes
from tierstore.adapters.grouping import recomputes_parts


class Trained:
    """The parameters of a model that are trained, by their `ids`, as it is now."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._recomputing = _recomputing(root)
        self._parameters = list(root.parameters())
        self._wanting = [parameter.requires_grad for parameter in self._parameters]
        wanting = [p for p in self._parameters if p.requires_grad]
        frozen = [p for p in self._parameters if not p.requires_grad]
        meant = any(map(_may_be_trained, frozen)) and weight_bytes(wanting) < weight_bytes(frozen)
        self.ids = {id(parameter) for parameter in wanting} if meant else set[int]()

    @property
    def outdated(self) -> bool:
        """Whether any of the parameters was frozen since, or is not frozen any more; or whether
        other modules are recomputed in a backward pass."""
        wanting = [parameter.requires_grad for parameter in self._parameters]
        return self._wanting != wanting or self._recomputing != _recomputing(self._root)


def _recomputing(root: nn.Module) -> list[nn.Module]:
    """The modules whose parts are computed again one by one: these move one by one, too."""
    return [module for module in root.modules() if recomputes_parts(module)]


def _may_be_trained(parameter: torch.Tensor) -> bool:
    """Whether somebody chose that it is frozen: integers and what is quantised always are."""
    return is_movable(parameter) and parameter.is_floating_point()
