"""Compiling kernels for sm_90a in tests, in a process of its own: the tests' kernels may belong to
Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton


def need_compiler() -> None:
    """Skip where Triton brings no ptxas and nvdisasm for sm_90a."""
    try:
        tools = [triton.knobs.nvidia.ptxas.path, triton.knobs.nvidia.nvdisasm.path]
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"this Triton cannot compile for sm_90a: {error}")
    assert all(map(Path.exists, map(Path, tools)))


def registers(listing: str) -> int:
    """Of a thread, as ptxas counts them: two more than SASS names."""
    return max(int(n) for n in re.findall(r"\bR(\d+)", listing)) + 3


def run_alone(file: str, *arguments: str) -> list[str]:
    """The lines that a test's file prints as a program."""
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = {"PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
    command = [sys.executable, file, *arguments]
    done = subprocess.run(command, env=known | path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
