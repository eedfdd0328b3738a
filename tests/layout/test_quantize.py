"""Few-bit integers and the rotation before them, against slow references and stated bounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.layout.formats.integers import (
    FP16_MAX,
    GAUSSIAN_STEP,
    dequantize,
    pack,
    quantize,
    scale_of,
    unpack,
)
from kvfold.ops.common.rotation import rotation
from quantize_cases import U, bound

BITS = (8, 6, 4, 3, 2, 1)


def slow_pack(codes: list[int], bits: int) -> list[int]:
    """Number i of a byte in its bits i * b and up; 3 and 6 bits: all low ones, then all high."""
    if bits in (3, 6):
        low = 2 * bits // 3
        first = slow_pack([c & (1 << low) - 1 for c in codes], low)
        return first + slow_pack([c >> low for c in codes], bits - low)
    per = 8 // bits
    found = [0] * -(-len(codes) // per)
    for i, code in enumerate(codes):
        found[i // per] |= code << (i % per * bits)
    return found


def roundtrip(x: Tensor, bits: int, zeros: bool) -> Tensor:
    codes, scale, zero = quantize(x, bits, zeros)
    assert codes.dtype is torch.uint8 and scale.dtype is torch.float16
    assert codes.shape == x.shape and scale.shape == x.shape[:-1]
    assert (zero is not None) == zeros
    return dequantize(codes, scale_of(scale, bits), zero, bits)


def samples(name: str, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if name == "laplace":
        x = x.sign() * torch.empty(shape).exponential_(generator=generator)
    if name == "outlier":
        x[..., 0] *= 100
    if name == "shifted":
        x += 20
    return x


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from(BITS), data=st.data())
def test_pack_is_bit_exact(bits: int, data) -> None:
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=35))
    rows = torch.tensor([codes, codes[::-1]], dtype=torch.uint8)
    packed = pack(rows, bits)
    assert packed.tolist() == [slow_pack(codes, bits), slow_pack(codes[::-1], bits)]
    assert torch.equal(unpack(packed, len(codes), bits), rows)


@pytest.mark.parametrize("bits", BITS)
def test_pack_takes_any_strides_and_no_rows(bits: int) -> None:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randint(0, 2**bits, (5, 3, 19), generator=generator, dtype=torch.uint8)
    one = wide[..., :16].contiguous()[..., None].mT  # a dimension of one, whose stride is 1
    for codes in (wide.transpose(0, 2), wide[..., 1:], wide[:, 1:2, 2:3], wide[:0], one):
        packed = pack(codes, bits)
        assert torch.equal(packed, pack(codes.contiguous(), bits))
        padded = torch.full((*packed.shape[:-1], packed.shape[-1] + 3), 255, dtype=torch.uint8)
        padded[..., 1:-2] = packed
        assert torch.equal(unpack(padded[..., 1:-2], codes.shape[-1], bits), codes)


@pytest.mark.parametrize("bits", BITS)
def test_step_is_the_best_for_a_gaussian(bits: int) -> None:
    x = torch.linspace(-12, 12, 200001, dtype=torch.float64)
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def error(step: float) -> float:
        top = 2**bits - 1
        grid = ((x / step + top / 2).round().clamp(0, top) - top / 2) * step
        return float(torch.trapezoid((x - grid) ** 2 * density, x))

    step = GAUSSIAN_STEP[bits]
    assert error(step) < min(error(step * 0.99), error(step * 1.01))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["gauss", "laplace", "outlier", "shifted"])
def test_error_stays_below_the_stated_bound(name: str, bits: int, zeros: bool) -> None:
    for n in (1, 2, 7, 64, 128):
        for size in (1e-7, 1e-3, 1.0, 50.0):
            x = size * samples(name, 200, n)
            error = (x - roundtrip(x, bits, zeros)).abs()
            assert (error <= bound(x, bits, zeros) * (1 + 1e-4)).all(), (n, size)
            if zeros:
                continue
            step = quantize(x, bits, zeros)[1].float()[..., None]
            reach = x.abs().amax(-1, keepdim=True) - step * (2**bits - 1) / 2
            assert (error <= torch.maximum(step / 2, reach) * (1 + 1e-4)).all(), (n, size)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["gauss", "laplace", "outlier"])
def test_symmetric_scale_beats_covering_the_maximum(name: str, bits: int) -> None:
    x = samples(name, 500, 128)
    half = (2**bits - 1) / 2
    widest = (x.abs().amax(-1) / half).half()
    codes = (x / widest.float()[..., None] + half).round().clamp(0, 2**bits - 1)
    naive = (dequantize(codes.to(torch.uint8), widest.float(), None, bits) - x).square().sum(-1)
    ours = (roundtrip(x, bits, False) - x).square().sum(-1)
    assert (ours <= naive * (1 + 1e-5)).all()
    most = {1: 0.3, 2: 0.45, 3: 0.7, 4: 0.92, 6: 1.0, 8: 1.0}[bits]
    assert ours.sum() <= most * naive.sum()


@pytest.mark.parametrize("bits", BITS)
def test_gaussian_error_is_near_the_optimum(bits: int) -> None:
    """Max 1960, table II: 0.3634, 0.1188, 0.03744, 0.01154 with 2, 4, 8, 16 levels."""
    x = samples("gauss", 2000, 128)
    share = float((roundtrip(x, bits, False) - x).square().mean() / x.square().mean())
    assert share < {1: 0.364, 2: 0.1190, 3: 0.0375, 4: 0.0116, 6: 9e-4, 8: 4.5e-5}[bits]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_constant_groups_are_exact(bits: int, zeros: bool) -> None:
    values = torch.tensor([0.0, 1.0, -1.0, 0.1, -3e-5, 7.3e-8, 1234.56, 32752.0, -32752.0])
    for n in (1, 5, 64):
        x = values.half().float()[:, None].expand(-1, n)
        assert torch.equal(roundtrip(x, bits, zeros), x)
        x = values[:, None].expand(-1, n)
        nearest = (x - x.half().float()).abs()
        assert ((roundtrip(x, bits, zeros) - x).abs() <= nearest).all()
    if bits == 1 and not zeros:
        return  # the scale, twice the number, saturates
    large = torch.tensor([[32768.0], [-50000.0], [65504.0]]).expand(-1, 9)
    assert torch.allclose(roundtrip(large, bits, zeros), large, rtol=1.01 * U, atol=0)


@pytest.mark.parametrize("bits", BITS)
def test_groups_of_one_magnitude_are_exact(bits: int) -> None:
    x = 3.14 * samples("gauss", 50, 33).sign()
    error = (roundtrip(x, bits, False) - x).abs()
    assert (error <= (x.half().float() - x).abs()).all()
    assert torch.equal(roundtrip(x.half(), bits, False), x.half().float())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_nan_and_inf_stay_in_their_group(bits: int, zeros: bool) -> None:
    x = samples("gauss", 4, 16)
    clean = roundtrip(x, bits, zeros)
    x[0, 3], x[1, 0], x[2, 15] = torch.nan, torch.inf, -torch.inf
    found = roundtrip(x, bits, zeros)
    assert found[:3].isnan().all()
    assert torch.equal(found[3], clean[3])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_huge_numbers_saturate(bits: int, zeros: bool) -> None:
    x = torch.tensor([[3e38, -3e38, 1.0], [1e30, 1e30, 1e30], [-1e7, 0.0, 1e7]])
    codes, scale, zero = quantize(x, bits, zeros)
    found = dequantize(codes, scale_of(scale, bits), zero, bits)
    assert found.isfinite().all()
    assert (scale.abs() <= FP16_MAX).all()
    assert found[0, 0] > 30000 or bits == 1  # one level above -65504 is 0
    assert found[0, 1] < -30000


def test_half_precision_numbers_quantize_as_their_fp32_values() -> None:
    x = samples("gauss", 6, 40)
    for dtype in (torch.bfloat16, torch.float16):
        low = x.to(dtype)
        for a, b in zip(quantize(low, 4, True), quantize(low.float(), 4, True), strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 12, 20, 64, 80, 100, 256])
def test_rotation_is_orthogonal(n: int) -> None:
    q = rotation(n)
    assert q.shape == (n, n) and q.dtype is torch.float64
    identity = torch.eye(n, dtype=torch.float64)
    assert torch.allclose(q @ q.T, identity, rtol=0, atol=1e-12)
    assert torch.allclose(q.T @ q, identity, rtol=0, atol=1e-12)
    assert torch.equal(q, rotation(n, seed=0))
    assert n < 12 or not torch.equal(q, rotation(n, seed=1))


def test_rotation_is_the_one_factor_of_its_gaussian() -> None:
    """With R's diagonal positive Q is unique, whatever signs the platform's QR gives."""
    gaussian = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    r = rotation(12, seed=3).T @ gaussian
    assert torch.allclose(r, r.triu(), rtol=0, atol=1e-12) and (r.diagonal() > 0).all()


def test_rotation_spreads_outliers() -> None:
    assert torch.allclose(rotation(64).abs(), torch.full((64, 64), 1 / 8, dtype=torch.float64))
    for n in (96, 128):
        x = samples("outlier", 100, n).double()
        turned = x @ rotation(n)
        assert (turned.abs().amax(-1) < 0.5 * x.abs().amax(-1)).float().mean() > 0.9
        before = (roundtrip(x.float(), 4, True) - x).square().mean()
        after = (roundtrip(turned.float(), 4, True) - turned).square().mean()
        assert after < 0.5 * before


def test_rotation_refuses_a_negative_width() -> None:
    with pytest.raises(ValueError, match="-1"):
        rotation(-1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["gauss", "laplace"])
def test_fp8_scales_cost_little_where_numbers_are_of_known_size(name: str, bits: int) -> None:
    for size in (0.02, 1.0, 10.0):
        x = size * samples(name, 500, 128)
        codes, stored, _ = quantize(x, bits, False, torch.float8_e4m3fn)
        assert stored.dtype is torch.float8_e4m3fn
        step = scale_of(stored, bits)[..., None]
        found = dequantize(codes, step[..., 0], None, bits)
        reach = x.abs().amax(-1, keepdim=True) - step * (2**bits - 1) / 2
        assert ((found - x).abs() <= torch.maximum(step / 2, reach) * (1 + 1e-4)).all()
        exact = (roundtrip(x, bits, False) - x).square().sum()
        # With many levels the scale should reach the largest number, and misses it by up to 1/16.
        assert (found - x).square().sum() <= (1.15 if bits <= 4 else 2.0) * exact


def test_fp8_scales_keep_zero_and_nan_apart() -> None:
    x = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0]])
    codes, stored, _ = quantize(x, 4, False, torch.float8_e4m3fn)
    found = dequantize(codes, scale_of(stored, 4), None, 4)
    assert not found[0].any() and found[1:].isnan().all()
