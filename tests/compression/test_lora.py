"""Palu's recovery: what is not compressed learns, and what is stays as it is."""

import copy
import json
import math
import sys

import peft
import pytest
import torch
from torch import Tensor

import kvfold
from commands import refused
from kvfold import recipes
from kvfold.calibration import text as calibration_text
from kvfold.calibration.calibrate import calibrate
from kvfold.cli.main import main
from kvfold.compression.compressor import Compressor
from kvfold.compression.training import lora, training
from kvfold.compression.training.rounded_cache import RoundOnlyCache
from kvfold.config import LoRA
from kvfold.hub.checkpoint import provenance_of, spec_of
from kvfold.hub.loading import load_config, load_tokenizer
from kvfold.models.families import family_of
from kvfold.utils.versions import cache_argument
from models import tiny, tokens

pytestmark = pytest.mark.usefixtures("still")

QUICK = {"steps": 12, "rank": 4, "learning_rate": 2e-2}
MAPS = {"key_up", "key_down", "key_shift", "key_mean", "value_up", "score_map"}


def folded(name: str, recipe: str, **size):
    """A tiny model, folded, and what it was folded from."""
    original = tiny(name)
    model = copy.deepcopy(original)
    ready = Compressor(model, recipes.get(recipe))
    bases = ready.prepare(calibrate(model, ready.family, tokens(8, 64), ready.needs))
    factor = size.get("factor")
    bases.fold(bases.plan_factor(factor) if factor else bases.plan(size["keep"], 1), {})
    return model, original


def learnt(model, windows: Tensor, teacher=None, dtype=None, **settings) -> tuple[float, float]:
    given = LoRA(**{**QUICK, **settings})
    how = {"teacher": teacher, "dtype": dtype}
    return lora.finetune(model, family_of(model.config), spec_of(model), windows, given, **how)


def changed(before: dict[str, Tensor], model) -> set[str]:
    after = model.state_dict()
    assert before.keys() == after.keys()  # no adapter is left
    return {name for name, x in before.items() if not torch.equal(x, after[name])}


def state(model) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


@pytest.fixture
def text() -> Tensor:
    """Ten windows of a text that has few words."""
    return tokens(10, 40) % 12 + 3


@pytest.mark.parametrize("name", ["llama-gqa", "opt", "gpt-neox", "phi3"])
def test_what_is_merged_computes_what_the_adapters_did(name: str) -> None:
    model, _ = folded(name, "palu-j", keep=0.5)
    rows = tokens(2, 30)
    with torch.no_grad():
        before = model(rows).logits
        with lora._adapters(model, family_of(model.config), LoRA(rank=4)) as adapters:
            for own, x in model.named_parameters():
                if "lora_B" in own:
                    x.normal_(std=0.05)
            wanted = model.eval()(rows).logits
            adapters.merge_adapter()
        found = model(rows).logits
    assert (wanted - before).abs().max() > 1e-2
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("recipe", ["palu-m", "small", "zack"])
@pytest.mark.parametrize("name", ["llama-gqa", "opt", "qwen2"])
def test_the_maps_stay(name: str, recipe: str, maps: bool, text) -> None:
    model, _ = folded(name, recipe, keep=0.5)
    before = state(model)
    flags, training_before = [x.requires_grad for x in model.parameters()], model.training
    learnt(model, text, steps=2, maps=maps)
    names = changed(before, model)
    makes_rows = {x for x in names if x.endswith(".self_attn.down_proj.weight")}
    assert bool(makes_rows) == maps
    assert not {x for x in names if x.rpartition(".")[2] in MAPS | {"bias"}}
    assert not {x for x in names if "norm" in x or "embed" in x or "lm_head" in x}
    mlp = "fc1" if name == "opt" else "mlp.gate_proj"
    for part in ("self_attn.q_proj", "self_attn.o_proj", mlp):
        assert sum(f"{part}.weight" in x for x in names) == model.config.num_hidden_layers
    assert [x.requires_grad for x in model.parameters()] == flags
    assert model.training == training_before
    assert all(x.grad is None for x in model.parameters())


