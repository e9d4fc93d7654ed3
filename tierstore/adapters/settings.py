"""How a model is offloaded: the arguments of `enable_group_offload` and of `dispatch_model`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tierstore.adapters.compat import hints_of
from tierstore.adapters.grouping import Cutting, sizes_for
from tierstore.store import TierStore

ON_DEVICE, IN_RAM, ANYWHERE = "device", "cpu", "disk"
"""Where a weight should stay between its uses: for good on the device; in RAM, given up last; or
wherever the store finds it best."""


@dataclass(frozen=True)
class OffloadSettings:
    """The settings of one offloading. None leaves a choice to the budgets, or to hints of the
    model's class.

    `places` has pairs of a name and one of the places above; the longest name that leads to a
    tensor counts. With `dispatched`, every module's inputs come to the device, and what the model
    returns goes to the device of what it was given. Modules whose class is named in `whole` use
    the weights of their children without calling them.
    """

    offload_type: str = "block_level"
    num_blocks_per_group: int | None = None
    group_size: int | None = None
    exclude_modules: tuple[str, ...] = ()
    exclude_kwargs: frozenset[str] | None = None
    block_modules: tuple[str, ...] | None = None
    dispatched: bool = False
    places: tuple[tuple[str, str], ...] = (("", ANYWHERE),)
    whole: frozenset[str] = frozenset()

    def cutting(self, model: nn.Module, store: TierStore) -> Cutting:
        """Return how a model is cut into units and groups, given the store's budgets."""
        sizes = sizes_for(self.offload_type, store, model)
        blocks = self.block_modules
        return Cutting(
            self.offload_type,
            self.group_size or sizes.group,
            hints_of(model).blocks if blocks is None else blocks,
            self.num_blocks_per_group,
            self.whole,
            largest_block=0 if self.group_size else sizes.block,
            largest_compiled=sizes.compiled,
        )

    def skipped(self, model: nn.Module) -> frozenset[str]:
        """Return the names of values that are not moved between devices."""
        return hints_of(model).skip if self.exclude_kwargs is None else self.exclude_kwargs


def place_of(places: Mapping[str, str], name: str) -> str | None:
    """Return the place of a tensor: that of the longest of the names that lead to it."""
    while name not in places:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return places[name]


def check_arguments(
    function: str, given: Mapping[str, Any], replaced: Mapping[str, str], harmless: Collection[str]
) -> None:
    """Raise TypeError for an argument of another library's function that the store replaces, and
    for one that the function does not have. One that says nothing is left out."""
    for name, value in given.items():
        if name in replaced:
            if value:
                raise TypeError(f"{name} is replaced by {replaced[name]}; leave it out")
        elif name not in harmless:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
