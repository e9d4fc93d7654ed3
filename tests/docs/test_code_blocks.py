"""Every Python example in the documentation runs.

The ```python blocks of one Markdown file run in order, in one namespace and a fresh process, in
an empty directory and without network. Below a comment `<!-- stand-in: pipeline some/path -->`, a
small one of its kind is made first (tests/docs/stand_ins.py). A block below `<!-- no-run: why -->`
is compiled only, and there are few reasons. The examples in docstrings run too. Of commands, see
tests/docs/test_commands.py.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs import stand_ins
from tests.fresh import run_fresh

ROOT = Path(__file__).resolve().parents[2]
SECONDS_PER_FILE = 300
GUIDES = (
    "dispatch",
    "profiling",
    "diffusers",
    "activations",
    "training",
    "service",
    "recipes",
    "remote",
)
LONGEST = {"README.md", *(f"docs/guides/{name}.md" for name in GUIDES)}

FENCE = re.compile(r"(?P<indent>\s*)(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
NO_RUN = re.compile(r"<!--\s*no-run:\s*(?P<reason>\S.*?)\s*-->")
STAND_IN = re.compile(r"<!--\s*stand-in:\s*(?P<what>\S.*?)\s*-->")

EXCUSES = (
    "needs a GPU",
    "needs two GPUs",
    "needs several GPUs",
    "needs a GGUF file",
    "needs torchao",
)
"""What a machine of a test does not have, and nothing small can stand for."""


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is the number of its first line of code in the file, from 1."""

    language: str
    line: int
    code: str
    excuse: str = ""
    stand_in: str = ""

    @property
    def runs(self) -> bool:
        return not self.excuse


def blocks_of(text: str) -> list[Block]:
    """Every fenced block of a Markdown text, in order."""
    blocks: list[Block] = []
    lines = text.splitlines()
    remark = ""  # the last line of prose that was not empty
    position = 0
    while position < len(lines):
        opening = FENCE.match(lines[position])
        if opening is None:
            remark = lines[position].strip() or remark
            position += 1
            continue
        first = position + 1
        position = first
        while position < len(lines) and not closes(lines[position], opening["fence"]):
            position += 1
        code = textwrap.dedent("\n".join(lines[first:position]))
        excuse, stand_in = NO_RUN.fullmatch(remark), STAND_IN.fullmatch(remark)
        blocks.append(
            Block(
                opening["language"].lower(),
                first + 1,
                code,
                excuse["reason"] if excuse else "",
                stand_in["what"] if stand_in else "",
            )
        )
        remark = ""
        position += 1
    return blocks


def closes(line: str, fence: str) -> bool:
    mark = line.strip()
    return len(mark) >= len(fence) and set(mark) == {fence[0]}


def python_blocks(path: Path) -> list[Block]:
    blocks = blocks_of(path.read_text(encoding="utf-8"))
    return [block for block in blocks if block.language in {"py", "python"}]


def program_of(blocks: list[Block]) -> str:
    """The blocks that run, as one program whose line numbers are those of the Markdown file."""
    lines: list[str] = []
    for block in blocks:
        if block.runs:
            lines += [""] * (block.line - 1 - len(lines))
            if block.stand_in:  # in the lines of the fences
                lines[-1] = f"from tests.docs import stand_ins; {said('prepare', block.stand_in)}"
                lines += stand_ins.with_paths_here(block.code).splitlines()
                lines += [said("finish", block.stand_in)]
            else:
                lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def said(function: str, what: str) -> str:
    return f"stand_ins.{function}({what!r}, globals())"


def documents_with_python() -> list[Path]:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in documents if path.exists() and python_blocks(path)]


def modules_with_examples() -> list[Path]:
    modules = sorted((ROOT / "tierstore").rglob("*.py"))
    return [path for path in modules if ">>> " in path.read_text(encoding="utf-8")]


def name_in_repository(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run_python(program: Path, *words: str, directory: Path) -> None:
    """Run a program as a reader would, save that the hub of models is out of reach."""
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    run = run_fresh(
        program, *words, directory=directory, seconds=SECONDS_PER_FILE, environment=environment
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"


@pytest.mark.full(
    "whole runs of models, as tests/dispatch has them",
    keep=[name for name in map(name_in_repository, documents_with_python()) if name not in LONGEST],
)
@pytest.mark.parametrize("document", documents_with_python(), ids=name_in_repository)
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    blocks = python_blocks(document)
    for block in blocks:
        # Compiled one by one, so that a block cut short cannot borrow lines of the next.
        compile(block.code, f"{document.name}, block at line {block.line}", "exec")
    # Not the bare stem: `inspect.py` would stand in for the standard library's module.
    program = tmp_path / f"{document.stem}_blocks.py"
    program.write_text(program_of(blocks), encoding="utf-8")
    directory = tmp_path / "empty"
    directory.mkdir()
    run_python(program, directory=directory)


@pytest.mark.parametrize("module", modules_with_examples(), ids=name_in_repository)
def test_docstring_examples_run(module: Path, tmp_path: Path) -> None:
    parts = list(module.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    check = tmp_path / "check.py"
    check.write_text(
        "import doctest, importlib, sys\n"
        "result = doctest.testmod(importlib.import_module(sys.argv[1]))\n"
        "sys.exit(result.failed > 0 or result.attempted == 0)\n"
    )
    run_python(check, ".".join(parts), directory=tmp_path)


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
   ~~~python
   if second:
       third = 3
   ~~~
"""


def test_blocks_are_found_with_their_line_numbers() -> None:
    found = [(block.language, block.line, block.runs) for block in blocks_of(MARKDOWN)]
    assert found == [
        ("python", 4, True),
        ("console", 8, True),
        ("python", 14, False),
        ("python", 19, True),  # a comment that gives no reason excuses nothing
        ("python", 24, True),
    ]


def test_a_block_that_does_not_run_has_one_of_few_excuses() -> None:
    excuses = {
        f"{name_in_repository(path)}:{block.line}: {block.excuse}"
        for path in documents_with_python()
        for block in python_blocks(path)
        if block.excuse and not block.excuse.startswith(EXCUSES)
    }
    assert excuses == set()


def test_what_stands_in_comes_before_its_block_and_is_looked_at_after_it() -> None:
    text = '# T\n\n<!-- stand-in: inputs -->\n```python\nused = inputs, "/nvme/x"\n```\n'
    program = program_of(blocks_of(text)).splitlines()
    assert program[4] == 'used = inputs, "nvme/x"'
    namespace: dict[str, object] = {}
    exec("\n".join(program), namespace)
    assert namespace["used"] == (namespace["inputs"], "nvme/x")


def test_program_keeps_line_numbers_and_leaves_out_what_does_not_run() -> None:
    blocks = [block for block in blocks_of(MARKDOWN) if block.language == "python"]
    program = program_of(blocks).splitlines()
    assert program[3] == "first = 1"
    assert program[18] == "second = first + 1"
    assert "raise RuntimeError" not in program
    namespace: dict[str, int] = {}
    exec("\n".join(program), namespace)
    assert namespace["third"] == 3
