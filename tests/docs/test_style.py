"""Names and sentences follow docs/contributing.md, where a program can tell.

`style.py` finds the constructions. A class has a name that no other module uses.
"""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.architecture.test_layers import ROOT, parsed_files
from tests.docs.style import Fault, faults, faults_in_code, faults_in_page

MESSAGES = "tierstore/wire/messages.py"
"""Messages have the names of what they ask for, and are written with their module."""


@pytest.mark.parametrize("part", ["tierstore", "docs", "README.md", "tests", "tools"])
def test_style_of_all_texts_has_no_fault(part: str) -> None:
    assert [str(fault) for fault in faults([ROOT / part])] == []


PLANTED_CODE = '''
"""What a module has."""

def test_what_is_wrong() -> None:
    """Whether it is so."""
    raise ValueError("Nobody is told of it")

def two() -> None:
    """A line that does not
    end its sentence."""
'''
PLANTED_PAGE = f"""# Title

Whoever reads this is told of it.
One {"word " * 35}.

```
What is in code is code.
```
"""


def rules(found: list[Fault]) -> list[tuple[int, str]]:
    return sorted((fault.line, fault.rule) for fault in found)


def test_style_of_planted_texts_has_each_fault() -> None:
    assert rules(list(faults_in_code("planted.py", PLANTED_CODE))) == [
        (2, "opening"),
        (4, "test name"),
        (5, "opening"),
        (6, "actor"),
        (6, "opening"),
        (9, "summary"),
    ]
    assert rules(list(faults_in_page("planted.md", PLANTED_PAGE))) == [
        (3, "actor"),
        (3, "opening"),
        (4, "length"),
    ]


def test_class_names_are_unique() -> None:
    modules = defaultdict(list)
    for path, tree in parsed_files():
        file = str(path.relative_to(ROOT))
        for node in ast.iter_child_nodes(tree) if file != MESSAGES else ():
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(file)
    assert {name: files for name, files in modules.items() if len(files) > 1} == {}
