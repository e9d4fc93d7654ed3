"""The record of all events of a planner, from which every decision can be made again.

A log that is whole (`dropped` is 0) and is played to a planner of the same budgets and policy
(`replayed`) gives the same instructions, event by event: a decision that looks wrong, in a failing
test or in a report of somebody's run, can be looked at as often as one likes.

As JSON an event is a row `[seconds, type, field, ...]`, in the order of `tierstore.model.events`. A
group is `[key, generation]`, a tier its name, a way of use its value; an error is its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from enum import Enum
from typing import Any, Protocol

from tierstore.model import events
from tierstore.model.errors import TransferError
from tierstore.model.events import Event
from tierstore.model.groups import GroupId
from tierstore.model.moves import Instruction
from tierstore.model.tiers import TIERS, Access, HostAccess, Tier
from tierstore.observe.journal import Ring

KEPT = 1 << 16
"""Events that are kept; of more, the oldest are dropped."""

PLAIN = {"int": int, "bool": bool}
TYPES = {kind.__name__: kind for kind in Event.__args__}


class EventLog(Ring[tuple[float, Event]]):
    """The newest events of a planner, and when they happened, in seconds."""

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__(kept)
        self._kept = kept

    def add(self, handled: tuple[float, Event]) -> None:
        """Note an event that was handled, and when. Of an error, the text is kept."""
        now, event = handled
        if isinstance(event, events.Failed):
            # The error itself would keep the frames alive that it came through, and their tensors.
            handled = now, replace(event, error=TransferError(str(event.error)))
        self._added += 1
        self._events.append(handled)

    def clear(self) -> None:
        """A new planner begins."""
        super().__init__(self._kept)

    def __iter__(self) -> Iterator[tuple[float, Event]]:
        return iter(self._events)


class Handler(Protocol):
    """A planner, as far as a log needs to know it."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Believe what the event says, which happened at `now`. Returns what to do."""


def replayed(
    log: Iterable[tuple[float, Event]], planner: Handler
) -> Iterator[tuple[Event, list[Instruction]]]:
    """Each event of a whole log, and what a new planner instructs after it.

    If it has the budgets, the policy and the schedule of the one whose log it is, these are the
    same instructions.
    """
    for now, event in log:
        yield event, planner.handle(event, now)


def to_row(now: float, event: Event) -> list[Any]:
    """An event as JSON knows it."""
    return [now, type(event).__name__, *(_plain(getattr(event, f.name)) for f in fields(event))]


def from_row(row: list[Any], tiers: Mapping[str, Tier] = TIERS) -> tuple[float, Event]:
    """The event of a row, on these `tiers`, by name. Raises ValueError for what is none."""
    try:
        now, name, *values = row
        return _value("float", now, tiers), _made(TYPES[name], values, tiers)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{row!r} is no event: {type(error).__name__}: {error}") from error


def _made(kind: type[Any], values: list[Any], tiers: Mapping[str, Tier]) -> Any:
    """A dataclass of the values of its fields."""
    pairs = zip(fields(kind), values, strict=True)
    return kind(*(_value(str(field.type), value, tiers) for field, value in pairs))


def _plain(value: Any) -> Any:
    if isinstance(value, Tier):
        return value.name
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, GroupId):
        return [value.key, value.generation]
    if isinstance(value, BaseException):
        return str(value)
    if isinstance(value, events.RecoveredGroup):
        return [_plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value


def _value(kind: str, value: Any, tiers: Mapping[str, Tier]) -> Any:  # noqa: C901 - a table
    """`value` of a row as what a field of this annotation holds."""
    if kind.endswith(" | None"):
        return None if value is None else _value(kind.removesuffix(" | None"), value, tiers)
    if kind.startswith("tuple["):
        listed = _checked(value, list)
        kinds = kind.removeprefix("tuple[").removesuffix("]")
        if kinds.endswith(", ..."):
            of = kinds.removesuffix(", ...")
            return tuple(_value(of, one, tiers) for one in listed)
        pairs = zip(kinds.split(", "), listed, strict=True)
        return tuple(_value(of, one, tiers) for of, one in pairs)
    match kind:
        case "GroupId":
            key, generation = _checked(value, list)
            return GroupId(_checked(key, str), _checked(generation, int))
        case "Tier":
            return tiers[value]
        case "Access":
            return Access(value)
        case "HostAccess":
            return HostAccess(value)
        case "BaseException":
            return TransferError(_checked(value, str))
        case "RecoveredGroup":
            return _made(events.RecoveredGroup, _checked(value, list), tiers)
        case "float":
            return float(_checked(value, int, float))
    return _checked(value, PLAIN[kind])


def _checked(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{value!r} is no {names}")
    return value
