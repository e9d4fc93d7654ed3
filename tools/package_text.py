"""Reads assignments in `tierstore/__init__.py` from its text, without importing the package."""

from __future__ import annotations

import ast


def assigned(package: str, name: str) -> object:
    """Return the literal assigned to a name. Raises ValueError if there is none."""
    for node in ast.parse(package).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                return ast.literal_eval(node.value)
    raise ValueError(f"tierstore/__init__.py does not assign {name}")
