"""Every bad input of `bad_inputs` is refused in exactly those words, and docs/errors.md shows them.

KVFOLD_WRITE=1 writes the page anew.
"""

import errno
import gzip
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import bad_inputs as bad
import kvfold
import kvfold.parallel
from commands import refused
from kvfold import LLM, CacheParams, SamplingParams, recipes
from kvfold.config import CacheConfig, Recipe
from kvfold.evaluation import report
from kvfold.evaluation.suites import SUITES
from kvfold.hub import download
from kvfold.hub.checkpoint import KVFoldConfig
from kvfold.hub.loading import load_config, load_tokenizer
from kvfold.layout import CacheSpec, LayerSpec
from kvfold.layout.pages import Latent, plain_spec
from kvfold.maps.plain import Means, full_spec, plain_maps
from kvfold.maps.sidecar import TENSORS, Sidecar
from kvfold.models.families import family_of
from kvfold.ops.backend import use_triton

LONGBENCH = dict(SUITES["longbench"].example)
PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
HEAD = """# Bad inputs and what they are told

A mistake is one line on stderr and exit code 2, in terms of flags; in Python it is a `ValueError`,
in terms of parameters. What settings, files and a model's config tell is told before the model is
loaded. This page is written by `KVFOLD_WRITE=1 pytest tests/cli/test_bad_inputs.py`, which runs
all of it; `reference:gqa` is the embedded model, other names are of bad files that the test makes.
"""
EARLY = {
    "The model, and where it runs": bad.COMMANDS,
    "Sizes and recipes": bad.SIZES,
    "Files": bad.FILES,
    "Suites of questions": bad.SUITES,
    "The paged cache": bad.CACHE,
    "Measuring": bad.MEASURING,
    "Generating": bad.GENERATING,
    "Maps beside the weights": bad.MAPS,
    "Python": bad.PYTHON,
}
REQUESTS, CHECKPOINTS = "Requests", "Checkpoints that were damaged or edited"
POOLS, FULL_DISK, NO_MEMORY = "Pools that are too small", "A full disk", "A full GPU"
GROUPS = EARLY | {
    REQUESTS: bad.REQUESTS,
    CHECKPOINTS: bad.CHECKPOINTS,
    POOLS: bad.POOLS,
    FULL_DISK: bad.FULL_DISK,
    NO_MEMORY: bad.NO_MEMORY,
}
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.50 GiB is free. Including non-PyTorch memory, this process has 77.60 GiB in use."
)


