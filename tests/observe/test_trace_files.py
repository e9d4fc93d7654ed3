"""Files to which a trace is written."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

from tierstore import TierStore


def test_traces_written_concurrently_are_whole(tmp_path: Path, disk_dir: Path) -> None:
    path, errors = tmp_path / "t.json", []

    def write(store: TierStore) -> None:
        try:
            for _ in range(20):
                store.trace(path)
                json.loads(path.read_text())
        except (OSError, ValueError) as error:
            errors.append(error)

    with TierStore("1MiB", disk_dir, device="cpu") as store:
        threads = [threading.Thread(target=write, args=(store,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert os.listdir(tmp_path) == ["t.json"] or set(os.listdir(tmp_path)) == {"t.json", "store"}


def test_trace_follows_links_and_writes_into_pipes(tmp_path: Path, disk_dir: Path) -> None:
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "target.json")
    os.mkfifo(pipe)
    reader = subprocess.Popen([sys.executable, "-c", f"print(len(open({str(pipe)!r}).read()))"],
                              stdout=subprocess.PIPE)  # fmt: skip
    with TierStore("1MiB", disk_dir, device="cpu") as store:
        store.trace(link)
        store.trace(pipe)
    assert int(reader.communicate(timeout=60)[0]) > 100
    assert link.is_symlink()
    assert json.loads((tmp_path / "target.json").read_text())["traceEvents"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
