"""Runs programs that a model wrote, each in a process with limits.

The operating system's limits, an audit hook inside the process and a supervisor around it contain
programs that hang, fork, fill the memory or write files. They do not stop a program that was
written to escape: run a model that you do not trust in a container.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvfold.utils.progress import Report

CHILD = Path(__file__).with_name("sandbox_child.py")
GRACE = 10.0  # seconds beyond the program's own limit, for the supervisor


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """Limits of a program: seconds of CPU, seconds of wall-clock time, bytes of address space."""

    cpu_seconds: int = 5
    wall_seconds: int = 15
    memory_bytes: int = 2**30


@dataclass(frozen=True)
class Outcome:
    """How a program ended. kind: "passed", "failed" (it raised, or ended its process), "timed out",
    "memory", "forked" (started a process or a thread), "wrote", "connected" or "signalled"."""

    kind: str
    detail: str = ""


def run_programs(
    programs: Sequence[str], limits: ProgramLimits | None = None, report: Report | None = None
) -> list[Outcome]:
    """Run Python programs, as many at once as there are CPUs, and return their outcomes in order.
    Nothing that a program does raises an error; `check_runs` checks that any can run."""
    limits = limits or ProgramLimits()
    pool = ThreadPoolExecutor(num_cpus())
    try:
        jobs = {pool.submit(run_program, x, limits): i for i, x in enumerate(programs)}
        for done, _ in enumerate(as_completed(jobs), start=1):
            if report is not None:
                report(done, len(jobs))
    finally:
        pool.shutdown(cancel_futures=True)
    return [job.result() for job in jobs]


def check_runs() -> None:
    """Raise ValueError if a correct program does not pass on this machine."""
    if find_spec("resource") is None:
        raise ValueError("programs are run on Linux and macOS only: this system has no limits")
    outcome = run_program("import math, typing", ProgramLimits())
    if outcome.kind != "passed":
        raise ValueError(
            f"no program can be run here: one that does nothing {outcome.kind}: {outcome.detail}"
        )


def num_cpus() -> int:
    """The number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_program(program: str, limits: ProgramLimits) -> Outcome:
    """Run one program in a new session, in an empty folder."""
    sizes = (limits.cpu_seconds, limits.wall_seconds, limits.memory_bytes)
    # Like -I, but with a fixed hash seed, since some answers depend on the order of a set.
    command = [sys.executable, "-P", "-s", "-B", str(CHILD), *map(str, sizes)]
    with tempfile.TemporaryDirectory(prefix="kvfold-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(
                program.encode(errors="replace"), limits.wall_seconds + GRACE
            )
        except subprocess.TimeoutExpired:
            text = b'["timed out", "the supervisor did not answer"]'
        finally:
            _kill_group(process)
    try:
        return Outcome(*json.loads(text))
    except (ValueError, TypeError):
        return Outcome("failed", f"its supervisor ended with code {process.returncode}")


def _environment(folder: str) -> dict[str, str]:
    inherited = {x: os.environ[x] for x in ("PATH", "LANG", "LD_LIBRARY_PATH") if x in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return inherited | threads | {"HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"}


def _kill_group(process: subprocess.Popen) -> None:
    """Kill the process group of a session's leader, and wait for the leader."""
    with suppress(OSError):  # it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
