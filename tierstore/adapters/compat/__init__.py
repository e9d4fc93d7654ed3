"""Support for other libraries: one file per library, and the interface that the adapters call.

The adapters support plain PyTorch. A library's own conventions (an attribute that marks a block, an
unusual weight class, hooks of its own offloading) are in its file in this folder, as a `Library`
that overrides the methods it needs. Files in this folder are found automatically: a new library
needs only a new file. Importing these files imports no library. Only `mark`, `loading` and
`read_single_file` import the library themselves, if it is installed.

Functions of libraries that are replaced, and why the library's hooks do not suffice:

| library | replaced | why |
|---|---|---|
| accelerate | `AlignDevicesHook.init_hook`, `CpuOffload.init_hook` | both attach to a model without a check: two owners of one weight give wrong results without an error |
| diffusers | `group_offloading._apply_group_offloading` | the same; and it is applied again after a LoRA was loaded |
| diffusers | `DiffusionPipeline.to` and the methods in `Diffusers.changes_weights`, on their classes | a pipeline may be created before or after its models are offloaded, and has no hook for either |
| diffusers | `HookRegistry.hooks` of one model, by a dict with one more entry | `register_hook` would wrap `forward`, and a deep copy of the model would run the original's weights |
| torchao | `quantization.quantize_`, while a model is loaded | it quantises each layer in memory as soon as it is loaded |
| transformers | the variable `HF_DEACTIVATE_ASYNC_LOAD`, while a model is loaded | other threads would cast weights outside the dispatch mode |
"""  # noqa: E501 - a table

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")

Unpack = Callable[[], torch.Tensor]
"""Held by the graph in place of a saved tensor; returns the tensor."""
PackView = Callable[[torch.Tensor], Unpack | None]
"""Returns an `Unpack` for a saved tensor that is a view of a leased weight; else None."""


