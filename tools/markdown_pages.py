"""Headings and code blocks of Markdown files, for tools and tests."""

from __future__ import annotations

import re

BLOCK = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
"""A code block with its fences."""

HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

_FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors that a code host generates for the headings of a Markdown text."""
    found = (re.sub(r"\]\([^)]*\)", "", line) for line in HEADING.findall(BLOCK.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in found}


def code_blocks(text: str, language: str) -> list[str]:
    """Return the code of all unindented blocks of a language, in order."""
    return [code for name, code in _FENCED.findall(text) if name == language]
