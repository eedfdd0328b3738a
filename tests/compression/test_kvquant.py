"""KVQuant: levels of weighted k-means, ranges in the maps, outliers in the rows."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import recipes
from kvfold.calibration.calibrate import calibrate
from kvfold.calibration.statistics import Moment
from kvfold.calibration.statistics.quantities import Sampled
from kvfold.compression import codebooks
from kvfold.compression.bases.base import Source
from kvfold.compression.bases.sorted_channels import SortedChannels, sheared
from kvfold.compression.codebooks import Samples, in_range, k_means
from kvfold.compression.compressor import Compressor, Prepared
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.paged import PagedSession
from kvfold.layout import CacheSpec
from kvfold.layout.formats.kvquant import KVQuant, num_outliers
from kvfold.layout.pages import cache_layout
from kvfold.models.fold import LatentMaps
from kvfold.ops.store import gather
from models import tiny, tokens
from steps import logits_of

LEVELS = (-1.0, -0.4, 0.1, 0.9)


def decoded(form: KVQuant, x: Tensor) -> Tensor:
    codes, metadata = form.encode(x, 1)
    out = torch.empty_like(x, dtype=torch.float32)
    form.decode(codes, metadata, torch.ones_like(x[..., 0], dtype=torch.bool), out)
    return out


def test_numbers_become_their_nearest_level_and_outliers_stay() -> None:
    x = torch.tensor([[[0.0, -0.8, 0.45, 3.25, -0.6, 0.48, 2.0]]])
    keys = KVQuant(bits=2, levels=LEVELS, ranged=False)
    wanted = [0.1, -1.0, 0.1, 3.25, -0.4, 0.1, 0.9]  # one of 7 is an outlier; 2.0 is not
    torch.testing.assert_close(decoded(keys, x), torch.tensor([[wanted]]))
    values = KVQuant(bits=2, levels=LEVELS, ranged=True)
    middle, half = 0.6, 1.4  # of -0.8 .. 2.0
    wanted = [middle + half * level for level in (-0.4, -1.0, 0.1, 0, -1.0, 0.1, 0.9)]
    wanted[3] = 3.25
    torch.testing.assert_close(decoded(values, x), torch.tensor([[wanted]]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ranged", [False, True])
@pytest.mark.parametrize("width", [1, 2, 64, 101, 300])
def test_bytes_are_what_is_written(width: int, ranged: bool) -> None:
    """Constant rows, and numbers beyond fp16, are no accident."""
    form = KVQuant(bits=2, levels=LEVELS, ranged=ranged)
    x = torch.zeros(3, 2, width)
    x[1] = 2.5
    x[2, 0, width // 2] = 1e6
    codes, metadata = form.encode(x, 1)
    assert codes.shape[-1] == form.row_bytes(width) and len(metadata) == form.num_metadata
    per_outlier = 3 if width <= 256 else 4
    assert form.sparse_bytes(width) == per_outlier * num_outliers(width)
    found = decoded(form, x)
    assert found.isfinite().all() and found[2, 0, width // 2] == 65504
    if ranged:
        torch.testing.assert_close(found[1], x[1], rtol=0, atol=0)


def test_what_a_token_stores_counts() -> None:
    """4 bits of 64 numbers, an outlier of 3 bytes, and of values a half range and a middle."""
    books = tuple(tuple(torch.linspace(-1, 1, n).tolist()) for n in (16, 8, 4))
    spec = kvfold_spec(books)
    layout = cache_layout(spec, bits=4, format="kvquant")
    per_head = 2 * (64 * 4 + 24) + 2 * 16
    assert layout.bits_per_token == per_head * sum(len(x.key_latents) for x in spec.layers)
    pages = layout.groups[0].layout
    assert pages.page_bytes >= 32 * (2 * (32 + 3) + 4)


def test_a_side_of_which_nothing_is_stored_needs_no_levels() -> None:
    spec = kvfold_spec(((0.0,) * 16,))
    layer = spec.layers[0]
    keys = [replace(x, rank=0, codebooks=()) for x in layer.key_latents]
    layer = replace(layer, latents=(*keys, *layer.latents[len(keys) :]))
    layout = cache_layout(replace(spec, layers=(layer,)), bits=4, format="kvquant")
    assert {x.side for group in layout.groups for x in group.layout.segments} == {"v"}


def kvfold_spec(books) -> CacheSpec:
    from kvfold.layout.pages import plain_spec
    from selector_cases import GEOMETRY

    spec = plain_spec(replace(GEOMETRY, head_dim=64))
    layers = tuple(
        replace(x, latents=tuple(replace(y, codebooks=books) for y in x.latents))
        for x in spec.layers
    )
    return replace(spec, layers=layers)


def test_k_means_finds_the_weighted_optimum() -> None:
    """Far clusters: their weighted means; weightless numbers move nothing."""
    numbers = torch.tensor([-1, -0.9, -0.1, 0.1, 0.8, 0.9, 1.0], dtype=torch.double)
    weights = torch.tensor([3, 1, 1, 1, 1, 1, 0], dtype=torch.double)
    wanted = torch.tensor([-0.975, 0.0, 0.85], dtype=torch.double)
    torch.testing.assert_close(k_means(numbers, weights, 3), wanted)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_levels_beat_even_ones(bits: int) -> None:
    """By the error that they are found for; k-means ends no worse than where it began."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, generator=generator).double().clamp(-3, 3).sort().values / 3
    weights = torch.rand(4000, generator=generator).double()

    def loss(levels: Tensor) -> float:
        return float((weights * (x[:, None] - levels).abs().amin(1).square()).sum())

    found = k_means(x, weights, 2**bits)
    assert loss(found) < 0.9 * loss(torch.linspace(-1, 1, 2**bits).double())
    assert torch.equal(found, found.sort().values)


