"""Operations that users do with a model: one row of the documentation each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.accelerator import ACCELERATOR
from tests.operations.actions import Actions

Do = Callable[[Actions], None]


@dataclass(frozen=True)
class Refusal:
    """An operation that raises on an offloaded model, with advice, and leaves it as it was.

    What was computed last before it is computed once more after it.
    """

    error: type[Exception]
    says: str
    """A regular expression that the message matches."""
    advice: str
    """The alternative that the documentation gives."""


@dataclass(frozen=True)
class Operation:
    """One row: `do` works the same on an ordinary model, or is refused."""

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
    """Rows of the documentation that belong together, in their order."""

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
        """Say what a function does with a model, as the documentation names it.

        `note` is what a reader should know besides.
        """

        def add(do: Do) -> Do:
            self.operations.append(Operation(self.title, name, do, refusal, note, devices))
            return do

        return add
