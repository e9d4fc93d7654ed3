"""transformers: stacked experts, caches, tied weights, and buffers outside checkpoints."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from tierstore.adapters.codecs import movable_leaves
from tierstore.adapters.compat import Library
from tierstore.adapters.contents import named_parameters_of
from tierstore.adapters.grouping import is_compiled

_CHOICES = frozenset({"top_k_index", "router_indices"})
"""Names of the argument that holds the chosen experts."""
_STACKED = 3
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that makes transformers convert weights serially on the loading thread."""


class Transformers(Library):
    """Support for transformers.

    Recognizes its models by attributes and signatures, so copies of their code work as well.
    """

    name = "transformers"

    def recomputes_parts(self, module: nn.Module) -> bool:
        """Return whether gradient checkpointing is enabled on a module.

        The attribute is the same in transformers and diffusers.
        """
        return bool(getattr(module, "gradient_checkpointing", False))

    def expert_stacks(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the stacked weights of an experts module.

        Its `forward(hidden_states, top_k_index, top_k_weights)` indexes their first dimension.
        """
        experts = getattr(module, "num_experts", None)
        if not isinstance(experts, int) or experts < 2 or is_compiled(module):
            return {}
        if _CHOICES.isdisjoint(inspect.signature(type(module).forward).parameters):
            return {}
        return {
            name: parameter
            for name, parameter in named_parameters_of(module, recurse=False)
            if parameter.dim() >= _STACKED
            and parameter.shape[0] == experts
            and movable_leaves(parameter).keys() == {""}
        }

    def is_cache(self, value: object) -> bool:
        """Return whether a value is a `Cache` or a layer of one."""
        return hasattr(value, "get_seq_length") or hasattr(value, "update_conv_state")

    def tied_names(self, module: nn.Module) -> Mapping[str, str]:
        """Return the names that the model declares as tied.

        These may be different Parameter objects: `accelerate.init_empty_weights()` separates them.
        """
        known = getattr(module, "all_tied_weights_keys", None)
        return known if isinstance(known, Mapping) else {}

    def base_prefix(self, model: nn.Module) -> str | None:
        """Return `base_model_prefix`."""
        base = getattr(model, "base_model_prefix", None)
        return base if isinstance(base, str) else None

    def initializer(self, module: nn.Module) -> Callable[[nn.Module], object] | None:
        """Return `_init_weights` if the module is a transformers model."""
        modeling: Any = sys.modules.get("transformers.modeling_utils")
        if modeling is None or not isinstance(module, modeling.PreTrainedModel):
            return None
        init: Callable[[nn.Module], object] = module._init_weights
        return init

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Convert weights on the loading thread, where `LoadingMode` intercepts it."""
        before = os.environ.get(_ONE_BY_ONE)
        os.environ[_ONE_BY_ONE] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ONE_BY_ONE]
            else:
                os.environ[_ONE_BY_ONE] = before
