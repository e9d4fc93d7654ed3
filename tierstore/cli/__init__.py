"""LOOK: `tierstore-inspect`, which shows and tidies a store's directory without a running store."""

from __future__ import annotations

import sys


def main() -> None:
    """The command's entry point. Nothing is imported before it is called."""
    try:
        from tierstore.cli.commands import inspector
    except KeyboardInterrupt:
        sys.exit(130)

    if hasattr(sys.stdout, "reconfigure"):
        # A key that the terminal's encoding does not know is shown as an escape.
        sys.stdout.reconfigure(errors="backslashreplace")
    inspector.main(prog_name="tierstore-inspect")
