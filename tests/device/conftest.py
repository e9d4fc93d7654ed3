"""The promises of the asynchronous device are tested only where it is the one that was chosen."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TIERSTORE_PRETEND") == "asynchronous" else ["asynchronous"]
