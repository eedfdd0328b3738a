"""GEAR: outliers, few bits and a low-rank part, in whole pages."""

import pytest
import torch
from torch import Tensor

from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.paged import PagedSession
from kvfold.layout import CacheSpec, Latent, LayerSpec
from kvfold.layout.formats import format_of
from kvfold.layout.formats.base import FormatRequest
from kvfold.layout.formats.gear import MOST, Gear, low_rank, num_outliers
from kvfold.layout.formats.kivi import Kivi
from kvfold.layout.pages import cache_layout
from models import tiny, tokens
from selector_cases import GEOMETRY
from steps import logits_of


def form_of(side: str, bits: int = 2, page: int = 64) -> Gear:
    found = format_of("gear").for_request(FormatRequest(side=side, bits=bits, page=page))
    assert isinstance(found, Gear)
    return found


def through(form, x: Tensor, page: int) -> Tensor:
    """x [N, g, n] as pages give it back."""
    codes, metadata = form.encode(x, page)
    codes = codes.unflatten(0, (-1, page)).transpose(1, 2)
    out = torch.empty(*codes.shape[:-1], x.shape[-1])
    if not form.per_channel:
        metadata = tuple(y.unflatten(0, (-1, page)).mT for y in metadata)
    form.decode(codes, metadata, torch.ones_like(out[..., 0], dtype=torch.bool), out)
    return out.transpose(1, 2).flatten(0, 1)


