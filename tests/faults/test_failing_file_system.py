"""A file system in user space whose operations fail, like one on a network or a dying disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.faults.failing_fs import FailingFileSystem, failing_file_system
from tests.faults.scenarios import SCENARIOS, World
from tests.faults.sweeping import Sweep, no_fault

pytestmark = pytest.mark.needs("root", "fuse")

ERRORS = [
    ("read", "EIO", "getting what is on disk"),
    ("read", "ESTALE", "opening one with groups"),
    ("read", "short", "getting what is on disk"),
    ("read", "EIO", "spilling"),
    ("write", "EIO", "spilling"),
    ("write", "EIO", "replacing"),
    ("write", "ENOSPC", "replacing"),
    ("write", "EDQUOT", "training"),
    ("write", "short", "putting"),
    ("fsync", "EIO", "replacing"),
    ("fsync", "EDQUOT", "closing with unsaved groups"),
    ("fsyncdir", "EIO", "putting"),
    ("flush", "EDQUOT", "replacing"),
    ("flush", "EIO", "closing with unsaved groups"),
    ("open", "EMFILE", "opening one with groups"),
    ("open", "EACCES", "getting what is on disk"),
    ("open directly", "EINVAL", "replacing"),
    ("create", "EROFS", "replacing"),
    ("create", "ENOSPC", "opening a new directory"),
    ("rename", "EIO", "replacing"),
    ("unlink", "EROFS", "discarding"),
    ("mkdir", "ENOSPC", "putting"),
    ("truncate", "EIO", "spilling"),
    ("getattr", "EIO", "opening one with groups"),
    ("getattr", "ESTALE", "reading a checkpoint"),
    ("readdir", "EIO", "opening one with groups"),
    ("statfs", "EIO", "spilling"),
]

ONE_OF_EACH = [
    "-".join(last)
    for last in {operation: (operation, error, name) for operation, error, name in ERRORS}.values()
]
"""Ids of cases: one of each operation."""

LOOKS_AT_MAPS = ("registering tensors", "training")
"""Operations on maps of a failing disk, excluded from the sweep.

The system kills a process that reads a map of such a file, and treats partly written data as
written. No error can be raised.
"""


@pytest.fixture(scope="module")
def file_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingFileSystem]:
    with failing_file_system(tmp_path_factory.mktemp("failing")) as file_system:
        yield file_system


def failing(
    file_system: FailingFileSystem, operation: str, error: str
) -> Callable[[World], AbstractContextManager[None]]:
    return lambda world: file_system.failing(**{operation: error})


@pytest.mark.full("each operation, each error and each scenario", keep="a third")
@pytest.mark.long("each operation in more than one scenario", keep=ONE_OF_EACH)
@pytest.mark.parametrize(("operation", "error", "name"), ERRORS)
def test_file_system_failure_raises_or_is_recovered(
    operation: str, error: str, name: str, file_system: FailingFileSystem
) -> None:
    sweep = Sweep(name, file_system.at)
    sweep.surely_meets(f"{operation}: {error}", failing(file_system, operation, error))


@pytest.mark.full("each scenario, without a fault; the test above has most of them, with one")
@pytest.mark.long("each scenario, without a fault", keep="a third")
@pytest.mark.parametrize("name", SCENARIOS)
def test_unnamed_files_and_reservation_are_optional(
    name: str, file_system: FailingFileSystem
) -> None:
    """Direct reads and writes are optional, too: see the errors above."""
    Sweep(name, file_system.at).surely_meets("nothing", no_fault, untold=True)


@pytest.mark.long(
    "the same operations fail in the test above, each in one scenario",
    sentinel="tests/faults/test_failing_file_system.py"
    "::test_file_system_failure_raises_or_is_recovered",
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_uses_every_operation(name: str, file_system: FailingFileSystem) -> None:
    kinds = sorted({(operation, error) for operation, error, _ in ERRORS})
    if name in LOOKS_AT_MAPS:
        kinds = [kind for kind in kinds if kind[0] != "read" and kind != ("write", "short")]
    sweep = Sweep(name, file_system.at)
    for operation, error in kinds:
        sweep.surely_meets(f"{operation}: {error}", failing(file_system, operation, error))


def test_file_system_fails_on_command(file_system: FailingFileSystem, tmp_path: Path) -> None:
    """Check the control: an order takes effect, and only while it is given."""
    file = file_system.at / "file"
    file.write_bytes(b"bytes")
    for operation, act in (
        ("open", file.read_bytes),
        ("rename", lambda: file.rename(file_system.at / "other")),
        ("unlink", file.unlink),
    ):
        with file_system.failing(**{operation: "EIO"}), pytest.raises(OSError, match="Errno 5"):
            act()
    assert file.read_bytes() == b"bytes"
    file.unlink()
