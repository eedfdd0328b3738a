"""Every number format keeps the contract that pages are written and read by."""

from functools import lru_cache
from typing import Any

import pytest
import torch

from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.paged import PagedSession
from kvfold.layout.formats import FORMATS, format_of
from kvfold.layout.formats.base import Format, FormatRequest
from kvfold.layout.formats.unquantized import Unquantized
from kvfold.recipes import get
from models import tiny, tokens
from steps import logits_of
from store_cases import numbers

PAGE, GROUPS, PAGES, WIDTH = 8, 3, 2, 20
BOOKS = tuple(tuple(torch.linspace(-1, 1, 2**bits).tolist()) for bits in (4, 3, 2))
CASES = [Unquantized(itemsize=2)] + [
    format_of(name).for_request(FormatRequest(side=side, bits=bits, page=PAGE, codebooks=BOOKS))
    for name in FORMATS
    for side in ("k", "v")
    for bits in format_of(name).widths
]


@pytest.mark.parametrize("form", CASES, ids=repr)
def test_a_format_decodes_what_it_encodes(form: Format) -> None:
    """Bytes and metadata are as many as declared; rows that are not there are 0, whatever their
    bytes; the others come back as exactly as so many bits can."""
    rows = numbers(0, torch.bfloat16, PAGES * PAGE, GROUPS, WIDTH)
    rows /= rows.abs().amax(0)  # as formats with calibrated ranges are given them
    codes, metadata = form.encode(rows, PAGE)
    shape = (PAGES, GROUPS, WIDTH) if form.per_channel else (PAGES * PAGE, GROUPS)
    assert codes.shape == (*rows.shape[:2], form.row_bytes(WIDTH)) and codes.dtype is torch.uint8
    assert [(x.shape, x.dtype) for x in metadata] == [(shape, form.metadata)] * form.num_metadata

    last = 0 if form.per_channel else 5  # rows of the last page
    inside = torch.arange(PAGE) < torch.tensor([PAGE, last])[:, None, None]
    inside = inside.expand(-1, GROUPS, -1)
    codes, want = (x.unflatten(0, (PAGES, PAGE)).transpose(1, 2).clone() for x in (codes, rows))
    codes[~inside] = 255
    if not form.per_channel:
        metadata = tuple(x.unflatten(0, (PAGES, PAGE)).mT.clone() for x in metadata)
    for x in metadata:
        x[~inside[..., 0] if form.per_channel else ~inside] = torch.nan
    out = torch.full_like(want, torch.nan, dtype=torch.float32 if form.bits < 16 else None)
    form.decode(codes, metadata, inside, out)
    assert not out[~inside].any()
    error = (out - want)[inside].norm() / want[inside].norm()
    # About what steps from the least to the largest leave of Gaussian numbers, or e4m3.
    assert error <= max(0.05, 2.5 * 1.8**-form.bits)


@lru_cache
def model_of(form: str) -> Any:
    """A tiny model, with levels for a format that needs them."""
    model = tiny("llama-gqa")
    if form != "kvquant":
        return model
    compressor = Compressor(model, get(form))
    made = calibrate(model, compressor.family, tokens(16, 64), compressor.needs)
    prepared = compressor.prepare(made)
    return prepared.folded_copy(prepared.plan(1.0))


def logits(form: str, chunk: int = 16, **settings: Any) -> torch.Tensor:
    """Of 61 tokens, the last 11 one by one; pages hold what they say, and are given back."""
    config = CacheConfig(kv_bytes=2**22, page=PAGE, **settings)
    runner = build_runner(model_of(form), config, num_slots=2, max_tokens=100)
    ids = tokens(1, 61)[0].tolist()
    with PagedSession(runner, chunk) as session:
        found = [logits_of(session, ids[:50], prompt=50)]
        found += [logits_of(session, [x]) for x in ids[50:]]
        runner.pool.check_integrity()
        held = session.footprint()
        assert held.tokens == 61 and held.cache_bytes == runner.pool.used_bytes
        assert held.kept_fraction < held.pool_fraction
    assert runner.pool.used_bytes == 0
    return torch.cat(found)


def packed(form: str, bits: int) -> dict[str, Any]:
    """A cache whose tokens wait as shortly as may be."""
    waits = format_of(form).residual is not None
    return {"format": form, "bits": bits, "residual": PAGE if waits else None}


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_serves_a_model(form: str) -> None:
    """More bits lose less, down to nothing, and never a token that is not there."""
    whole, lost = logits(form), []
    for bits in sorted(format_of(form).widths, reverse=True):
        found = logits(form, **packed(form, bits))
        assert found.isfinite().all()
        lost.append(float((found - whole).norm() / whole.norm()))
    assert lost == sorted(lost) and 0 < lost[0] < 0.15
    assert len(lost) == 1 or lost[-1] > 2 * lost[0]


@pytest.mark.parametrize("form", FORMATS)
def test_chunks_of_a_prompt_do_not_matter(form: str) -> None:
    """Tokens one by one, in chunks that end within a page, and all at once."""
    widths = format_of(form).widths
    settings = packed(form, 4 if 4 in widths else widths[0])
    if settings["residual"]:
        settings["residual"] = 2 * PAGE
    one, *others = (logits(form, chunk, **settings) for chunk in (1, 7, 64))
    for found in others:
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-4)


def test_a_format_has_the_name_that_it_is_chosen_by() -> None:
    for name in FORMATS:
        assert format_of(name).name == name
    with pytest.raises(ValueError, match=r"one of integers, kivi.* got 'int5'"):
        format_of("int5")
