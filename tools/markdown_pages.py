"""What tools and tests read in a Markdown file: headings, and blocks of code."""

from __future__ import annotations

import re

BLOCK = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
"""A block of code with its fences."""

HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

_FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What a code host calls the headings of a Markdown text."""
    found = (re.sub(r"\]\([^)]*\)", "", line) for line in HEADING.findall(BLOCK.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in found}


def code_blocks(text: str, language: str) -> list[str]:
    """The code of all blocks of a language that are not indented, in order."""
    return [code for name, code in _FENCED.findall(text) if name == language]
