"""The tables of docs/guides/operations.md, generated from the operations in the tests."""

from __future__ import annotations

from pathlib import Path

from tests.operations.adapters import ADAPTERS
from tests.operations.architectures import ARCHITECTURES
from tests.operations.by_hand import BY_HAND
from tests.operations.caches import CACHES
from tests.operations.changes import CONVERSIONS, SAVING
from tests.operations.compiling import COMPILING
from tests.operations.computing import COMPUTING
from tests.operations.generation import GENERATION
from tests.operations.language_models import LANGUAGE_MODELS
from tests.operations.loras import LORAS
from tests.operations.operation import Table
from tests.operations.plain_modules import CALLING, EDITING
from tests.operations.refused import REFUSED
from tests.operations.sharing import SHARING
from tests.operations.surroundings import SURROUNDINGS

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/operations.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"

TABLES: tuple[Table, ...] = (
    LORAS,
    ADAPTERS,
    COMPUTING,
    CACHES,
    SHARING,
    BY_HAND,
    CONVERSIONS,
    SAVING,
    REFUSED,
    GENERATION,
    ARCHITECTURES,
    LANGUAGE_MODELS,
    EDITING,
    CALLING,
    COMPILING,
    SURROUNDINGS,
)
OPERATIONS = [operation for table in TABLES for operation in table.operations]


def works(table: Table) -> str:
    """Format the operations of a section that work, as a list."""
    return "".join(
        f"- {operation.name}" + (f": *{operation.note}*" if operation.note else "") + "\n"
        for operation in table.operations
        if operation.refusal is None
    )


def refused(table: Table) -> str:
    """Format the operations of a section that are refused, as a table; empty if there are none."""
    names: dict[str, list[str]] = {}
    for operation in table.operations:
        if (refusal := operation.refusal) is not None:
            where = "" if "cpu" in operation.devices else "on an accelerator, "
            error = f"{where}{refusal.error.__name__}: {refusal.advice}"
            names.setdefault(error, []).append(operation.name)
    rows = [f"| {'; '.join(same)} | {error} |\n" for error, same in names.items()]
    head = "| refused | raises, and what to do instead |\n|---|---|\n"
    return head + "".join(rows) if rows else ""


def tables() -> str:
    """Format all operations for the page: in each section, refused ones come last."""
    return "\n".join(
        f"### {table.title}\n\n" + "\n".join(filter(None, [works(table), refused(table)]))
        for table in TABLES
    )


def page_with(text: str, found: str) -> str:
    """Return the page `text` with its tables replaced by `found`."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + found + end + after


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
