"""Predicted step times: near what was measured, honest about what was not, None without kernels."""

import pytest

from fit_step_time import coefficients
from kvfold import recipes
from kvfold.bench.variants import SHAPES, variant_layout
from kvfold.compression.planning.default import even_spec
from kvfold.compression.planning.step_time import (
    DEFAULT,
    DecodeLoad,
    attention_work,
    load_of,
    predict,
    reconstruction_cost,
    tables,
)
from kvfold.config import LEVELS
from kvfold.layout.pages import plain_spec
from kvfold.models.families import family_of
from lab.variants import VARIANTS
from models import CONFIGS, llama_8b

LLAMA = llama_8b(vocab_size=128256, max_position_embeddings=131072)
GEOMETRY = family_of(LLAMA).geometry(LLAMA)


def layer_us(name: str, batch: int = 64, tokens: int = 8192) -> float:
    geometry, table = SHAPES["llama-3.1-8b"], tables()[DEFAULT]
    layout = variant_layout(geometry, VARIANTS[name], 1)
    layer = layout.spec.layers[0]
    work = attention_work(layer, layout.groups, geometry, batch * tokens, table.read)
    return table.attention_us(work)


@pytest.mark.parametrize(
    ("name", "us"),
    [
        ("bf16-full", 479.8),
        ("bf16-half", 248.0),
        ("int8-half", 137.5),
        ("int4-half", 86.7),
        ("lean-31", 262.7),
        ("lean-35", 300.2),
        ("small-10", 360.3),
        ("small-25", 1500.0),
    ],
)
def test_attention_is_near_what_was_measured(name: str, us: float) -> None:
    assert layer_us(name) == pytest.approx(us, rel=0.15)


def test_a_step_is_near_what_was_measured() -> None:
    whole = predict(LLAMA, plain_spec(GEOMETRY), DecodeLoad())
    assert whole is not None and whole.ms == pytest.approx(20.20, rel=0.1)
    assert not whole.estimated and whole.device == DEFAULT
    fewer = predict(LLAMA, plain_spec(GEOMETRY), DecodeLoad(), bits=4, device="a new one")
    assert fewer is not None and fewer.ms < whole.ms / 1.5 and fewer.device == DEFAULT


@pytest.mark.parametrize(
    ("name", "batch", "ms"),
    [
        ("swift-4.6x-odd", 1, 5.53),
        ("swift-4.6x-odd", 8, 6.47),
        ("swift-4.6x-odd", 64, 10.53),
        ("lean-6x", 64, 18.19),
        ("small-6x", 64, 205),
    ],
)
def test_steps_on_tiers_are_near_what_was_measured(name: str, batch: int, ms: float) -> None:
    spec = variant_layout(SHAPES["llama-3.1-8b"], VARIANTS[name]).spec
    found = predict(LLAMA, spec, DecodeLoad(batch=batch))
    # Keys in tiers that are reconstructed in two passes were timed with `small` alone.
    assert found is not None and found.estimated == name.startswith("small")
    assert found.ms == pytest.approx(ms, rel=0.15)


def test_one_pass_takes_less_of_fewer_heads_and_no_less_than_its_bytes() -> None:
    def us(shape: str, name: str) -> float:
        geometry, table = SHAPES[shape], tables()[DEFAULT]
        layout = variant_layout(geometry, VARIANTS[name], 1)
        work = attention_work(
            layout.spec.layers[0], layout.groups, geometry, 48 * 8192, table.read, True
        )
        assert work["bytes"] < table.attention_us(work)
        return table.attention_us(work)

    few, many = us("qwen2.5-1.5b", "swift-4x-256"), us("llama-3.1-8b", "swift-4x-odd")
    assert 0.6 * many < few < 0.85 * many  # 2 KV heads of 6 query heads; 8 of 4
    table = tables()[DEFAULT]
    assert table.attention_us({"launch": 1.0, "bytes": 400.0}) == 400.0


@pytest.mark.parametrize("recipe", ["swift", "lean", "small"])
def test_what_was_not_timed_is_an_estimate(recipe: str) -> None:
    tiers, whole = (
        predict(LLAMA, even_spec(recipes.get(recipe), GEOMETRY, 0.6, levels), DecodeLoad())
        for levels in (LEVELS, None)
    )
    assert tiers is not None and tiers.estimated == (recipe == "small")
    assert whole is not None and whole.estimated  # 16-bit rows that are read in pieces


def test_more_rows_take_longer_and_cost_no_less_a_token() -> None:
    spec = plain_spec(GEOMETRY)
    small, large = (predict(LLAMA, spec, DecodeLoad(batch=b, context=2048)) for b in (1, 64))
    assert small is not None and large is not None and small.ms < large.ms < 64 * small.ms


def test_recipes_that_reconstruct_keys_say_what_a_step_takes() -> None:
    def said(name: str, share: float, config=LLAMA) -> str:
        geometry = family_of(config).geometry(config)
        return str(reconstruction_cost(name, config, even_spec(recipes.get(name), geometry, share)))

    where = "times the original's (predicted for 64 x 8192 on an NVIDIA H200)"
    assert said("small", 0.25).startswith("small trades time for memory: a decode step takes")
    assert said("small", 0.25).endswith(where) and said("palu-j", 0.5).startswith("palu-j trades")
    assert said("lean", 0.25).startswith("lean reconstructs all cached keys: a decode step")
    assert said("lean", 0.25).endswith(f" about 0.6 {where}")
    assert said("swift", 0.5) == said("lean", 0.5, CONFIGS["opt"]()) == "None"
    words = "small trades time for memory: every decode step reconstructs all cached keys"
    assert said("small", 0.5, CONFIGS["gemma2"]()) == words


def test_a_prediction_leaves_the_config_as_it_was() -> None:
    config = llama_8b(num_hidden_layers=2, dtype="float32")
    before = config.to_dict()
    assert predict(config, plain_spec(family_of(config).geometry(config)), DecodeLoad()) is not None
    assert config.to_dict() == before


def test_without_kernels_nothing_is_predicted() -> None:
    config = CONFIGS["gemma2"]()
    assert predict(config, plain_spec(family_of(config).geometry(config)), DecodeLoad()) is None


def test_a_step_is_stated_within_the_positions_of_a_model() -> None:
    short = llama_8b(max_position_embeddings=4096)
    assert load_of(short) == DecodeLoad(context=4096) and str(load_of(LLAMA, 8)) == "8 x 8192"
    with pytest.raises(ValueError, match="context must be at most 4096, the model's posit"):
        load_of(short, context=8192)
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        load_of(short, batch=0)


@pytest.mark.slow
def test_the_table_is_what_is_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    """By benchmarks/fit_step_time.py, to the results that are there."""
    found, kept = coefficients(DEFAULT), tables()[DEFAULT]
    assert found.attention == pytest.approx(kept.attention, rel=0.01)
    assert (found.layer, found.sequence) == pytest.approx((kept.layer, kept.sequence), rel=0.01)
    assert list(found.estimated) == list(kept.estimated)
    assert "off by" in capsys.readouterr().out
