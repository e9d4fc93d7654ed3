"""Run the tests of quantised models with the quantisation libraries.

    python tools/quantised.py [--long] [-- ARGUMENTS FOR PYTEST]

The libraries are in a separate environment, `.venv-quantised`, with all packages of the current one
(see tests/quantised). Without access to packages, exits with status `NOT_INSTALLED`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import environments
from tools.environments import NOT_INSTALLED, ROOT, pinned, without_workers

PLACE = ROOT / ".venv-quantised"
NEEDED = ("bitsandbytes", "gguf", "ninja", "optimum-quanto", "torchao")


def main(words: Sequence[str] | None = None, place: Path = PLACE) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", action="store_true", help="run the long lane")
    parser.add_argument("words", nargs="*", help="arguments for pytest")
    options = parser.parse_args(words)
    packages = pinned(NEEDED, (ROOT / "tools" / "constraints.txt").read_text())
    try:
        environments.make(place, packages, ours_too=True)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return NOT_INSTALLED
    command = [place / "bin" / "python", "-m", "pytest", "-q", "-n2", "-p", "no:cacheprovider"]
    command += [
        "--long" if options.long else "--full",
        *options.words,
        ROOT / "tests" / "quantised",
    ]
    return subprocess.run(command, cwd=ROOT, env=without_workers(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
