"""What shells offer when somebody presses TAB: by click's interface, and in a real bash."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.shell_completion import CompletionItem

from tests.cli.conftest import ROOT, environment, put
from tests.helpers.files import object_file
from tierstore.cli.commands import inspector
from tierstore.completion import STORE, Bash, Fish, Zsh, directories
from tierstore.service.cli import serve
from tierstore.tiers.directory import ObjectDirectory

SPECIAL = 'run 1: a,b*c\'d "e" $f=g\\h'
"""A key with everything that a shell does something with."""


@pytest.fixture
def full(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with keys that shells find hard, in the current directory; no default one."""
    directory = ObjectDirectory(store)
    for key in (SPECIAL, "größe/界", "two\nlines", "layers/10", "latents:0", "latents:1"):
        put(directory, key)
    directory.close()
    monkeypatch.chdir(store.parent)
    monkeypatch.setenv("TIERSTORE_DIR", str(tmp_path / "nothing"))
    return store


def offered(
    args: Sequence[object], incomplete: str = "", program: click.Command = inspector
) -> list[CompletionItem[str]]:
    """What is offered after `args` for a word that begins with `incomplete`."""
    asked = Bash(program, {}, program.name or "", "_COMPLETE")
    return asked.get_completions([str(arg) for arg in args], incomplete)


def values(args: Sequence[object], incomplete: str = "", **more: click.Command) -> list[str]:
    return [item.value for item in offered(args, incomplete, **more)]


# Commands, options, values -----------------------------------------------------------------------


def test_commands_and_options_are_offered() -> None:
    assert values([]) == sorted(inspector.commands)
    assert values([], "p") == ["plan", "prune", "ps"]
    assert "--json" in values(["ls"], "--")
    assert values(["verify", "DIR"], "--re") == ["--repair"]
    assert values(["ls", "--sort"], "s") == ["size"]
    assert values([], "--disk", program=serve) == ["--disk"]


def test_each_offered_command_is_explained() -> None:
    assert all(item.help and "..." not in item.help for item in offered([]))


def test_files_are_left_to_the_shell() -> None:
    for args in (["trace"], ["replay"], ["plan"]):
        assert [item.type for item in offered(args, "ru")] == ["file"], args
    assert [item.type for item in offered(["d", "--socket"], "/r", program=serve)] == ["file"]


