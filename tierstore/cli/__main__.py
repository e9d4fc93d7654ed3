"""Run `tierstore-inspect` as `python -m tierstore.cli`."""

from tierstore.cli import main

main()
