"""Keys and tensor names are data: they name no file, and no terminal executes them."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from tests.faults.watching import watched
from tests.helpers.files import flip_bit
from tests.store.helpers import PAGE, assert_group, open_store, pages, push_out
from tierstore import TierStoreError
from tierstore.cli.commands import inspector
from tierstore.errors import UnknownKeyError

LEGAL = [
    *("..", ".", "/", "../../etc/passwd", "/etc/passwd", "a/b", "a//b", "a/./b", "a/", "a", "A"),
    *(
        "a\0b",
        "a\0001",
        "\0",
        "\n",
        "\r",
        "\t",
        "a\x1b[31mb",
        "\x1b]0;title\x07",
        "\x7f",
        "\x9b31m",
    ),
    *(
        "__metadata__",
        "tierstore.key",
        "LOCK",
        "STORE.json",
        "CON",
        "nul.txt",
        "a.",
        " a",
        "a ",
        "~",
    ),
    *(
        "-rf",
        "--help",
        "%s%n",
        "{}",
        "[bold]x[/bold]",
        "$(reboot)",
        "`id`",
        "*",
        "?",
        "\\",
        '"',
        "'",
    ),
    *("\u202egnp.exe", "\u200b", "\ufeff", "\U0001f600", "\uffff", "\U0010ffff", "\xe9", "e\u0301"),
    *("\u212b", "\xc5", "A\u030a", "\xdf", "SS", "ss", "\u0130", "i\u0307", "\uff41", "x" * 1024),
    *("\xe9" * 512, "0" * 32, "objects/ab", "weights/a"),
]
ILLEGAL: list[tuple[Any, type[Exception]]] = [
    ("", ValueError),
    ("x" * 1025, ValueError),
    ("x" * 4096, ValueError),
    ("\xe9" * 513, ValueError),
    ("\ud800", ValueError),
    ("a\udcff", ValueError),
    (None, TypeError),
    (1, TypeError),
    (b"bytes", TypeError),
    (("a",), TypeError),
    (Path("a"), TypeError),
]
NAMES = [name for name in LEGAL if len(name) < 100] + ["", "x" * 5000]


def test_every_legal_key_is_distinct_and_survives(disk_dir: Path) -> None:
    assert len(set(LEGAL)) == len(LEGAL)
    folded = [unicodedata.normalize("NFKC", key).casefold() for key in LEGAL]
    assert len(set(folded)) < len(LEGAL) - 5, "no two keys look alike"
    with watched() as seen:
        with open_store(disk_dir, 8 * PAGE) as store:
            for i, key in enumerate(LEGAL):
                store.put(key, pages(i))
            store.flush()
            for i, key in enumerate(LEGAL):
                assert key in store
                assert_group(store.get(key), pages(i))
            assert store.keys() == sorted(LEGAL)
        with open_store(disk_dir, 8 * PAGE) as store:
            assert store.keys() == sorted(LEGAL)
            for i, key in reversed(list(enumerate(LEGAL))):
                assert_group(store.get(key), pages(i))
            for key in LEGAL[::2]:
                store.discard(key)
                with pytest.raises(UnknownKeyError) as error:
                    store.get(key)
                assert error.value.key == key
            assert store.keys() == sorted(LEGAL[1::2])
    assert not seen.outside(disk_dir, disk_dir.parent)
    assert {path.name for path in disk_dir.parent.iterdir()} == {disk_dir.name}
    names = {str(path.relative_to(disk_dir)) for path in disk_dir.rglob("*") if path.is_file()}
    assert all(
        re.fullmatch(r"LOCK|STORE.json|objects/../[0-9a-f]{32}.safetensors", n) for n in names
    )
    with open_store(disk_dir) as store:
        assert store.keys() == sorted(LEGAL[1::2])


@pytest.mark.parametrize(("key", "kind"), ILLEGAL, ids=lambda value: ascii(value)[:30])
def test_illegal_key_changes_nothing(key: Any, kind: type[Exception], disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("there", pages(1))
        with pytest.raises(kind) as error:
            store.put(key, pages(2))
        assert len(str(error.value)) < 500
        with pytest.raises(kind):
            store.register(key, {"a": pages(2)})
        for call in (store.get, store.acquire, store.discard, store.offload):
            with pytest.raises((UnknownKeyError, TypeError, ValueError)):
                call(key)
        assert store.keys() == ["there"]
        assert_group(store.get("there"), pages(1))


def test_tensor_names_are_only_data(disk_dir: Path) -> None:
    group = {name: torch.full((i + 1,), float(i)) for i, name in enumerate(NAMES)}
    with open_store(disk_dir, 64 * PAGE) as store:
        store.put("group", group)
        store.flush()
    with open_store(disk_dir, 64 * PAGE) as store:
        assert_group(store.get("group"), group)
        for name in ("\ud800", "a\udcff"):
            with pytest.raises(ValueError):
                store.put("other", {name: pages(1)})
        for odd in (None, 1, b"bytes"):
            with pytest.raises(TypeError):
                store.put("other", {odd: pages(1)})
        assert store.keys() == ["group"]


def test_checkpoint_names_lead_nowhere(tmp_path: Path, disk_dir: Path) -> None:
    path = tmp_path / "model.safetensors"
    names = [name for name in NAMES if name not in ("", "__metadata__") and len(name) < 1000]
    save_file({name: pages(i) for i, name in enumerate(names)}, path)
    with watched() as seen, open_store(disk_dir, 8 * PAGE) as store:
        assert set(store.register_checkpoint(path)) == set(names)
        for i, name in enumerate(names):
            assert_group(store.get(name), pages(i))
        push_out(store, names[0])
    assert not seen.outside(tmp_path)


def test_name_that_can_be_no_key_refuses_the_checkpoint(tmp_path: Path, disk_dir: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"fine": pages(1), "x" * 5000: pages(2)}, path)
    with open_store(disk_dir) as store:
        with pytest.raises(ValueError, match="a key has 1 to 1024 bytes"):
            store.register_checkpoint(path)
        assert store.keys() == []


def test_terminal_obeys_no_key_or_name(disk_dir: Path) -> None:
    nasty = [key for key in LEGAL if not key.isprintable() or "[" in key or key == "\xe9" * 512]
    assert len(nasty) > 12
    with open_store(disk_dir) as store:
        for key in nasty:
            store.put(key, {key: pages(1), f"{key}\x1b[2J": pages(2)})
    steering = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202e\ufeff]")
    commands = [["ls", disk_dir], ["verify", disk_dir, "--data"], ["ls", disk_dir, "--json"]]
    commands += [["show", disk_dir, key] for key in nasty if "\0" not in key]
    commands += [["show", disk_dir, key, "--json"] for key in nasty if "\0" not in key]
    commands += [["show", disk_dir, "\x1b[31mnothing"], ["rm", disk_dir, "\x1b[31mnothing", "-y"]]
    commands += [["ls", f"{disk_dir}\x1b[31m"], ["plan", f"{disk_dir}\x1b[31m", "--ram", "1MB"]]
    for words in commands:
        done = CliRunner().invoke(inspector, [str(word) for word in words])
        assert done.exception is None or isinstance(done.exception, SystemExit), words
        found = steering.search(done.output)
        assert found is None, (words, found, done.output)


def test_unescaped_output_would_steer_a_terminal(disk_dir: Path, monkeypatch: Any) -> None:
    """Check the control: it is the escaping that protects the terminal."""
    monkeypatch.setattr("tierstore.model.formatting.printable", lambda text: text)
    with open_store(disk_dir) as store:
        store.put("a\u202eb", pages(1))
    assert "\u202e" in CliRunner().invoke(inspector, ["show", str(disk_dir), "a\u202eb"]).output


def test_damaged_object_error_escapes_its_key(disk_dir: Path) -> None:
    key = "a\x1b[31m" + "b" * 1000
    with open_store(disk_dir) as store:
        store.put(key, pages(1))
    [path] = disk_dir.glob("objects/*/*")
    flip_bit(path, -1)
    with open_store(disk_dir) as store:
        with pytest.raises(TierStoreError) as error:
            store.get(key)
        assert str(error.value).isprintable()
