"""Casts of weights that autocast makes: none of them outlives what it was made for.

Autocast keeps its cast of every float32 parameter that requires grad until the outermost autocast
ends, also where no gradient is wanted: half a model, in memory that no budget counts. So it keeps
none while modules run whose weights are in a store: a weight that is used twice is cast twice.
"""

from __future__ import annotations

import torch


class CastCache:
    """Autocast's cache, for one run of a module: off on this thread from `stop` to `resume`.

    An autocast that is made meanwhile keeps no casts either. One that was made before, and is
    entered meanwhile (a decorator), keeps what it casts as always, until the outermost one ends.
    """

    __slots__ = ("_was_on",)

    def __init__(self) -> None:
        self._was_on = False

    def stop(self) -> None:
        """Keep no casts from now on."""
        self._was_on = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def resume(self) -> None:
        """Do again as before `stop`. May be repeated if interrupted, and called without `stop`."""
        if self._was_on:
            torch.set_autocast_cache_enabled(True)
            self._was_on = False
