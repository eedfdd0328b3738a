"""The benchmark of shared latents: what is stored, its bytes, and what of a cache it changes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, LlamaForCausalLM

from kvfold.compression.planning.bit_allocation import DISTORTION, SCALE_BITS
from models import CONFIGS
from shared_latents import (
    EXACT,
    Latent,
    basis_of,
    calibrate,
    latents_of,
    losses,
    measure,
    overwrite,
    planned,
    recorded,
    saved_bytes,
)

CHUNK = 16
SHARINGS = ("side", "layer", "pair", "pair-1", "pair-sides", "triple")
PAIR = latents_of("pair", 2)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config: Any = CONFIGS["llama-gqa"]()
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (8, 72), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def bases(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """By way to share, the bases of its latents."""
    samples = calibrate(model, ids)
    return {x: [basis_of(y, *samples) for y in latents_of(x, 2)] for x in SHARINGS}


def entries(model: Any, ids: torch.Tensor) -> tuple[Any, dict[Any, torch.Tensor]]:
    cache = DynamicCache()
    with torch.no_grad(), recorded(model) as seen:
        model(ids, cache=cache, use_cache=True)
    return cache, dict(seen)


@pytest.mark.parametrize("layers", [2, 7])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_number_is_in_one_latent(sharing: str, layers: int) -> None:
    parts = [part for latent in latents_of(sharing, layers) for part in latent]
    assert sorted(parts) == [(i, side) for i in range(layers) for side in "kv"]


def test_pairs_may_begin_with_either_layer() -> None:
    layers = [[sorted({i for i, _ in x}) for x in latents_of(y, 4)] for y in ("pair", "pair-1")]
    assert layers == [[[0, 1], [2, 3]], [[0], [1, 2], [3]]]


@pytest.mark.parametrize("sharing", SHARINGS)
def test_at_eight_bits_a_latent_gives_back_nearly_what_it_got(
    sharing: str, model: Any, ids: torch.Tensor, bases: dict[str, Any]
) -> None:
    latents = latents_of(sharing, 2)
    made, about = planned(latents, bases[sharing], 10**6)
    assert {bits for x in made for _, bits in x.tiers or ()} == {8}
    assert about["bytes_per_token"] == 2 * 2 * 24 + len(latents)
    seen = entries(model, ids)[1]
    for latent in made:
        x = torch.cat([seen[part] for part in latent.parts], -1)
        down, up, mean = latent.maps
        error = ((latent.decoded(x) - x) @ down).square().sum()
        assert error < 4 * DISTORTION[8] * ((x - mean) @ down).square().sum()
        torch.testing.assert_close((x - mean) @ down @ up.mT + mean, x, atol=1e-4, rtol=0)


def test_bytes_have_scales_and_keep_the_budget(bases: dict[str, Any]) -> None:
    for sharing, budget in ((x, y) for x in SHARINGS for y in (250, 600)):
        made, about = planned(latents_of(sharing, 2), bases[sharing], budget)
        tiers = [tier for x in made for tier in x.tiers or ()]
        stored = sum(width * bits for width, bits in tiers)
        assert about["bytes_per_token"] * 8 == stored + SCALE_BITS * len(tiers) <= budget
        assert stored > budget / 2


def test_only_a_finished_chunk_is_overwritten(
    model: Any, ids: torch.Tensor, bases: dict[str, Any]
) -> None:
    nothing = [Latent(PAIR[0], bases["pair"][0], ())]
    before = entries(model, ids)[0]
    cache, seen = entries(model, ids)
    seen = {part: x[:, CHUNK : 2 * CHUNK] for part, x in seen.items()}
    overwrite(model, cache, seen, nothing, CHUNK, 2 * CHUNK)
    for old, new in zip(before.layers, cache.layers, strict=True):
        for x, y in ((old.keys, new.keys), (old.values, new.values)):
            changed = x.ne(y).any(-1)
            assert changed[:, :, CHUNK : 2 * CHUNK].all() and changed.sum() == 8 * 2 * CHUNK


def test_first_tokens_stay_exact(model: Any, ids: torch.Tensor, bases: dict[str, Any]) -> None:
    before = entries(model, ids)[0]
    cache, seen = entries(model, ids)
    overwrite(model, cache, seen, [Latent(PAIR[0], bases["pair"][0], ())], 0, CHUNK)
    changed = before.layers[0].keys.ne(cache.layers[0].keys).any(-1)
    assert changed[:, :, EXACT:CHUNK].all() and changed.sum() == 8 * 2 * (CHUNK - EXACT)


def test_reconstructed_keys_are_rotated_by_their_own_positions(
    model: Any, ids: torch.Tensor, bases: dict[str, Any]
) -> None:
    before = entries(model, ids)[0]
    cache, seen = entries(model, ids)
    seen = {part: x[:, CHUNK:] for part, x in seen.items()}
    overwrite(model, cache, seen, [Latent(PAIR[0], bases["pair"][0], None)], CHUNK, ids.shape[1])
    for old, new in zip(before.layers, cache.layers, strict=True):
        torch.testing.assert_close(new.keys, old.keys, atol=1e-3, rtol=0)
        torch.testing.assert_close(new.values, old.values, atol=1e-3, rtol=0)


def test_losses_are_those_of_the_model_until_something_is_dropped(
    model: Any, ids: torch.Tensor, bases: dict[str, Any]
) -> None:
    with torch.no_grad():
        logits = model(ids).logits
    dense = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").double().mean(1)
    torch.testing.assert_close(losses(model, ids, [], CHUNK), dense, atol=1e-5, rtol=0)
    whole, nothing = ([Latent(PAIR[0], bases["pair"][0], x)] for x in (None, ()))
    torch.testing.assert_close(losses(model, ids, whole, CHUNK), dense, atol=1e-4, rtol=0)
    # a chunk's own queries never see what is stored of it
    torch.testing.assert_close(losses(model, ids, nothing, 72), dense, atol=1e-5, rtol=0)
    assert (losses(model, ids, nothing, CHUNK) - dense).abs().min() > 1e-4


def test_saved_bytes_are_those_at_equal_loss() -> None:
    def row(sharing: str, factor: float, size: float, nats: float) -> dict[str, Any]:
        lost = {"text": {"nats": nats}}
        return {"sharing": sharing, "factor": factor, "bytes_per_token": size, "lost": lost}

    rows = [row("layer", 4, 400, 0.01), row("layer", 8, 200, 0.09), row("pair", 8, 201, 0.03)]
    rows += [row("pair", 4, 400, -0.001), row("pair", 16, 100, 0.5)]
    # .03 is halfway from .01 to .09, where `layer` takes 300 bytes; others are outside its rows
    assert saved_bytes(rows, "text") == {"pair 8x": pytest.approx(1 - 201 / 300)}


def test_the_report_has_every_setting(model: Any, ids: torch.Tensor) -> None:
    saved: list[int] = []

    def save(report: dict[str, Any]) -> None:
        saved.append(len(report["rows"]))

    settings = [("layer", 4.0), ("pair", 4.0), ("side", 6.0)]
    report = measure(model, {"text": ids[:3]}, ids, settings, CHUNK, 2, save)
    assert [(x["sharing"], x["factor"]) for x in report["rows"]] == settings
    layer, pair, side = (x["lost"]["text"] for x in report["rows"])
    between = report["rows"][1]["over_layer"]["text"]
    assert between["nats"] == pytest.approx(pair["nats"] - layer["nats"])
    assert len(between["windows"]) == 3 and "over_layer" not in report["rows"][2]
    assert abs(report["fp16 latents"]["text"]["nats"]) < 1e-4 < abs(side["nats"])
    assert saved == [1, 2, 3]