def test_whole_keys_that_are_computed_learn(text) -> None:
    """After RoPE, maps stand behind W_K, which is not compressed."""
    model, _ = folded("llama-gqa", "zack", keep=0.5)
    before = state(model)
    learnt(model, text, steps=2)
    assert any(x.endswith("k_proj.weight") for x in changed(before, model))


@pytest.mark.parametrize("size", [{"keep": 0.5}, {"factor": 8}])
def test_the_loss_falls_on_text_that_is_kept_back(text, size) -> None:
    model, _ = folded("llama-gqa", "small", **size)
    kept = text[::4]
    first, last = learnt(model, text)
    assert last < 0.95 * first
    with torch.no_grad():
        logits = model(kept, **cache_argument(RoundOnlyCache(spec_of(model).layers))).logits
    nats = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), kept[:, 1:].flatten())
    assert last == pytest.approx(float(nats), abs=1e-4)


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32])
def test_the_loss_after_is_that_of_what_is_saved(text, own: torch.dtype) -> None:
    """Of merged weights as they are rounded, not of adapters beside weights."""
    model = folded("llama-gqa", "small", keep=0.5)[0].to(own)
    last = learnt(model, text, dtype=torch.bfloat16)[1]
    assert all(torch.equal(x, x.bfloat16().to(own)) for x in model.parameters())
    assert last == training.mean_loss(model, None, spec_of(model), text[::4])


def test_what_is_kept_back_is_not_learnt(text, monkeypatch) -> None:
    seen = []

    def spied(windows: Tensor, *rest):
        seen.append(windows)
        return training.batches_of(windows, *rest)

    monkeypatch.setattr(lora, "batches_of", spied)
    learnt(folded("llama-gqa", "small", keep=0.5)[0], text, steps=1)
    kept = {tuple(x) for x in text[::4].tolist()}
    assert len(kept) == 3 and not kept & {tuple(x) for x in seen[0].tolist()}


def test_an_original_teaches(text) -> None:
    model, original = folded("llama-gqa", "palu-m", keep=0.25)
    before = state(original)
    first, last = learnt(model, text, original, learning_rate=5e-3, steps=30)
    assert 0 < last < 0.9 * first
    assert not changed(before, original)


def test_windows_one_by_one_have_the_gradient_of_all_at_once(text) -> None:
    model, _ = folded("llama-gqa", "small", keep=0.5)
    found = []
    for at_once in (1, 2, 4):
        model.requires_grad_(True)
        (loss,) = training.gradients(
            model,
            None,
            family_of(model.config),
            spec_of(model),
            iter([text[:4]]),
            1,
            at_once=at_once,
            way_out="",
        )
        found.append((loss, model.model.layers[0].mlp.up_proj.weight.grad.clone()))
        model.zero_grad()
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-5)
        torch.testing.assert_close(gradient, found[0][1], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("steps", "when"), [(12, "step . of 12"), (1, "its last step")])
def test_a_loss_that_diverges_leaves_the_model(text, steps: int, when: str) -> None:
    model, _ = folded("llama-gqa", "small", keep=0.5)
    before = state(model)
    with pytest.raises(ValueError, match=f"diverged at {when}: take a lower learning_rate"):
        learnt(model, text, learning_rate=1e30, steps=steps)
    assert not changed(before, model)


def test_adapters_that_fail_halfway_leave_the_model(monkeypatch) -> None:
    model, _ = folded("llama-gqa", "small", keep=0.5)
    before, modules = state(model), dict(model.named_modules())
    flags, make = [x.requires_grad for x in model.parameters()], peft.get_peft_model

    def short(*given):
        make(*given)
        raise MemoryError

    monkeypatch.setattr(peft, "get_peft_model", short)
    with pytest.raises(MemoryError), lora._adapters(model, family_of(model.config), LoRA()):
        pass
    assert not changed(before, model) and dict(model.named_modules()) == modules
    assert [x.requires_grad for x in model.parameters()] == flags and not model.training
    assert not hasattr(model, "peft_config")


