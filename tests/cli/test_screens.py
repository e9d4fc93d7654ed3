"""How what is told fits a terminal, and which directory is looked at if none is named."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import pytest

from tests.cli.conftest import Inspect, on_terminal, start
from tests.helpers.files import object_file
from tierstore.cli.commands import SECTIONS, inspector
from tierstore.cli.output import Column
from tierstore.service.cli import serve

# Help --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", ["80", "60"])
def test_no_summary_is_cut(width: str, inspect: Inspect) -> None:
    shown = inspect("--help", COLUMNS=width).stdout
    assert "..." not in shown.partition("[ARGS]...")[2]
    assert max(map(len, shown.splitlines())) <= 80
    for title, commands in SECTIONS.items():
        assert f"\n{title}:\n" in shown
        for command, summary in commands.items():
            assert f"\n  {command.name} " in shown
            assert summary in " ".join(shown.split())


def test_every_command_has_a_section_and_fits_80_columns() -> None:
    listed = [command for commands in SECTIONS.values() for command in commands]
    assert {command.name for command in listed} == set(inspector.commands)
    assert all(len(s) <= 60 for commands in SECTIONS.values() for s in commands.values())


@pytest.mark.parametrize("name", sorted(inspector.commands))
def test_each_command_takes_h(name: str, inspect: Inspect) -> None:
    short = inspect(name, "-h")
    assert short.exit_code == 0
    assert short.stdout == inspect(name, "--help").stdout
    assert "Usage: " in short.stdout


def test_so_does_the_service() -> None:
    context = click.Context(serve, info_name="tierstore-serve")
    assert "-h" in serve.get_help_option_names(click.Context(serve, **serve.context_settings))
    assert "--ram" in serve.get_help(context)


# Names that there are not -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["lss", "offload"], ["'ls'"]),
        (["ver"], ["'verify'"]),
        (["nothing-alike"], []),
        ([""], []),
        (["plan", "x", "--disk", "3GB/s"], ["'--disk-bandwidth'"]),
        (["plan", "x", "--bandwidth=3GB/s"], ["'--disk-bandwidth'", "'--link-bandwidth'"]),
        (["plan", "x", "--stepz", "3"], ["'--steps'"]),
        (["ls", "-s", "size"], ["'--sort'"]),
        (["ls", "--nobody"], []),
    ],
)
def test_what_may_be_meant_is_named(typed: list[str], meant: list[str], inspect: Inspect) -> None:
    result = inspect(*typed)
    assert result.exit_code == 2
    asked = f" Did you mean {' or '.join(meant)}?" if meant else ""
    *_, told = result.stderr.splitlines()
    if typed[0] in inspector.commands:
        wrong = next(each for each in typed if each.startswith("-")).partition("=")[0]
        assert told == f"Error: No such option {wrong!r}.{asked}"
    else:
        assert told == f"Error: {typed[0]!r} is neither a command nor a directory.{asked}"


# Which directory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [("ls",), ("show", "a"), ("verify",), ("df",)])
def test_where_none_is_named_it_is_the_default_one_and_that_is_said(
    args: tuple[str, ...], store: Path, inspect: Inspect
) -> None:
    command, *rest = args
    found = inspect(command, *rest, TIERSTORE_DIR=str(store))
    assert found.exit_code == 0
    said, *others = found.stderr.splitlines()
    assert said == f"DIR is left out: this is {store}, as TIERSTORE_DIR says."
    named = inspect(command, store, *rest)
    assert others == named.stderr.splitlines()
    told, expected = (re.sub(r"\d+\.\d .iB", "SIZE", each.stdout) for each in (found, named))
    assert told == expected  # what is free may have changed meanwhile


def test_it_is_the_one_of_stores_that_name_none(
    store: Path, tmp_path: Path, inspect: Inspect
) -> None:
    default = tmp_path / "cache" / "tierstore" / "store"
    default.parent.mkdir(parents=True)
    store.rename(default)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TIERSTORE_DIR": ""}
    found = inspect("ls", **env)
    assert found.stdout.startswith("KEY")
    assert found.stderr == f"DIR is left out: this is {default}, the default directory.\n"
    nothing = inspect("ls", **{**env, "XDG_CACHE_HOME": str(tmp_path / "empty")})
    assert nothing.exit_code == 2
    assert "is no directory" in nothing.stderr


@pytest.mark.parametrize("args", [("rm", "a", "-y"), ("prune", "-y"), ("bench",)])
def test_what_removes_or_measures_wants_its_directory_named(
    args: tuple[str, ...], store: Path, inspect: Inspect
) -> None:
    before = object_file(store, "a").read_bytes()
    refused = inspect(*args, TIERSTORE_DIR=str(store))
    assert refused.exit_code == 2
    assert object_file(store, "a").read_bytes() == before


def test_so_does_a_repair(store: Path, inspect: Inspect) -> None:
    os.truncate(object_file(store, "a"), 100)
    refused = inspect("verify", "--repair", TIERSTORE_DIR=str(store))
    assert refused.exit_code == 2
    assert "Name the DIR that --repair is to change." in refused.stderr
    assert not (store / "quarantine").exists()
    assert inspect("verify", store, "--repair").exit_code == 0


def test_two_keys_for_show_are_refused(store: Path, inspect: Inspect) -> None:
    refused = inspect("show", store, "a", "b")
    assert refused.exit_code == 2
    assert "must be quoted" in refused.stderr


# Times and sums ----------------------------------------------------------------------------------


# Lines and columns -------------------------------------------------------------------------------


def test_lines_break_between_words_on_a_terminal_only(store: Path) -> None:
    os.truncate(object_file(store, "a"), 100)
    shown = on_terminal("verify", store, COLUMNS="60").output
    path = str(object_file(store, "a"))
    assert path in shown, "a path stays whole"
    told = [line for line in shown.splitlines() if path not in line and str(store) not in line]
    assert max(map(len, told)) <= 60
    begin = next(i for i, line in enumerate(told) if "announces a header" in line)
    assert told[begin].startswith(" " * 12) and told[begin + 1].startswith(" " * 12)
    piped = start("verify", store, COLUMNS="60")
    (reason,) = [line for line in piped.stdout.splitlines() if "announces" in line]
    assert len(reason) > 100


SPARE = (
    Column("NAME", lambda row: row["name"], flexible=True),
    Column("FIRST", lambda row: "1" * 20, spare=True),
    Column("SECOND", lambda row: "2" * 20, spare=True),
    Column("LAST", lambda row: "3" * 20),
)


@pytest.mark.parametrize(
    ("width", "left"), [(100, ""), (60, "SECOND"), (40, "FIRST, SECOND"), (10, "FIRST, SECOND")]
)
def test_spare_columns_go_where_there_is_no_room(width: int, left: str) -> None:
    drawn = (
        "from tests.cli.test_screens import SPARE\n"
        "from tierstore.cli.output import draw\n"
        "draw(SPARE, [{'name': 'n' * 15}])\n"
        "sys.exit()"
    )
    shown = on_terminal(before=drawn, COLUMNS=str(width)).output
    note = f"No room for {left}: " if left else ""
    assert ("1" * 20 in shown, "2" * 20 in shown) == ("FIRST" not in left, "SECOND" not in left)
    assert "3" * 20 in shown
    assert note in " ".join(shown.split())
    assert bool(left) == ("--json" in shown)
