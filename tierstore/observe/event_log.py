"""The log of a planner's events, from which every decision can be reproduced.

A store keeps an `EventLog`: each event, and the instructions that followed. `EventLog.record`
returns its contents together with the settings that a new planner needs to start in the same state;
a trace contains it as a document. Replaying a complete record (`dropped` is 0) gives the same
instructions again, event by event (`tierstore.simulation.replay`). So a decision that looks wrong,
in a failing test or in a user's report, can be replayed as often as needed.

As JSON a record is an object:

    tiers            [[rank, name, persistent, budget in bytes, or null for no limit], ...]
    policy           its name
    timed_by_device  see `Planner`
    dropped          number of oldest events that were dropped because there were too many
    handled          [[event, instruction, ...], ...] in order of time

An event is a row `[seconds, type, field, ...]` with the fields in the order of
`tierstore.model.events`; an instruction is a row `[type, field, ...]` in the order of
`tierstore.model.moves`. A group is `[key, generation]`, a tier its name, an enum member its value,
and an error its text.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol

from tierstore.errors import TransferError
from tierstore.model import events
from tierstore.model.events import Event
from tierstore.model.groups import GroupId
from tierstore.model.moves import Instruction
from tierstore.model.tiers import TIERS, Access, HostAccess, Tier, UseOrder
from tierstore.observe.journal import Ring

KEPT = 1 << 16
"""Events to keep. Beyond that, the oldest are dropped."""

LARGEST = 1 << 63
"""Exclusive limit on the absolute value of every number in a record."""

PLAIN = {"int": int, "bool": bool}
EVENTS = {kind.__name__: kind for kind in Event.__args__}
INSTRUCTIONS = {kind.__name__: kind for kind in Instruction.__args__}
_TYPED: dict[type, tuple[tuple[str, str], ...]] = {
    kind: tuple((field.name, str(field.type)) for field in fields(kind))
    for kind in (*EVENTS.values(), *INSTRUCTIONS.values(), events.RecoveredGroup)
}
"""The fields of each type of row, and their annotations."""


class Handled(NamedTuple):
    """An event, its time in seconds, and the instructions that the planner returned."""

    now: float
    event: Event
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class EventRecord:
    """The newest events of a planner and its instructions; `dropped` older ones are missing.

    The planner was created with these `budgets` (bytes; None for no limit), `policy` and
    `timed_by_device`.
    """

    budgets: Mapping[Tier, int | None]
    policy: str
    timed_by_device: bool
    dropped: int
    handled: tuple[Handled, ...]


class EventLog(Ring[tuple[float, Event, tuple[Instruction, ...]]]):
    """The newest events of a planner that was created with these budgets. See `EventRecord`."""

    def __init__(
        self,
        budgets: Mapping[Tier, int | None],
        policy: str,
        *,
        timed_by_device: bool = False,
        kept: int = KEPT,
    ) -> None:
        super().__init__(kept)
        self._budgets = dict(budgets)
        self._policy = policy
        self._timed_by_device = timed_by_device

    def note(self, now: float, event: Event, instructions: Iterable[Instruction]) -> None:
        """Append an event that was handled at `now`. Keeps only the text of an error."""
        if isinstance(event, events.Failed):
            # The error itself would keep its traceback's frames alive, and their tensors.
            event = replace(event, error=TransferError(str(event.error)))
        self._added += 1
        # A plain tuple takes a quarter of the time, and callers wait for it.
        self._events.append((now, event, tuple(instructions)))

    def record(self) -> EventRecord:
        """Return the log so far."""
        handled = tuple(map(Handled._make, self._events))
        return EventRecord(
            self._budgets, self._policy, self._timed_by_device, self.dropped, handled
        )


class Handler(Protocol):
    """The interface of a planner that a log is replayed on."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Apply an event that happened at `now`. Returns the instructions."""


def replay_events(
    log: Iterable[tuple[float, Event]], planner: Handler
) -> Iterator[tuple[Event, list[Instruction]]]:
    """Yield each event of a complete log, and the instructions that a new planner returns.

    These are the recorded instructions if the planner has the same budgets, policy and schedule as
    the one that was logged.
    """
    for now, event in log:
        yield event, planner.handle(event, now)


# As JSON -----------------------------------------------------------------------------------------


def to_document(record: EventRecord) -> dict[str, Any]:
    """Return a record as a JSON document."""
    return {
        "tiers": [[int(t), t.name, t.persistent, size] for t, size in record.budgets.items()],
        "policy": record.policy,
        "timed_by_device": record.timed_by_device,
        "dropped": record.dropped,
        "handled": [
            [to_row(one.now, one.event), *map(_row, one.instructions)] for one in record.handled
        ],
    }


