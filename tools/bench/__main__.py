"""Run a benchmark: `python -m tools.bench NAME [OPTIONS]`. Without NAME, list all benchmarks."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

from tools.bench.page import Page
from tools.bench.runner import Bench

FOLDER = Path(__file__).parent


def main() -> int:
    """Run the named benchmark. Return 1 if a full run misses one of its claims."""
    names = [p.stem for p in sorted(FOLDER.glob("*.py")) if "\ndef measure(" in p.read_text()]
    if sys.argv[1:2] not in [[name] for name in names]:
        print(__doc__, *names, sep="\n")
        return 2
    name, *words = sys.argv[1:]
    module = importlib.import_module(f"tools.bench.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--small", action="store_true", help="small sizes and one round, for a trial"
    )
    parser.add_argument("--rounds", type=int, help="number of rounds")
    parser.add_argument("--dir", type=Path, help="folder for files, where models are kept")
    parser.add_argument("--markdown", type=Path, help="also write the figures to this page")
    if hasattr(module, "options"):
        module.options(parser)
    options = parser.parse_args(words)
    if getattr(module, "PRETEND", False):
        from tests.device import pretend

        if reason := pretend.ready():
            print(f"Nothing was measured: {reason}.")
            return 0
    rounds = options.rounds or (1 if options.small else getattr(module, "ROUNDS", 1))
    if options.dir is not None:
        options.dir = options.dir.resolve()
        options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.dir) as scratch:
        page = Page(module.__doc__ or "", Path(scratch), module.PACKAGES)
        bench = Bench(Path(scratch), options.dir or Path(scratch), rounds, page, options)
        claims = list(module.measure(bench))
        page.claims(claims)
        page.write(options.markdown)
    return int(not options.small and not all(claim.held for claim in claims))


if __name__ == "__main__":
    sys.exit(main())
