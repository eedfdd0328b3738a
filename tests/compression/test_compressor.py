"""One compressor behind `kvfold.compress` and the command: the same sizes, the same result."""

import json

import pytest
import torch

import kvfold
from cli_cases import plain  # noqa: F401  (a fixture: a random Llama as a checkpoint)
from kvfold import recipes
from kvfold.cli.main import main
from kvfold.compression.bases import BASES, builder_of, recipes_where
from kvfold.compression.compressor import Compressor
from kvfold.compression.ranks import METHODS
from kvfold.config import Recipe
from kvfold.hub.checkpoint import spec_of
from kvfold.hub.loading import load, load_tokenizer
from kvfold.layout import CacheSpec
from matrix import slow
from models import tiny

FEW = 1024  # tokens of calibration
LOSS_WEIGHTED = recipes_where(lambda basis: basis.predicts_loss)


@pytest.fixture
def model(plain):
    return load(str(plain), device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("reference:gqa")


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        slow(["--budget", "ppl<=1.5"], {"budget": "ppl<=1.5"}),
        (["--bytes-per-token", "20"], {"bytes_per_token": 20}),
        (["--factor", "6.4", "--levels", "4,8"], {"factor": 6.4, "levels": (8, 4)}),
        (["--factor", "6.4", "--levels", "all"], {"factor": 6.4, "levels": (8, 6, 4, 3, 2, 1)}),
        (["--keep", "0.4", "--align", "1"], {"keep": 0.4, "align": 1}),
        ([], {}),
    ],
)
def test_python_and_command_line_plan_the_same(plain, model, tmp_path, capsys, flags, size):
    path = tmp_path / "out"
    options = [*flags, "--max-tokens", str(FEW), "--output", str(path)]
    assert main(["compress", str(plain), "--fold", *options]) == 0
    saved = json.loads((path / "config.json").read_text())["quantization_config"]
    folded = kvfold.compress(
        str(plain), max_tokens=FEW, output=tmp_path / "python", **size, fold=True
    )
    assert spec_of(folded) == CacheSpec.from_dict(saved["cache"])
    again = json.loads((tmp_path / "python" / "config.json").read_text())["quantization_config"]
    assert again == saved


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"budget": "ppl<=1.1"}, "budget: calibration reads the whole text"),
        ({"budget": "1 %"}, r"'ppl<=1\.01'"),
        ({"bytes_per_token": 129}, "bytes_per_token must be at most 128"),
        ({"bytes_per_token": 0}, "bytes_per_token must be above 0, got 0"),
        (
            {"bytes_per_token": 20, "recipe": "zack"},
            f"use {LOSS_WEIGHTED}",
        ),
        ({"factor": 900}, "factor=900 leaves 1 bits a token, and each of 2 layers takes at least"),
        ({"keep": 0.01, "align": 8}, "keep=0.01 leaves 0 numbers a token, and each of 2 layers"),
        ({"keep": 0.5, "budget": "ppl<=1.1"}, "keep=0.5 and budget='ppl<=1.1' exclude each other"),
    ],
)
def test_a_failing_compress_leaves_the_model_as_it_was(
    model, tokenizer, tmp_path, size, message
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("The ship went out to sea, and nobody saw it again. " * 60, encoding="utf-8")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        kvfold.compress(model, tokenizer=tokenizer, calib=[text], **size, fold=True)
    assert spec_of(model) is None and [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


def test_recovery_without_text_fails_before_the_model_changes(model) -> None:
    with pytest.raises(ValueError, match="a tokenizer is needed"):
        kvfold.compress(model, "lorc", recover=2, fold=True)
    assert spec_of(model) is None


# -- names of bases and of rank methods ---------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"basis": "zak"}, f"unknown basis 'zak'; bases: {', '.join(BASES)}"),
        ({"basis": "lorc", "ranks": "best"}, f"unknown ranks 'best'; .*: {', '.join(METHODS)}"),
        ({"basis": "palu", "keys": "kv", "values": "kv"}, "leave it out, or use basis 'pre_rope'"),
        ({"basis": "palu", "equal_ranks": True}, "equal_ranks needs ranks='fisher'"),
        ({"basis": "palu", "whole_share": 0.2}, "whole_share needs ranks='condition'"),
    ],
)
def test_a_recipe_that_no_method_can_follow_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Compressor(tiny("llama-gqa"), Recipe(name="mine", **settings))


@pytest.mark.parametrize(("old", "new"), [("post", "post_rope"), ("latent", "pre_rope")])
def test_earlier_names_of_bases_still_work(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"called '{new}' now"):
        builder = builder_of(Recipe(name="mine", basis=old))
    assert type(builder) is BASES[new]


def test_recipes_that_would_do_are_named() -> None:
    suited = recipes_where(lambda basis: not basis.factors_weights)
    assert {"swift", "zack"} <= {*suited.replace(" or", ",").split(", ")}
    with pytest.raises(ValueError, match=f"use {suited}$"):
        Compressor(tiny("qwen3"), recipes.get("palu-g"))
