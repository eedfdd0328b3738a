"""Precision and place, the same from Python and the command line."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import kvfold
from cli_cases import TINY
from kvfold.cli.main import main
from kvfold.hub.loading import load_tokenizer
from models import CONFIGS

bfloat16, float32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A random Llama in bfloat16 with tied weights and the reference model's tokenizer."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "plain"
    config = hf.LlamaConfig(**TINY, tie_word_embeddings=True)
    hf.LlamaForCausalLM(config).to(bfloat16).save_pretrained(path)
    load_tokenizer("reference:gqa").save_pretrained(path)
    return path


def dtypes(path) -> set[torch.dtype]:
    return {tensor.dtype for tensor in load_file(path / "model.safetensors").values()}


def test_a_cpu_computes_in_float32_unless_told_otherwise(plain) -> None:
    assert kvfold.load(str(plain), device="cpu").dtype is float32
    assert kvfold.load(str(plain), device="cpu", dtype="bfloat16").dtype is bfloat16
    assert kvfold.LLM(str(plain), device="cpu", max_tokens=64).model.dtype is float32


@pytest.mark.parametrize(("dtype", "saved"), [("auto", bfloat16), ("float32", float32)])
def test_python_and_the_command_save_the_same(plain, tmp_path, dtype, saved, capsys) -> None:
    how = {"keep": 0.5, "max_tokens": 1024, "device": "cpu", "dtype": dtype}
    model = kvfold.compress(plain, output=tmp_path / "a", **how, fold=True)
    flags = [x for key, value in how.items() for x in (f"--{key.replace('_', '-')}", str(value))]
    assert main(["compress", str(plain), "--fold", *flags, "--output", str(tmp_path / "b")]) == 0
    kernels = f"kernels on a GPU: {2 if saved is bfloat16 else 0} of 2 layers in decoding"
    first, why, facts, *_ = (out := capsys.readouterr().out).splitlines()
    assert first.startswith("small reconstructs all cached keys: a decode step takes about 1.0 t")
    assert why.startswith("recipe small: loses least of those whose decode step is predicted")
    assert facts.startswith("small: 0.5000 of") and kernels in out
    assert main(["inspect", str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert f"chosen: {why.removeprefix('recipe small: ')}" in out
    assert kernels in out
    assert first in out.splitlines()
    first, second = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert first.keys() == second.keys() and "lm_head.weight" not in first
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert dtypes(tmp_path / "a") == {saved}
    assert hf.AutoConfig.from_pretrained(tmp_path / "a").dtype is saved
    weight = model.model.layers[0].self_attn.down_proj.weight
    assert weight.dtype is float32 and model.lm_head.weight is model.model.embed_tokens.weight
    exact = torch.equal(weight, first["model.layers.0.self_attn.down_proj.weight"].float())
    assert exact is (saved is float32), "what is returned is not rounded"
    assert model.model.rotary_emb.inv_freq.dtype is float32


@pytest.mark.parametrize("given", [{"device": "cpu"}, {"dtype": "float32"}])
def test_a_loaded_model_is_where_it_is(given) -> None:
    model = hf.AutoModelForCausalLM.from_config(CONFIGS["llama-gqa"]())
    with pytest.raises(ValueError, match=r"loaded already.*model\.to"):
        kvfold.compress(model, **given, fold=True)


@pytest.mark.parametrize("device", ["abacus", "cuda:99:1"])
def test_an_unknown_device_is_named(device: str) -> None:
    with pytest.raises(ValueError, match=f"device must be cpu, cuda, .* got '{device}'"):
        kvfold.load("reference:gqa", device=device)
