"""A program in a fork of a process that has imported torch behaves like a freshly started one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fresh import LATE, run_fresh


@pytest.mark.parametrize(
    ("code", "status", "output"),
    [
        ("print('out'); print('err', file=sys.stderr)", 0, "out\n err\n"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('advice')", 1, " advice\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("time.sleep(60)", LATE, ""),
        ("threading.Timer(0.1, print, ['thread']).start()", 0, "thread\n "),
        ("atexit.register(print, 'at exit')", 0, "at exit\n "),
        ("print(sys.argv[1:], __name__, 'tierstore' in sys.modules)", 0, "['word'] __main__ False"),
        ("raise KeyError('a')", 1, "KeyError: 'a'\n"),
    ],
)
def test_forked_program_ends_like_a_started_one(
    code: str, status: int, output: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import atexit, os, signal, sys, threading, time\n" + code)
    seconds = 0.5 if "sleep" in code else 60
    done = run_fresh(program, "word", directory=tmp_path, seconds=seconds)
    assert done.returncode == status
    assert output in f"{done.stdout} {done.stderr}"
