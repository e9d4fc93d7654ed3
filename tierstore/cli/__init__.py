"""LOOK: `tierstore-inspect`, which inspects and cleans a store's directory without a store."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `tierstore-inspect`. Imports are deferred until this call."""
    try:
        from tierstore.cli.commands import inspector
    except KeyboardInterrupt:
        sys.exit(130)

    if hasattr(sys.stdout, "reconfigure"):
        # Characters that the terminal's encoding lacks are printed as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    inspector.main(prog_name="tierstore-inspect")
