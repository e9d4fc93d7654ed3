"""Models that other libraries offload, and models on a store that they are to leave alone.

Who comes second is refused, by us or for us: two that move the same weights make each other's
tensors wrong without any error.
"""

from __future__ import annotations

from torch import nn

from tierstore.adapters.compat import first_answer, notify_all
from tierstore.adapters.contents import modules_of
from tierstore.adapters.owners import is_claimed, owner_of


def check_not_offloaded(name: str, module: nn.Module) -> None:
    """Raise ValueError if something else moves the weights of a model.

    From now on, other libraries refuse the models that are in a store.
    """
    notify_all("guard")
    owner = owner_of(module)
    if owner is not None and owner.root is module:
        raise ValueError(
            f"{name} is offloaded already, to a store: undo that first with "
            "tierstore.disable_offload(model)"
        )
    for part in modules_of(module):
        if is_claimed(part):
            raise ValueError(
                f"{name} is in training on a store: call disable() of its OffloadModel first"
            )
        if (by := first_answer("other_offloading", part)) is not None:
            raise ValueError(f"{name} is offloaded {by}")
