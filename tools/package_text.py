"""What `tierstore/__init__.py` assigns, read from its text: the package need not be importable."""

from __future__ import annotations

import ast


def assigned(package: str, name: str) -> object:
    """The literal that the package's text assigns to a name. Raises ValueError if there is none."""
    for node in ast.parse(package).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                return ast.literal_eval(node.value)
    raise ValueError(f"tierstore/__init__.py does not say {name}")
