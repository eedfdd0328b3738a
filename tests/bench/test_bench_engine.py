"""--engine of kvfold bench serve and agents: the server is started with the settings of kvfold
serve, and stopped whatever happens. A stub takes its place."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason='needs pip install "kvfold[load]"')

from commands import refused
from kvfold.bench import server_process
from kvfold.cli.bench_engine import EngineFlags
from kvfold.cli.main import main
from kvfold.cli.options import Storage
from kvfold.cli.serve import EngineSize

STUB = Path(__file__).parents[1] / "helpers" / "engine_stub.py"
START = ["bench", "serve", "reference:gqa", "--engine", "vllm"]
LOAD = ["--rate", "inf", "--requests", "2", "--input-tokens", "9", "--output-tokens", "3"]


@pytest.fixture
def stubs(monkeypatch, tmp_path):
    """A function that lets a stub take the server's place, which behaves as told. Returns the
    processes. Afterwards all must have ended."""
    processes = []
    create = server_process.ServerProcess.__init__

    def recorded(server, *arguments) -> None:
        create(server, *arguments)
        processes.append(server.process)

    def start(how: str):
        words = lambda _, model, port: [sys.executable, str(STUB), how, str(port)]  # noqa: E731
        monkeypatch.setattr(EngineFlags, "words", words)
        return processes

    monkeypatch.setattr(server_process.ServerProcess, "__init__", recorded)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("KVFOLD_API_KEY", raising=False)
    yield start
    assert all(x.returncode is not None for x in processes)
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


def logs(folder: Path) -> list[Path]:
    return [*folder.glob("kvfold-*.log")]


def test_a_server_is_measured_and_stopped(stubs, tmp_path, capsys) -> None:
    processes, path = stubs("well"), tmp_path / "load.json"
    more = ["--bits", "4", "--api-key", "sesame", "--json", str(path)]
    assert main([*START, *LOAD, *more, "--set", f"result-dir={tmp_path}"]) == 0
    assert processes[0].returncode == -15 and not logs(tmp_path)
    assert "the server is ready after" in capsys.readouterr().err
    report = json.loads(path.read_text())
    assert report["rows"][0]["completed"] == 2 and report["ready_s"] > 0
    assert report["settings"]["server"] == {"engine": "vllm", "bits": 4}
    assert report["settings"]["model"] == "sesame", "the stub names itself after the key"
    (vllm,) = tmp_path.glob("sesame-infqps-*.json")
    assert json.loads(vllm.read_text())["total_output_tokens"] == 6


def test_agents_of_a_server_that_is_started(stubs, tmp_path) -> None:
    stubs("well")
    words = ["bench", "agents", "reference:gqa", "--engine", "vllm", "--longest", "200"]
    settings = ["shortest=60", "shared=32", "turn-tokens=12", "answer-tokens=4", "pause=.05"]
    settings += ["seconds=1", "settle=0", f"result-dir={tmp_path}"]
    for setting in settings:
        words += ["--set", setting]
    assert main([*words, "--agents", "2"]) == 0
    (path,) = tmp_path.glob("stub-2-agents-*.json")
    result = json.loads(path.read_text())
    assert result["max_concurrency"] == 2 and result["completed"] == result["num_prompts"] > 0


def test_the_command_is_that_of_kvfold_serve() -> None:
    flags = EngineFlags(
        engine="vllm",
        maps="folder",
        size=EngineSize(max_tokens=900, no_prefix_caching=True),
        storage=Storage(bits=4, sub_group=32),
    )
    assert flags.words("m", 77)[1:] == [
        *("-m", "kvfold", "serve", "m", "--engine=vllm", "--set=port=77", "--set=maps=folder"),
        *("--set=max_tokens=900", "--set=no_prefix_caching=True"),
        *("--set=bits=4", "--set=sub_group=32"),
    ]


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [("ends", "ended with code 1 before it answered", "line 49"),
     ("dies", "ended with code 3 during the benchmark", "out of memory")],
)  # fmt: skip
def test_a_server_that_ends(how, code, last, stubs, tmp_path, capsys) -> None:
    """One error, after the last lines of the log, which stays."""
    stubs(how)
    assert main([*START, *LOAD]) == 2
    said = capsys.readouterr().err.splitlines()
    (log,) = logs(tmp_path)
    assert f"the server {code}" in said[-1] and str(log) in said[-1]
    assert said[-2] == last and "line 5" not in said
    assert log.read_text().endswith(f"{last}\n")


def test_settings_that_the_server_refuses(stubs, tmp_path, capsys) -> None:
    stubs("refuses")
    assert main([*START, *LOAD]) == 2
    assert capsys.readouterr().err.endswith("\nkvfold: error: --bits must be one of 16, 8\n")
    assert not logs(tmp_path)


def test_an_interrupt_stops_the_server(stubs, tmp_path, capsys) -> None:
    processes = stubs("interrupts")
    assert main([*START, *LOAD]) == 130
    assert processes[0].returncode == -15 and not logs(tmp_path)
    assert capsys.readouterr().err.endswith("kvfold: interrupted\n")


def test_a_server_that_does_not_stop_is_killed(stubs, monkeypatch) -> None:
    processes = stubs("deaf")
    monkeypatch.setattr(server_process, "STOPPING", 0.1)
    assert main([*START, *LOAD]) == 0
    assert processes[0].returncode == -9


def test_a_server_that_never_answers(stubs, monkeypatch, tmp_path, capsys) -> None:
    stubs("well")
    monkeypatch.setattr(server_process, "READY", 0.0)
    monkeypatch.setattr(server_process, "_answers", lambda _: False)
    assert main([*START, *LOAD]) == 2
    assert "the server does not answer after 0 s" in capsys.readouterr().err


def test_settings_of_a_server_need_an_engine(capsys) -> None:
    url = "http://127.0.0.1:1"
    said = refused(capsys, "bench", "serve", url, *LOAD, "--bits", "4")
    assert "--bits is a setting of a server that is started here: give --engine too" in said
    said = refused(capsys, "bench", "agents", url, "--engine", "vllm")
    assert f"give a model instead of the URL {url}" in said
