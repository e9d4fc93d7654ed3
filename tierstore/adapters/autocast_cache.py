"""Disable autocast's cache of weight casts while offloaded modules run.

Autocast caches its cast of every float32 parameter that requires grad until the outermost autocast
exits, even if no gradient is needed: half a model, in memory that is not counted in any budget.
Without the cache, a weight that is used twice is cast twice.
"""

from __future__ import annotations

import torch


class CastCache:
    """Switch for autocast's cache on this thread: off from `stop` to `resume`.

    An autocast created in between caches nothing either. One created before and entered in between
    (a decorator) caches its casts as usual, until the outermost autocast exits.
    """

    __slots__ = ("_was_on",)

    def __init__(self) -> None:
        self._was_on = False

    def stop(self) -> None:
        """Turn the cache off."""
        self._was_on = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def resume(self) -> None:
        """Restore the state before `stop`. Can be repeated, and called without `stop`."""
        if self._was_on:
            torch.set_autocast_cache_enabled(True)
            self._was_on = False