def test_windows_are_spread_over_a_text(tmp_path) -> None:
    config, tokenizer = load_config("reference:gqa"), load_tokenizer("reference:gqa")
    numbers = tmp_path / "numbers.txt"
    numbers.write_text(" ".join(str(i) for i in range(60_000)))
    for count in (5, 40, 1000):  # some of it, most of it, and more than there is
        rows = calibration_text.training_windows(tokenizer, config, [numbers], count)
        assert rows.shape[1] == 1024 and 4 < len(rows) <= count
        assert (rows[:, 0] == tokenizer.bos_token_id).all()
        found = [tokenizer.decode(x[10:]).split()[1:-1] for x in rows.tolist()]
        firsts, lasts = ([int(x[i]) for x in found] for i in (0, -1))
        assert all(a < b for a, b in zip(lasts, firsts[1:], strict=False))  # in order, apart
        assert firsts[0] < 100 and firsts[-1] > 60_000 * 0.7


# -- checkpoints --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / "folded"
    kvfold.compress("reference:gqa", "lorc", device="cpu", output=path, fold=True)
    return path


@pytest.fixture
def short(monkeypatch) -> None:
    monkeypatch.setattr(calibration_text, "CALIBRATION_WINDOW", 64)


def test_a_checkpoint_is_recovered(checkpoint, short, tmp_path, capsys) -> None:
    path = tmp_path / "recovered"
    settings = ["--steps", "6", "--learning-rate", "2e-3", "--device", "cpu"]
    assert main(["recover", str(checkpoint), "--output", str(path), *settings]) == 0
    said = capsys.readouterr()
    assert "nats a token of held-out text, after 6 steps" in said.out
    assert "Warning" not in said.err
    old, new = (kvfold.load(str(x), device="cpu") for x in (checkpoint, path))
    made = provenance_of(new)["lora"]
    assert made["after"] < made["before"] and made["rank"] == 32 and made["original"] is None
    assert spec_of(new) == spec_of(old) and provenance_of(new)["recipe"]["name"] == "lorc"
    assert f"{made['before']:.4f} to {made['after']:.4f}" in (path / "README.md").read_text()
    files = [json.loads((x / "config.json").read_text()) for x in (checkpoint, path)]
    assert files[0]["dtype"] == files[1]["dtype"]
    ids = tokens(1, 20)
    with torch.no_grad():
        assert (old(ids).logits - new(ids).logits).abs().max() > 1e-3
    assert "kvfold-partial" not in " ".join(x.name for x in tmp_path.iterdir())


def test_in_python_with_progress_and_an_original(checkpoint, short, tmp_path) -> None:
    seen = []
    model = kvfold.recover(
        checkpoint,
        output=tmp_path / "new",
        original="reference:gqa",
        device="cpu",
        steps=2,
        progress=lambda *stage: seen.append(stage),
    )
    assert seen == [("recover", 1, 2), ("recover", 2, 2)]
    made = provenance_of(model)["lora"]
    assert made["original"] == "reference:gqa" and math.isfinite(made["after"])
    again, ids = kvfold.load(str(tmp_path / "new"), device="cpu"), tokens(1, 20)
    with torch.no_grad():  # saved in 16 bits
        torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=0.1, rtol=0.1)


def test_nothing_is_written_where_it_diverges(checkpoint, short, tmp_path, capsys) -> None:
    where = ["--output", tmp_path / "new", "--device", "cpu"]
    line = refused(capsys, "recover", checkpoint, *where, "--learning-rate", "1e30", "--steps", 4)
    assert "take a lower --set learning-rate" in line
    assert not list(tmp_path.iterdir())


def test_too_little_text_is_refused(checkpoint, tmp_path, capsys) -> None:
    (tmp_path / "text.txt").write_text("A few words.")
    where = ["--output", tmp_path / "new", "--device", "cpu"]
    line = refused(capsys, "recover", checkpoint, *where, "--text", tmp_path / "text.txt")
    assert "fewer than 4 windows of 1024 tokens: give more --text" in line


def test_peft_is_asked_for(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    line = refused(capsys, "recover", "reference:gqa", "--output", tmp_path / "new")
    assert line.endswith('recover: peft is not installed; run: pip install "kvfold[recover]"')
