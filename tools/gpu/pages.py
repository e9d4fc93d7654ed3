"""Turn the results of `python -m tools.gpu` into pages of docs/benchmarks.

    python -m tools.gpu.pages gpu/*.json [--to DIR]

A page is named after its subject, the device and the date, and describes the hardware. Files with
the same three are merged into one page. Rewriting a page keeps the prose around the figures. A run
with `--small` or without a GPU is a trial, and gets a page only with `--trial`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tools.bench.page import publish, table
from tools.gpu.lines import HOLDS, MEASURED, MISSED

PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
TITLES = {
    "correctness": "Correctness on a GPU",
    "inference": "Inference on a GPU that holds half of the weights",
    "training": "Training on a GPU with activations or state offloaded",
}

HOW = "```sh\npython -m tools.gpu --minutes 12 --out gpu\n```"
NO_FIGURE = "checksum"
"""Prefix of figures that only serve to compare lines."""

Document = Mapping[str, Any]


def merged(documents: Sequence[Document]) -> list[Document]:
    """Merge documents that belong on the same page."""
    joined: dict[str, dict[str, Any]] = {}
    for document in documents:
        page = joined.setdefault(name_of(document), {**document, "seconds": 0, "lines": []})
        page["seconds"] += document["seconds"]
        page["lines"] += document["lines"]
    return list(joined.values())


def name_of(document: Document) -> str:
    """Return the file name of a page."""
    hardware = re.sub(r"[^a-z0-9]+", "-", document["hardware"]["name"].lower()).strip("-")
    return f"gpu-{document['command']}_{hardware}_{document['began'][:10]}.md"


def text_of(document: Document) -> str:
    """Return the text of a page."""
    parts = ["\n".join(f"- {line}" for line in about(document)), HOW]
    for name, lines in groupby(document["lines"], key=lambda line: line["group"]):
        found = list(lines)
        rows = [[line["name"], line["about"], verdict_of(line), figures_of(line)] for line in found]
        parts.append(f"## {name.capitalize()}\n\n" + table(("", "", "verdict", "figures"), rows))
        parts += [
            f"{line['name']}:\n\n```text\n{line['error']}```" for line in found if line["error"]
        ]
    parts.append("\n".join(f"- {claim}" for claim in claims(document)) or "- no goals")
    return "\n\n".join(parts)


def about(document: Document) -> Iterator[str]:
    """The machine."""
    found = document["hardware"]
    device = f"{found['name']}"
    if "device_gib" in found:
        device += f", {found['device_gib']} GiB, CUDA {found['cuda']}"
        device += f"; driver, PCIe generation and lanes: {found['link']}"
    yield device
    yield f"{found['cores']} cores, {found['memory_gib']} GiB of RAM, {found['system']}"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield f"Python {found['python']}, {versions}; commit {found['commit'][:12]}"
    yield f"{document['began']}, {document['seconds']:.0f} s" + ", small" * document["small"]


def verdict_of(line: Document) -> str:
    """Return the verdict of a line, in bold if missed."""
    verdict: str = line["verdict"]
    return verdict.upper() if verdict == MISSED else "" if verdict == MEASURED else verdict


def figures_of(line: Document) -> str:
    """Format the figures of a line in one cell."""
    return "; ".join(
        f"{name} {value:,.4g}"
        for name, value in line["figures"].items()
        if not name.startswith(NO_FIGURE)
    )


def claims(document: Document) -> Iterator[str]:
    """Yield each goal with its verdict."""
    for line in document["lines"]:
        if line["goals"] and line["verdict"] in (HOLDS, MISSED):
            yield f"{verdict_of(line)}: {line['name']}: {', '.join(line['goals'])}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.pages", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files")
    parser.add_argument("--to", type=Path, default=PAGES, help="folder for pages")
    parser.add_argument("--trial", action="store_true", help="write pages of trials, too")
    options = parser.parse_args(words)
    documents = []
    for path in options.results:
        document = json.loads(path.read_text())
        if (document["small"] or "device_gib" not in document["hardware"]) and not options.trial:
            print(f"{path}: a trial run: no page (use --trial)")
        else:
            documents.append(document)
    for document in merged(documents):
        page = options.to / name_of(document)
        publish(page, TITLES[document["command"]], text_of(document))
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
