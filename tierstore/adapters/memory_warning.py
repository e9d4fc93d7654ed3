"""Warn about models loaded in memory that barely fit there."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import psutil
from torch import nn

from tierstore.adapters.codecs import movable_leaves
from tierstore.adapters.codecs.memory import address_of, tensor_bytes, unique_bytes
from tierstore.adapters.contents import parameters_of
from tierstore.model.sizes import usable_memory
from tierstore.system.maps import AddressSpace


def warn_of_little_memory(models: Iterable[nn.Module]) -> None:
    """Warn if weights take more memory than is still available.

    The operating system would then kill the process while it loads a second model of this size, or
    one twice as large. Weights mapped from files take no memory. If the process uses less memory
    than is available, nothing is checked.
    """
    memory = psutil.Process().memory_info()
    anonymous = memory.rss - memory.shared
    available = min(usable_memory() - anonymous, psutil.virtual_memory().available)
    if anonymous <= available:
        return
    space = AddressSpace()
    nbytes = unique_bytes(
        leaf
        for model in models
        for parameter in parameters_of(model)
        for leaf in movable_leaves(parameter).values()
        if leaf.device.type == "cpu"
        and space.extent_at(address_of(leaf), tensor_bytes(leaf)) is None
    )
    if min(nbytes, anonymous) > available:
        warnings.warn(
            f"{nbytes:,} bytes of weights are in memory instead of mapped from a checkpoint's "
            f"files, and {max(available, 0):,} bytes are available: with a larger model, the "
            "system would kill this process before the model is in the store. Load with "
            "tierstore.from_pretrained or tierstore.load_checkpoint_and_dispatch, which cast group "
            "by group and use little memory",
            RuntimeWarning,
            stacklevel=3,
        )