def cases(*titles: str) -> list:
    pairs = [pair for title in titles for pair in GROUPS[title].items()]
    return [pytest.param(*pair, id=pair[0]) for pair in pairs]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """The folder that all calls are made in."""
    here = tmp_path_factory.mktemp("here")
    (here / "folder").mkdir()
    texts = {
        "text.txt": "The ship went out to sea, and nobody saw it again. " * 60,
        "short.txt": "A few words.",
        "blank.txt": " \n",
        "keys.jsonl": '{"question": "Why?", "answer": "So."}',
        "label.jsonl": '{"context": "One", "choices": [" two", " three"], "label": 2}',
        "question.jsonl": '{"context": "One, two.", "question": " ", "answer": "So."}',
        "folder/text.txt": "",
        "surrogate.jsonl": '{"prompt": "a\\ud800", "answer": "b"}',
        "deep.jsonl": "[" * 20000,
        "digits.jsonl": '{"prompt": "a", "answer": ' + "1" * 5000 + "}",
        "long.txt": "The ship went out to sea. " * 40000,
        "answer.jsonl": '{"question": "Why?", "answer": "#### So."}',
        "untested.jsonl": json.dumps(humaneval(test="assert True")),
        "other-name.jsonl": json.dumps(humaneval(entry_point="other")),
        "twice.jsonl": f"{json.dumps(humaneval())}\n{json.dumps(humaneval())}",
        "number.jsonl": '{"question": "Two and two?", "answer": 4}',
        "text.json": "A few words.",
        "no-suite.json": '{"suites": {"code": {}}}',
        "chinese.jsonl": json.dumps({**LONGBENCH, "dataset": "vcsum"}),
        "lines.jsonl": json.dumps(dict(SUITES["longeval"].example)),
        "no-classes.jsonl": json.dumps({**LONGBENCH, "dataset": "trec"}),
        "no-question.jsonl": '{"prompt": "line a: <1>", "expected_number": 1}',
        "gsm8k.jsonl": '{"question": "Two and two?", "answer": "#### 4"}',
    }
    for name, text in texts.items():
        (here / name).write_text(text, encoding="utf-8")
    (here / "latin1.txt").write_bytes("Où est-il?".encode("latin-1"))
    (here / "damaged.gz").write_bytes(gzip.compress(b"text")[:-4])
    config = load_config("reference:gqa")
    spec = plain_spec(family_of(config).geometry(config))
    checkpoint(here / "other-tokenizer", vocab_size=64)
    checkpoint(here / "compressed", quantization_config=KVFoldConfig(cache=spec.to_dict()))
    beside_weights(here / "maps", spec, model="reference:gqa")
    beside_weights(here / "other-maps", spec, model="someone/other", sizes={"hidden_size": 512})
    beside_weights(here / "torn-maps", spec, model="reference:gqa")
    (here / "torn-maps" / TENSORS).write_bytes(b"")
    shared = Latent(side="kv", heads=tuple(range(spec.geometry.num_kv_heads)), rank=8)
    layer = LayerSpec(keys="pre_rope", values="fused", latents=(shared,))
    joint = replace(spec, layers=(layer,) * len(spec.layers))
    checkpoint(here / "joint", quantization_config=KVFoldConfig(cache=joint.to_dict()))
    hf.MistralConfig(sliding_window=128, max_position_embeddings=256).save_pretrained(
        checkpoint(here / "sliding")
    )
    (checkpoint(here / "damaged") / "config.json").write_text("{")
    (checkpoint(here / "deep") / "config.json").write_text("[" * 20000)
    (checkpoint(here / "digits") / "config.json").write_text('{"a": ' + "1" * 5000 + "}")
    edits: dict[str, dict] = {
        "float7": {"dtype": "float7"},
        "no-heads": {"num_attention_heads": 0},
        "width-text": {"hidden_size": "256"},
        "minus-layers": {"num_hidden_layers": -1},
        "quantized-list": {"quantization_config": ["gptq"]},
        "quantized-text": {"quantization_config": "gptq"},
    }
    for name, changes in edits.items():
        edit(checkpoint(here / name) / "config.json", changes)
    (checkpoint(here / "torn-tokenizer") / "tokenizer.json").write_text("{")
    (checkpoint(here / "empty-tokenizer") / "tokenizer.json").write_text("")
    (checkpoint(here / "other-shape") / "tokenizer.json").write_text("{}")
    (checkpoint(here / "listed-tokenizer") / "tokenizer_config.json").write_text("[]")
    return here


def beside_weights(path: Path, spec: CacheSpec, **provenance) -> None:
    """Maps beside the weights, which drop nothing."""
    recipe, geometry = {"recipe": {"name": "swift"}}, spec.geometry
    zeros = torch.zeros(geometry.num_kv_heads, geometry.head_dim)
    names = [f"model.layers.{i}.self_attn" for i in range(geometry.num_layers)]
    made = Sidecar(
        maps=dict.fromkeys(names, plain_maps(Means(zeros, zeros))),
        spec=full_spec(geometry, geometry.num_layers),
        base={key: [0.0] for key in names},
        provenance=recipe | provenance,
    )
    made.save(path)


def humaneval(**changes: str) -> dict[str, str]:
    """A row of HumanEval, changed."""
    row = {"task_id": "HumanEval/0", "prompt": "def one():\n", "entry_point": "one"}
    return row | {"test": "def check(candidate): pass"} | changes


