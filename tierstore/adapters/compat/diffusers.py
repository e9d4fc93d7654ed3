"""diffusers: pipelines, hooks, hints in its models' classes, GGUF files."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tierstore.adapters.compat import Library, ModelHints
from tierstore.adapters.other_offloading import TierstoreOffloading, install_model_check
from tierstore.adapters.pipelines import patch_class_tree
from tierstore.model.extras import extra_for

MARKER = "group_offloading"
"""Name of the hook by which diffusers recognizes an offloaded model."""


class Diffusers(Library):
    """Support for diffusers. Marks offloaded models by an entry in their `HookRegistry`."""

    name = "diffusers"
    # Includes methods that change hooks: diffusers restores older `forward`s when it removes one.
    changes_weights = (
        "load_lora_weights",
        "unload_lora_weights",
        "delete_adapters",
        "load_lora_adapter",
        "unload_lora",
        "load_ip_adapter",
        "unload_ip_adapter",
        "load_textual_inversion",
        "unload_textual_inversion",
        "load_attn_procs",
        "fuse_qkv_projections",
        "unfuse_qkv_projections",
        "enable_layerwise_casting",
        "add_adapter",
        "enable_cache",
        "disable_cache",
    )

    def hints(self, model: nn.Module) -> ModelHints:
        """Return the class attributes for diffusers' own group offloading."""
        return ModelHints(
            supported=getattr(model, "_supports_group_offloading", True),
            skip=frozenset(getattr(model, "_skip_keys", None) or ()),
            blocks=tuple(getattr(model, "_group_offload_block_modules", None) or ()),
        )

    def other_offloading(self, module: nn.Module) -> str | None:
        """Return how to undo diffusers' group offloading."""
        registry = getattr(module, "_diffusers_hook", None)
        if registry is None or registry.get_hook(MARKER) is None:
            return None
        return "by diffusers, or to another store: load it again, or undo that first"

    def guard(self) -> None:
        """Make diffusers' group offloading raise for models that are in a store."""
        from diffusers.hooks import group_offloading

        install_model_check(group_offloading, "_apply_group_offloading")

    def mark(self, model: nn.Module, device: torch.device) -> None:
        """Add an entry to the model's hooks, with the devices that pipelines ask for."""
        try:
            from diffusers.hooks import HookRegistry
        except ImportError:
            return  # without diffusers, the mark is never read
        registry = HookRegistry.check_if_exists_or_initialize(model)
        registry.hooks = _Marked(registry.hooks, _MarkConfig(device, torch.device("cpu")))

    def unmark(self, model: nn.Module) -> None:
        """Remove the entry from the model's hooks."""
        registry = getattr(model, "_diffusers_hook", None)
        if registry is not None and isinstance(registry.hooks, _Marked):
            registry.hooks = dict(registry.hooks)

    def patch_pipelines(self) -> None:
        """Make pipelines of every class, including future ones, respect offloaded models."""
        from diffusers import DiffusionPipeline

        patch_class_tree(DiffusionPipeline)

    def read_single_file(self, path: str) -> Mapping[str, torch.Tensor] | None:
        """Return the tensors of a GGUF file on this machine; None for any other path."""
        return mapped_gguf(path) if path.endswith(".gguf") and os.path.isfile(path) else None


# Marking an offloaded model -----------------------------------------------------------------------


@dataclass(frozen=True)
class _MarkConfig(TierstoreOffloading):
    """The configuration that diffusers reads from an offloaded model's hook."""

    onload_device: torch.device
    offload_device: torch.device


class _Marked(dict[str, Any]):
    """A model's hooks with an extra mark that only `get` finds, so that it cannot be removed.

    A copy or a pickle of the model is an ordinary model with only the other hooks.
    """

    def __init__(self, others: dict[str, Any], config: _MarkConfig) -> None:
        super().__init__(others)
        self._mark = SimpleNamespace(config=config)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the hook of that name. `HookRegistry.get_hook` calls this."""
        return self._mark if name == MARKER else super().get(name, default)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


# GGUF files ---------------------------------------------------------------------------------------


def mapped_gguf(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a GGUF file by name, each a copy-on-write map of it on the CPU.

    A quantised tensor is a diffusers `GGUFParameter` with the shape of its bytes: rows of uint8.
    (diffusers' own `load_gguf_checkpoint` copies each tensor into memory.) The format is
    llama.cpp's: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

    Raises ImportError without gguf or diffusers, and ValueError if the file is not a GGUF file or
    has a quantisation type that diffusers does not support.
    """
    with extra_for("to read a GGUF file"):
        gguf: Any = import_module("gguf")
        utils: Any = import_module("diffusers.quantizers.gguf.utils")
    plain = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(path, "c").tensors:
        kind = tensor.tensor_type
        weight = torch.from_numpy(tensor.data)
        if kind not in plain and kind not in utils.SUPPORTED_GGUF_QUANT_TYPES:
            known = ", ".join(sorted(k.name for k in utils.SUPPORTED_GGUF_QUANT_TYPES))
            raise ValueError(
                f"{path}: {tensor.name} is quantised as {kind.name}, which diffusers does not "
                f"support. It supports {known}"
            )
        tensors[tensor.name] = (
            weight if kind in plain else utils.GGUFParameter(weight, quant_type=kind)
        )
    return tensors
