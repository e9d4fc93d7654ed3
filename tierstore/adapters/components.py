"""One model of a pipeline, offloaded for all pipelines that have it, until none does.

Methods of it that change weights run while its offloading is suspended.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from tierstore.adapters.codecs import weight_bytes
from tierstore.adapters.contents import parameters_of
from tierstore.adapters.grouping import Cutting, sizes_for
from tierstore.adapters.modules import OffloadedModule
from tierstore.adapters.other_offloading import mark, refuse_other_offloading, unmark
from tierstore.adapters.owners import owner_of
from tierstore.adapters.suspended import SuspendedModel
from tierstore.adapters.unit_use import method_of_class
from tierstore.store import TierStore, engine_of

logger = logging.getLogger("tierstore.adapters")

CHANGES_WEIGHTS = (
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
"""Methods of pipelines and models that change weights or modules, or the hooks of diffusers (which
restores older `forward`s when it removes one): they run suspended."""

# A component does not hold its model, so that an entry goes with it.
_components: weakref.WeakKeyDictionary[nn.Module, Component] = weakref.WeakKeyDictionary()


class Component:
    """One model that is offloaded, for as long as any pipeline uses it.

    A model that is offloaded by itself is its own user. It keeps neither the model nor its users
    alive; the `OffloadedModule` is kept by the model, whose methods it wraps.
    """

    def __init__(
        self, module: nn.Module, store: TierStore, prefix: str, settings: dict[str, Any]
    ) -> None:
        self.store = store
        self._prefix = prefix
        self._settings = settings
        self._module = weakref.ref(module)
        self._offloaded: weakref.ref[OffloadedModule] | None = None
        self._suspensions = 0
        self._users: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    @property
    def first_user(self) -> Any:
        """The first to have come of the pipelines that use it; None if all are gone."""
        return next(iter(list(self._users)), None)

    def join(self, user: Any) -> None:
        """Be offloaded for a pipeline, too. If it raises, it is used by those who did before."""
        module = self._module()
        if module is None:
            return
        try:
            self._offload(module)
        except BaseException:
            self.leave(user)
            raise
        self._users[user] = None
        _components[module] = self
        suspend_methods(module, self)

    def leave(self, user: Any | None) -> None:
        """A pipeline has no use for it any more, or is gone."""
        if user is not None:
            self._users.pop(user, None)
        if self.first_user is None:
            self.end()

    def end(self) -> None:
        """Let the model be an ordinary one."""
        module = self._module()
        if module is None:
            return
        if _components.get(module) is self:
            del _components[module]
        unwrap(module, self)
        self._make_ordinary(module)
        engine_of(self.store).groups.discard_soon(())

    @property
    def ordinary(self) -> bool:
        """Whether the model is alive and not offloaded at this moment."""
        return self._module() is not None and self._now() is None

    @property
    def groups(self) -> dict[str, list[str]]:
        """The keys of its groups and the names of the tensors in each."""
        offloaded = self._now()
        return {} if offloaded is None else offloaded.groups

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the model is an ordinary one. What is changed in it is stored as it comes."""
        self._suspensions += 1
        suspended = None
        try:
            module = self._module()
            if module is not None and self._now() is not None:
                self._make_ordinary(module)
                suspended = SuspendedModel(module, self.store, self._cutting(module).target)
                suspended.begin()
            yield
        finally:
            if suspended is not None:
                suspended.end()
            self._suspensions -= 1
            self._resume()

    def _resume(self) -> None:
        module = self._module()
        if module is None or _components.get(module) is not self:
            return  # it ended meanwhile
        if not self.store.closed:
            self._offload(module)

    def _now(self) -> OffloadedModule | None:
        return None if self._offloaded is None else self._offloaded()

    def _offload(self, module: nn.Module) -> None:
        if self._suspensions or self._now() is not None:
            return
        refuse_other_offloading(self._prefix.partition("/")[2] or type(module).__name__, module)
        settings = self._settings
        before = self.store.stats().bytes_written
        skip = settings["exclude_kwargs"]
        if skip is None:
            skip = getattr(module, "_skip_keys", None) or []
        cutting = self._cutting(module)
        offloaded = OffloadedModule(module, self.store, self._prefix, cutting, skip=frozenset(skip))
        self._offloaded = weakref.ref(offloaded)
        mark(module, self.store.device)
        if (diffusers := sys.modules.get("diffusers")) is not None:
            # A pipeline that has this model need not be offloaded itself.
            follow_pipelines(diffusers.DiffusionPipeline)
        logger.info(
            "%s: %d groups, %d bytes of weights; %d bytes written",
            self._prefix,
            len(self.groups),
            weight_bytes(parameters_of(module)),
            self.store.stats().bytes_written - before,
        )

    def _cutting(self, module: nn.Module) -> Cutting:
        settings = self._settings
        blocks = settings["block_modules"]
        if blocks is None:
            blocks = getattr(module, "_group_offload_block_modules", None) or []
        sizes = sizes_for(settings["offload_type"], self.store, module)
        return Cutting(
            settings["offload_type"],
            settings["group_size"] or sizes.group,
            tuple(blocks),
            settings["num_blocks_per_group"],
            largest_block=0 if settings["group_size"] else sizes.block,
            largest_compiled=sizes.compiled,
        )

    def _make_ordinary(self, module: nn.Module) -> None:
        offloaded = self._now()
        if offloaded is not None:
            unmark(module)
            offloaded.disable()
            self._offloaded = None


