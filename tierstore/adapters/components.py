"""One model of a pipeline, offloaded for all pipelines that have it, until none does.

Methods of it that change weights run while its offloading is suspended.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from tierstore.adapters.codecs import weight_bytes
from tierstore.adapters.compat import (
    hints_of,
    methods_that_change_weights,
    notify_all,
    tell_of_offloading,
)
from tierstore.adapters.contents import parameters_of
from tierstore.adapters.grouping import Cutting, cutting_for
from tierstore.adapters.modules import OffloadedModule
from tierstore.adapters.other_offloading import check_not_offloaded
from tierstore.adapters.suspended import SuspendedModel
from tierstore.adapters.unit_use import method_of_class
from tierstore.store import TierStore, engine_of

logger = logging.getLogger("tierstore.adapters")

# A component does not hold its model, so that an entry goes with it.
components: weakref.WeakKeyDictionary[nn.Module, Component] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class OffloadSettings:
    """How the models of a pipeline are offloaded: the arguments of `enable_group_offload`."""

    offload_type: str = "block_level"
    num_blocks_per_group: int | None = None
    group_size: int | None = None
    exclude_modules: tuple[str, ...] = ()
    exclude_kwargs: frozenset[str] | None = None
    block_modules: tuple[str, ...] | None = None


class Component:
    """One model that is offloaded, for as long as any pipeline uses it.

    A model that is offloaded by itself is its own user. It keeps neither the model nor its users
    alive; the `OffloadedModule` is kept by the model, whose methods it wraps.
    """

    def __init__(
        self, module: nn.Module, store: TierStore, prefix: str, settings: OffloadSettings
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
        components[module] = self
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
        if components.get(module) is self:
            del components[module]
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
        if module is None or components.get(module) is not self:
            return  # it ended meanwhile
        if not self.store.closed:
            self._offload(module)

    def _now(self) -> OffloadedModule | None:
        return None if self._offloaded is None else self._offloaded()

    def _offload(self, module: nn.Module) -> None:
        if self._suspensions or self._now() is not None:
            return
        check_not_offloaded(self._prefix.partition("/")[2] or type(module).__name__, module)
        before = self.store.stats().bytes_written
        skip = self._settings.exclude_kwargs
        offloaded = OffloadedModule(
            module,
            self.store,
            self._prefix,
            self._cutting(module),
            skip=hints_of(module).skip if skip is None else skip,
        )
        self._offloaded = weakref.ref(offloaded)
        tell_of_offloading(module, self.store.device)
        logger.info(
            "%s: %d groups, %d bytes of weights; %d bytes written",
            self._prefix,
            len(self.groups),
            weight_bytes(parameters_of(module)),
            self.store.stats().bytes_written - before,
        )

    def _cutting(self, module: nn.Module) -> Cutting:
        settings = self._settings
        return cutting_for(
            module,
            self.store,
            offload_type=settings.offload_type,
            group_size=settings.group_size,
            blocks_per_group=settings.num_blocks_per_group,
            blocks=settings.block_modules,
        )

    def _make_ordinary(self, module: nn.Module) -> None:
        offloaded = self._now()
        if offloaded is not None:
            notify_all("unmark", module)
            offloaded.disable()
            self._offloaded = None


def component_of(module: nn.Module, store: TierStore) -> Component | None:
    """What offloads a model to a store for pipelines that are there.

    What did so for pipelines that are gone ends, and what is suspended on another store, too.
    """
    component = components.get(module)
    if component is None:
        return None
    elsewhere = component.store is not store
    if component.first_user is None or (elsewhere and component.ordinary):
        component.end()
        return None
    return None if elsewhere else component


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
    for name in methods_that_change_weights():
        method = getattr(module, name, None)
        if inspect.ismethod(method):
            object.__setattr__(module, name, SuspendingMethod(by, name, method))


def unwrap(module: nn.Module, by: Component) -> None:
    """Give the model its own methods back."""
    for name in methods_that_change_weights():
        method = module.__dict__.get(name)
        if isinstance(method, SuspendingMethod) and method.by is by:
            method.remove()


def suspended_in(pipe: Any) -> Iterator[AbstractContextManager[None]]:
    """Yield what suspends the offloading of a pipeline and of each of its models."""
    by: Suspending | None = handles.get(pipe)
    if by is not None:
        yield by.suspended()
    for model in models_in(pipe).values():
        if (component := components.get(model)) is not None:
            yield component.suspended()
