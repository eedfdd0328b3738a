"""Attention over rebuilt keys: the reference against float64, the kernels against the reference.

Without a GPU the kernels run in Triton's interpreter.
"""

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from kvfold.layout import CacheSpec, Geometry, LayerSpec  # noqa: E402
from kvfold.layout.pages import cache_layout  # noqa: E402
from kvfold.ops.backend import use_triton  # noqa: E402
from kvfold.ops.common.tuning import Tuning  # noqa: E402
from kvfold.ops.latent_decode import (  # noqa: E402
    latent_decode,
    plan_layers,
    reference,
    rope_table,
    triton_pieces,
)
from kvfold.ops.latent_decode import triton as latent_triton  # noqa: E402
from kvfold.ops.latent_decode.groups import unsupported_reason  # noqa: E402
from kvfold.ops.latent_decode.maps import find_drift  # noqa: E402
from kvfold.ops.latent_decode.pieces import unsupported_reason as unsupported_by_pieces  # noqa: E402
from kvfold.ops.latent_decode.plan import HOPPER_BLOCK, Passes, table  # noqa: E402
from matrix import slow  # noqa: E402
from rebuild_triton_cases import (  # noqa: E402
    DEVICE,
    Case,
    _angles,
    explicit,
    latents,
    poisoned,  # noqa: F401
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]
SMALL = Passes(
    scores=Tuning(block=16, warps=4, slices=1), values=Tuning(block=16, warps=4, slices=1)
)


def error(case: Case, passes: Passes | None = SMALL) -> float:
    """Of the kernels, relative to float64; passes None: as they come."""
    assert not unsupported_reason(case.layer, case.groups)
    want = explicit(case)[0].float()
    out, _ = case.run(latent_triton.latent_decode, passes=passes)
    return float((out.float() - want).norm() / want.norm())


def error_of_pieces(case: Case) -> float:
    assert not unsupported_by_pieces(case.layer, case.groups)
    want = explicit(case)[0].float()
    out, _ = case.run(triton_pieces.latent_decode)
    return float((out.float() - want).norm() / want.norm())


KINDS = [("lean", [16, 48], 64), ("palu", [48, 48], 64), ("small", [0, 0], 48)]


