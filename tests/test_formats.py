"""Every number format keeps the contract that pages are written and read by."""

import pytest
import torch

from kvfold.formats import FORMATS, format_of
from kvfold.formats.base import Asked, Format
from kvfold.formats.unquantized import Unquantized
from test_store import numbers

PAGE, GROUPS, PAGES, WIDTH = 8, 3, 2, 20
BOOKS = tuple(tuple(torch.linspace(-1, 1, 2**bits).tolist()) for bits in (4, 3, 2))
CASES = [Unquantized(itemsize=2)] + [
    format_of(name).of(Asked(side=side, bits=bits, page=PAGE, codebooks=BOOKS))
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


def test_a_format_has_the_name_that_it_is_chosen_by() -> None:
    for name in FORMATS:
        assert format_of(name).name == name
    with pytest.raises(ValueError, match=r"one of integers, kivi.* got 'int5'"):
        format_of("int5")