def component_of(module: nn.Module, store: TierStore) -> Component | None:
    """What offloads a model to a store for pipelines that are there.

    What did so for pipelines that are gone ends, and what is suspended on another store, too.
    """
    component = _components.get(module)
    if component is None:
        return None
    elsewhere = component.store is not store
    if component.first_user is None or (elsewhere and component.ordinary):
        component.end()
        return None
    return None if elsewhere else component


REPLACED_METHODS: weakref.WeakKeyDictionary[type[Any], set[str]] = weakref.WeakKeyDictionary()
"""The methods of classes that are replaced."""

# A handle does not hold its target, so that an entry goes with it.
handles: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The handles of pipelines and models that were offloaded as a whole; each is `Suspending`."""


class Suspending(Protocol):
    """An offloading that can be suspended."""

    def suspended(self) -> AbstractContextManager[None]:
        """Inside, the weights are ordinary tensors."""


class SuspendingMethod:
    """Stands in for a method that changes weights: it runs while the offloading is suspended.

    A copy or a pickle of its owner gets the ordinary method back.
    """

    def __init__(self, by: Suspending, name: str, method: types.MethodType) -> None:
        self.by = by
        self._name = name
        owner = method.__self__
        # None: whatever its class has when it is called. It is not kept alive.
        self._function = method.__func__ if name in vars(owner) else None
        self._owner = weakref.ref(owner)
        # Not its attributes: they would be in the way of ours.
        functools.update_wrapper(self, method.__func__, updated=())

    def method_of(self, owner: Any) -> Callable[..., Any]:
        """The method that this one stands in for, as `owner` has it."""
        if self._function is None:
            return method_of_class(owner, self._name)
        return types.MethodType(self._function, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.by.suspended():
            return self.method_of(self._owner())(*args, **kwargs)

    def remove(self) -> None:
        """Give the owner its own method back."""
        owner = self._owner()
        del owner.__dict__[self._name]
        if self._function is not None:
            owner.__dict__[self._name] = types.MethodType(self._function, owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = self._owner()
        return self.method_of(memo.get(id(owner), owner))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner(), self._name)  # of an owner whose attributes come later


def models_in(target: Any) -> dict[str, nn.Module]:
    """The models of a pipeline by name; of a module, itself under the name ""."""
    if isinstance(target, nn.Module):
        return {"": target}
    return {n: m for n, m in target.components.items() if isinstance(m, nn.Module)}


def suspend_methods(module: nn.Module, by: Component) -> None:
    """Have the methods of a model that change weights run suspended, those for which this is not
    done yet."""
    for name in CHANGES_WEIGHTS:
        method = getattr(module, name, None)
        if inspect.ismethod(method):
            object.__setattr__(module, name, SuspendingMethod(by, name, method))


def unwrap(module: nn.Module, by: Component) -> None:
    """Give the model its own methods back."""
    for name in CHANGES_WEIGHTS:
        method = module.__dict__.get(name)
        if isinstance(method, SuspendingMethod) and method.by is by:
            method.remove()


# Methods of pipelines -------------------------------------------------------------------------


def follow_pipelines(base: type[Any]) -> None:
    """Have methods of all pipelines of a kind, and of kinds derived from it, also later, see to
    what is offloaded of their models, whoever offloads that.

    They are replaced on their classes: when a model is offloaded, nobody knows which pipelines have
    it, or will. For a pipeline with no offloaded model they do what they did.
    """
    replaced = REPLACED_METHODS.setdefault(base, set())
    if "__init_subclass__" in replaced:
        return
    replaced.add("__init_subclass__")
    _follow_later_ones(base)
    pending = [base]
    while pending:
        kind = pending.pop()
        follow_methods(kind)
        pending += kind.__subclasses__()


def _follow_later_ones(base: type[Any]) -> None:
    """Have kinds followed that are derived from one, when they are made."""
    own = vars(base).get("__init_subclass__")

    def followed(kind: type[Any], /, **kwargs: Any) -> None:
        if own is None:
            super(base, kind).__init_subclass__(**kwargs)
        else:
            own.__func__(kind, **kwargs)
        follow_methods(kind)

    base.__init_subclass__ = classmethod(followed)  # type: ignore[assignment]


def follow_methods(kind: type[Any]) -> None:
    """Have the methods of pipelines of one kind run while what is offloaded of them is suspended:
    those that change weights or models. `to` gives offloaded models its dtype."""
    for name in ("to", *CHANGES_WEIGHTS):
        defining = next((each for each in kind.__mro__ if name in vars(each)), None)
        if defining is None or not inspect.isfunction(vars(defining)[name]):
            continue
        replaced = REPLACED_METHODS.setdefault(defining, set())
        if name not in replaced:
            replaced.add(name)
            setattr(defining, name, _around(vars(defining)[name], name))


def _around(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the replacement of a method of pipelines."""
    run = _converted if name == "to" else _suspended

    @functools.wraps(original)
    def method(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(original, pipe), pipe, *args, **kwargs)

    return method


def _suspended(method: Callable[..., Any], pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method while all that is offloaded of a pipeline is suspended."""
    with ExitStack() as stack:
        by: Suspending | None = handles.get(pipe)
        if by is not None:
            stack.enter_context(by.suspended())
        for model in models_in(pipe).values():
            if (component := _components.get(model)) is not None:
                stack.enter_context(component.suspended())
        return method(*args, **kwargs)


def _converted(method: Callable[..., Any], pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `to`, which passes over models that are offloaded, and give them its dtype, too.
    `from_pipe` makes other pipelines, and casts those."""
    result = method(*args, **kwargs)
    models = models_in(pipe).values()
    for given in (*args, *kwargs.values()):
        for model in models if isinstance(given, torch.dtype) else ():
            if owner_of(model) is not None:
                model.to(given)
    return result
