"""Recovery: rows as pages hold them, only maps learn, and what was learnt is saved."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import recipes
from kvfold.calibration import text as calibration_text
from kvfold.calibration.calibrate import calibrate
from kvfold.compression import compressor
from kvfold.compression.compressor import Compressor, Prepared
from kvfold.compression.training import recover as recovery
from kvfold.compression.training import training
from kvfold.compression.training.rounded_cache import RoundedCache, RoundOnlyCache, round_to_bits
from kvfold.compression.training.training import batches_of
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.dense import DenseSession
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import token_nll, window_perplexity
from kvfold.evaluation.reader import Reader
from kvfold.hub.checkpoint import provenance_of, spec_of
from kvfold.hub.loading import load, load_tokenizer
from kvfold.layout import Latent, LayerSpec
from kvfold.models.copies import shared_copy
from kvfold.utils.text import packaged, running
from kvfold.utils.tokens import windows
from kvfold.utils.versions import cache_argument
from matrix import slow
from models import tiny, tokens

pytestmark = pytest.mark.usefixtures("still")


STEPS = 10
OURS = ["fast", "swift", "lean", "small"]


def prepared(model, recipe: str, rows: Tensor) -> Prepared:
    ready = Compressor(model, recipes.get(recipe))
    return ready.prepare(calibrate(model, ready.family, rows, ready.needs))


def losses_of(model, rows: Tensor, **extra) -> Tensor:
    """Nats of every token but the first."""
    with torch.no_grad():
        logits = model(rows, **extra).logits
    return token_nll(logits[:, :-1], rows[:, 1:])


# -- rows as pages hold them --------------------------------------------------------------------


@pytest.mark.parametrize("recipe", OURS)
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_rows_come_back_as_from_pages(name: str, recipe: str) -> None:
    model, rows = tiny(name), tokens(2, 60)
    bases = prepared(model, recipe, tokens(8, 64))
    bases.fold(bases.plan_factor(6.0), {})
    whole = losses_of(model, rows)
    ours = losses_of(model, rows, **cache_argument(RoundOnlyCache(spec_of(model).layers)))
    config = CacheConfig(kv_bytes=2**21, page=8)
    runner = build_runner(model, config, num_slots=1, max_tokens=64)
    paged, _ = window_perplexity(partial(PagedSession, runner), rows)
    assert float(ours.mean()) == pytest.approx(paged.nll, abs=1e-3)
    assert (ours - whole).abs().max() > 1e-2  # bits change something


def test_planned_tasks_weigh_the_same_on_pages() -> None:
    """Both ways of answering tasks with planned bits: on pages, and from rows kept as there."""
    model, context = tiny("llama-gqa"), tokens(1, 40)[0].tolist()
    bases = prepared(model, "small", tokens(8, 64))
    bases.fold(bases.plan_factor(6.0), {})
    layers, found = spec_of(model).layers, []
    dense = partial(DenseSession, model, 16)
    runner = build_runner(
        copy.deepcopy(model), CacheConfig(kv_bytes=2**21, page=8), num_slots=1, max_tokens=64
    )
    stored = partial(dense, new_cache=partial(RoundedCache, layers))
    for sessions in (partial(PagedSession, runner, 16), stored, dense):
        reader = Reader(sessions)
        reader.prefill(context)
        found.append([reader.log_likelihood(ending) for ending in ([5, 6], [7], [5, 8, 9])])
    paged, kept, whole = map(torch.tensor, found)
    assert (paged - kept).abs().max() < 3e-3  # summed over three tokens
    assert (whole - kept).abs().max() > 1e-2  # bits change something


def test_kept_rows_serve_chunks() -> None:
    model, rows = tiny("llama-gqa"), tokens(2, 40)
    bases = prepared(model, "small", tokens(8, 64))
    bases.fold(bases.plan_factor(6.0), {})
    layers = spec_of(model).layers
    cache = RoundedCache(layers)
    with torch.no_grad():
        parts = [model(x, **cache_argument(cache)).logits for x in rows.split(7, 1)]
        whole = model(rows, **cache_argument(RoundOnlyCache(layers))).logits
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-4
    assert cache.get_seq_length() == 40


def planned_row(*tiers: tuple[tuple[int, int], ...] | None) -> LayerSpec:
    """A layer of one latent for each entry; 8 numbers where there is no plan."""
    latents = tuple(
        Latent(side=side, heads=(0,), rank=sum(w for w, _ in x) if x is not None else 8, tiers=x)
        for side, x in zip("kv", tiers, strict=True)
    )
    return LayerSpec(keys="post_rope", values="fused", latents=latents)


def test_the_gradient_passes_the_quantiser() -> None:
    layer = planned_row(((16, 4), (8, 1)), ((12, 3),))
    rows = torch.randn(3, 5, 36, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = round_to_bits(rows, layer)
    assert 0.05 < (found - rows).norm() / rows.norm() < 0.6
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    found.backward(upstream)
    assert torch.equal(rows.grad, upstream)


def test_numbers_without_a_plan_pass_unchanged() -> None:
    rows = torch.randn(2, 24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_to_bits(rows[:, :16], planned_row(None, None)), rows[:, :16])
    found = round_to_bits(rows, planned_row(None, ((16, 2),)))
    assert torch.equal(found[:, :8], rows[:, :8])
    assert not torch.allclose(found[:, 8:], rows[:, 8:], atol=1e-3)


# -- what learns --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    return load("reference:gqa", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def batch() -> Tensor:
    """Two windows of 64 tokens."""
    return windows(load_tokenizer("reference:gqa"), running(packaged("filler.txt")), 64, 128)


@pytest.fixture(scope="module")
def jobs(reference, batch) -> dict[str, Prepared]:
    return {name: prepared(reference, name, batch) for name in ("lean", "swift")}


def folded(jobs: dict[str, Prepared], recipe: str, dtype: torch.dtype = torch.float32, **size):
    """(model and family, teacher, spec); the model is a copy, so that bases serve many tests."""
    bases = jobs[recipe]
    teacher = copy.deepcopy(bases.compressor.model).to(dtype)
    job = SimpleNamespace(model=shared_copy(teacher), family=bases.compressor.family)
    spec = bases.plan_factor(size["factor"]) if "factor" in size else bases.plan(size["keep"], 1)
    bases.fold(spec, {}, model=job.model)
    return job, teacher, spec


def changed(before: dict[str, Tensor], model) -> set[str]:
    """Names of tensors that differ, without their layers."""
    after = model.state_dict()
    names = {name for name, x in before.items() if not torch.equal(x, after[name])}
    return {name.split(".self_attn.")[-1] for name in names}


def recovered(job, teacher, spec, batch: Tensor, steps: int = STEPS) -> tuple[float, float]:
    return recovery.recover(job.model, teacher, job.family, spec, batch, steps)


@pytest.mark.parametrize(
    ("recipe", "size"),
    [slow("lean", {"keep": 0.15}), ("lean", {"factor": 12}), ("swift", {"factor": 6})],
)
def test_maps_learn_and_nothing_else(jobs, batch, recipe: str, size: dict) -> None:
    job, teacher, spec = folded(jobs, recipe, **size)
    before = {name: x.clone() for name, x in job.model.state_dict().items()}
    original = {name: x.clone() for name, x in teacher.state_dict().items()}
    flags = [p.requires_grad for p in job.model.parameters()]
    first, last = recovered(job, teacher, spec, batch)
    print(f"{recipe} {size}: {first:.4f} -> {last:.4f}")
    assert last < 0.8 * first
    maps = {"down_proj.weight", "down_proj.bias", "key_up", "key_down", "key_shift", "key_mean"}
    maps |= {"value_up", "o_proj.bias"}
    kinds = {layer.values for layer in spec.layers}
    maps |= {"o_proj.weight"} if "fused" in kinds else set()
    names = changed(before, job.model)
    assert names <= maps and "down_proj.weight" in names
    assert not changed(original, teacher)
    assert [p.requires_grad for p in job.model.parameters()] == flags
    assert all(p.grad is None for p in job.model.parameters())


def test_the_loss_is_the_divergence_of_what_pages_give(jobs, batch, monkeypatch) -> None:
    job, teacher, spec = folded(jobs, "lean", factor=12)
    cache = RoundOnlyCache(spec.layers)
    with torch.no_grad():
        wanted = teacher(batch).logits.log_softmax(-1)
        found = job.model(batch, **cache_argument(cache)).logits.log_softmax(-1)
    divergence = (wanted.exp() * (wanted - found)).sum(-1).mean()
    monkeypatch.setattr(training, "_CHUNK", 50)  # of 128 positions
    first, _ = recovered(job, teacher, spec, batch, 1)
    assert first == pytest.approx(float(divergence), rel=1e-4)


def test_padding_of_stacks_stays_zero(jobs, batch) -> None:
    job, teacher, spec = folded(jobs, "lean", keep=0.15)
    recovered(job, teacher, spec, batch, 3)
    padded = 0
    for attention in job.family.attentions(job.model):
        for latent, stack in zip(attention.spec.key_latents, attention.key_up, strict=True):
            assert not stack[:, latent.rank :].any()
            assert stack[:, : latent.rank].any() or not latent.rank
            padded += stack[:, latent.rank :].numel()
    assert padded


def test_a_model_in_few_bits_learns_in_float32_and_keeps_its_dtype(jobs, batch) -> None:
    job, teacher, spec = folded(jobs, "lean", torch.bfloat16, keep=0.15)
    first, last = recovered(job, teacher, spec, batch)
    assert last < 0.9 * first
    assert {p.dtype for p in job.model.parameters()} == {torch.bfloat16}


def test_seeds_decide_the_order(batch) -> None:
    rows = torch.arange(40)[:, None]
    one, same, other = (list(batches_of(rows, recovery.BATCH, 5, seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len(torch.cat(one[:2]).unique()) == 2 * recovery.BATCH  # none twice before all were seen


def test_a_diverging_loss_is_refused(jobs, batch, monkeypatch) -> None:
    job, teacher, spec = folded(jobs, "lean", keep=0.15)
    monkeypatch.setattr(recovery, "RATE", 1e30)
    with pytest.raises(
        ValueError, match=f"diverged at step . of {STEPS}, and the maps with it: load"
    ):
        recovered(job, teacher, spec, batch)
    assert not any(
        p.requires_grad for a in job.family.attentions(job.model) for p in a.parameters()
    )


# -- through the API ----------------------------------------------------------------------------


def test_what_was_learnt_is_saved(reference, jobs, tmp_path, monkeypatch) -> None:
    for module in (recovery, compressor):
        monkeypatch.setattr(module, "BATCH", 2)
    monkeypatch.setattr(calibration_text, "CALIBRATION_WINDOW", 64)
    seen: list[tuple[str, int, int]] = []
    model = kvfold.compress(
        copy.deepcopy(reference),
        "lean",
        factor=12,
        recover=4,
        statistics=jobs["lean"].statistics,
        tokenizer=load_tokenizer("reference:gqa"),
        output=tmp_path / "recovered",
        progress=lambda *stage: seen.append(stage),
        fold=True,
    )
    made = provenance_of(model)["recovery"]
    assert made["steps"] == 4 and made["tokens"] == 4 * 2 * 64
    # Of the first and the last windows, which are other text: far from diverging.
    assert math.isfinite(made["before"]) and 0 < made["after"] < 2 * made["before"]
    assert [x for x in seen if x[0] == "recover"] == [("recover", i, 4) for i in range(1, 5)]
    again = kvfold.load(str(tmp_path / "recovered"), device="cpu")
    ids = tokens(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert provenance_of(again)["recovery"] == made
    plain = kvfold.compress(
        copy.deepcopy(reference), "lean", factor=12, statistics=jobs["lean"].statistics, fold=True
    )
    with torch.no_grad():
        assert (plain(ids).logits - model(ids).logits).abs().max() > 1e-2
    assert "recovery" not in provenance_of(plain)


def test_a_text_that_is_read_often_is_warned_of(recwarn) -> None:
    recovery.warn_of_passes(4, 16)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="reads its text 8 times, .* at most 4 steps"):
        recovery.warn_of_passes(8, 16)


def test_negative_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="recover must be at least 0 steps, got -1"):
        kvfold.compress("nowhere", recover=-1, fold=True)
