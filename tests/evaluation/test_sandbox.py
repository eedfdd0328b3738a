"""Programs of a model in processes of their own: what each did is named, and nothing is left."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.evaluation.suites.sandbox import ProgramLimits, check_runs, run_program, run_programs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's")
SHORT = ProgramLimits(cpu_seconds=1, wall_seconds=4)
FREEZE = """
import ctypes
libc = ctypes.CDLL(None)
if libc.fork() == 0:
    libc.setsid()
    libc.fork()
    libc.sleep(1000)
"""
PROGRAMS = {
    "assert sum([1, 2]) == 3": "passed",
    "print('x' * 10**6)": "passed",
    "import os\nopen(os.devnull, 'w').write('x')": "passed",
    "if __name__ == '__main__': raise ValueError": "passed",
    "assert 1 == 2": "failed",
    "def (": "failed",
    "raise SystemExit(0)": "failed",
    "import os\nos._exit(0)": "failed",
    "input()": "failed",
    "import ctypes\nctypes.string_at(0)": "failed",
    "def f(): return f()\nf()": "failed",
    "text = '\ud800'": "passed",
    "while True: pass": "timed out",
    "while True:\n  try:\n    while True: pass\n  except BaseException: pass": "timed out",
    "import time\ntime.sleep(1000)": "timed out",
    "bytearray(2**40)": "memory",
    "[0] * 2**40": "memory",
    "import os\nos.fork()": "forked",
    "import os\ntry:\n  os.fork()\nexcept BaseException: pass": "forked",
    "import subprocess\nsubprocess.run(['true'])": "forked",
    "import os\nos.system('true')": "forked",
    "import threading\nthreading.Thread(target=print).start()": "forked",
    "open('new', 'w')": "wrote",
    "import os\nos.open('new', os.O_CREAT)": "wrote",
    "import os\nos.mkdir('new')": "wrote",
    "import tempfile\ntempfile.TemporaryFile()": "wrote",
    "import socket\nsocket.socket()": "connected",
    "import os\nos.kill(os.getppid(), 9)": "signalled",
}


def test_what_a_program_did_is_named() -> None:
    found = run_programs(list(PROGRAMS), SHORT)
    assert dict(zip(PROGRAMS, (x.kind for x in found), strict=True)) == PROGRAMS


def test_the_way_a_program_failed_is_told() -> None:
    (found,) = run_programs(["[1][2]"], SHORT)
    assert found.detail == "IndexError: list index out of range"


def test_processes_that_pass_the_hook_are_killed() -> None:
    """A fork in C has no audit event. It leaves the session, so no process group holds it."""
    own = replace(SHORT, memory_bytes=2**30 + 4096)  # which its command line shows
    found = run_program(FREEZE, own)
    if os.getuid() == 0:  # to others the system refuses the fork
        assert found.kind == "forked"
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(own.memory_bytes) not in left


def test_a_set_has_one_order() -> None:
    """Or an answer would be right in one run and wrong in the next."""
    program = "raise ValueError(list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}))"
    details = {x.detail for x in run_programs([program] * 4, SHORT)}
    assert len(details) == 1


def test_a_program_sees_an_empty_folder_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    program = "import os\nassert os.listdir() == [] and 'HF_TOKEN' not in os.environ"
    assert run_program(program, SHORT).kind == "passed"


def test_progress_and_order() -> None:
    told: list[tuple[int, int]] = []
    found = run_programs(["1", "1/0", "1"], SHORT, lambda *x: told.append(x))
    assert [x.kind for x in found] == ["passed", "failed", "passed"]
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_machine_that_runs_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_runs()
    monkeypatch.setattr(
        "kvfold.evaluation.suites.sandbox.CHILD", Path(__file__).with_name("nowhere.py")
    )
    with pytest.raises(ValueError, match="no program can be run here"):
        check_runs()
