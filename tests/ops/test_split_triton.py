"""Decoding in two passes against float64: rows that KV heads share, runs of several precisions.

Without a GPU it runs in Triton's interpreter.
"""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton", reason="Triton is not installed")

from decode_triton_cases import check, poisoned  # noqa: E402, F401
from kvfold.layout import Latent  # noqa: E402
from kvfold.layout.pages import CacheLayout  # noqa: E402
from kvfold.ops.backend import GPU as ANY_GPU  # noqa: E402
from kvfold.ops.common.tuning import Tuning  # noqa: E402
from kvfold.ops.decode import DECODE, triton_split  # noqa: E402
from matrix import matrix, slow  # noqa: E402
from pages import Case, error  # noqa: E402
from split_triton_cases import LAYOUTS, SMALL, run, swift  # noqa: E402
from store_cases import one_layer  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "dtype"), matrix(list(LAYOUTS), [torch.float16, torch.bfloat16]))
def test_kernels_are_the_formula(name: str, dtype: torch.dtype) -> None:
    layout = LAYOUTS[name]
    assert DECODE.why_not(ANY_GPU, layout.groups) is None
    rows = [[37], [0], [16], [101]] if len(layout.groups) == 1 else [[37, 5], [0, 16]]
    case = Case.of(layout, rows, 4, dtype, seed=len(name))
    check(case, *run(case))


def shared(heads: int, share: int, keys: list[int], values: list[int], **options) -> CacheLayout:
    """Latents of `share` heads each, of so many numbers in turn: Palu's groups without RoPE."""
    latents = [
        Latent(side=side, heads=tuple(range(first, first + share)), rank=ranks[i % len(ranks)])
        for side, ranks in (("k", keys), ("v", values))
        for i, first in enumerate(range(0, heads, share))
    ]
    return one_layer(latents, **{"page": 16, **options})


@pytest.mark.parametrize("wide,case", matrix([False, True], [
    (1, torch.float16, shared(8, 4, [32], [48])),
    (1, torch.bfloat16, shared(8, 4, [48, 16], [80, 16])),
    (3, torch.float16, shared(8, 4, [48, 0], [32, 64])),
    (1, torch.float16, shared(32, 32, [80], [144])),
    (2, torch.float16, shared(32, 8, [32], [16], page=64)),
    (1, torch.float16, shared(8, 4, [64], [48], bits=4, zeros=True)),
    (1, torch.float16, shared(32, 32, [320], [96], bits=8)),
    (1, torch.float16, shared(8, 4, [32, 48], [48], tracked=True)),
]))  # fmt: skip
def test_heads_that_share_keys(wide: bool, case: tuple, monkeypatch) -> None:
    """A latent is read once for all its heads: held by a warp, or piece by piece."""
    queries, dtype, layout = case
    assert DECODE.which(ANY_GPU, layout.groups) == "triton_split"
    monkeypatch.setattr(triton_split, "held", lambda *_: not wide)
    lengths = [[37, 5], [0, 16], [101, 64]]
    if dtype is torch.bfloat16:  # rows are many enough for the rounding of weights to average out
        lengths = [[4 * n + 60 * (n > 0) for n in own] for own in lengths]
    rows = [(own * len(layout.groups))[: len(layout.groups)] for own in lengths]
    case = Case.of(layout, rows, queries, dtype, seed=queries)
    q, pages, slots, _ = case.args
    counts, heads = pages.lengths[slots], len(layout.groups[0].heads) * len(layout.groups)
    plan = triton_split.plan_layers([pages.groups], counts, queries, int(counts.sum()), SMALL)[0]
    latents = len(layout.spec.layers[0].key_latents)
    assert plan.wide == wide and len(plan.scores.counts) == len(q) * latents < len(q) * heads
    check(case, *triton_split.decode(*case.args, plan))


def test_what_a_warp_holds() -> None:
    """Latents as wide as a head's keys for few heads; wider ones, and more columns, do not spill
    piece by piece."""
    for layout, queries, wanted in (
        (shared(8, 4, [128], [16]), 8, True),
        (shared(8, 4, [128], [16]), 16, False),
        (shared(8, 4, [144], [16]), 1, False),
        (shared(8, 4, [256], [16], bits=8), 1, True),
        (swift([((64, 4),)] * 2, [((96, 4),)]), 32, True),
    ):
        assert triton_split.held(layout.groups, queries, torch.device("cpu")) == wanted


@pytest.mark.parametrize(("bits", "zeros"), matrix([8, 4, 2], [False, True]))
def test_bits_of_a_run_time(bits: int, zeros: bool) -> None:
    latents = [Latent(side="k", heads=(h,), rank=64) for h in range(2)]
    latents.append(Latent(side="v", heads=(0, 1), rank=96))
    layout = one_layer(latents, page=16, bits=bits, zeros=zeros)
    case = Case.of(layout, [[70], [33]], 2, torch.float16, peak=20.0)
    check(case, *run(case))


@pytest.mark.parametrize("slices", [slow(1), 3])
def test_what_slices_do_not_change(slices: int) -> None:
    case = Case.of(LAYOUTS["three precisions"], [[300], [45]], 1, torch.float16)
    cuts = tuple(Tuning(block=32, stages=1, warps=1, slices=slices) for _ in range(2))
    out, lse = run(case, cuts)
    check(case, out, lse)
    again, _ = run(case, cuts)
    assert torch.equal(out, again)


@pytest.mark.parametrize("layouts", [
    (LAYOUTS["four bits"], LAYOUTS["long runs"]),
    (shared(2, 2, [48], [32]), swift([((160, 16),), ((32, 16),)], [((64, 16),)])),
])  # fmt: skip
def test_layers_of_unlike_pieces_are_planned_together(layouts: tuple[CacheLayout, ...]) -> None:
    """Heads that share keys or not, which a warp holds or not, too."""
    cases = [Case.of(x, [[40], [9]], 2, torch.float16) for x in layouts]
    counts = [case.args[1].lengths[case.args[2]] for case in cases]
    plans = triton_split.plan_layers(
        [x.groups for x in layouts], torch.cat(counts, 1), 2, 49, SMALL
    )
    for case, plan in zip(cases, plans, strict=True):
        assert error(triton_split.decode(*case.args, plan)[0], case.out) < 1e-3


@pytest.mark.parametrize("layout,reason", [
    (swift([((64, 3),)], [((64, 4),)]), "numbers in 3 bits: the kernels read 16, 8, 4 and 2"),
    (swift([((60, 2),)], [((64, 4),)]), "60 numbers in 2 bits: the kernels read whole 16-bit"
     " words"),
])  # fmt: skip
def test_what_is_not_read(layout: CacheLayout, reason: str) -> None:
    assert str(DECODE.why_not(ANY_GPU, layout.groups)).endswith(reason)