def test_ranges_hold_what_they_should() -> None:
    """99 % of every stored number of the samples in -1 .. 1, and the same numbers come back."""
    x = torch.randn(2000, 5, generator=torch.Generator().manual_seed(1)).double()
    samples = Samples(x * torch.tensor([1, 5, 0.1, 0, 2]) + 3, torch.ones_like(x))
    eye = torch.eye(5).double()
    maps = in_range(LatentMaps(eye, eye, eye.new_zeros(5)), samples)
    stored = samples.stored(maps)
    outside = (stored.numbers.abs() > 1 + 1e-9).double().mean(0)
    assert (outside[[0, 1, 2, 4]] - 0.01).abs().max() < 1e-3 and outside[3] == 0
    torch.testing.assert_close(maps.mean + stored.numbers @ maps.up.mT, samples.numbers)
    torch.testing.assert_close(stored.gradients[0], torch.diagonal(maps.up))


def test_samples_are_spread_over_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.calibration.statistics.quantities.MIN_SAMPLES", 50)
    found = Sampled(torch.zeros(40, 1))
    for i in range(1, 40):
        found += Sampled(torch.full((40, 1), float(i)))
    assert 50 <= len(found.rows) <= 100
    assert len(found.rows.unique()) == 40


def prepared(recipe: str, name: str = "llama-gqa") -> Prepared:
    model = tiny(name)
    compressor = Compressor(model, recipes.get(recipe))
    made = calibrate(model, compressor.family, tokens(16, 64), compressor.needs)
    return compressor.prepare(made)


