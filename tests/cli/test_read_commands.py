"""`ls`, `show`, `df` and `env`: their output, and that they change nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import xxhash

from tests.cli.conftest import (
    Inspect,
    float_block,
    on_terminal,
    put,
    start,
    tree,
)
from tests.helpers.events import before
from tests.helpers.files import flip_bit, object_file
from tierstore.model.groups import Block, TensorSpec
from tierstore.model.header import LENGTH_BYTES
from tierstore.tiers.directory import ObjectDirectory

EVIL = "a \x1b[31mb\x07 [bold]c[/] [red] \u202e d"
EVIL_AS_SHOWN = r"a \x1b[31mb\x07 [bold]c[/] [red] \u202e d"


def add(store: Path, key: str, *blocks: Block) -> None:
    directory = ObjectDirectory(store)
    put(directory, key, *blocks)
    directory.close()


# ls ----------------------------------------------------------------------------------------------


def test_ls_lists_each_group_with_its_size(store: Path, inspect: Inspect) -> None:
    document = inspect.json("ls", store)
    assert [group["key"] for group in document["groups"]] == ["a", "b", "layers/0"]
    for group in document["groups"]:
        status = object_file(store, group["key"]).stat()
        assert group == {
            "key": group["key"],
            "path": str(object_file(store, group["key"])),
            "nbytes": status.st_size,
            "modified": status.st_mtime,
            "tensors": 2,
            "dtypes": ["F32"],
            "state": "ok",
            "problem": None,
        }
    assert document["nbytes"] == sum(group["nbytes"] for group in document["groups"])
    assert document["group_count"] == 3
    assert document["unusable_count"] == 0
    assert document["locked_by"] is None
    assert document["free"] > 0


def leave_orphans(store: Path) -> None:
    """Make a damaged group, a temporary file, and a foreign file."""
    os.truncate(object_file(store, "a"), 100)
    (store / "tmp" / "object-0123456789abcdef").write_bytes(bytes(2048))
    (store / "notes").write_bytes(bytes(30))


LS = r"KEY +TENSORS +DTYPES +SIZE +MODIFIED +STATE\n"
DF = r"DIRECTORY +GROUPS +OBJECTS +RECLAIMABLE +QUARANTINE +FREE +FILE SYSTEM\n"
OK_ROWS = r"(\S+ +2  F32 +20\.0 KiB  just now  ok\n)"


@pytest.mark.parametrize(
    ("arrange", "words", "expected"),
    [
        (None, "ls DIR", LS + OK_ROWS + r"{3}3 groups, 60\.0 KiB; .* free\n"),
        (None, "ls DIR --limit 1", LS + OK_ROWS + r"3 groups, 60\.0 KiB; 1 shown; .* free\n"),
        (
            shutil.rmtree,
            "ls DIR",
            r"0 groups, 0 B; nothing stored here: checkpoints are used in place; .*\n",
        ),
        (
            leave_orphans,
            "ls DIR --limit 0",
            r"3 groups, .*; 0 shown; 1 damaged; 1 temporary file \(2\.0 KiB\); "
            r"1 foreign entry; .* free\n",
        ),
        (
            None,
            "show DIR a",
            r"NAME +DTYPE +SHAPE +SIZE +OFFSET +XXH3\nweight +F32 +\[64, 64\] +16\.0 KiB +4096 .*\n"
            r"bias +F32 .*\n2 tensors, 20\.0 KiB in \S+\n",
        ),
        (leave_orphans, "df DIR", DF + r"\S+ +3 +40\.1 KiB +2\.0 KiB +0 B .*\n"),
        (
            None,
            "df DIR DIR",
            DF + r".*\n.*\n2 directories: 6 groups, 120\.1 KiB; 0 B reclaimable\n",
        ),
    ],
)
def test_output_matches(
    arrange: Callable[[Path], None] | None,
    words: str,
    expected: str,
    store: Path,
    inspect: Inspect,
) -> None:
    if arrange is not None:
        arrange(store)
    if not store.exists():
        ObjectDirectory(store).close()
    result = inspect(*(store if word == "DIR" else word for word in words.split()))
    assert result.exit_code == 0
    assert re.fullmatch(expected, result.stdout), result.stdout


def test_directory_without_a_verb_means_ls(store: Path, inspect: Inspect) -> None:
    alone, named = inspect(store).stdout, inspect("ls", store).stdout
    # the rest is the current free space
    assert alone.rpartition(";")[0] == named.rpartition(";")[0]
    assert inspect.json(store)["group_count"] == 3


def test_ls_sorts_limits_and_filters(store: Path, inspect: Inspect) -> None:
    add(store, "layers/10", float_block("weight", 8192))
    add(store, "layers/9", float_block("weight", 4))
    os.utime(object_file(store, "b"), (2e9, 2e9))

    def keys(*options: object) -> list[str]:
        return [group["key"] for group in inspect.json("ls", store, *options)["groups"]]

    assert keys() == ["a", "b", "layers/0", "layers/9", "layers/10"]
    assert keys("--sort", "size", "--limit", 1) == ["layers/10"]
    assert keys("--sort", "modified", "--limit", 1) == ["b"]
    assert keys("--prefix", "layers/") == ["layers/0", "layers/9", "layers/10"]
    assert keys("--limit", 0) == []
    assert "; 1 shown; " in inspect("ls", store, "--limit", 1).stdout


def test_ls_counts_files_that_hold_no_group(store: Path, inspect: Inspect) -> None:
    (store / "tmp" / "object-0123456789abcdef").write_bytes(bytes(100))
    (store / "tmp" / "marker-0123456789abcdef").write_bytes(bytes(10))
    (store / ".spill-12-0123456789abcdef").write_bytes(bytes(1))
    (store / "tmp" / "notes").write_bytes(bytes(20))
    (store / "notes").write_bytes(bytes(30))
    (store / "objects" / "readme").write_bytes(bytes(40))
    document = inspect.json("ls", store)
    assert sum(item["nbytes"] for item in document["temporary"]) == 111
    assert sum(item["nbytes"] for item in document["stray"]) == 90
    assert document["reclaimable"] == {"count": 3, "nbytes": 111}
    summary = inspect("ls", store).stdout.splitlines()[-1]
    assert "; 3 temporary files (111 B); 3 foreign entries; " in summary


def test_ls_vanished_file_is_left_out(store: Path, inspect: Inspect) -> None:
    there = object_file(store, "b")

    def remove_it(path: object, *_: object) -> None:
        if path == there.name:
            there.unlink()

    with before("open", remove_it):
        groups = inspect.json("ls", store)["groups"]
    assert [group["key"] for group in groups] == ["a", "layers/0"]
    assert not there.exists()


# Keys with arbitrary characters ------------------------------------------------------------------


def test_keys_with_control_characters_are_escaped(store: Path, inspect: Inspect) -> None:
    add(store, EVIL, float_block(EVIL, 4))
    flip_bit(object_file(store, EVIL), 4096)
    for args in (
        ("ls", store),
        ("show", store, EVIL),
        ("show", store, EVIL + "?"),
        ("verify", store, "--data"),
        ("rm", store, EVIL + "?", "--dry-run"),
    ):
        result = inspect(*args)
        assert EVIL_AS_SHOWN in result.output, args
        assert not set(result.output) & {"\x1b", "\x07", "\u202e"}, args
    assert inspect.json("ls", store)["groups"][1]["key"] == EVIL
    assert "\x1b" not in inspect("ls", store, "--json").stdout


def test_keys_on_a_terminal_are_escaped(store: Path) -> None:
    add(store, EVIL)
    shown = on_terminal("ls", store, COLUMNS="150")
    assert shown.exit_code == 0
    assert EVIL_AS_SHOWN in shown.output
    assert "\x1b[31mb" not in shown.output


def test_encoding_without_a_letter_prints_escapes(store: Path) -> None:
    add(store, "größe 界")
    run = start("ls", store, PYTHONIOENCODING="ascii")
    assert run.returncode == 0, run.stderr
    assert r"gr\xf6\xdfe \u754c" in run.stdout


LONG = "begin/" + "x" * 300 + "/界/end"


def test_long_keys_on_a_terminal_are_shortened_in_the_middle(store: Path) -> None:
    add(store, LONG)
    lines = click.unstyle(on_terminal("ls", store, COLUMNS="80").output).splitlines()
    assert max(len(line) for line in lines[:-1]) <= 80
    assert any("begin/" in line and "…" in line and "end" in line for line in lines)


@pytest.mark.parametrize("more", [{}, {"COLUMNS": "80"}, {"COLUMNS": "80", "FORCE_COLOR": "1"}])
def test_long_keys_in_a_pipe_are_whole(more: dict[str, str], store: Path) -> None:
    add(store, LONG)
    shown = start("ls", store, **more).stdout
    assert LONG in shown
    assert not any(line.endswith(" ") for line in shown.splitlines())


def test_colours_can_be_turned_off(store: Path) -> None:
    os.truncate(object_file(store, "a"), 5000)
    red = "\x1b[31m\x1b[1mdamaged"
    assert red in on_terminal("ls", store, COLUMNS="100").output
    plain = on_terminal("ls", store, COLUMNS="100", NO_COLOR="1").output
    assert red not in plain
    assert "damaged" in plain


# show --------------------------------------------------------------------------------------------


def test_show_prints_the_location_of_each_tensor(store: Path, inspect: Inspect) -> None:
    document = inspect.json("show", store, "a")
    assert [tensor["name"] for tensor in document["tensors"]] == ["weight", "bias"]
    raw = object_file(store, "a").read_bytes()
    for tensor in document["tensors"]:
        data = raw[tensor["offset"] :][: tensor["nbytes"]]
        assert xxhash.xxh3_64_hexdigest(data) == tensor["xxh3"]
        assert tensor["contiguous"]
        assert tensor["tied"] is None
    assert document["tensors"][0]["shape"] == [64, 64]
    assert document["tensors"][0]["stride"] == [64, 1]
    assert document["tensors"][0]["nbytes"] == 64 * 64 * 4


def test_show_prints_strides_and_ties(store: Path, inspect: Inspect) -> None:
    views = (
        TensorSpec("whole", "F32", (16, 32), (32, 1), 0),
        TensorSpec("turned", "F32", (32, 16), (1, 32), 0),
    )
    halves = (
        TensorSpec("left", "F32", (8,), (1,), 0),
        TensorSpec("right", "F32", (8,), (1,), 32),
    )
    add(
        store,
        "tied",
        Block("whole", "U8", (2048,), 2048, views),
        Block("left", "U8", (64,), 64, halves),
    )
    rows = {tensor["name"]: tensor for tensor in inspect.json("show", store, "tied")["tensors"]}
    assert rows["whole"]["tied"] == rows["turned"]["tied"] == 1
    assert rows["left"]["tied"] is rows["right"]["tied"] is None
    assert rows["right"]["offset"] == rows["left"]["offset"] + 32
    assert not rows["turned"]["contiguous"]
    lines = inspect("show", store, "tied").stdout.splitlines()
    (turned,) = (line for line in lines if line.startswith("turned"))
    assert "[32, 16]  [1, 32]  #1" in turned
    (left,) = (line for line in lines if line.startswith("left"))
    assert "#" not in left


def test_show_unknown_key_exits_4(store: Path, inspect: Inspect) -> None:
    result = inspect("show", store, "c")
    assert result.exit_code == 4
    assert result.stderr.splitlines() == [
        f"Error: {store} has no group 'c'",
        f"List the keys with: tierstore-inspect ls {store}",
    ]
    assert not result.stdout


@pytest.mark.parametrize("key", ["", "x" * 2000, "\udcff"])
def test_show_invalid_key_is_usage_error(store: Path, inspect: Inspect, key: str) -> None:
    assert inspect("show", store, key).exit_code == 2


# df, env -----------------------------------------------------------------------------------------


def test_df_prints_used_and_reclaimable_bytes(store: Path, inspect: Inspect) -> None:
    size = object_file(store, "a").stat().st_size
    before = inspect.json("df", store, store)["directories"]
    for described in before:
        assert described.pop("free") > 0  # others use the same file system meanwhile
    assert before[0] == before[1]
    assert before[0]["nbytes"] == 3 * size
    assert before[0]["reclaimable"]["nbytes"] == 0
    assert before[0]["file_system"]
    os.truncate(object_file(store, "b"), size - 1)
    (store / "tmp" / "object-0123456789abcdef").write_bytes(bytes(100))
    (after,) = inspect.json("df", store)["directories"]
    assert after["damaged"] == {"count": 1, "nbytes": size - 1}
    assert after["reclaimable"] == {"count": 1, "nbytes": 100}
    title, row = inspect("df", store).stdout.splitlines()
    assert title.split()[:4] == ["DIRECTORY", "GROUPS", "OBJECTS", "RECLAIMABLE"]
    assert row.split()[:2] == [str(store), "3"]
    assert row.split()[-1] == before[0]["file_system"]


def test_env_describes_the_machine(tmp_path: Path, inspect: Inspect) -> None:
    from importlib.metadata import version

    before = tree(tmp_path)
    document = inspect.json("env", "--dir", tmp_path)
    assert document["packages"]["torch"] == version("torch")
    assert document["cores"] == len(os.sched_getaffinity(0))
    assert document["usable_memory"] > 0
    assert document["direct_reads"] == "no" or document["direct_reads"].startswith(("yes", "not"))
    lines = inspect("env", "--dir", tmp_path).stdout.splitlines()
    assert f"torch          {version('torch')}" in lines
    assert tree(tmp_path) == before
    assert inspect("env", "--dir", tmp_path / "missing").exit_code == 2


# Usage errors and side effects -------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "verify", "df"])
def test_path_not_a_store_is_usage_error(tmp_path: Path, inspect: Inspect, command: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "STORE.json").write_text('{"format": 2}')
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "STORE.json").symlink_to("/etc/passwd")
    for name in ("missing", "file", ".", "newer", "planted"):
        result = inspect(command, tmp_path / name)
        assert result.exit_code == 2, name
        assert result.stderr.startswith("Error: "), name
        assert len(result.stderr.splitlines()) == 1, name
        assert not result.stdout, name


@pytest.mark.parametrize(
    "args", [["nothing"], ["ls"], ["ls", "a", "b"], ["ls", ".", "--sort", "x"], ["--wrong"]]
)
def test_wrong_words_are_usage_errors(inspect: Inspect, args: list[str]) -> None:
    result = inspect(*args)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


LOOKING: list[tuple[str, ...]] = [
    ("ls", "DIR"),
    ("ls", "DIR", "--json"),
    ("show", "DIR", "a"),
    ("df", "DIR"),
    ("verify", "DIR", "--data"),
    ("prune", "DIR", "--damaged", "--dry-run"),
    ("rm", "DIR", "a", "--dry-run"),
    ("env", "--dir", "DIR"),
]


def test_read_only_commands_change_nothing(store: Path, inspect: Inspect) -> None:
    (store / "tmp" / "object-0123456789abcdef").write_bytes(bytes(100))
    for path in sorted(store.rglob("*"), reverse=True):
        path.chmod(0o500 if path.is_dir() else 0o400)
    store.chmod(0o500)
    before = tree(store)
    for args in LOOKING:
        result = inspect(*(store if arg == "DIR" else arg for arg in args))
        assert result.exit_code == 0, result.output
        assert tree(store) == before, args
    for path in [store, *store.rglob("*")]:
        path.chmod(0o700)
    before = tree(store)
    assert inspect("prune", store, "-y").exit_code == 0
    assert tree(store) != before, "the control: a change would be detected"


def plant_link(at: Path, valid: Path) -> None:
    at.symlink_to(valid)


def plant_fifo(at: Path, _: Path) -> None:
    os.mkfifo(at)


def plant_directory(at: Path, valid: Path) -> None:
    at.mkdir()
    shutil.copy(valid, at / valid.name)


@pytest.mark.parametrize("plant", [plant_link, plant_fifo, plant_directory])
def test_entry_planted_at_an_object_name_is_stray(
    store: Path, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    place = object_file(store, "a")
    valid = tmp_path / place.name
    shutil.move(place, valid)
    plant(place, valid)
    run = start("ls", store, "--json")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert [group["key"] for group in document["groups"]] == ["b", "layers/0"]
    assert [item["path"] for item in document["stray"]] == [str(place)]
    assert start("show", store, "a").returncode == 4
    assert start("verify", store, "--data").returncode == 3, "no store could use that name"
    shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
    shutil.copy(valid, place)
    assert len(json.loads(start("ls", store, "--json").stdout)["groups"]) == 3


@pytest.mark.parametrize("views", ["[]", "null", "[" * 100_000, '{"x":["weight","F32",1,1,0]}'])
def test_malformed_file_hides_no_other(store: Path, inspect: Inspect, views: str) -> None:
    directory = ObjectDirectory(store)
    stored = put(directory, "evil")
    directory.close()
    path = object_file(store, "evil")
    header = path.read_bytes()[LENGTH_BYTES : stored.data_start]
    document = json.loads(header)
    document["__metadata__"]["tierstore.views"] = views
    raw = json.dumps(document).encode()
    data = path.read_bytes()[stored.data_start :]
    path.write_bytes(len(raw).to_bytes(LENGTH_BYTES, "little") + raw + data)
    states = {group["key"]: group["state"] for group in inspect.json("ls", store)["groups"]}
    assert [states.pop(key) for key in ("a", "b", "layers/0")] == ["ok"] * 3
    assert len(states) == 1
    assert "ok" not in states.values()
    assert inspect("verify", store, "--data").exit_code == 3
    assert inspect("rm", store, "evil", "-y").exit_code == 0
    assert inspect("verify", store, "--data").exit_code == 0


@pytest.mark.parametrize("name", ["objects", "shard"])
def test_linked_directories_are_not_followed(
    store: Path, tmp_path: Path, inspect: Inspect, name: str
) -> None:
    place = store / "objects" if name == "objects" else object_file(store, "a").parent
    elsewhere = tmp_path / "elsewhere"
    shutil.move(place, elsewhere)
    place.symlink_to(elsewhere)
    document = inspect.json("ls", store)
    assert "a" not in [group["key"] for group in document["groups"]]
    assert [(item["path"], item["kind"]) for item in document["stray"]] == [(str(place), "link")]
    assert inspect("show", store, "a").exit_code == 4
    place.unlink()
    shutil.move(elsewhere, place)
    assert len(inspect.json("ls", store)["groups"]) == 3


def test_link_to_the_store_itself_is_followed(
    store: Path, tmp_path: Path, inspect: Inspect
) -> None:
    (tmp_path / "short").symlink_to(store)
    assert inspect.json("ls", tmp_path / "short")["group_count"] == 3