# Directories -------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some directories, of which two are stores; a third is the default one."""
    for name in ("zeta", "below/offload", "default"):
        ObjectDirectory(tmp_path / name).close()
    for name in ("alpha", ".hidden", "below/other"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "short").symlink_to(tmp_path / "zeta")
    monkeypatch.setenv("TIERSTORE_DIR", str(tmp_path / "default"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("program", "args"), [(inspector, ["ls"]), (inspector, ["df", "zeta"]), (serve, [])]
)
def test_stores_come_first_and_the_default_one_before_all(
    places: Path, program: click.Command, args: list[str]
) -> None:
    default = str(places / "default")
    assert values(args, program=program) == [default, "short", "zeta", "alpha/", "below/"]
    assert values(args, "al", program=program) == ["alpha/"]
    assert values(args, "below/", program=program) == ["below/offload", "below/other/"]
    assert values(args, "~/z", program=program) == ["~/zeta"]
    assert values(args, ".h", program=program) == [".hidden/"]
    assert values(args, "nowhere/", program=program) == []


def test_a_directory_is_offered_in_place_of_a_command(places: Path) -> None:
    assert values([], "zet") == ["zeta"]
    assert "--limit" in values(["zeta"], "--l")


def test_what_nobody_may_read_offers_nothing(places: Path) -> None:
    (places / "gone").symlink_to(places / "nowhere")
    assert values(["ls"], "gone") == []
    assert values(["ls"], "file") == []


# Keys --------------------------------------------------------------------------------------------


def test_keys_are_those_of_the_directory_that_was_typed(full: Path) -> None:
    expected = sorted(["a", "b", "layers/0", "layers/10", "latents:0", "latents:1", "größe/界"])
    for command in ("show", "rm"):
        found = values([command, full])
        assert [key for key in found if key != SPECIAL] == expected, command
        assert SPECIAL in found
        assert values([command, full.name], "lay") == ["layers/0", "layers/10"]
    assert values(["rm", full, "layers/0"], "lay") == ["layers/10"], "it was typed already"
    assert values(["show", full, "a"], "z") == []
    assert values(["ls", full, "--prefix"]) == ["größe/", "layers/"]


def test_a_damaged_group_hides_no_other(full: Path) -> None:
    object_file(full, "a").write_bytes(b"")
    assert values(["show", full], "l") == ["latents:0", "latents:1", "layers/0", "layers/10"]


def test_of_no_store_no_key_is_offered_and_nothing_is_said(
    full: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert values(["show", tmp_path]) == []
    assert values(["rm", tmp_path / "nothing"]) == []
    assert capfd.readouterr() == ("", "")


def test_keys_of_the_default_directory_are_offered_beside_directories(
    full: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIERSTORE_DIR", str(full))
    assert values(["show"], "layers/1") == ["layers/10"]
    assert values(["show"], str(full.parent / full.name[:2])) == [str(full)]
    assert values(["rm"], "layers/1") == [], "what removes wants its directory named"
    assert capfd.readouterr().err == ""


# Shells ------------------------------------------------------------------------------------------


def test_words_are_those_that_a_shell_would_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Bash(inspector, {}, "tierstore-inspect", "_COMPLETE")
    for line, expected in (
        ("tierstore-inspect ", ([], "")),
        ("tierstore-inspect sh", ([], "sh")),
        ("/opt/bin/tierstore-inspect rm d ", (["rm", "d"], "")),
        (r"A=1 tierstore-inspect rm d run\ 1", (["rm", "d"], "run 1")),
        ("tierstore-inspect rm d 'run 1' 'ru n", (["rm", "d", "run 1"], "ru n")),
        ("tierstore-inspect rm d a:b", (["rm", "d"], "a:b")),
    ):
        monkeypatch.setenv("COMP_WORDS", line)
        assert asked.get_completion_args() == expected, line


@pytest.mark.parametrize("shell", [Zsh, Fish])
def test_other_shells_get_whole_keys(shell: type[Zsh] | type[Fish]) -> None:
    asked = shell(inspector, {}, "tierstore-inspect", "_COMPLETE")
    told = asked.format_completion(CompletionItem(SPECIAL))
    assert os.path.expanduser("~") in Zsh(inspector, {}, "", "").format_completion(
        CompletionItem("~/a", STORE, "a store")
    )
    assert SPECIAL in told.split("\n" if shell is Zsh else ",", 1)[1]
    assert "tierstore-inspect" in asked.source()


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with both programs, which note down how they were called, unless a shell asks."""
    made = tmp_path / "programs"
    made.mkdir()
    for name, module in (("tierstore-inspect", "cli"), ("tierstore-serve", "service")):
        run = shlex.join([sys.executable, "-m", f"tierstore.{module}"])
        asked = f"_{name.upper().replace('-', '_')}_COMPLETE"
        script = (
            "#!/bin/sh\n"
            f'if [ -n "${asked}" ]; then exec {run}; fi\n'
            f'printf "%s\\0" "$@" > {shlex.quote(str(tmp_path))}/called\n'
        )
        (made / name).write_text(script)
        (made / name).chmod(0o700)
    return made


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.full("a shell of its own for each", keep=["special", "serve"])
@pytest.mark.parametrize(
    ("typed", "called"),
    [
        pytest.param("inspect ver", ["verify"], id="command"),
        pytest.param("inspect show DI", ["show", "DIR/"], id="other-directory"),
        pytest.param("inspect show sto", ["show", "store"], id="directory"),
        pytest.param("inspect show ~/sto", ["show", "HOME/store"], id="user-directory"),
        pytest.param("inspect show store run", ["show", "store", SPECIAL], id="special"),
        pytest.param("inspect show store 'größe", ["show", "store", "größe/界"], id="quoted"),
        pytest.param('inspect show store "run', ["show", "store", SPECIAL], id="double-quoted"),
        pytest.param(r"inspect show store run\ ", ["show", "store", SPECIAL], id="escaped"),
        pytest.param("inspect show store latents:", ["show", "store", "latents:"], id="ambiguous"),
        pytest.param("inspect rm store latents:0 lat", ["rm", "store", "latents:0", "latents:1"]),
        pytest.param("inspect ls store --prefix lay", ["ls", "store", "--prefix", "layers/"]),
        pytest.param("inspect trace not", ["trace", "notes.json"], id="file"),
        pytest.param("serve sto", ["store"], id="serve"),
    ],
)
def test_a_real_bash_completes(full: Path, programs: Path, typed: str, called: list[str]) -> None:
    (full.parent / "DIR").mkdir()
    (full.parent / "notes.json").touch()
    name = f"tierstore-{typed.split()[0]}"
    turn_on = f'eval "$(_{name.upper().replace("-", "_")}_COMPLETE=bash_source {name})"'
    ours, its = os.openpty()
    try:
        os.write(ours, f"{turn_on}\ntierstore-{typed}\t\nexit\n".encode())
        run = subprocess.run(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=its,
            stdout=its,
            stderr=subprocess.PIPE,
            env=environment(
                PATH=f"{programs}:{os.environ['PATH']}", LC_ALL="C.UTF-8", HOME=str(full.parent)
            ),
            cwd=full.parent,
            start_new_session=True,
            timeout=60,
            check=False,
        )
        told = run.stderr.decode()
    finally:
        os.close(ours)
        os.close(its)
    noted = programs.parent / "called"
    assert noted.exists(), told
    expected = [word.replace("HOME", str(full.parent)) for word in called]
    assert noted.read_bytes().decode().split("\0")[:-1] == expected, told


def test_completion_is_quick_to_load(full: Path) -> None:
    words = f"tierstore-inspect show {full} l"
    more = {"_TIERSTORE_INSPECT_COMPLETE": "bash_complete", "COMP_WORDS": words}
    code = (
        "import atexit, sys\n"
        "names = 'torch', 'numpy', 'rich', 'tierstore.store'\n"
        "tell = lambda: print([n for n in names if n in sys.modules], file=sys.stderr)\n"
        "atexit.register(tell)\n"
        "from tierstore.cli import main\nmain()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    keys = "latents:0", "latents:1", "layers/0", "layers/10"
    assert run.stdout.split() == [f"plain,{key}" for key in keys]
    assert run.stderr == "[]\n"


def test_the_default_directory_is_not_offered_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIERSTORE_DIR", str(tmp_path / "later"))
    context = click.Context(inspector)
    assert directories(context, None, "") == []
    ObjectDirectory(tmp_path / "later").close()
    assert [item.value for item in directories(context, None, "")] == [str(tmp_path / "later")]
