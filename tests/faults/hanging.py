"""A store whose disk stops answering, in a separate process, so that a test cannot hang with it.

    python -m tests.faults.hanging DIRECTORY PART

Prints a line of JSON for each result. To make the disk hang or resume, it asks its parent, and
waits until the parent has done so.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.faults.scenarios import PAGE, tensors_of, value_of
from tierstore import TierStore

BUDGET = 24 * PAGE
SOON = 2.0
"""Timeout of calls while the disk hangs, in seconds."""
VALUES = {"far": 1, "near": 2, "unsaved": 3}


def tell(**found: Any) -> None:
    """Send to the parent."""
    print(json.dumps(found), flush=True)


def wait_for(word: str) -> None:
    """Wait for the parent's word."""
    tell(wants=word)
    assert sys.stdin.readline().strip() == word


def outcome(act: Callable[[], Any]) -> dict[str, Any]:
    """The outcome of a call, and its seconds."""
    began = time.monotonic()
    try:
        ended = act()
    except BaseException as error:
        ended = "raised"
        names = [kind.__name__ for kind in type(error).__mro__]
        return {"ended": ended, "names": names, "text": str(error), "after": since(began)}
    return {"ended": ended, "after": since(began)}


def since(began: float) -> float:
    """Return the seconds since then."""
    return round(time.monotonic() - began, 3)


def filled(directory: str) -> TierStore:
    """Return a store with a group on disk, one in memory, and one to be saved."""
    store = TierStore(BUDGET, directory, device="cpu")
    store.put("far", tensors_of(VALUES["far"]))
    store.flush()
    store.put("filler", torch.zeros(BUDGET // 4), durable=False)
    store.discard("filler")
    store.put("near", tensors_of(VALUES["near"]), durable=False)
    return store


def getting(directory: str) -> None:
    """Check that calls needing the disk time out as asked, and that memory is served."""
    store = filled(directory)
    wait_for("hang")
    tell(acquire=outcome(lambda: store.acquire("far", timeout=SOON).key))
    tell(near=outcome(lambda: value_of(store.get("near"))))
    tell(put=outcome(lambda: store.put("unsaved", tensors_of(VALUES["unsaved"]), timeout=SOON)))
    tell(unsaved=outcome(lambda: value_of(store.get("unsaved"))))
    tell(flush=outcome(lambda: store.flush(timeout=SOON)))
    tell(get=outcome(lambda: value_of(store.get("far", timeout=SOON))))
    tell(again=outcome(lambda: value_of(store.get("near"))))
    wait_for("go on")
    tell(far=outcome(lambda: value_of(store.get("far"))))
    tell(flushed=outcome(store.flush))
    tell(closed=outcome(store.close))
    with TierStore(BUDGET, directory, device="cpu") as store:
        tell(keys={key: value_of(store.get(key)) for key in store})


def closing(directory: str) -> None:
    """Check that `close` ends with a hung disk, and that no other store opens in the meantime."""
    store = filled(directory)
    store.put("unsaved", tensors_of(VALUES["unsaved"]))
    wait_for("hang")
    tell(closed=outcome(store.close))
    tell(again=outcome(store.close))
    tell(used=outcome(lambda: store.get("near")))
    wait_for("go on")
    names = [t.name for t in threading.enumerate()]
    tell(threads=names)


if __name__ == "__main__":
    {"getting": getting, "closing": closing}[sys.argv[2]](sys.argv[1])
