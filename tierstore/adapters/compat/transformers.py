"""transformers: stacked experts, caches, ties, buffers that no checkpoint has."""

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
"""Names of the argument that says which experts are used."""
_STACKED = 3
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Has weights converted on the thread that loads, one after the other."""


class Transformers(Library):
    """Knows its models by attributes and signatures, so that copies of their code work too."""

    name = "transformers"

    def recomputes_parts(self, module: nn.Module) -> bool:
        """Whether gradient checkpointing is on: transformers and diffusers say so of a module."""
        return bool(getattr(module, "gradient_checkpointing", False))

    def expert_stacks(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the stacked weights of `Experts`, whose `forward(hidden_states, top_k_index,
        top_k_weights)` looks them up by the first dimension."""
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
        """Whether it is a `Cache`, or one layer of it."""
        return hasattr(value, "get_seq_length") or hasattr(value, "update_conv_state")

    def tied_names(self, module: nn.Module) -> Mapping[str, str]:
        """Return what the model declares as tied. These need not be one Parameter object:
        `accelerate.init_empty_weights()` makes several of it."""
        known = getattr(module, "all_tied_weights_keys", None)
        return known if isinstance(known, Mapping) else {}

    def base_prefix(self, model: nn.Module) -> str | None:
        """Return `base_model_prefix`."""
        base = getattr(model, "base_model_prefix", None)
        return base if isinstance(base, str) else None

    def initializer(self, module: nn.Module) -> Callable[[nn.Module], object] | None:
        """Return `_init_weights` of one of its models."""
        modeling: Any = sys.modules.get("transformers.modeling_utils")
        if modeling is None or not isinstance(module, modeling.PreTrainedModel):
            return None
        init: Callable[[nn.Module], object] = module._init_weights
        return init

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Convert weights on the loading thread, where `LoadingMode` sees it."""
        before = os.environ.get(_ONE_BY_ONE)
        os.environ[_ONE_BY_ONE] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ONE_BY_ONE]
            else:
                os.environ[_ONE_BY_ONE] = before