class TensorCodec(Protocol):
    """Codec of one kind of tensor, which a store holds as (nested) plain tensors."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is of this kind."""

    def flatten(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the inner tensors by name, as aliases, not copies.

        They are plain tensors, or of another kind with its own codec.
        """

    def rebuild(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a tensor with the class and attributes of `tensor`, made of `parts`."""

    def assign(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Point `tensor` at the memory of `value`, on any device. It stays the same object."""


@dataclass(frozen=True)
class ModelHints:
    """Hints of a model's class about offloading it.

    Keyword arguments named in `skip` are not moved between devices. `blocks` names children that
    are blocks. `supported` is False if the model cannot be offloaded in groups.
    """

    supported: bool = True
    skip: frozenset[str] = frozenset()
    blocks: tuple[str, ...] = ()


class Deferred(Protocol):
    """Work that a library defers while a model is loaded, until all weights are mapped."""

    def finish(self, groups: Any, dtypes: Mapping[int, torch.dtype], target: int) -> None:
        """Do the work, with up to `target` bytes of weights at a time.

        Tensors (by id) are cast to `dtypes` before.
        """


class Library:
    """Conventions of one library. Methods that are not overridden are never called.

    `name` is the library's import name; `codecs` handle its kinds of tensors.
    """

    name: ClassVar[str]
    codecs: ClassVar[Sequence[TensorCodec]] = ()

    # Partition ---------------------------------------------------------------------------------

    def uses_weights_of_parts(self, module: nn.Module) -> bool:
        """Return whether a module's forward uses weights of submodules without calling them."""
        return False

    def recomputes_parts(self, module: nn.Module) -> bool:
        """Return whether a backward pass recomputes parts of a module without calling it."""
        return False

    def expert_stacks(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters, by attribute, whose first dimension indexes routed experts.

        Empty if the module has none.
        """
        return {}

    def hidden_tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return tensors that a forward needs but that are neither parameters nor buffers."""
        return {}

    def hints(self, model: nn.Module) -> ModelHints | None:
        """Return the hints of the model's class about offloading; None if there are none."""
        return None

    # Running -----------------------------------------------------------------------------------

    def is_cache(self, value: object) -> bool:
        """Return whether a value is a cache that a forward extends, such as a key-value cache."""
        return False

    def saves_weights(self, tensor: torch.Tensor) -> bool:
        """Return whether the library's autograd functions save this weight outside the hooks.

        No saved-tensor hook sees such a weight; `release_saved` replaces it.
        """
        return False

    def release_saved(
        self, results: Iterable[torch.Tensor], given: Any, pack_view: PackView
    ) -> None:
        """Replace views of leased weights in the graph of a unit's `results`.

        Called after the unit's forward, with its `given` arguments, while its weights are leased.
        """

    # Owning weights ----------------------------------------------------------------------------

    def other_offloading(self, module: nn.Module) -> str | None:
        """Return a message if the library offloads this module, else None.

        It names the library and how to undo its offloading ("by x: call y").
        """
        return None

    def guard(self) -> None:
        """Make the library raise for a model that is in a store. Called repeatedly."""

    def mark(self, model: nn.Module, device: torch.device) -> None:
        """Mark a model for the library as offloaded and running on `device`."""

    def unmark(self, model: nn.Module) -> None:
        """Remove the mark of an offloaded model."""

    # Changing weights --------------------------------------------------------------------------

    changes_weights: ClassVar[tuple[str, ...]] = ()
    """Methods of models that replace weights or modules: they run while offloading is suspended."""

    def patch_pipelines(self) -> None:
        """Make the library's pipelines respect models that are in a store. Called repeatedly."""

    def merges(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of methods that merge trained weights into offloaded ones."""
        return ()

    # Loading ------------------------------------------------------------------------------------

    def loading(self) -> AbstractContextManager[Deferred | None] | None:
        """Return a context in which the library loads models without allocating memory."""
        return None

    def tied_names(self, module: nn.Module) -> Mapping[str, str]:
        """Return tied weights, as a map from the name of each to the name it is tied to."""
        return {}

    def base_prefix(self, model: nn.Module) -> str | None:
        """Return the attribute that holds the base model in a model with a head."""
        return None

    def initializer(self, module: nn.Module) -> Callable[[nn.Module], object] | None:
        """Return a function that initializes modules of this model; None if there is none."""
        return None

    def read_single_file(self, path: str) -> Mapping[str, torch.Tensor] | None:
        """Return the tensors of a file in a format of the library, mapped from the file."""
        return None


@functools.cache
def libraries() -> tuple[Library, ...]:
    """Return every library that has a file in this folder, sorted by file name."""
    found: list[Library] = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        kinds = [each for each in vars(module).values() if isinstance(each, type)]
        own = [k for k in kinds if issubclass(k, Library) and k.__module__ == module.__name__]
        found += [kind() for kind in own]
    return tuple(found)


@functools.cache
def _overrides(question: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Return the bound methods of all libraries that override a method of `Library`."""
    name = question.__name__
    overriding = [each for each in libraries() if getattr(type(each), name) is not question]
    return tuple(getattr(each, name) for each in overriding)


def any_answer(question: Callable[[Library, V], bool], value: V) -> bool:
    """Return whether a method of `Library` returns True for any library."""
    return any(ask(value) for ask in _overrides(question))


def first_answer(question: Callable[[Library, V], R | None], value: V) -> R | None:
    """Return the first non-empty result of a method of `Library`; None if there is none."""
    return next((found for ask in _overrides(question) if (found := ask(value))), None)


def joined_answers(question: Callable[[Library, V], Mapping[str, R]], value: V) -> dict[str, R]:
    """Return the merged results of all libraries for a method that returns a mapping."""
    return {key: found for ask in _overrides(question) for key, found in ask(value).items()}


def hints_of(model: nn.Module) -> ModelHints:
    """Return the hints of a model's class about offloading it."""
    return first_answer(Library.hints, model) or ModelHints()


def notify_all(
    method: Callable[Concatenate[Library, P], None], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Call a method of `Library` for every library that is imported and overrides it."""
    for ask in _overrides(method):
        if ask.__self__.name in sys.modules:  # type: ignore[attr-defined]
            ask(*args, **kwargs)


def notify_offloaded(model: nn.Module, device: torch.device) -> None:
    """Notify every installed library that a model is offloaded and runs on `device`.

    Also marks the model for libraries that are not imported yet.
    """
    for mark in _overrides(Library.mark):
        mark(model, device)
    notify_all(Library.guard)
    notify_all(Library.patch_pipelines)


def weight_changing_methods() -> tuple[str, ...]:
    """Return the names of methods of models that replace weights or modules."""
    return tuple(name for each in libraries() for name in each.changes_weights)


@contextmanager
def loading() -> Iterator[list[Deferred]]:
    """Enter the loading contexts of all libraries. Yields the work that they defer."""
    with ExitStack() as stack:
        contexts = [
            context for ask in _overrides(Library.loading) if (context := ask()) is not None
        ]
        entered = [stack.enter_context(context) for context in contexts]
        yield [each for each in entered if each is not None]
