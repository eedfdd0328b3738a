"""Statistics against brute force, and an artifact that is reused only where it fits."""

from dataclasses import replace

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from kvfold import recipes
from kvfold.calibration.calibrate import artifact_key, calibrate
from kvfold.calibration.statistics import QUANTITIES, Statistics, record, reduce
from kvfold.calibration.statistics.reduce import prune, window_topics
from kvfold.compression.compressor import Compressor
from kvfold.layout.pages import cache_layout
from kvfold.models.families import family_of
from kvfold.ops.common.attention import attention, rotate
from models import tiny, tokens

pytestmark = pytest.mark.usefixtures("still")

WINDOWS = tokens(4, 32)


def measured(name: str, needs: set[str], seed: int = 0):
    model = tiny(name)
    family = family_of(model.config)
    topics = torch.arange(4) // 2
    return model, calibrate(model, family, WINDOWS, needs, topics=topics, seed=seed)


def hidden_inputs(model, layer: int):
    """What layer `layer`'s attention reads, for every window [N, T, D]."""
    kept = []
    attention = model.model.layers[layer].self_attn
    hook = attention.register_forward_pre_hook(
        lambda _, args, kwargs: kept.append(kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        for window in WINDOWS:
            model(window[None])
    hook.remove()
    return torch.cat(kept)


@pytest.mark.parametrize("name", ["llama-gqa", "llama3-scaling"])
def test_key_and_value_moments(name: str) -> None:
    model, statistics = measured(name, {"key_pre", "value", "key_post"})
    attention, x = model.model.layers[1].self_attn, hidden_inputs(model, 1)
    keys, values = attention.k_proj(x), attention.v_proj(x)
    for quantity, numbers in (("key_pre", keys), ("value", values)):
        flat = numbers.flatten(0, 1).double()
        moment = statistics[1, quantity]
        assert torch.allclose(moment.raw(), flat.mT @ flat / len(flat), atol=1e-5)
        assert torch.allclose(moment.mean(), flat.mean(0), atol=1e-5)
        assert torch.allclose(moment.covariance(), torch.cov(flat.mT, correction=0), atol=1e-5)
    cos, sin = model.model.rotary_emb(x, torch.arange(32)[None])
    heads = rotate(keys.unflatten(-1, (2, -1)), cos[:, :, None], sin[:, :, None])
    flat = heads.transpose(1, 2)[:, 1].flatten(0, 1).double()
    assert torch.allclose(statistics[1, "key_post"].raw()[1], flat.mT @ flat / len(flat), atol=1e-5)


def test_gradients_are_those_of_the_sampled_loss() -> None:
    """One window: the last layer's value gradient against autograd on the same labels."""
    model = tiny("llama-gqa")
    family, window = family_of(model.config), WINDOWS[:1]
    statistics = calibrate(model, family, window, {"grad_kv", "kv", "kv_weighted"}, seed=3)
    attention = model.model.layers[1].self_attn
    kept = {}
    hooks = [
        attention.v_proj.register_forward_hook(lambda _, __, out: kept.update(v=out)),
        attention.k_proj.register_forward_hook(lambda _, __, out: kept.update(k=out)),
    ]
    model.requires_grad_(True)
    out = model(window).logits.float()[0]
    drawn = torch.multinomial(out.softmax(-1), 1, generator=torch.Generator().manual_seed(3))
    loss = torch.nn.functional.cross_entropy(out, drawn[:, 0], reduction="sum")
    grads = torch.autograd.grad(loss, (kept["k"], kept["v"]))
    for hook in hooks:
        hook.remove()
    flat = torch.cat(grads, -1)[0, 1:].double()  # without the first token
    want = flat.mT @ flat / len(flat)
    got = statistics[1, "grad_kv"].raw()
    assert torch.allclose(got, want, atol=1e-4 * want.abs().max())


def attended(name: str, needs: set[str]) -> tuple[dict[str, torch.Tensor], Statistics]:
    """What layer 1's attention sees of one window, the loss's gradients there, and statistics.

    q, k, v after RoPE [Hq or Hk, T, d], `before`: keys before it; dq, dk, dv, dout likewise.
    """
    model = tiny(name)
    family, window = family_of(model.config), WINDOWS[:1]
    statistics = calibrate(model, family, window, needs, seed=3)
    kept: dict[str, torch.Tensor] = {}

    def seeing(module, q, k, v, mask, scaling=None, **_):
        out, weights = attention(q, k, v, mask, scaling, True)
        if module.layer_idx == 1:
            kept.update(q=q, k=k, v=v, out=out, weights=weights)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("kvfold_test_seeing", seeing)
    AttentionMaskInterface.register("kvfold_test_seeing", eager_mask)
    model.set_attn_implementation("kvfold_test_seeing")
    out = model(window).logits.float()[0]
    drawn = torch.multinomial(out.softmax(-1), 1, generator=torch.Generator().manual_seed(3))
    loss = torch.nn.functional.cross_entropy(out, drawn[:, 0], reduction="sum")
    tensors = [kept[x] for x in ("k", "v", "out")]
    grads = torch.autograd.grad(loss, tensors)
    kept |= dict(zip(("dk", "dv", "dout"), grads, strict=True))
    cos, sin = model.model.rotary_emb(kept["v"], torch.arange(32)[None])
    for turned, back in (("k", "before"), ("dk", "dbefore")):
        kept[back] = rotate(kept[turned], cos[:, None], sin[:, None], sign=-1)
    return {name: x.detach()[0].double() for name, x in kept.items()}, statistics


def flat(x: torch.Tensor) -> torch.Tensor:
    """[Hk, T, d] -> [T, K]."""
    return x.transpose(0, 1).flatten(1)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize(
    ("side", "x", "g"), [("key_pre", "before", "dbefore"), ("value", "v", "dv")]
)
def test_gradients_and_weighted_entries_leave_the_first_token_out(
    side: str, x: str, g: str
) -> None:
    seen, statistics = attended("llama-gqa", {f"{side}_weighted", f"grad_{side}"})
    rows, grads = flat(seen[x])[1:], flat(seen[g])[1:]
    same(statistics[1, f"grad_{side}"].raw(), grads.mT @ grads / len(grads))
    weights = grads.norm(dim=-1)
    weighted = statistics[1, f"{side}_weighted"]
    same(weighted.mean(), weights @ rows / weights.sum())
    same(weighted.raw(), rows.mT * weights @ rows / weights.sum())


def test_keys_after_rope_are_weighted_per_head_without_the_first() -> None:
    seen, statistics = attended("llama-gqa", {"key_post_weighted", "grad_key_post"})
    rows, grads = seen["k"][:, 1:], seen["dk"][:, 1:]
    same(statistics[1, "grad_key_post"].raw(), grads.mT @ grads / grads.shape[1])
    weights = grads.norm(dim=-1, keepdim=True)
    total = weights.sum(1, keepdim=True)
    same(statistics[1, "key_post_weighted"].mean(), (weights * rows).sum(1) / total[:, 0])
    same(statistics[1, "key_post_weighted"].raw(), (weights * rows).mT @ rows / total)


def test_first_is_what_the_cache_holds_of_first_tokens() -> None:
    model, statistics = measured("llama3-scaling", {"first", "grad_value", "value_weighted"})
    attention, x = model.model.layers[1].self_attn, hidden_inputs(model, 1)[:, 0]
    keys, values = attention.k_proj(x), attention.v_proj(x)
    k, v, rotated = statistics[1, "first"].mean().chunk(3)
    same(k, keys.double().mean(0))
    same(v, values.double().mean(0))
    same(rotated, keys.double().mean(0))  # at position 0 RoPE turns nothing


def test_fisher_is_the_mean_root_mean_square_of_a_heads_weight_gradients() -> None:
    """Palu's release: squares are averaged over batches before the root, elements after it."""
    model = tiny("llama-gqa")
    windows, family = WINDOWS[:2], family_of(model.config)
    got = calibrate(model, family, windows, {"fisher"}, seed=3)[1, "fisher"].raw()
    attention, generator = model.model.layers[1].self_attn, torch.Generator().manual_seed(3)
    squares = [0.0, 0.0]
    for window in windows:
        out = model(window[None]).logits.float()[0]
        drawn = torch.multinomial(out.detach().softmax(-1), 1, generator=generator)
        loss = torch.nn.functional.cross_entropy(out, drawn[:, 0], reduction="sum")
        weights = attention.k_proj.weight, attention.v_proj.weight
        for side, gradient in enumerate(torch.autograd.grad(loss, weights)):
            squares[side] = squares[side] + gradient.double().square()
    roots = [(total / 2).sqrt().unflatten(0, (2, -1)).mean((1, 2)) for total in squares]
    assert torch.allclose(got, torch.stack(roots, 1), rtol=1e-4)


def test_reduced_rows_count_every_query_head() -> None:
    """With as many centroids as half the rows, their moments are near those of the rows."""
    _, statistics = measured("llama-gqa", {"rows_reduced", "query", "key_post", "value"})
    reduced = statistics[1, "rows_reduced"]
    queries, keys, windows = 2 * 32, 32, 2  # two query heads a KV head; half of four windows
    assert reduced.weight.tolist() == [[(queries + keys) * windows / 2, keys * windows / 2]] * 2
    rows = statistics[1, "query"].second + statistics[1, "key_post"].second
    share = torch.trace(reduced.second[0, 0]) / torch.trace(rows[0])
    assert 0.1 < share < 0.3


def test_centroids_are_half_of_the_vectors_and_not_more_than_the_default(monkeypatch) -> None:
    rows = [tuple(torch.randn(1, count, 2) for count in (24, 12, 12))]
    assert reduce.reduced_rows(rows, None, 0).weight.tolist() == [[12 + 6, 6]]
    monkeypatch.setattr(reduce, "CENTROIDS", 8)
    assert reduce.reduced_rows(rows, None, 0).weight.tolist() == [[8 + 6, 6]]
    assert reduce.reduced_rows(rows, 10, 0).weight.tolist() == [[10 + 6, 6]]


def test_the_number_of_centroids_is_part_of_the_artifact(tmp_path) -> None:
    model = tiny("llama-gqa")
    family, path = family_of(model.config), tmp_path / "stats.safetensors"
    made = calibrate(model, family, WINDOWS, {"rows_reduced"}, centroids=5)
    assert made[0, "rows_reduced"].weight[0].tolist() == [10, 5]
    made.save(path)
    assert Statistics.load(path, artifact_key(model, WINDOWS, 5))
    with pytest.raises(ValueError, match="centroids"):
        Statistics.load(path, artifact_key(model, WINDOWS))


def test_a_changed_default_of_centroids_refuses_what_was_clustered(monkeypatch, tmp_path) -> None:
    model = tiny("llama-gqa")
    for name in ("rows_reduced", "key_pre"):
        found = calibrate(model, family_of(model.config), WINDOWS, {name})
        found.save(tmp_path / name)
        assert Statistics.load(tmp_path / name, artifact_key(model, WINDOWS)).has({name})
    monkeypatch.setattr(reduce, "CENTROIDS", 8)
    key = artifact_key(model, WINDOWS)
    with pytest.raises(ValueError, match="something else: centroids differ"):
        Statistics.load(tmp_path / "rows_reduced", key)
    assert Statistics.load(tmp_path / "key_pre", key).has({"key_pre"})


def test_windows_of_a_topic_are_found_and_half_of_them_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 10 * torch.randn(3, 16, generator=generator)
    embedded = centres.repeat(4, 1) + 0.1 * torch.randn(12, 16, generator=generator)
    topics = window_topics(embedded, seed=0)
    assert all(len(set(topics[i::3].tolist())) == 1 for i in range(3))
    assert len(set(topics.tolist())) == 3
    kept = prune(topics, seed=0)
    assert [sum(i % 3 == topic for i in kept) for topic in range(3)] == [2, 2, 2]


@pytest.mark.parametrize(
    "name", ["llama-gqa", "opt", "gpt-neox", "mistral-sliding", "qwen3", "gemma2-sliding"]
)
def test_every_quantity_is_collected_and_the_model_left_alone(name: str) -> None:
    model = tiny(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    want, implementation = model(WINDOWS[:1]).logits, model.config._attn_implementation
    family = family_of(model.config)
    topics = torch.zeros(4, dtype=torch.long)
    statistics = calibrate(model, family, WINDOWS, set(QUANTITIES), topics=topics)
    for layer in range(2):
        for quantity in QUANTITIES:
            assert torch.isfinite(statistics[layer, quantity].second).all()
    assert torch.equal(model(WINDOWS[:1]).logits, want)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == implementation


def test_recomputed_layers_measure_the_same(monkeypatch) -> None:
    """Of large models layers run twice, and are counted once."""
    _, kept = measured("llama-gqa", set(QUANTITIES))
    monkeypatch.setattr(record, "RECOMPUTE_ABOVE", 0)
    _, again = measured("llama-gqa", set(QUANTITIES))
    for quantity in QUANTITIES:
        assert torch.equal(kept[1, quantity].weight, again[1, quantity].weight)
        same(again[1, quantity].second, kept[1, quantity].second)


def test_seeds_decide() -> None:
    _, first = measured("llama-gqa", {"grad_out"})
    _, same = measured("llama-gqa", {"grad_out"})
    _, other = measured("llama-gqa", {"grad_out"}, seed=1)
    assert torch.equal(first[0, "grad_out"].second, same[0, "grad_out"].second)
    assert not torch.equal(first[0, "grad_out"].second, other[0, "grad_out"].second)


def test_statistics_files_with_former_names_are_read(tmp_path) -> None:
    model, statistics = measured("llama-gqa", {"value_weighted"})
    for stored in statistics.layers.values():
        stored["value_felt"] = stored.pop("value_weighted")
    statistics.save(tmp_path / "former.safetensors")
    loaded = Statistics.load(tmp_path / "former.safetensors", artifact_key(model, WINDOWS))
    assert loaded.has({"value_weighted"})


def test_artifact_round_trip_and_refusal(tmp_path) -> None:
    model, statistics = measured("llama-gqa", {"key_pre"})
    path = tmp_path / "stats.safetensors"
    statistics.save(path)
    loaded = Statistics.load(path, artifact_key(model, WINDOWS))
    assert torch.equal(loaded[1, "key_pre"].second, statistics[1, "key_pre"].second)
    with pytest.raises(ValueError, match="text"):
        Statistics.load(path, artifact_key(model, tokens(4, 32, seed=9)))
    with pytest.raises(ValueError, match="model"):
        Statistics.load(path, artifact_key(tiny("llama-gqa", seed=1), WINDOWS))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a readable"):
        Statistics.load(path, artifact_key(model, WINDOWS))
    with pytest.raises(ValueError, match="calibrate again"):
        loaded[0, "grad_kv"]


@pytest.mark.parametrize("recipe", ["lorc", "palu-m"])
def test_skipped_layers_stay_plain(recipe: str) -> None:
    model = tiny("llama-gqa")
    compressor = Compressor(model, replace(recipes.get(recipe), skip_layers=(1,)))
    prepared = compressor.prepare(calibrate(model, compressor.family, WINDOWS, compressor.needs))
    spec = prepared.plan(0.6, 1)
    assert [layer.keys for layer in spec.layers] == ["pre_rope", "plain"]
    assert 0.59 < spec.kept_fraction <= 0.6
    prepared.fold(spec, {})
    with pytest.raises(ValueError, match=r"names \[2\], but the model's layers are 0 to 1"):
        Compressor(tiny("llama-gqa"), replace(recipes.get(recipe), skip_layers=(0, 2)))


def test_a_share_of_the_first_layers_stays_whole() -> None:
    """They are those with the largest products of condition numbers (LoRC's Algorithm 1)."""
    model = tiny("llama-gqa")
    recipe = replace(recipes.get("lorc"), whole_share=0.5)
    prepared = Compressor(model, recipe).prepare()
    first, second = prepared.candidates[::2]
    assert first.score > second.score and (first.skip, second.skip) == (True, False)
    spec = prepared.plan(0.6, 1)
    assert [layer.keys for layer in spec.layers] == ["plain", "pre_rope"]
    assert cache_layout(spec).kept_fraction <= 0.6
    with pytest.raises(ValueError, match=r"raise keep to at least 0\.5"):
        prepared.plan(0.4, 1)  # room for the whole keys, and not for the values


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("recipe", ["fast", "swift", "lean", "small"])
def test_our_bases_work_with_and_without_gradients(recipe: str, gradients: bool) -> None:
    model = tiny("llama-gqa")
    compressor = Compressor(model, replace(recipes.get(recipe), gradients=gradients))
    prepared = compressor.prepare(calibrate(model, compressor.family, WINDOWS, compressor.needs))
    keep = 0.5
    spec = prepared.plan(keep, 1)
    assert keep - 0.01 < spec.kept_fraction <= keep
