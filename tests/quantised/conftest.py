"""Without the libraries, as in the environment of all other tests, there is nothing to collect."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torchao") else ["test_*.py"]
