"""`import kvfold` costs nothing until it is used, and transformers knows its format."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

import kvfold
from kvfold.cli import common
from kvfold.cli.bench import BENCHMARKS
from kvfold.cli.main import COMMANDS

HEAVY = "{'torch', 'transformers', 'numpy', 'numba', 'fastapi', 'uvicorn', 'pydantic'}"
KNOWN = "from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as known"


def run(code: str, *arguments: str | Path) -> str:
    call = [sys.executable, *(arguments or ("-c",)), *([] if arguments else [code])]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout


def test_torch_and_transformers_wait() -> None:
    assert run(f"import sys, kvfold; print({HEAVY} & set(sys.modules))").strip() == "set()"
    names = "import sys; from kvfold.cache.eviction.policies import POLICIES"
    assert run(f"{names}; print({HEAVY} & set(sys.modules))").strip() == "set()"
    command = "import sys, kvfold.cli.main; kvfold.cli.main.main(['--help'])"
    assert run(f"{command}; print({HEAVY} & set(sys.modules))").strip().endswith("set()")


def test_help_of_a_command_waits_for_neither() -> None:
    commands = [*COMMANDS, "bench", *(f"bench {x}" for x in BENCHMARKS)]
    lines = ["import sys, kvfold.cli.main as cli"]
    for command in commands:  # the first that is wrong names itself, with what it imported
        lines.append(f"cli.main({[*command.split(), '--help']})")
        lines.append(f"found = {HEAVY} & set(sys.modules)")
        lines.append(f"assert not found, ({command!r}, found)")
    assert run("\n".join(lines)).count("Usage: kvfold") == len(commands)


@pytest.mark.parametrize("command", ["advise x --gpu x", "inspect x --keep 2"])
def test_the_collector_visits_no_imports(command: str) -> None:
    """Of commands that take little more time than their imports do."""
    lines = [
        "import gc, sys, kvfold.cli.main as cli",
        "frozen = []",
        "seen = lambda *_: 'torch' in sys.modules and frozen.append(gc.get_freeze_count())",
        "gc.callbacks.append(seen)",
        f"code = cli.main({command.split()})",
        "gc.collect()",
        "print(code, gc.isenabled(), min(frozen) > 100_000)",
    ]
    assert run("\n".join(lines)) == "2 True True\n"


def test_the_collector_is_left_alone_later() -> None:
    before = gc.get_freeze_count()
    with common.fast_imports():
        assert gc.isenabled() and "torch" in sys.modules
    assert gc.get_freeze_count() == before


@pytest.mark.parametrize("first", ["import kvfold", "import transformers.quantizers.auto"])
def test_transformers_knows_the_format_whoever_comes_first(first: str) -> None:
    code = f"{first}; import kvfold; from transformers import AutoModelForCausalLM; {KNOWN}"
    assert "KVFoldConfig" in run(f"{code}; print(known['kvfold'])")


def test_names_are_there_whatever_the_program_is_called(tmp_path) -> None:
    program = tmp_path / "kvfold"
    program.write_text("from kvfold import LLM, compress, recipes\nprint(LLM.__name__)\n")
    assert run("", program).strip() == "LLM"


def test_public_names() -> None:
    assert set(kvfold.__all__) <= set(dir(kvfold))
    for name in kvfold.__all__:
        assert getattr(kvfold, name) is getattr(kvfold, name)
    assert callable(kvfold.compress)
    with pytest.raises(AttributeError, match="module 'kvfold' has no attribute 'expand'"):
        kvfold.expand  # noqa: B018
