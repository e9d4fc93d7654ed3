"""Settings of an offloaded model, from `enable_group_offload` and `dispatch_model` arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tierstore.adapters.compat import hints_of
from tierstore.adapters.grouping import Partitioner, sizes_for
from tierstore.store import TierStore

ON_DEVICE, STICKY, ANYWHERE = "device", "cpu", "disk"
"""Places of a weight in a device map.

Permanently on the device; in RAM, evicted last; or wherever the store chooses.
"""


@dataclass(frozen=True)
class OffloadSettings:
    """Settings of one offloaded model. None defers to the budgets, or to hints of the model class.

    `places` pairs name prefixes with one of the places above; the longest matching prefix applies.
    With `dispatched`, every module's inputs are moved to the device, and the model's outputs to the
    device of its inputs. Modules whose class is named in `whole` use the weights of their children
    without calling them.
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

    def partitioner(self, model: nn.Module, store: TierStore) -> Partitioner:
        """Return the partitioner for a model, with group sizes from the store's budgets."""
        sizes = sizes_for(self.offload_type, store, model)
        blocks = self.block_modules
        return Partitioner(
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
    """Return the place of a tensor, given by its longest matching prefix; None if there is none."""
    while name not in places:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return places[name]


def check_arguments(
    function: str, given: Mapping[str, Any], replaced: Mapping[str, str], harmless: Collection[str]
) -> None:
    """Raise TypeError for arguments that the store replaces, and for unknown arguments.

    `replaced` and `harmless` name arguments of another library's function. A falsy value of a
    replaced argument, and any value of a harmless one, is ignored.
    """
    for name, value in given.items():
        if name in replaced:
            if value:
                raise TypeError(f"{name} is replaced by {replaced[name]}; leave it out")
        elif name not in harmless:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