@pytest.mark.parametrize("sink", [True, False])
def test_a_first_token_far_out_is_one_outlier(sink: bool) -> None:
    """It comes back as well as others do; where it is not far out, channels stay as they are."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(64, generator=generator).double() + 0.1
    keys = torch.randn(4000, 64, generator=generator).double() * spread + 1
    first = keys[0] + (40 * spread * torch.randn(64, generator=generator) if sink else 0)
    up = sheared(keys, first)
    down = torch.linalg.inv(up).mT
    assert torch.equal(up, torch.eye(64).double()) != sink
    stored = Samples(keys @ down, keys)
    assert (stored.numbers.std(0) <= 1.5 * spread).all()
    maps = in_range(LatentMaps(down, up, torch.zeros(64).double()), Samples(keys, keys))
    form = KVQuant(bits=4, levels=tuple(torch.linspace(-1, 1, 16).tolist()), ranged=False)
    both = torch.stack((first, keys[1]))
    rows = ((both - maps.mean) @ maps.down).float()[:, None]
    error = (decoded(form, rows)[:, 0].double() @ maps.up.mT + maps.mean - both) / spread
    assert error.square().mean(1).sqrt().max() < 0.25


def test_axes_are_sheared_by_a_head_s_own_first_key() -> None:
    """Of keys before RoPE alone; values keep theirs, and all come back exactly."""
    generator = torch.Generator().manual_seed(0)
    d, keys = 64, torch.randn(500, 128, generator=generator).double() + 1
    keys[:, d:] *= torch.arange(1, d + 1)  # the second head's channels are not equally strong
    first = keys[0] + 40 * torch.randn(128, generator=generator)
    other = torch.randn(500, 256, generator=generator)
    made = {
        "key_pre": Moment.of(keys),
        "value": Moment.of(keys),
        "first": Moment.once(first, torch.cat((first, *other[0].split(128)))),
        "samples": Moment.once(torch.cat((keys, other, keys, other), 1).float(), first),
    }
    source = Source(
        layer=0,
        family=None,
        attention=None,
        geometry=SimpleNamespace(head_dim=d, head_width=lambda side: d),
        statistics={(0, name): moment for name, moment in made.items()},
    )
    builder = SortedChannels(recipes.get("kvquant"))
    for head in range(2):
        where = slice(head * d, (head + 1) * d)
        found = builder.build(source, "k", (head,))
        torch.testing.assert_close(found.down.mT @ found.up, torch.eye(d).double())
        off = (first[where] - keys[:, where].float().mean(0)) @ found.down
        assert int((off.abs() > 1e-3 * off.abs().max()).sum()) == 1
        plain = builder.build(source, "v", (head,))
        energy = keys[:, where].square().mean(0)
        assert torch.equal(plain.up, torch.eye(d).double()[:, energy.argsort(descending=True)])
        torch.testing.assert_close(plain.singular, energy.sort(descending=True).values.sqrt())


@pytest.mark.parametrize("recipe, keep", [("kvquant", 1.0), ("kvquant-z", 0.5)])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_a_model_is_served_from_its_levels(recipe: str, keep: float, bits: int) -> None:
    """Rows come back as near as so many levels can bring them; a saved spec is the same."""
    ready = prepared(recipe)
    spec = ready.plan(keep, 1)
    assert CacheSpec.from_dict(spec.to_dict()) == spec
    ready.fold(spec, {})
    config = CacheConfig(format="kvquant", bits=bits, kv_bytes=2**22)
    runner = build_runner(ready.compressor.model, config, num_slots=1, max_tokens=64)
    whole = build_runner(
        ready.compressor.model, CacheConfig(kv_bytes=2**22), num_slots=1, max_tokens=64
    )
    ids = tokens(1, 40, seed=9)[0].tolist()
    rows = []
    for one in (runner, whole):
        with PagedSession(one) as session:
            logits_of(session, ids, prompt=40)
            slot = torch.tensor([session.sequence.slot])
            pages = one.attention.view.pages[0]
            rows.append(gather(pages, slot, pages.lengths[slot], torch.float32, 40).rows[0])
            one.pool.check_integrity()
    got, want = rows
    latents = spec.layers[0].key_latents
    at = spec.layers[0].columns(latents[0])
    error = (got[:, at] - want[:, at]).square().mean() / want[:, at].square().mean()
    assert error < {4: 0.02, 3: 0.07, 2: 0.25}[bits]  # twice what is best for a Gaussian


def test_eviction_moves_rows_with_their_outliers() -> None:
    ready = prepared("kvquant-z")
    ready.fold(ready.plan(0.5, 1), {})
    config = CacheConfig(
        format="kvquant", bits=4, kv_bytes=2**22, page=4, evict="kv-compress", keep_tokens=0.5
    )
    runner = build_runner(ready.compressor.model, config, num_slots=1, max_tokens=64)
    with PagedSession(runner) as session:
        logits_of(session, tokens(1, 40)[0].tolist(), prompt=40)
        before = runner.pool.stats().used_bytes
        session.compress()
        runner.pool.check_integrity()
        assert runner.pool.stats().used_bytes <= 0.6 * before
        assert logits_of(session, [3, 4]).isfinite().all()


def test_mistakes_are_explained() -> None:
    model = tiny("llama-gqa")
    with pytest.raises(ValueError, match=r"needs levels.*recipe kvquant \(keep 1\) or kvquant-z"):
        build_runner(model, CacheConfig(format="kvquant", bits=4), num_slots=1, max_tokens=64)
    for size in ({}, {"keep": 0.5}, {"factor": 4}, {"budget": "ppl<=1.01"}):
        with pytest.raises(ValueError, match=r"'kvquant' drops nothing.*set keep=1"):
            kvfold.compress(model, "kvquant", **size, fold=True)
    with pytest.raises(ValueError, match=r"bits must be one of 16, 4, 3, 2; got 8"):
        ready = prepared("kvquant")
        ready.fold(ready.plan(1.0), {})
        build_runner(
            ready.compressor.model,
            CacheConfig(format="kvquant", bits=8),
            num_slots=1,
            max_tokens=64,
        )
    spec = prepared("kvquant-z").plan(0.5, 1).to_dict()
    spec["layers"][0]["latents"][0]["codebooks"] = [[1.0, 0.0, 2.0, 3.0]]
    with pytest.raises(ValueError, match="codebooks must be lists of 4, 8, 16 ascending levels"):
        CacheSpec.from_dict(spec)


def test_bits_of_codebooks_are_those_of_the_format() -> None:
    assert KVQuant.widths == codebooks.BITS