@pytest.mark.parametrize("kind,keys,values", KINDS)
def test_reference(kind: str, keys: list[int], values: int) -> None:
    case = Case(kind, keys, values, [37, 0, 16, 2], tracked=True, rotary=16, scaling=1.2)
    found, _ = case.run(reference.latent_decode, dtype=torch.float64)
    torch.testing.assert_close(found.double(), explicit(case)[0], rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("kind,keys,values", KINDS)
def test_sixteen_bits(kind: str, keys: list[int], values: int, tracked: bool) -> None:
    """Ragged ranks; no rows, a full tile, one row more than a group has; positions in no order."""
    assert error(Case(kind, keys, values, [33, 0, 16, 1], tracked=tracked)) < 1e-3


@pytest.mark.parametrize("kind,bits,zeros", [
    ("lean", 8, False), ("lean", 4, True), ("palu", 8, True), ("palu", 4, False),
    ("small", 4, True), ("small", 8, False),
])  # fmt: skip
def test_codes(kind: str, bits: int, zeros: bool) -> None:
    """Rows of an odd number of scales too, and of one scale for keys and values."""
    keys, values = next((k, v) for name, k, v in KINDS if name == kind)
    assert error(Case(kind, keys, values, [21], bits=bits, zeros=zeros, tracked=zeros)) < 1e-3


@pytest.mark.parametrize("kind,keys,values,options", [
    ("lean", [16, 48], 64, {"tiers": [8, 4, 2]}),
    ("lean", [16, 48], 64, {"tiers": [8, 2], "tracked": True}),
    ("lean", [64, 64], 96, {"bits": 2}),
    ("lean", [64, 64], 96, {"bits": 4, "zeros": True, "queries": 3, "rotary": 40, "d": 48}),
    ("palu", [48, 48], 64, {"tiers": [4, 2]}),
    ("small", [0, 0], 48, {}),
    ("small", [0, 0], 64, {"tiers": [8, 4, 2], "scaling": 1.2}),
    ("small", [0, 0], 600, {"tiers": [8, 4], "page": 64, "queries": 1}),
    ("small", [0, 0], 600, {"queries": 4}),
])  # fmt: skip
def test_piece_by_piece(kind: str, keys: list[int], values: int, options: dict) -> None:
    """Several precisions, and latents of any width."""
    assert error_of_pieces(Case(kind, keys, values, [70, 0, 17], **options)) < 1e-3


@pytest.mark.parametrize("kind,keys,values,options", [
    slow("joint", [640] * 32, 528, {}),
    slow("joint", [640] * 32, 528, {"bits": 8}),
    ("joint", [640] * 32, 528, {"bits": 4, "zeros": True, "tracked": True}),
    slow("fours", [80] * 32, 96, {}),
])  # fmt: skip
def test_thirty_two_heads(kind: str, keys: list[int], values: int, options: dict) -> None:
    """Llama-2-7B's heads, which have one query each: all of a latent, as LoRC and Palu's J-LRD have
    them, wider than other kernels hold; or four."""
    case = Case(kind, keys, values, [37, 0, 1], queries=1, d=16, **options)
    assert bool(unsupported_reason(case.layer, case.groups)) == (kind == "joint")
    assert error_of_pieces(case) < 1e-3
    if kind == "fours":
        assert error(case) < 1e-3


@pytest.mark.parametrize("options", [
    {"queries": 1}, {"queries": 3, "rotary": 40, "scaling": 1.3}, {"page": 64, "queries": 8},
    slow({"bits": 8, "queries": 2}), {"bits": 4, "zeros": True, "queries": 1}, slow({"bits": 4}),
])  # fmt: skip
@pytest.mark.parametrize("kind,keys,values", [("lean", [48], 32)])
def test_slow_pairs(kind: str, keys: list[int], values: int, options: dict) -> None:
    """Half of the pairs are not rebuilt; rows are in two stretches, of 64, but for one query."""
    case = Case(kind, keys, values, [70, 17], d=64, **options)
    case.run(latent_triton.latent_decode, passes=SMALL)
    (packed,) = case.maps.packed.values()
    assert packed.drift.fast == 16
    assert error(case) < 1e-3


@pytest.mark.parametrize("queries,base,reach", [(4, 5e5, 512), (4, 1e4, 64), (1, 1e4, 512)])
def test_drift(queries: int, base: float, reach: int) -> None:
    """What the powers miss, of all angles in a stretch of models in use."""
    inv_freq = base ** (-torch.arange(64) / 64)
    drift = find_drift(inv_freq, 64, queries)
    assert (drift.fast, drift.reach) == (32, reach)
    offset = torch.arange(-reach / 2, reach / 2)[:, None]
    basis = (offset / (reach / 2)) ** torch.arange(len(drift.powers))
    angles = offset * inv_freq[32:]
    for first, wanted in ((0, angles.cos()), (1, angles.sin())):
        assert (basis[:, first::2] @ drift.powers[first::2] - wanted).abs().max() < 1e-3
    assert find_drift(inv_freq * 500, 64, queries).fast == 64


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU: tests/ops/test_decode_compile.py compiles it")
@pytest.mark.parametrize("kind,keys,values,options", [
    ("lean", [48, 48], 64, {}), ("lean", [56, 56], 64, {"base": 5e5}), ("lean", [48, 64], 32, {}),
    ("lean", [48, 32], 64, {"page": 32}), ("lean", [48, 48, 48], 64, {"queries": 3}),
    ("lean", [64, 64], 64, {"queries": 8}), ("lean", [48, 48], 64, {"rotary": 64, "scaling": 1.2}),
    ("lean", [64, 64], 64, {"d": 64}), ("lean", [128, 128], 64, {}), ("palu", [64, 64], 64, {}),
    ("small", [0, 0], 96, {}), ("small", [0] * 4, 192, {"base": 5e5}), ("small", [0] * 3, 208, {}),
    ("small", [0, 0], 384, {}), ("small", [0, 0], 512, {"page": 32}),
    ("lean", [48, 48], 64, {"bits": 8}), ("lean", [64, 64], 64, {"bits": 4, "zeros": True}),
    ("lean", [64, 32], 32, {"bits": 8, "zeros": True, "page": 32}),
    ("small", [0] * 4, 192, {"bits": 4}), ("small", [0] * 3, 96, {"bits": 8}),
])  # fmt: skip
def test_hopper(kind: str, keys: list[int], values: int, options: dict) -> None:
    """Where the GPU is one, its own kernel scores: heads that share a latent or not, an odd number
    of them, ragged rows, several stretches, parts of tiles and no rows."""
    base = options.pop("base", 1e4)
    case = Case(
        kind, keys, values, [600, 0, 64, 70, 1], **({"d": 128, "queries": 4, "page": 64} | options)
    )
    angles = _angles(base, case.maps.rotary)
    rope = rope_table(angles, 1024, case.maps.up.shape[1])
    case.maps = replace(case.maps, inv_freq=angles, rope=rope)
    assert error(case, None) < 1.5e-3


@pytest.mark.parametrize("options", [
    {"rotary": 8, "scaling": 1.3},  # partial, as of GPT-NeoX, and scaled, as of YaRN
    {"d": 80, "queries": 1},  # no power of 2
    {"page": 32, "queries": 7},  # tiles smaller than a page
    {"page": 8, "queries": 3, "tracked": True},  # and larger
])  # fmt: skip
def test_shapes(options: dict) -> None:
    assert error(Case("lean", [32, 16], 32, [40], **options)) < 1e-3


def test_slices_and_tiles_do_not_matter() -> None:
    """Parts of an item are merged; value tiles may be smaller than score tiles; equal again."""
    case, found = Case("lean", [16, 16], 32, [70, 0, 3], queries=1), []
    for score_block, value_block, slices in ((64, 64, 1), (32, 16, 2)):
        passes = Passes(
            scores=Tuning(block=score_block, warps=4, slices=slices),
            values=Tuning(block=value_block, warps=4, slices=slices),
        )
        run = lambda: case.run(latent_triton.latent_decode, passes=passes)  # noqa: B023, E731
        out, lse = run()
        assert torch.equal(out, run()[0])
        found.append((out, lse))
    for out, lse in found[1:]:
        torch.testing.assert_close(out, found[0][0], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(lse, found[0][1], rtol=0, atol=1e-3)
    assert (found[0][0][case.slots == 1] == 0).all() and (
        found[0][1][case.slots == 1] == -torch.inf
    ).all()


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_parts_have_room(batch: int) -> None:
    """Whatever the number of sequences: the last item's part in the last slice is one of them."""
    case = Case("lean", [16] * 4, 32, [40])
    lengths = torch.full((batch, 1), 40, dtype=torch.int32, device=DEVICE)
    q = case.q.expand(batch, -1, -1)
    plan = latent_triton.plan_layers(q, [(case.layer, case.groups)], lengths, 40 * batch)[0]
    items, slices = len(plan.values.counts), len(plan.values.starts) - 1
    assert items == batch and len(plan.room.part) >= slices + items
    assert len(plan.room.part_ml) == len(plan.room.part)


def test_large_scores_and_means() -> None:
    case = Case("lean", [16, 16], 32, [40])
    case.maps.mean.mul_(20)
    case.q.mul_(3)
    assert error(case) < 5e-3


def test_reference_and_kernels_give_the_same_log_sum_exps(monkeypatch) -> None:
    """By the public function, with a plan made before, and none where the reference runs."""
    case, found = Case("lean", [16, 48], 64, [33, 0, 1]), []
    lengths = case.lengths.to(DEVICE)[case.slots]
    for name in ("reference", "triton"):
        monkeypatch.setenv("KVFOLD_BACKEND", name)
        use_triton.cache_clear()
        (plan,) = plan_layers(case.q, [(case.layer, case.groups)], lengths, 34, [case.maps])
        assert (plan is None) is (name == "reference")
        found.append(case.run(latent_decode, plan=plan))
    use_triton.cache_clear()
    (want, lse), (out, own) = found
    torch.testing.assert_close(out, want, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(own, lse, rtol=0, atol=5e-3)
    assert lse[case.slots == 1].isinf().all()


def test_every_measured_cut_can_be_launched() -> None:
    """Each kernel has one for all sizes, and the one for Hopper has tiles of a warp group."""
    last = {x["kernel"]: x for x, _ in table()}
    assert {name: x["most"] for name, x in last.items()} == dict.fromkeys(
        ("scores_triton", "scores_gluon", "values_triton")
    )
    assert not any(x["exact"] or x["bits"] for x in last.values())
    assert all(x.block == HOPPER_BLOCK for how, x in table() if how["kernel"] == "scores_gluon")


def test_supports() -> None:
    case = Case("lean", [16, 16], 32, [1])
    assert not unsupported_reason(case.layer, case.groups)
    post = LayerSpec(keys="post_rope", values="fused", latents=case.layer.latents)
    assert unsupported_reason(post, case.groups)
    assert unsupported_reason(*layer_and_groups(bits=2))
    assert unsupported_reason(*layer_and_groups(bits=4, sub_group=16))
    assert unsupported_reason(*layer_and_groups(bits=4, format="kivi"))
    assert unsupported_reason(*layer_and_groups(ranks=[16, 0]))


def layer_and_groups(ranks: tuple[int, ...] | list[int] = (32, 32), **options):
    """A lean layer laid out with `options`."""
    layer = LayerSpec(keys="pre_rope", values="fused", latents=latents("lean", list(ranks), 32))
    geometry = Geometry(
        hidden_size=8, num_query_heads=2, num_kv_heads=2, head_dim=32, num_layers=1, rope=True,
        key_norm=False, scaling=0.1,
    )  # fmt: skip
    spec = CacheSpec(geometry=geometry, layers=(layer,))
    return layer, cache_layout(spec, **options).groups
