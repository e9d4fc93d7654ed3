"""Without the libraries, as in the environment of all other tests, nothing is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torchao") else ["test_*.py"]
