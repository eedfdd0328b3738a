"""The second reading by kernels, against the formula in float64: ragged, evicted, poisoned.

Without a GPU it runs in Triton's interpreter, in fp16.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from prefill_triton_cases import CUT, DEVICE, GPU, LSE, RAGGED, Case, poisoned  # noqa: F401

triton = pytest.importorskip("triton", reason="Triton is not installed")

from kvfold.config import Recipe  # noqa: E402
from kvfold.ops.prefill import reference, triton_peaks  # noqa: E402
from kvfold.ops.prefill import triton as prefill_triton  # noqa: E402
from matrix import slow  # noqa: E402
from steps import backends, even, folded, runner_of, sequences_of, step  # noqa: E402

SMALL = triton_peaks.PeaksCut(rows=16, queries=16, warps=4, stages=1)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"),
]


def some(case: Case, share: float, seed: int = 0) -> Tensor:
    """Rows of every group, bool [B, G, S], no more than there are."""
    chance = torch.Generator().manual_seed(seed)
    counts, size = case.seen.counts.cpu(), case.keys.data.shape[1]
    drawn = torch.rand(*counts.shape, size, generator=chance) < share
    return (drawn & (torch.arange(size) < counts[..., None])).to(DEVICE)


def check_among(case: Case, among: Tensor, cut=CUT) -> None:
    """Outputs as they are without it, and the other log-sum-exp."""
    place = case.q, case.keys, case.values, case.seen, case.scale
    out, lse, found = prefill_triton.prefill_among(*place, among, cut=lambda _: cut)
    plain, plain_lse = prefill_triton.prefill(*place, cut=lambda _: cut)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    sides = (replace(side, data=side.data.double()) for side in (case.keys, case.values))
    *_, want = reference.prefill_among(case.q.double(), *sides, case.seen, case.scale, among)
    nothing = want.isinf()
    assert torch.equal(found.isinf(), nothing) and ((found - want)[~nothing].abs() <= LSE).all()


@pytest.mark.parametrize("share", [slow(0), 0.05, slow(0.6), 1])
def test_a_log_sum_exp_of_some_rows(share: float) -> None:
    counts = ((48, 16, 0, 33), (7, 40, 47, 1))
    case = Case.of(RAGGED, counts, 11, group=2, first=37, positions=True)
    check_among(case, some(case, share), CUT)


@pytest.mark.parametrize("size", [1, 16, 17, 33])
def test_tiles_without_such_rows_are_passed_by(size: int) -> None:
    case = Case.of(((16, 16), (16, 32)), ((70, 65),), size, first=20, positions=True)
    among = torch.zeros(1, 2, 75, dtype=torch.bool, device=DEVICE)
    among[0, 0, 16:30] = among[0, 1, 64] = True
    check_among(case, among)


def test_scores_far_below_those_of_other_rows() -> None:
    """Their own largest score is what they are measured by."""
    case = Case.of(((16, 16),), ((40,),), 8, first=80, positions=True)
    case.q[...] = 0
    case.q[..., 0] = 60
    case.keys.data[:, :, 0] = 20
    case.keys.data[:, 5:20, 0] = -20
    among = torch.zeros(1, 1, 45, dtype=torch.bool, device=DEVICE)
    among[0, 0, 5:20] = True
    check_among(case, among)


def brute(case: Case, bias: Tensor, counted: Tensor, of_rows: Tensor | None) -> Tensor:
    """Row by row, query by query: what the reference itself must be."""
    heads, size = len(case.seen.owner), case.keys.data.shape[1]
    found, group = torch.zeros(len(case.q), heads, size), case.q.shape[1] // heads
    for b, h, s in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        if counted[b, case.seen.owner[h], s]:
            k = case.keys.head(h)[b, s].double()
            for n in range(h * group, (h + 1) * group):
                for t in range(case.q.shape[2]):
                    score = float(case.q[b, n, t, : len(k)].double() @ k) * case.scale
                    worth = torch.exp2(score * 1.4426950408889634 + bias[b, n, t].double())
                    worth = worth if of_rows is None else worth * of_rows[b, n, s]
                    found[b, h, s] = max(found[b, h, s], float(worth))
    return found


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("ranks", [RAGGED, ((0, 4), (250, 4)), ((96, 1), (16, 1))])
@pytest.mark.parametrize("num_queries, group", [(1, 1), (17, 3), (32, 2)])
def test_what_rows_are_worth_at_most(
    ranks: tuple[tuple[int, int], ...], num_queries: int, group: int, weighed: bool
) -> None:
    counts = ((48, 16, 0, 33)[: len(ranks)], (7, 40, 47, 1)[: len(ranks)])
    case = Case.of(ranks, counts, num_queries, group=group, positions=True)
    bias = -3 * torch.rand(case.q.shape[:3], device=DEVICE) - 8
    of_rows = torch.rand(*case.q.shape[:2], case.keys.data.shape[1], device=DEVICE)
    of_rows[..., ::5] = 0
    counted, of = some(case, 0.5), of_rows if weighed else None
    place = bias, counted, case.seen.owner, case.scale, of
    found = triton_peaks.peaks(case.q, case.keys, *place, cut=SMALL)
    exact = replace(case.keys, data=case.keys.data.double())
    want = reference.peaks(case.q.double(), exact, *place)
    torch.testing.assert_close(found, want, rtol=2e-3, atol=1e-7)
    if num_queries == 1 and not GPU:
        torch.testing.assert_close(want, brute(case, bias, counted, of))


def test_joint_rows_and_rebuilt_keys() -> None:
    """One group of two heads, whose keys are [B, S, Hk, d] of a tensor of their own."""
    case = Case.of(((16, 16),) * 2, ((40,),), 12, group=2, owner=(0, 0), positions=True)
    k = torch.randn(1, 45, 2, 16, device=DEVICE).half()
    case.keys = type(case.keys)(k, (0, 16), (16, 16))
    bias, counted = torch.zeros(case.q.shape[:3], device=DEVICE), some(case, 0.3)
    place = bias, counted, (0, 0), case.scale
    found = triton_peaks.peaks(case.q, case.keys, *place, cut=SMALL)
    exact = replace(case.keys, data=k.double())
    want = reference.peaks(case.q.double(), exact, *place)
    torch.testing.assert_close(found, want, rtol=2e-3, atol=0)


# -- in the engine --------------------------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


def scored(recipe: Recipe | None, evict: str, settings: dict) -> list[Tensor]:
    """Metrics of a prompt in two pieces; of what is left of it and comes after; and last logits."""
    runner = runner_of(folded(recipe, layers=2), evict=evict, keep_tokens=0.5, **settings)
    runner.rescorer.policy = runner.policy = runner.policy.changed(chunk=24)
    (one,) = sequences_of(runner, 37)
    step(runner, (one, 37))
    found = []
    for more in (0, 9):
        if more:
            step(runner, (one, more))
        runner.rescorer.score(one)
        metrics, positions, valid = (x[0] for x in runner.eviction.tracked(one.open_slot))
        order = positions.masked_fill(~valid, 2**30).argsort(1)
        found += [metrics.where(valid, 0.0).gather(1, order)]
        if not more:
            runner.compress([one])
            lengths = runner.pool.host_lengths[one.open_slot]
            assert (lengths < 37).all()
            fewer = [0, 15, 3, 9][: len(lengths)]  # so that groups differ
            runner.pool.truncate(one.open_slot, lengths - fewer)
    found.append(step(runner, (one, 1)))
    return found


@pytest.mark.parametrize(
    ("recipe", "settings", "evict"),
    [
        (None, {}, "kvzip+"),
        (even("small"), {"bits": 8}, "kvzip"),
        slow(None, {}, "kvzip"),
        slow(even("small"), {"bits": 8}, "kvzip+"),
        *(slow(even("swift"), {"bits": 8}, x) for x in ("kvzip", "kvzip+")),
        *(slow(even("lean"), {}, x) for x in ("kvzip", "kvzip+")),
    ],
)
def test_kernels_score_as_pytorch_does(recipe, settings, evict, backend, monkeypatch) -> None:
    found, calls = [], []
    for name in ("reference", "triton"):
        backend(name)
        with monkeypatch.context() as patch:
            count = partial(_counting, triton_peaks.peaks, calls)
            patch.setattr(triton_peaks, "peaks", count)
            found.append(scored(recipe, evict, settings))
    assert len(calls) == 6  # three pieces of two layers
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-2 * theirs.abs().max()


def _counting(run, calls: list, *args, **how):
    calls.append(run)
    return run(*args, **how)