def edit(file: Path, changes: dict) -> None:
    """Change a JSON file as an editor would: nobody checks it."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def checkpoint(path: Path, **changes) -> Path:
    """The reference model's config, changed, and its tokenizer beside a file that says weights."""
    config = load_config("reference:gqa")
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(path)
    load_tokenizer("reference:gqa").save_pretrained(path)
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture(autouse=True)
def machine(files, monkeypatch) -> Iterator[None]:
    """One without a GPU and a network, in the folder with the files."""
    monkeypatch.chdir(files)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(download, "_answers", lambda _: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    use_triton.cache_clear()
    yield
    use_triton.cache_clear()


@pytest.fixture
def no_loading(monkeypatch) -> None:
    def load(*_, **__) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", load)


def told(call: str, capsys, monkeypatch) -> str:
    """What is said about a call; of a command, without `kvfold: error: `."""
    if "(" in call and not call.startswith("kvfold "):
        with pytest.raises(ValueError) as caught:
            eval(call, {"kvfold": kvfold, "CacheConfig": CacheConfig, "Recipe": Recipe})
        return str(caught.value)
    words = shlex.split(call.replace(r"$'\xff'", "\udcff"))
    while words[0] != "kvfold":
        monkeypatch.setenv(*words.pop(0).split("="))
    line = refused(capsys, *words[1:]).removeprefix("kvfold: error: ")
    return line.replace(f"{Path.cwd()}/", "")


@pytest.mark.parametrize(("call", "message"), cases(*EARLY))
def test_refused_before_a_model_is_loaded(call, message, capsys, monkeypatch, no_loading) -> None:
    before = sorted(Path.cwd().rglob("*"))
    assert told(call, capsys, monkeypatch) == message
    assert sorted(Path.cwd().rglob("*")) == before


@pytest.fixture(scope="module")
def llm() -> LLM:
    limits = {"max_sequences": 2, "max_tokens": 256, "kv_bytes": 2**20}
    return LLM("reference:gqa", device="cpu", **limits)


@pytest.mark.parametrize(("call", "message"), cases(REQUESTS))
def test_a_request_that_cannot_be_served(call, message, llm) -> None:
    known = {"llm": llm, "SamplingParams": SamplingParams, "CacheParams": CacheParams}
    with pytest.raises(ValueError) as caught:
        eval(call, known)
    assert str(caught.value) == message
    assert not llm.engine.has_work


@pytest.fixture(scope="module")
def checkpoints(files) -> None:
    """Folded ones, with something wrong each."""
    kept = files / "folded"
    every_layer = replace(recipes.lorc(), whole_share=0.0)
    kvfold.compress("reference:gqa", every_layer, output=kept, fold=True)
    kvfold.compress("reference:gqa", every_layer, keep=0.25, output=files / "quarter", fold=True)

    def edited(name: str, change: Callable[[dict], object]) -> None:
        config = shutil.copytree(kept, files / name) / "config.json"
        found = json.loads(config.read_text())
        change(found)
        config.write_text(json.dumps(found))

    def weights(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        file = shutil.copytree(kept, files / name) / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    def overflowing(name: str, layer: int, factor: float, *projections: str) -> None:
        model = kvfold.load("reference:gqa")
        attention = model.model.layers[layer].self_attn
        with torch.no_grad():
            for projection in projections:
                attention.get_submodule(projection).weight.mul_(factor)
        model.save_pretrained(files / name)
        load_tokenizer("reference:gqa").save_pretrained(files / name)

    def layers(found: dict) -> list[dict]:
        return found["quantization_config"]["cache"]["layers"]

    overflowing("large-scores", 2, 1e20, "q_proj", "k_proj")
    overflowing("large-values", 4, 5e4, "v_proj")
    weights("no-tensor", lambda x: x.pop("model.layers.1.mlp.up_proj.weight"))
    weights("edited-weights", lambda x: x["model.layers.1.self_attn.key_up"].mul_(2))
    weights("nan", lambda x: x["model.layers.1.mlp.up_proj.weight"].fill_(torch.nan))
    edited("no-section", lambda x: x.pop("quantization_config"))
    edited("reversed", lambda x: layers(x)[0]["latents"].reverse())
    edited("twice", lambda x: layers(x)[0]["latents"][0]["heads"].append(0))
    edited("rank-32.7", lambda x: layers(x)[0]["latents"][0].update(rank=32.7))
    edited("fewer-layers", lambda x: layers(x).pop())
    edited("no-tiers", lambda x: layers(x)[0]["latents"][0].update(tiers=[]))
    edited("gptq", lambda x: x.update(quantization_config={"quant_method": "gptq"}))
    shutil.copytree(kept, files / "ends")
    edit(files / "ends" / "generation_config.json", {"eos_token_id": "end"})
    shutil.copytree(kept, files / "other-weights")
    shutil.copy(files / "quarter" / "model.safetensors", files / "other-weights")


@pytest.mark.parametrize(("call", "message"), cases(CHECKPOINTS))
def test_a_checkpoint_that_is_not_whole(call, message, capsys, monkeypatch, checkpoints) -> None:
    assert told(call, capsys, monkeypatch) == message


@pytest.mark.parametrize(("call", "message"), cases(POOLS))
def test_a_pool_that_is_too_small(call, message, capsys, monkeypatch) -> None:
    assert told(call, capsys, monkeypatch) == message


@pytest.mark.parametrize(("call", "message"), cases(FULL_DISK))
def test_a_full_disk(call, message, capsys, monkeypatch) -> None:
    def full(*_, **__) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_too(*_, **__) -> None:
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    monkeypatch.setattr("kvfold.utils.files.write_text", full)
    monkeypatch.setattr(report, "write_text", full)
    monkeypatch.setattr("kvfold.calibration.statistics.artifact.save_file", full_too)
    monkeypatch.setattr(hf.PreTrainedModel, "save_pretrained", full)
    monkeypatch.setattr("kvfold.compression.compressor.calibrate", lambda *_, **__: empty())
    assert told(call, capsys, monkeypatch) == message
    assert not list(Path.cwd().glob("*new*"))


def empty():
    from kvfold.calibration.statistics import Statistics

    return Statistics({})


@pytest.mark.parametrize(("call", "message"), cases(NO_MEMORY))
def test_a_full_gpu(call, message, capsys, monkeypatch) -> None:
    def full(*_, **__) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", full)
    monkeypatch.setattr("kvfold.hub.loading.load", full)
    monkeypatch.setattr("kvfold.api.load", full)
    assert told(call, capsys, monkeypatch) == message


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch) -> None:
    def fail(*_, **__) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("kvfold.hub.loading.load_config", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        kvfold.cli.main.main(["eval", "reference:gqa"])


def test_a_folder_that_is_read_only_is_refused_early(monkeypatch, capsys, no_loading) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    line = refused(capsys, "compress", "reference:gqa", "--output", "new/one")
    assert "cannot write new/one: folder" in line and "is read-only" in line
    line = refused(capsys, "eval", "reference:gqa", "--json", "new.json")
    assert "cannot write new.json: folder" in line and "is read-only" in line


def test_a_folder_that_creates_nothing_is_refused_early(monkeypatch, capsys, no_loading) -> None:
    """As /proc, to whose permissions root may write."""

    def refuse(*, dir: Path) -> None:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    for call in (
        ["compress", "reference:gqa", "--output", "new/one"],
        ["eval", "reference:gqa", "--json", "new.json"],
        ["pack", "reference:gqa", "--context", "text.txt", "--output", "new.kvf"],
    ):
        line = refused(capsys, *call)
        assert f"cannot write {call[-1]}: nothing can be created in folder" in line
        assert "(No such file or directory); name another one" in line


def page() -> str:
    """docs/errors.md, with lists of names abbreviated, so that a new name changes no line."""
    lines = [HEAD]
    for title, group in GROUPS.items():
        cells = ((call, message.replace("|", "\\|")) for call, message in group.items())
        rows = (f"| `{call}` | {message} |" for call, message in cells)
        lines += [f"## {title}\n", "| input | message |", "| --- | --- |", *rows, ""]
    text = "\n".join(lines)
    for listed, short in bad.LISTS.items():
        text = text.replace(listed, short)
    return text


def test_the_page_shows_them_all() -> None:
    if os.environ.get("KVFOLD_WRITE"):
        PAGE.write_text(page(), encoding="utf-8")
    assert sum(map(len, GROUPS.values())) >= 40
    assert PAGE.read_text(encoding="utf-8") == page(), "run it with KVFOLD_WRITE=1"
