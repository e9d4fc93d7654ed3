"""Output fits a terminal, and a command without a directory uses the default one."""

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
def test_help_summaries_are_not_cut(width: str, inspect: Inspect) -> None:
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


def test_serve_takes_h() -> None:
    context = click.Context(serve, info_name="tierstore-serve")
    assert "-h" in serve.get_help_option_names(click.Context(serve, **serve.context_settings))
    assert "--ram" in serve.get_help(context)


# Unknown names ------------------------------------------------------------------------------------


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
        (["ls", "--colour"], []),
    ],
)
def test_misspelt_word_gets_a_suggestion(
    typed: list[str], meant: list[str], inspect: Inspect
) -> None:
    result = inspect(*typed)
    assert result.exit_code == 2
    asked = f" Did you mean {' or '.join(meant)}?" if meant else ""
    *_, printed = result.stderr.splitlines()
    if typed[0] in inspector.commands:
        wrong = next(each for each in typed if each.startswith("-")).partition("=")[0]
        assert printed == f"Error: No such option {wrong!r}.{asked}"
    else:
        assert printed == f"Error: {typed[0]!r} is neither a command nor a directory.{asked}"


# The default directory ---------------------------------------------------------------------------


@pytest.mark.parametrize("args", [("ls",), ("show", "a"), ("verify",), ("df",)])
def test_missing_directory_means_the_default_and_says_so(
    args: tuple[str, ...], store: Path, inspect: Inspect
) -> None:
    command, *rest = args
    found = inspect(command, *rest, TIERSTORE_DIR=str(store))
    assert found.exit_code == 0
    said, *others = found.stderr.splitlines()
    assert said == f"No DIR given: using {store}, from TIERSTORE_DIR."
    named = inspect(command, store, *rest)
    assert others == named.stderr.splitlines()
    printed, expected = (re.sub(r"\d+\.\d .iB", "SIZE", each.stdout) for each in (found, named))
    assert printed == expected  # free space may have changed meanwhile


def test_default_directory_is_that_of_stores(store: Path, tmp_path: Path, inspect: Inspect) -> None:
    default = tmp_path / "cache" / "tierstore" / "store"
    default.parent.mkdir(parents=True)
    store.rename(default)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TIERSTORE_DIR": ""}
    found = inspect("ls", **env)
    assert found.stdout.startswith("KEY")
    assert found.stderr == f"No DIR given: using {default}, the default directory.\n"
    nothing = inspect("ls", **{**env, "XDG_CACHE_HOME": str(tmp_path / "empty")})
    assert nothing.exit_code == 2
    assert "there is no directory" in nothing.stderr


@pytest.mark.parametrize("args", [("rm", "a", "-y"), ("prune", "-y"), ("bench",)])
def test_removing_or_measuring_without_a_directory_fails(
    args: tuple[str, ...], store: Path, inspect: Inspect
) -> None:
    before = object_file(store, "a").read_bytes()
    refused = inspect(*args, TIERSTORE_DIR=str(store))
    assert refused.exit_code == 2
    assert object_file(store, "a").read_bytes() == before


def test_repair_without_a_directory_fails(store: Path, inspect: Inspect) -> None:
    os.truncate(object_file(store, "a"), 100)
    refused = inspect("verify", "--repair", TIERSTORE_DIR=str(store))
    assert refused.exit_code == 2
    assert "--repair requires a DIR." in refused.stderr
    assert not (store / "quarantine").exists()
    assert inspect("verify", store, "--repair").exit_code == 0


def test_show_with_two_keys_is_usage_error(store: Path, inspect: Inspect) -> None:
    refused = inspect("show", store, "a", "b")
    assert refused.exit_code == 2
    assert "Quote a key that contains spaces" in refused.stderr


# Times and sums ----------------------------------------------------------------------------------


# Lines and columns -------------------------------------------------------------------------------


def test_lines_on_a_terminal_break_between_words(store: Path) -> None:
    os.truncate(object_file(store, "a"), 100)
    shown = on_terminal("verify", store, COLUMNS="60").output
    path = str(object_file(store, "a"))
    assert path in shown, "a path stays whole"
    printed = [line for line in shown.splitlines() if path not in line and str(store) not in line]
    assert max(map(len, printed)) <= 60
    begin = next(i for i, line in enumerate(printed) if "declares a header" in line)
    assert printed[begin].startswith(" " * 12) and printed[begin + 1].startswith(" " * 12)
    piped = start("verify", store, COLUMNS="60")
    (reason,) = [line for line in piped.stdout.splitlines() if "declares" in line]
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
def test_spare_columns_are_left_out_where_space_is_short(width: int, left: str) -> None:
    drawn = (
        "from tests.cli.test_screens import SPARE\n"
        "from tierstore.cli.output import draw\n"
        "draw(SPARE, [{'name': 'n' * 15}])\n"
        "sys.exit()"
    )
    shown = on_terminal(before=drawn, COLUMNS=str(width)).output
    note = f"Columns omitted: {left}. " if left else ""
    assert ("1" * 20 in shown, "2" * 20 in shown) == ("FIRST" not in left, "SECOND" not in left)
    assert "3" * 20 in shown
    assert note in " ".join(shown.split())
    assert bool(left) == ("--json" in shown)
