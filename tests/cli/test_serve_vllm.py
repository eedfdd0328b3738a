"""kvfold serve --engine vllm: the same options as a command line of vLLM's, which need not be
installed."""

import json
import os
import sys

import pytest

from kvfold import compress, recipes
from kvfold.calibration.calibrate import calibrate
from kvfold.cli import serve_vllm
from kvfold.cli.main import main
from kvfold.compression.compressor import Compressor
from kvfold.models.families import family_of
from models import tiny, tokens


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines that this process would have become."""
    found: list[list[str]] = []
    monkeypatch.setattr(serve_vllm, "find_spec", lambda _: object())
    monkeypatch.setattr(os, "execv", lambda _, words: (found.append(words), sys.exit(0)))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return found


def words_of(started: list[list[str]], *options: str) -> list[str]:
    with pytest.raises(SystemExit):
        main(["serve", *options, "--engine", "vllm"])
    python, *module = started[0][:4]
    assert (python, module) == (sys.executable, ["-m", "vllm.entrypoints.cli.main", "serve"])
    return started[0][4:]


def test_options_are_translated(started, capsys: pytest.CaptureFixture) -> None:
    path, *flags = words_of(
        started, "reference:gqa", "--bits", "4", "--sub-group", "32", "--page", "64",
        "--window", "64", "--kv-bytes", "1000000", "--max-sequences", "7", "--max-tokens", "900",
        "--dtype", "float32", "--max-logprobs", "3", "--host", "0.0.0.0", "--port", "1234",
    )  # fmt: skip
    assert path.endswith("/gqa")
    got = dict(zip(flags[::2], flags[1::2], strict=True))
    assert json.loads(got.pop("--additional-config")) == {
        "kvfold": {"bits": 4, "sub_group": 32, "window": 64}
    }
    assert got == {
        "--block-size": "64", "--kv-cache-memory-bytes": "1000000",
        "--max-num-seqs": "7", "--max-model-len": "900", "--dtype": "float32",
        "--max-logprobs": "3", "--host": "0.0.0.0", "--port": "1234",
        "--served-model-name": "reference:gqa",
    }  # fmt: skip
    assert f"vllm serve {path} " in capsys.readouterr().err


def test_a_model_as_it_is_needs_no_plugin(started) -> None:
    assert not {"--quantization", "--additional-config"} & {*words_of(started, "reference:mha")}


def test_a_key_is_not_among_the_words(started) -> None:
    assert "secret" not in " ".join(words_of(started, "reference:mha", "--api-key", "secret"))
    assert os.environ.pop("VLLM_API_KEY") == "secret"


def test_folded_families_that_the_plugin_does_not_serve(tmp_path, capsys) -> None:
    model = tiny("gemma2")
    wanted = Compressor(model, recipes.get("swift")).needs
    statistics = calibrate(model, family_of(model.config), tokens(2, 32), wanted)
    compress(model, "swift", keep=0.5, statistics=statistics, fold=True).save_pretrained(tmp_path)
    assert main(["serve", str(tmp_path), "--engine", "vllm", "--bits", "8"]) == 2
    assert "does not serve model type 'gemma2'" in capsys.readouterr().err


def test_vllm_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(serve_vllm, "find_spec", lambda _: None)
    assert main(["serve", "reference:mha", "--engine", "vllm"]) == 2
    assert 'pip install "kvfold[vllm]"' in capsys.readouterr().err
