"""Support for other libraries: one file per library, and the questions the adapters ask it.

The adapters know plain PyTorch. A library's own conventions (an attribute that marks a block, a
weight in an unusual class, hooks of its own offloading) are in its file in this folder, as a
`Library` that overrides the methods it has an answer for. The files are found by being here: a new
library is one new file. None of them imports its library before somebody else has.

Functions of libraries that are replaced, and why no hook of the library serves:

| library | replaced | why |
|---|---|---|
| accelerate | `AlignDevicesHook.init_hook`, `CpuOffload.init_hook` | both attach to a model without asking anybody: two owners of one weight are wrong without an error |
| diffusers | `group_offloading._apply_group_offloading` | the same; and it is applied anew after a LoRA was loaded |
| diffusers | `DiffusionPipeline.to` and the methods in `Diffusers.changes_weights`, on their classes | a pipeline may be made before or after its models are offloaded, and has no hook for either |
| diffusers | `HookRegistry.hooks` of one model, by a dict that has one entry more | `register_hook` would wrap `forward`, and a deep copy of the model would run this one's weights |
| torchao | `quantization.quantize_`, while a model is loaded | it quantises each layer in memory as soon as it is loaded |
| transformers | the variable `HF_DEACTIVATE_ASYNC_LOAD`, while a model is loaded | other threads would cast weights where no dispatch mode sees it |
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
"""Held by the graph in the place of a saved tensor: returns the tensor."""
PackView = Callable[[torch.Tensor], Unpack | None]
"""Returns the `Unpack` of a saved tensor that is a view of a leased weight; else None."""


class TensorCodec(Protocol):
    """One kind of tensor. A store holds it by its parts, which are plain tensors in the end."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of this kind."""

    def flatten(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that it consists of, by name: aliases, no copies. They are plain, or
        have a codec of their own."""

    def rebuild(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a tensor like `tensor` (its class, its attributes) that consists of `parts`."""

    def show(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Point `tensor` at the memory of `value`, on any device. It stays the same object."""


@dataclass(frozen=True)
class ModelHints:
    """Hints of a model's class about offloading it.

    Keyword arguments named in `skip` are not moved between devices. `blocks` names children that
    are blocks of their own. `supported` is False if the model cannot be offloaded in groups.
    """

    supported: bool = True
    skip: frozenset[str] = frozenset()
    blocks: tuple[str, ...] = ()


class Deferred(Protocol):
    """Work that a library deferred while a model was loaded, until all of it is mapped."""

    def finish(self, groups: Any, dtypes: Mapping[int, torch.dtype], target: int) -> None:
        """Do it, for up to `target` bytes of weights at a time. Tensors (by id) are cast to
        `dtypes` before."""


class Library:
    """One library's conventions. A method that is not overridden has no answer, and costs nothing.

    `name` is what the library is imported as; `codecs` take its kinds of tensors apart.
    """

    name: ClassVar[str]
    codecs: ClassVar[Sequence[TensorCodec]] = ()

    # Partition ---------------------------------------------------------------------------------

    def uses_weights_of_parts(self, module: nn.Module) -> bool:
        """Whether a module's forward uses weights of modules in it without calling them."""
        return False

    def recomputes_parts(self, module: nn.Module) -> bool:
        """Whether the backward pass runs modules of this one again without calling it."""
        return False

    def expert_stacks(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters, by attribute, whose first dimension is one of experts that each
        call chooses from; empty if the module has none."""
        return {}

    def hidden_tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return tensors that a forward needs and that are neither parameters nor buffers."""
        return {}

    def hints(self, model: nn.Module) -> ModelHints | None:
        """Return what the model's class says about offloading; None if it says nothing."""
        return None

    # Running -----------------------------------------------------------------------------------

    def is_cache(self, value: object) -> bool:
        """Whether a value is a cache that a forward extends, such as one of keys and values."""
        return False

    def saves_weights(self, tensor: torch.Tensor) -> bool:
        """Whether autograd functions of the library keep this weight for the backward pass where
        no saved-tensor hook sees it. If so, `release_saved` takes it out."""
        return False

    def release_saved(
        self, results: Iterable[torch.Tensor], given: Any, pack_view: PackView
    ) -> None:
        """After a unit made `results` of what it was `given`, while its weights are leased: keep no
        view of them in the graph."""

    # Owning weights ----------------------------------------------------------------------------

    def other_offloading(self, module: nn.Module) -> str | None:
        """Return who moves this module's weights and how to undo that ("by x already: call y"), if
        the library does; None if it does not."""
        return None

    def guard(self) -> None:
        """Have the library refuse to offload a model that is in a store. Called often."""

    def mark(self, model: nn.Module, device: torch.device) -> None:
        """Tell the library that a model is offloaded, and runs on `device`."""

    def unmark(self, model: nn.Module) -> None:
        """Tell the library that it no longer is."""

    # Changing weights --------------------------------------------------------------------------

    changes_weights: ClassVar[tuple[str, ...]] = ()
    """Methods of models that replace weights or modules: they run while offloading is suspended."""

    def follow_pipelines(self) -> None:
        """Have methods of the library's pipelines respect models that are in a store. Called
        often."""

    def merges(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of methods that add trained weights to others that may be away."""
        return ()

    # Loading ------------------------------------------------------------------------------------

    def loading(self) -> AbstractContextManager[Deferred | None] | None:
        """Return a context in which the library loads models without using memory for them."""
        return None

    def tied_names(self, module: nn.Module) -> Mapping[str, str]:
        """Return names of weights that always are the same tensor as another, by its name."""
        return {}

    def base_prefix(self, model: nn.Module) -> str | None:
        """Return the attribute under which a model with a head has its base model."""
        return None

    def initializer(self, module: nn.Module) -> Callable[[nn.Module], object] | None:
        """Return what computes the buffers of modules in a model; None for other modules."""
        return None

    def read_single_file(self, path: str) -> Mapping[str, torch.Tensor] | None:
        """Return the tensors of a file in a format of the library, as maps of it."""
        return None


@functools.cache
def libraries() -> tuple[Library, ...]:
    """Return every library that has a file in this folder, by name of the file."""
    found: list[Library] = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        kinds = [each for each in vars(module).values() if isinstance(each, type)]
        own = [k for k in kinds if issubclass(k, Library) and k.__module__ == module.__name__]
        found += [kind() for kind in own]
    return tuple(found)


@functools.cache
def _asked(question: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Return a method of `Library` as each library has it that overrides it."""
    name = question.__name__
    overriding = [each for each in libraries() if getattr(type(each), name) is not question]
    return tuple(getattr(each, name) for each in overriding)


def any_answer(question: Callable[[Library, V], bool], value: V) -> bool:
    """Return whether any library says yes to a method of `Library`."""
    return any(ask(value) for ask in _asked(question))


def first_answer(question: Callable[[Library, V], R | None], value: V) -> R | None:
    """Return the first answer that is not empty; None if there is none."""
    return next((found for ask in _asked(question) if (found := ask(value))), None)


def joined_answers(question: Callable[[Library, V], Mapping[str, R]], value: V) -> dict[str, R]:
    """Return the answers of all libraries, each a mapping, as one."""
    return {key: found for ask in _asked(question) for key, found in ask(value).items()}


def hints_of(model: nn.Module) -> ModelHints:
    """Return what a model's class says about offloading it."""
    return first_answer(Library.hints, model) or ModelHints()


def notify_all(
    method: Callable[Concatenate[Library, P], None], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Call a method of `Library` for every library that is imported and overrides it."""
    for ask in _asked(method):
        if ask.__self__.name in sys.modules:  # type: ignore[attr-defined]
            ask(*args, **kwargs)


def tell_of_offloading(model: nn.Module, device: torch.device) -> None:
    """Tell every library that is installed that a model is offloaded and runs on `device`. A
    library that is imported later may be given the model, too."""
    for mark in _asked(Library.mark):
        mark(model, device)
    notify_all(Library.guard)
    notify_all(Library.follow_pipelines)


def methods_that_change_weights() -> tuple[str, ...]:
    """Return the names of methods of models that replace weights or modules."""
    return tuple(name for each in libraries() for name in each.changes_weights)


@contextmanager
def loading() -> Iterator[list[Deferred]]:
    """A context in which libraries load without using memory. Yields what they put off."""
    with ExitStack() as stack:
        contexts = [context for ask in _asked(Library.loading) if (context := ask()) is not None]
        entered = [stack.enter_context(context) for context in contexts]
        yield [each for each in entered if each is not None]
