"""The fixture that runs the command line."""

from tests.cli.conftest import inspect as inspect
