"""Every Python example in the documentation runs.

The ```python blocks of one Markdown file run in order, in one namespace and a fresh process, in
an empty directory and without network. Below a comment `<!-- stand-in: pipeline some/path -->`, a
small one of its kind is made first (tests/docs/stand_ins.py). A block below `<!-- no-run: why -->`
is compiled only, and there are few reasons. The examples in docstrings run too: `>>>` with what
they print, and the indented blocks of what the reference shows. Of commands, see
tests/docs/test_commands.py.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs import stand_ins
from tests.docs.test_docstrings import SECTION, public_docstrings
from tests.fresh import run_fresh

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONGEST = re.compile(
    r"README\.md|guides/(dispatch|profiling|diffusers|activations|training|service|recipes|remote)\."
)

FENCED = re.compile(
    r"(?:<!-- *(?P<kind>no-run|stand-in): *(?P<remark>\S[^\n]*?) *-->\n\s*?)?"
    r"^ *(?P<fence>```|~~~)(?P<language>\w*)\n(?P<code>.*?)^ *(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)

EXCUSES = (
    "needs a GPU",
    "needs two GPUs",
    "needs several GPUs",
    "needs a GGUF file",
    "needs torchao",
)
"""Facilities that a test machine lacks, and that nothing small can replace."""


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is the number of its first line of code in the file, from 1."""

    language: str
    line: int
    code: str
    excuse: str = ""
    stand_in: str = ""


def blocks_of(text: str) -> Iterator[Block]:
    """Find every fenced block of a Markdown text, in order."""
    for match in FENCED.finditer(text):
        remarks = {match["kind"]: match["remark"] or ""}
        line = text.count("\n", 0, match.start("code")) + 1
        code = textwrap.dedent(match["code"])
        excuse, stand_in = remarks.get("no-run", ""), remarks.get("stand-in", "")
        yield Block(match["language"], line, code, excuse, stand_in)


def python_blocks(path: Path) -> list[Block]:
    blocks = blocks_of(path.read_text(encoding="utf-8"))
    return [block for block in blocks if block.language == "python"]


def program_of(blocks: list[Block]) -> str:
    """Join the blocks that run to one program whose line numbers are those of the file."""
    lines: list[str] = []
    for block in blocks:
        if block.excuse:
            continue
        lines += [""] * (block.line - 1 - len(lines))
        if block.stand_in:  # in the lines of the fences
            what = f"({block.stand_in!r}, globals())"
            lines[-1] = f"from tests.docs import stand_ins; stand_ins.prepare{what}"
            lines += stand_ins.with_paths_here(block.code).splitlines()
            lines += [f"stand_ins.finish{what}"]
        else:
            lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def name_in_repository(path: Path) -> str:
    return str(path.relative_to(ROOT))


DOCUMENTS = {name_in_repository(path): python_blocks(path) for path in PAGES if python_blocks(path)}


def run(code: str, folder: Path) -> None:
    """Run a program as a reader would, save that the hub of models is out of reach."""
    program, directory = folder / "documentation.py", folder / "empty"
    program.write_text(code, encoding="utf-8")
    directory.mkdir()
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = run_fresh(program, directory=directory, environment=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.full(
    "whole runs of models, as tests/dispatch has them",
    keep=[name for name in DOCUMENTS if not LONGEST.search(name)],
)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_run(document: str, tmp_path: Path) -> None:
    for block in DOCUMENTS[document]:
        # Compiled one by one, so that a block cut short cannot borrow lines of the next.
        compile(block.code, f"{document}, block at line {block.line}", "exec")
        assert not block.excuse or block.excuse.startswith(EXCUSES)
    run(program_of(DOCUMENTS[document]), tmp_path)


DOCTESTS = """
import doctest, importlib
for name in {}:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed, name
"""


def test_docstring_examples_run(tmp_path: Path) -> None:
    files = [path for path in (ROOT / "tierstore").rglob("*.py") if ">>> " in path.read_text()]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(files)]
    run(DOCTESTS.format([name.removesuffix(".__init__") for name in names]), tmp_path)


def examples() -> Iterator[tuple[str, str]]:
    """Find the indented blocks before the sections of public docstrings, with whose they are."""
    for name, docstring in public_docstrings():
        text = re.split(SECTION, inspect.cleandoc(docstring), maxsplit=1)[0]
        for match in re.finditer(r"(?:^ {4}.*\n?)+", text, re.MULTILINE):
            yield name, textwrap.dedent(match[0])


def run_examples(names: list[str], folder: Path, code: dict[str, str]) -> None:
    lines = [f"stand_ins.run_example({name!r}, {code[name]!r})\n" for name in names]
    run("from tests.docs import stand_ins\n" + "".join(lines), folder)


@pytest.mark.full("pipelines are made", keep=["without a pipeline"])
@pytest.mark.parametrize("pipelines", [False, True], ids=["without a pipeline", "pipelines"])
def test_examples_of_the_reference_run(pipelines: bool, tmp_path: Path) -> None:
    code = dict(examples())
    names = [name for name in code if ("pipe" in code[name]) == pipelines]
    assert len(names) > 1
    run_examples(names, tmp_path, code)


def test_example_that_fails_is_reported(tmp_path: Path) -> None:
    """The control."""
    code = dict(examples())["tierstore.Lease"].replace("acquire", "borrow")
    with pytest.raises(AssertionError, match="no attribute 'borrow'"):
        run_examples(["tierstore.Lease"], tmp_path, {"tierstore.Lease": code})


MARKDOWN = """\
# Title

```python
first = 1
```

```console
$ not python
```

<!-- no-run: needs a GPU -->

```python
raise RuntimeError
```

<!-- no-run: -->
```python
second = first + 1
```

1. In a list:
   <!-- stand-in: inputs -->
   ~~~python
   if second:
       third = inputs, "/nvme/x"
   ~~~
"""


def test_blocks_keep_their_lines_and_excused_ones_do_not_run() -> None:
    blocks = list(blocks_of(MARKDOWN))
    assert [(block.language, block.line, bool(block.excuse)) for block in blocks] == [
        ("python", 4, False),
        ("console", 8, False),
        ("python", 14, True),
        ("python", 19, False),  # a comment that gives no reason excuses nothing
        ("python", 25, False),
    ]
    program = program_of([block for block in blocks if block.language == "python"])
    assert program.splitlines()[18] == "second = first + 1"
    namespace: dict[str, object] = {}
    exec(program, namespace)
    assert namespace["third"] == (namespace["inputs"], "nvme/x")