def from_document(document: Any) -> EventRecord:
    """Parse a document. Raises ValueError, which names the fault, if it is invalid."""
    found = {name: _field(document, name, kind) for name, kind in _FIELDS.items()}
    tiers, budgets = dict(TIERS), dict[Tier, int | None]()
    for row in found["tiers"]:
        tier, budget = _tier(row)
        budgets[tiers.setdefault(tier.name, tier)] = budget
    if len({int(tier) for tier in budgets}) != len(found["tiers"]):
        raise ValueError("it lists a tier twice")
    handled = tuple(
        _handled(number, rows, tiers) for number, rows in enumerate(found["handled"], 1)
    )
    return EventRecord(
        budgets, found["policy"], found["timed_by_device"], found["dropped"], handled
    )


_FIELDS = {"tiers": list, "policy": str, "timed_by_device": bool, "dropped": int, "handled": list}


def _field(document: Any, name: str, kind: type) -> Any:
    try:
        found = _checked(document[name], kind)
        if kind is int and found < 0:
            raise ValueError(f"{found} is not a count")
        return found
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it has no {name!r}: {_brief(error)}") from error


def _tier(row: Any) -> tuple[Tier, int | None]:
    try:
        rank, name, persistent, budget = _checked(row, list)
        of = _checked(rank, int), _checked(name, str), _checked(persistent, bool)
        tier = TIERS.get(name, Tier(rank, name, persistent=persistent))
        if (int(tier), tier.name, tier.persistent) != of:
            raise ValueError(f"{name} is another tier")
        return tier, None if budget is None else _checked(budget, int)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{reprlib.repr(row)} is not a tier: {_brief(error)}") from error


def _handled(number: int, rows: Any, tiers: Mapping[str, Tier]) -> Handled:
    try:
        event, *instructions = _checked(rows, list)
        followed = tuple(_instruction(row, tiers) for row in instructions)
        return Handled(*from_row(event, tiers), followed)
    except (TypeError, ValueError) as error:
        raise ValueError(f"event {number:,}: {_brief(error)}") from error


def to_row(now: float, event: Event) -> list[Any]:
    """Return an event as a JSON row."""
    return [now, *_row(event)]


def _row(event: Any) -> list[Any]:
    kind = type(event)
    return [kind.__name__, *[_to_json(getattr(event, name)) for name, _ in _TYPED[kind]]]


def from_row(row: list[Any], tiers: Mapping[str, Tier] = TIERS) -> tuple[float, Event]:
    """Parse a row, with `tiers` by name. Raises ValueError if it is invalid."""
    try:
        now, name, *values = row
        return _from_json("float", now, tiers), _build(EVENTS[name], values, tiers)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{reprlib.repr(row)} is not an event: {_brief(error)}") from error


def _instruction(row: Any, tiers: Mapping[str, Tier]) -> Instruction:
    try:
        name, *values = _checked(row, list)
        made: Instruction = _build(INSTRUCTIONS[name], values, tiers)
        return made
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{reprlib.repr(row)} is not an instruction: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    """Return the error in at most 300 characters: the invalid value may be as large as a file."""
    return f"{type(error).__name__}: {error}"[:300]


def _build(kind: type[Any], values: list[Any], tiers: Mapping[str, Tier]) -> Any:
    """Build a dataclass from the values of its fields.

    Trailing fields with a default may be missing: older records lack fields that were added later.
    """
    needed = sum(field.default is MISSING for field in fields(kind))
    pairs = zip(_TYPED[kind][: max(len(values), needed)], values, strict=True)
    return kind(*[_from_json(of, value, tiers) for (_, of), value in pairs])


def _to_json(value: Any) -> Any:
    if isinstance(value, Tier):
        return value.name
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, GroupId):
        return [value.key, value.generation]
    if isinstance(value, BaseException):
        return str(value)
    if isinstance(value, events.RecoveredGroup):
        return _row(value)[1:]
    if isinstance(value, tuple):
        return [_to_json(one) for one in value]
    return value


def _from_json(kind: str, value: Any, tiers: Mapping[str, Tier]) -> Any:  # noqa: C901 - a table
    """Convert a value of a row to the type that a field's annotation names."""
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
        case "UseOrder":
            return UseOrder(value)
        case "BaseException":
            return TransferError(_checked(value, str))
        case "RecoveredGroup":
            return _build(events.RecoveredGroup, _checked(value, list), tiers)
        case "float":
            return float(_checked(value, int, float))
        case "int" | "bool":
            return _checked(value, PLAIN[kind])
    if kind.endswith(" | None"):
        return None if value is None else _from_json(kind.removesuffix(" | None"), value, tiers)
    listed = _checked(value, list)
    kinds = kind.removeprefix("tuple[").removesuffix("]")
    if kinds.endswith(", ..."):
        of = kinds.removesuffix(", ...")
        return tuple(_from_json(of, one, tiers) for one in listed)
    pairs = zip(kinds.split(", "), listed, strict=True)
    return tuple(_from_json(of, one, tiers) for of, one in pairs)


def _checked(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{reprlib.repr(value)} is not of type {names}")
    if type(value) in (int, float) and not -LARGEST < value < LARGEST:
        raise ValueError(f"{reprlib.repr(value)} is too large")
    return value
