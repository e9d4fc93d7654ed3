"""Operations that users perform on a model: one row of the documentation each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.accelerator import ACCELERATOR
from tests.operations.actions import Actions

Do = Callable[[Actions], None]


@dataclass(frozen=True)
class Refusal:
    """An operation that raises on an offloaded model, with advice, and leaves it unchanged.

    The computation before it is repeated afterwards.
    """

    error: type[Exception]
    says: str
    """A regular expression that the message matches."""
    advice: str
    """The alternative that the documentation gives."""


@dataclass(frozen=True)
class Operation:
    """A row: `do` gives the same as on an ordinary model, or raises."""

    table: str
    name: str
    do: Do
    refusal: Refusal | None
    note: str
    devices: tuple[str, ...]
    """Kinds of models with this operation. Others lack it without a store, too."""

    @property
    def identifier(self) -> str:
        """The name of its tests."""
        return self.do.__name__


class Table:
    """A table of the documentation, with its rows in order."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.operations: list[Operation] = []

    def row(
        self,
        name: str,
        *,
        refusal: Refusal | None = None,
        note: str = "",
        devices: tuple[str, ...] = ("cpu", ACCELERATOR),
    ) -> Callable[[Do], Do]:
        """Add a function as a row, under its name in the documentation.

        `note` is additional information for readers.
        """

        def add(do: Do) -> Do:
            self.operations.append(Operation(self.title, name, do, refusal, note, devices))
            return do

        return add