def naive(x: Tensor, bits: int, rank: int, by_channel: bool) -> Tensor:
    """One page [P, n], line by line, with the best low-rank part instead of power iteration."""
    lines = x.mT if by_channel else x
    base, kept = torch.empty_like(lines), torch.zeros_like(lines, dtype=torch.bool)
    for i, line in enumerate(lines):
        k = num_outliers(len(line))
        order = line.argsort()
        kept[i, order[:k]] = kept[i, order[-k:]] = True
        filled = line.where(~kept[i], line.mean())
        low, step = filled.min().half().float(), (filled.max() - filled.min()) / (2**bits - 1)
        base[i] = low + (filled - low).div(step).round().clamp(0, 2**bits - 1) * step
        base[i, kept[i]] = line[kept[i]]
    u, s, vt = torch.linalg.svd(lines - base)
    base += (u[:, :rank] * s[:rank] @ vt[:rank]).where(~kept, 0.0)
    return base.mT if by_channel else base


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("side", ["k", "v"])
def test_pages_are_lines_outliers_and_a_low_rank_part(side: str, bits: int) -> None:
    """Against loops and an SVD: the error is the same to three hundredths."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 2, 32, generator=generator) * 10 ** torch.rand(32, generator=generator)
    x[5, 1, 7], x[90, 0, 3] = 80.0, -95.0
    form = form_of(side, bits)
    found = through(form, x, 64)
    wanted = torch.empty_like(x)
    for first in (0, 64):
        for group in (0, 1):
            page = x[first : first + 64, group]
            wanted[first : first + 64, group] = naive(page, bits, form.rank, side == "k")
    assert found[5, 1, 7] == 80 and found[90, 0, 3] == -95
    mine, best = ((y - x).square().mean().sqrt() for y in (found, wanted))
    assert mine < 1.03 * best


def test_it_is_nearer_than_what_it_adds_to() -> None:
    """KIVI of as many bits: outliers and rank are what is paid for."""
    x = torch.randn(64, 2, 32, generator=torch.Generator().manual_seed(1)) ** 3
    kivi = Kivi(bits=2)
    mine, plain = ((through(f, x, 64) - x).square().mean() for f in (form_of("k"), kivi))
    assert mine < 0.7 * plain


def test_power_iteration_finds_the_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 2, n, 2, generator=generator) for n in (64, 20))
    left = a @ b.mT
    down, up = low_rank(left, 2)
    torch.testing.assert_close(down.float() @ up.float().mT, left, rtol=1e-2, atol=2e-2)
    down, up = low_rank(left[..., :1], 4)
    assert down.shape[-1] == up.shape[-1] == 4 and not down[..., 1:].any()


def test_bytes_count() -> None:
    """A page of 64 tokens and 16 numbers a head and side, 2 bits each. Keys: 2 numbers of a row and
    of a channel are the low rank, and a channel has a scale, a zero, and one outlier at either end,
    of fp16 and a byte. Values: the same of rows."""
    latents = tuple(Latent(side=side, heads=(head,), rank=16) for side in "kv" for head in (0, 1))
    layer = LayerSpec(keys="plain", values="plain", latents=latents)
    spec = CacheSpec(geometry=GEOMETRY, layers=(layer,))
    layout = cache_layout(spec, bits=2, format="gear", page=64)
    keys = 64 * (16 * 2 + 2 * 16) + 16 * (2 * 16 + 32 + 2 * 24)
    values = 64 * (16 * 2 + 2 * 16 + 32 + 2 * 24) + 16 * 2 * 16
    group = layout.groups[0].layout
    assert group.row_bits * 64 == keys + values
    assert 0 <= 8 * group.page_bytes - keys - values < 8 * 128
    assert layout.residual == 64


def test_defaults_are_the_published_ones() -> None:
    runner = build_runner(
        tiny("llama-gqa"), CacheConfig(format="gear", bits=2, kv_bytes=2**22), num_slots=1,
        max_tokens=200,
    )  # fmt: skip
    assert runner.pool.layout.page == runner.pool.layout.residual == 64
    ranks = [form_of("k", page=page).rank for page in (32, 64, 128, MOST)]
    assert ranks == [2, 2, 4, 4]
    assert form_of("v").segment_widths(130, 64) == [43, 43, 44] and form_of("k").segment_widths(
        130, 64
    ) == [130]


@pytest.mark.parametrize("chunk", [7, 96])
def test_a_model_is_served_from_it(chunk: int) -> None:
    """However prompts come; pages and tails are freed."""
    model, ids, found = tiny("llama-gqa"), tokens(1, 100)[0].tolist(), []
    for bits in (4, 16):
        form = {} if bits == 16 else {"format": "gear", "bits": bits, "page": 8, "residual": 16}
        runner = build_runner(
            model, CacheConfig(kv_bytes=2**22, **form), num_slots=1, max_tokens=128
        )
        with PagedSession(runner) as session:
            found.append(logits_of(session, ids, prompt=100, chunk=chunk))
            runner.pool.check_integrity()
            held = session.footprint().cache_bytes
        assert held > 0 and runner.pool.stats().used_bytes == 0
    error = (found[0] - found[1]).norm() / found[1].norm()
    assert 0 < error < 0.1


def test_mistakes_are_explained() -> None:
    model = tiny("llama-gqa")
    about = {"num_slots": 1, "max_tokens": 64}
    with pytest.raises(ValueError, match="pages of at most 256 rows, got 512: take smaller"):
        config = CacheConfig(format="gear", bits=2, page=512, residual=512)
        build_runner(model, config, **about)
    with pytest.raises(ValueError, match=r"whole pages of 64 rows.*got 32"):
        CacheConfig(format="gear", bits=2, residual=32)
    with pytest.raises(ValueError, match="stores zeros in any case"):
        build_runner(model, CacheConfig(format="gear", bits=2, zeros=True), **about)
    with pytest.raises(ValueError, match="exclude each other: tokens are packed together"):
        CacheConfig(format="gear", bits=2, evict="h2o", keep_tokens=0.5)
    layer = LayerSpec(
        keys="pre_rope", values="fused", latents=(Latent(side="kv", heads=(0, 1), rank=16),)
    )
    spec = CacheSpec(geometry=GEOMETRY, layers=(layer,))
    with pytest.raises(ValueError, match=r"one latent for both.*such as zdc"):
        cache_layout(spec, bits=2, format="gear", page=64)
