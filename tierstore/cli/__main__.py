"""`python -m tierstore.cli` is `tierstore-inspect`."""

from tierstore.cli import main

main()
