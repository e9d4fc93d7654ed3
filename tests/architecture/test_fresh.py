"""A program in a fork of a process that has imported torch behaves like one that was started."""

from __future__ import annotations

import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tests.fresh import LATE, run_fresh

ENDINGS = {
    "print('out'); print('err', file=sys.stderr)": (0, "out\n", "err\n"),
    "sys.exit(3)": (3, "", ""),
    "sys.exit('advice')": (1, "", "advice\n"),
    "os.kill(os.getpid(), signal.SIGKILL)": (-signal.SIGKILL, "", ""),
    "time.sleep(60)": (LATE, "", ""),
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()": (
        0,
        "thread\n",
        "",
    ),
    "atexit.register(print, 'at exit')": (0, "at exit\n", ""),
}


def fresh(code: str, tmp_path: Path, **options: float) -> tuple[int, str, str]:
    program = tmp_path / "program.py"
    program.write_text("import atexit, os, signal, sys, threading, time\n" + textwrap.dedent(code))
    done = run_fresh(program, "word", directory=tmp_path, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("code", ENDINGS)
def test_it_ends_as_it_would(code: str, tmp_path: Path) -> None:
    seconds = 1.0 if "sleep(60)" in code else 60.0
    assert fresh(code, tmp_path, seconds=seconds) == ENDINGS[code]


def test_an_error_is_told_with_its_line(tmp_path: Path) -> None:
    status, _, errors = fresh("raise KeyError('a')", tmp_path)
    assert status == 1
    assert "program.py" in errors and errors.endswith("KeyError: 'a'\n")


def test_it_is_a_process_of_its_own(tmp_path: Path) -> None:
    code = """
    print(sys.argv[1], os.getcwd(), __name__, 'torch' in sys.modules, 'tierstore' in sys.modules)
    sys.modules['changed'] = sys
    os.environ['CHANGED'] = 'yes'
    """
    told = f"word {tmp_path} __main__ True False\n"
    assert fresh(code, tmp_path) == (0, told, "")
    assert fresh("print('changed' in sys.modules, 'CHANGED' in os.environ)", tmp_path) == (
        0,
        "False False\n",
        "",
    )
    assert "changed" not in sys.modules
