"""`prune` and `rm` remove the right files, ask first, and touch nothing else."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Inspect, on_terminal, tree
from tests.helpers.events import before
from tests.helpers.files import flip_bit, object_file
from tests.helpers.system_calls import system_call
from tests.store.helpers import open_store, pages
from tierstore.system.locking import is_locked

ORPHAN = "object-0123456789abcdef"


@pytest.fixture
def orphan(store: Path) -> Path:
    """Make a file that a killed store left behind."""
    path = store / "tmp" / ORPHAN
    path.write_bytes(bytes(1000))
    return path


def keys(inspect: Inspect, store: Path) -> list[str]:
    return [group["key"] for group in inspect.json("ls", store)["groups"]]


# prune -------------------------------------------------------------------------------------------


def test_prune_removes_orphans(store: Path, orphan: Path, inspect: Inspect) -> None:
    (store / ".spill-12-0123456789abcdef").write_bytes(bytes(24))
    document = inspect.json("prune", store, "-y")
    assert not document["dry_run"]
    assert document["nbytes"] == 1024
    assert not orphan.exists()
    assert keys(inspect, store) == ["a", "b", "layers/0"]
    assert inspect.json("ls", store)["temporary"] == []
    assert inspect.json("prune", store, "-y")["removed"] == []


def test_prune_dry_run_prints_files_it_would_remove(
    store: Path, orphan: Path, inspect: Inspect
) -> None:
    before = tree(store)
    result = inspect("prune", store, "--dry-run")
    assert result.exit_code == 0
    assert result.stdout == f"{orphan}\n"
    assert result.stderr == "1 file (1000 B) would be removed.\n"
    assert tree(store) == before
    assert inspect("prune", store, "-y").stdout == result.stdout
    assert not orphan.exists()


def test_prune_removes_exactly_the_reclaimable_bytes(
    store: Path, orphan: Path, inspect: Inspect
) -> None:
    (store / "model_index.json").write_bytes(bytes(621))
    (store / "tmp" / "notes.txt").write_text("mine")
    flip_bit(object_file(store, "b"), 50)

    def reclaimable() -> int:
        (row,) = inspect.json("df", store)["directories"]
        nbytes: int = row["reclaimable"]["nbytes"]
        return nbytes

    assert reclaimable() == inspect.json("prune", store, "--dry-run")["nbytes"] == 1000
    assert inspect.json("prune", store, "-y")["nbytes"] == 1000
    assert reclaimable() == inspect.json("prune", store, "-y")["nbytes"] == 0
    assert (store / "model_index.json").exists()


def test_prune_removes_damaged_objects_only_on_request(store: Path, inspect: Inspect) -> None:
    path = object_file(store, "b")
    flip_bit(path, 50)
    assert inspect("prune", store, "-y").exit_code == 0
    assert path.exists()
    document = inspect.json("prune", store, "--damaged", "-y")
    assert [item["path"] for item in document["removed"]] == [str(path)]
    assert not path.exists()
    assert keys(inspect, store) == ["a", "layers/0"]


@pytest.mark.parametrize("goes", [False, True], ids=["not read", "rotten"])
def test_prune_keeps_objects_that_could_not_be_read(
    goes: bool, store: Path, inspect: Inspect
) -> None:
    path = object_file(store, "a")
    if goes:
        flip_bit(path, 60)
    refuse = system_call(
        "open",
        fails_with=errno.EACCES,
        when=lambda call: not goes and str(call.args[0]).endswith(path.name),
    )
    with refuse as refused:
        assert inspect("verify", store).exit_code == 3
        assert inspect("prune", store, "--damaged", "-y").exit_code == 0
    assert bool(refused) is not goes
    assert path.exists() is not goes


def test_prune_leaves_foreign_files_alone(
    store: Path, orphan: Path, tmp_path: Path, inspect: Inspect
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (store / "tmp" / "notes.txt").write_text("mine")
    (store / "tmp" / "object-fedcba9876543210").symlink_to(victim)
    (store / "tmp" / "object-aaaaaaaaaaaaaaaa").mkdir()
    os.mkfifo(store / "tmp" / "object-bbbbbbbbbbbbbbbb")
    (store / "checkpoint.safetensors").write_text("mine")
    (store / "objects" / "notes").write_text("mine")
    os.mkfifo(object_file(store, "a").with_name("c" * 32 + ".safetensors"))
    before = tree(tmp_path)
    document = inspect.json("prune", store, "--damaged", "-y")
    assert [item["path"] for item in document["removed"]] == [str(orphan)]
    after = tree(tmp_path)
    assert set(before) - set(after) == {str(orphan.relative_to(tmp_path))}
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("linked", ["tmp", "objects"])
def test_prune_follows_no_links_out_of_the_directory(
    store: Path, orphan: Path, tmp_path: Path, inspect: Inspect, linked: str
) -> None:
    flip_bit(object_file(store, "b"), 50)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(store / linked, elsewhere)
    (store / linked).symlink_to(elsewhere)
    before = tree(elsewhere)
    assert inspect("prune", store, "--damaged", "-y").exit_code == 0
    assert inspect("rm", store, "a", "-y").exit_code == (4 if linked == "objects" else 0)
    assert tree(elsewhere) == before
    (store / linked).unlink()
    shutil.move(elsewhere, store / linked)
    assert inspect("prune", store, "--damaged", "-y").exit_code == 0
    assert not orphan.exists()
    assert not object_file(store, "b").exists()


def test_prune_file_exchanged_meanwhile_stays(store: Path, orphan: Path, inspect: Inspect) -> None:
    opened: list[object] = []

    def exchange(path: object, *_: object) -> None:
        opened.extend([path] if path == "tmp" else [])
        if opened == ["tmp", "tmp"]:  # first to list, and now to remove
            orphan.rename(orphan.with_name("kept"))
            orphan.write_text("another")

    with before("open", exchange):
        assert inspect.json("prune", store, "-y")["removed"] == []
    assert orphan.read_text() == "another"
    assert len(inspect.json("prune", store, "-y")["removed"]) == 1


def test_prune_linked_lock_file_is_not_written(
    store: Path, orphan: Path, tmp_path: Path, inspect: Inspect
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (store / "LOCK").unlink()
    os.link(victim, store / "LOCK")
    result = inspect("prune", store, "-y")
    assert result.exit_code == 1
    assert "LOCK" in result.stderr
    assert victim.read_text() == "precious"
    assert orphan.exists()
    (store / "LOCK").unlink()
    (store / "LOCK").symlink_to(victim)
    assert inspect("prune", store, "-y").exit_code == 1
    assert victim.read_text() == "precious"
    (store / "LOCK").unlink()
    assert inspect("prune", store, "-y").exit_code == 0
    assert not orphan.exists()


# rm ----------------------------------------------------------------------------------------------


def test_rm_removes_groups(store: Path, orphan: Path, inspect: Inspect) -> None:
    document = inspect.json("rm", store, "b", "layers/0", "b", "-y")
    assert [item["path"] for item in document["removed"]] == [
        str(object_file(store, "b")),
        str(object_file(store, "layers/0")),
    ]
    assert keys(inspect, store) == ["a"]
    assert orphan.exists(), "rm removes nothing else"


def test_rm_removes_a_damaged_group_by_its_key(store: Path, inspect: Inspect) -> None:
    os.truncate(object_file(store, "b"), 0)
    assert inspect("show", store, "b").exit_code == 3
    assert inspect("rm", store, "b", "-y").exit_code == 0
    assert not object_file(store, "b").exists()
    assert inspect("verify", store).exit_code == 0


@pytest.mark.parametrize("how", ["-y", "--dry-run"])
def test_rm_unknown_key_removes_nothing(store: Path, inspect: Inspect, how: str) -> None:
    result = inspect("rm", store, "a", "c", how)
    assert result.exit_code == 4
    assert "'c'" in result.stderr
    assert "'a'" not in result.stderr
    assert keys(inspect, store) == ["a", "b", "layers/0"]


def test_rm_unknown_key_is_reported_before_the_confirmation(store: Path, inspect: Inspect) -> None:
    result = inspect("rm", store, "layer/0")
    assert result.exit_code == 4
    problem = f"Error: {store} has no group 'layer/0'. Did you mean 'layers/0'?"
    assert result.stderr.splitlines()[0] == problem
    assert "terminal" not in result.stderr


def test_rm_unknown_key_suggests_few_of_many(tmp_path: Path, inspect: Inspect) -> None:
    with open_store(tmp_path / "many") as opened:
        for number in range(20):
            opened.put(f"layers/{number}", pages(number, 1))
        opened.flush()
    stderr = inspect("rm", tmp_path / "many", "layers").stderr
    assert stderr.count("'layers/") == 3
    assert "--dry-run" not in stderr


def test_rm_does_not_remove_a_link(store: Path, tmp_path: Path, inspect: Inspect) -> None:
    victim = tmp_path / "victim"
    shutil.move(object_file(store, "a"), victim)
    object_file(store, "a").symlink_to(victim)
    before = tree(tmp_path)
    assert inspect("rm", store, "a", "-y").exit_code == 4
    after = tree(tmp_path)
    del before["store/LOCK"], after["store/LOCK"]  # it contains the name of the last owner
    assert after == before
    object_file(store, "a").unlink()
    shutil.move(victim, object_file(store, "a"))
    assert inspect("rm", store, "a", "-y").exit_code == 0


# Confirmation ------------------------------------------------------------------------------------

REMOVALS = [("prune", "DIR"), ("rm", "DIR", "a")]


def arguments(words: tuple[str, ...], store: Path) -> list[object]:
    return [store if word == "DIR" else word for word in words]


def target(words: tuple[str, ...], store: Path) -> Path:
    return store / "tmp" / ORPHAN if words[0] == "prune" else object_file(store, "a")


@pytest.mark.parametrize("words", REMOVALS)
def test_removal_without_terminal_or_yes_is_usage_error(
    store: Path, orphan: Path, inspect: Inspect, words: tuple[str, ...]
) -> None:
    before = tree(store)
    result = inspect(*arguments(words, store))
    assert result.exit_code == 2
    assert "-y" in result.stderr
    assert tree(store) == before
    assert inspect(*arguments(words, store), "-y").exit_code == 0
    assert not target(words, store).exists()


@pytest.mark.parametrize("words", REMOVALS)
@pytest.mark.parametrize(("answer", "goes"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_removal_on_a_terminal_asks(
    store: Path, orphan: Path, words: tuple[str, ...], answer: str, goes: bool
) -> None:
    shown = on_terminal(*arguments(words, store), typed=answer)
    assert shown.exit_code == 0
    assert "Remove 1 file (" in shown.output
    named = "  a\n" if words[0] == "rm" else target(words, store).name
    assert named in shown.output
    assert ("Nothing was removed." in shown.output) is not goes
    assert target(words, store).exists() is not goes


@pytest.mark.full("a process for each command")
def test_removal_interrupted_at_the_prompt_exits_130(store: Path, orphan: Path) -> None:
    shown = on_terminal("prune", store, interrupt=True)
    assert shown.exit_code == 130
    assert "Traceback" not in shown.output
    assert orphan.exists()


# The lock ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", REMOVALS)
def test_removal_from_a_directory_in_use_changes_nothing(
    locked: Path, inspect: Inspect, words: tuple[str, ...]
) -> None:
    orphan = locked / "tmp" / ORPHAN  # a live store may be writing it
    orphan.touch()
    before = tree(locked)
    result = inspect(*arguments(words, locked), "-y")
    assert result.exit_code == 11
    assert result.stderr.startswith(f"Error: {locked} is in use by process ")
    assert tree(locked) == before
    assert inspect(*arguments(words, locked), "--dry-run").exit_code == 0
    assert tree(locked) == before


def test_removal_holds_the_lock(store: Path, orphan: Path, inspect: Inspect) -> None:
    owners: list[str | None] = []

    def look(*_: object) -> None:
        owners.append(is_locked(str(store)))

    with before("os.remove", look):
        assert inspect("prune", store, "-y").exit_code == 0
    assert not orphan.exists()
    assert [str(owner).startswith(f"process {os.getpid()} on ") for owner in owners] == [True]
    assert is_locked(str(store)) is None
