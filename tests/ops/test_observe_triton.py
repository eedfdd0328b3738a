"""Metrics by a kernel against float64 on the rows as stored: ragged, shuffled and poisoned.

Without a GPU it runs in Triton's interpreter, on tiny cases. Shapes as in `ops.observe`.
"""

import json
import re
import sys
from dataclasses import dataclass, replace
from itertools import product
from math import e, log2
from unittest import mock

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")

from hopper import need_compiler, run_alone  # noqa: E402
from kvfold.cache.eviction.scorers.attention import (  # noqa: E402
    Attention,
    Observation,
    attention_scores,
)
from kvfold.layout.pages import CacheLayout  # noqa: E402
from kvfold.ops import backend  # noqa: E402
from kvfold.ops.backend import use_triton  # noqa: E402
from kvfold.ops.common.pages import LayerPages  # noqa: E402
from kvfold.ops.observe import observe, why_not  # noqa: E402
from kvfold.ops.observe import triton as observe_triton  # noqa: E402
from kvfold.ops.observe.reference import observe as observe_reference  # noqa: E402
from kvfold.ops.store import reference as store  # noqa: E402
from matrix import slow  # noqa: E402
from pages import heads_of, mixed, per_head, queries_of  # noqa: E402
from store_cases import DEVICE, Store, numbers, stored  # noqa: E402

RAGGED = [(48, 32), (64, 16), (0, 64)]
SCALE = 0.3
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]


@dataclass
class Case:
    """A filled cache, queries that were kept, and what they add to the metrics of its rows.

    Every row begins with a metric of 1. Rows that nobody owns and queries that are not counted are
    NaN, as are pages beyond a group's length.
    """

    args: tuple  # of `observe`
    weights: Tensor  # float64 [B, Hq, W, T]
    where: Tensor  # int [B, G, T], position of every row
    valid: Tensor  # bool [B, G, T]

    @classmethod
    def of(
        cls, layout: CacheLayout, lengths: list[list[int]], queries: int, kept: int,
        *, dtype: torch.dtype = torch.float16, seed: int = 0,
    ) -> "Case":  # fmt: skip
        """lengths [B, G]; queries: of a KV head; kept: W."""
        chance = torch.Generator().manual_seed(seed)
        groups, page, counts = layout.groups, layout.page, torch.tensor(lengths)
        num, size = len(counts) + 1, max(1, int(counts.max()))
        spare = -(-size // page) * page  # first row of a page for what no group owns
        on = Store.of(layout, num, spare + page, seed)
        slots = torch.randperm(num, generator=chance)[:-1]
        token = torch.arange(size)
        valid = token < counts[..., None]
        index = torch.where(valid, token, spare).mT.flatten(0, 1)
        rows = numbers(seed, dtype, len(counts), size, on.width)
        where = torch.stack([torch.randperm(3 * size, generator=chance)[:size] for _ in counts])
        owner = slots.repeat_interleave(size)
        on.append(rows.flatten(0, 1), owner, index, where.flatten().int())
        all_lengths = torch.full((num, len(groups)), spare)
        all_lengths[slots] = counts
        on.forget(all_lengths)
        q = queries_of(groups, queries * kept, dtype, len(counts), seed)
        q = q.unflatten(1, (-1, kept))
        positions = torch.randint(2 * size, (len(counts), kept), generator=chance)
        positions[:, 0], positions[:, -1] = -1, 2 * size  # a third of the rows came later
        whole = sum(stored(rows.float(), group).double() for group in groups)
        weights, lse = attended(q, whole, groups, counts, where, positions)
        skipped = (positions < 0)[:, None]
        q[skipped.expand(lse.shape)] = torch.nan
        lse = lse.masked_fill(skipped, torch.nan).float()
        found = [x.to(DEVICE) for x in (q, lse, positions)]
        place = [x.to(DEVICE) for x in (on.arena, on.tables, all_lengths)]
        args = *found, LayerPages(*place, groups), slots.to(DEVICE), SCALE
        case = cls(args, weights, where[:, None], valid)
        one = torch.ones(valid.shape, device=DEVICE)
        store.add_metrics(*case.owner, one, valid.to(DEVICE))
        return case

    @property
    def arena(self) -> Tensor:
        return self.args[3].arena

    @property
    def owner(self) -> tuple:
        """Pages and slots."""
        return self.args[3:5]

    def metrics(self) -> Tensor:
        return store.read_metrics(*self.owner, self.valid.to(DEVICE)).cpu()

    def want(self, power: int, exclude: int) -> Tensor:
        """float64 [B, G, T] of groups in the order of their heads, the 1 of the start included."""
        positions = self.args[2].cpu()[..., None]
        counts = (positions >= 0) & (self.where <= positions - exclude)
        mass = (self.weights**power * counts[:, None]).unflatten(1, (len(self.args[3].groups), -1))
        order = [group.heads[0] for group in self.args[3].groups]
        return torch.where(self.valid, 1 + mass.sum((2, 3))[:, order], 0)

    def check(self, run, power: int, exclude: int = 0) -> None:
        """Metrics are right and nothing else is written. Codes are not rounded by the kernel."""
        limit = 2e-3 if run is observe_triton.observe else 1e-2
        before = self.arena.clone()
        run(*self.args, power=power, exclude=exclude)
        found, want = self.metrics(), self.want(power, exclude)
        assert ((found - want).abs() <= limit * (want - 1).abs() + 1e-6).all()
        assert torch.equal(found[want == 1], want[want == 1].float()) and (want > 1.01).any()
        valid = self.valid.to(DEVICE)
        store.add_metrics(*self.owner, 1 - found.to(DEVICE), valid)
        store.add_metrics(*self.owner, 0 - self.metrics().to(DEVICE), valid)
        pages, slots = self.owner
        less = torch.full_like(found, -1).to(DEVICE)
        store.add_metrics(pages._replace(arena=before), slots, less, valid)
        assert torch.equal(self.arena, before)


def attended(q, rows, groups, counts, where, positions) -> tuple[Tensor, Tensor]:
    """float64 weights [B, Hq, W, T] and log2-sum-exp2s [B, Hq, W] of queries that see rows at
    their own position and before."""
    weights = torch.zeros(*q.shape[:3], rows.shape[1], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    kept, size = q.shape[2], q.shape[1] // len(groups)
    for b, heads, mine, k, _ in heads_of(q.flatten(1, 2), rows, groups, counts):
        first, n = heads.start // kept, len(k)
        s = (mine @ k.T * SCALE).unflatten(0, (size, kept))
        s = s.masked_fill(where[b, :n] > positions[b, :, None], -torch.inf)
        weights[b, first : first + size, :, :n] = s.softmax(-1).nan_to_num(0)
        lse[b, first : first + size] = s.logsumexp(-1) * log2(e)
    return weights, lse


LENGTHS = [[0, 33, 1], [31, 140, 17]]  # of pages of 32 rows, tiles of 64 or 128
RUNS = {"kernel": observe_triton.observe, "reference": observe_reference}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("bits, zeros", [(None, False), *product((8, 4), (False, True))])
@pytest.mark.parametrize("kept", [8, 40])
def test_metrics_are_the_formula(bits: int | None, zeros: bool, kept: int, run: str) -> None:
    """Queries of one block and of several; ragged ranks."""
    layout = per_head(RAGGED, page=32, bits=bits, zeros=zeros, tracked=True)
    case = Case.of(layout, LENGTHS, 2, kept, seed=kept)
    case.check(RUNS[run], power=1 + (kept == 8), exclude=10 * (kept == 40))
    assert (case.want(1, 0)[case.valid] == 1).any()  # rows that no query sees


@pytest.mark.parametrize("power, exclude", [*product((1, 2), (0, 7))])
@pytest.mark.parametrize("queries", [1, 7])
def test_powers_and_distances(power: int, exclude: int, queries: int) -> None:
    case = Case.of(per_head([(16, 16)], page=16, tracked=True), [[17], [15]], queries, 3)
    case.check(observe_triton.observe, power=power, exclude=exclude)


@pytest.mark.parametrize("bits", [(8, 4), (16, 8), (4, 16)])
def test_keys_and_values_of_different_bits(bits: tuple[int, int]) -> None:
    case = Case.of(mixed(bits, bits, zeros=True, tracked=True), [[40, 17]], 2, 4)
    case.check(observe_triton.observe, power=1)


def test_groups_in_any_order_and_wide_rows() -> None:
    layout = per_head([(256, 16), (16, 16), (48, 0)], page=16, tracked=True)
    layout = replace(layout, groups=(layout.groups[2], *layout.groups[:2]))
    Case.of(layout, [[20, 70, 1]], 2, 4).check(observe_triton.observe, power=2)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter multiplies bf16 as integers")
@pytest.mark.parametrize("kept", [8, 300])
def test_brain_floats(kept: int) -> None:
    layout = per_head([(64, 64)] * 2, page=32, tracked=True)
    case = Case.of(layout, [[4095, 700], [5000, 0]], 4, kept, dtype=torch.bfloat16)
    case.check(observe_triton.observe, power=2)


@pytest.mark.parametrize("kept", [8, 40])
def test_any_number_of_programs(kept: int, monkeypatch) -> None:
    """A program may take all tiles of its group, or none; the sums are the same."""
    found = []
    for programs in (1, 4096, 4096):
        monkeypatch.setattr(observe_triton, "PROGRAMS", programs)
        case = Case.of(per_head(RAGGED[:2], page=16, bits=8, tracked=True), [[290, 1]], 2, kept)
        observe_triton.observe(*case.args, power=1)
        found.append(case.metrics())
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize("power, exclude", [(1, 0), (2, 10)])
def test_agrees_with_explicit_weights(power: int, exclude: int) -> None:
    case = Case.of(per_head(RAGGED, page=32, tracked=True), LENGTHS, 2, 5)
    observe_triton.observe(*case.args, power=power, exclude=exclude)
    observation = Observation(Attention(power=power, exclude=exclude, continual=True))
    where = case.where.expand(-1, len(RAGGED), -1)
    lengths = torch.full((len(LENGTHS),), 9)
    heads = [group.heads for group in case.args[3].groups]
    queries = case.args[2].cpu()
    mass = attention_scores(case.weights, where, queries, lengths, observation, heads)
    torch.testing.assert_close(case.metrics(), (1 + mass) * case.valid, rtol=2e-3, atol=1e-6)


def test_what_runs_where(monkeypatch) -> None:
    """The kernel where there is one: tracked pages, a scale a side, one KV head a group."""
    monkeypatch.setenv("KVFOLD_BACKEND", "triton")
    monkeypatch.setattr(backend, "_interpreted", lambda: True)
    use_triton.cache_clear()
    ranks, calls = [(16, 16)], []
    monkeypatch.setattr(observe_triton, "observe", lambda *_, **how: calls.append(how))
    case = Case.of(per_head(ranks, page=16, tracked=True), [[9]], 2, 2)
    observe(*case.args, power=2, exclude=3)
    assert calls == [{"power": 2, "exclude": 3}] and not why_not(case.args[3].groups, "cpu")
    case = Case.of(per_head(ranks, page=16, bits=3, tracked=True), [[40]], 2, 2)
    case.check(observe, power=2)
    assert len(calls) == 1 and why_not(case.args[3].groups, "cpu")
    assert why_not(per_head(ranks, page=16).groups, "cpu")
    use_triton.cache_clear()


# -- compiled for sm_90a, in a process of its own: this one's may belong to the interpreter -------

COMPILED = [*product((None, 8, 4), ((64, 8), (64, 64))), (8, (128, 8))]  # bits, (key rank, W)


def compile_all(cases: list) -> None:
    """bf16, 8 and 4 bits with 4 queries a head, what a launch would be: see test_decode_compile."""
    from decode_compile_cases import one_sequence, operations, recorders

    for bits, (rank, kept) in cases:
        layout = per_head([(rank, rank), (rank // 2, 16)] * 4, page=32, bits=bits, tracked=True)
        q, pages = one_sequence(layout.groups, 32, rank)
        q = q[:, :, None].expand(-1, -1, kept, -1)
        positions = torch.zeros(1, kept, dtype=torch.int32)
        place = pages, torch.zeros(1, dtype=torch.int64)
        kernels = recorders(observe_triton, "observe_kernel")
        with mock.patch.multiple(observe_triton, **kernels):
            observe_triton.observe(q, torch.zeros(q.shape[:3]), positions, *place, 0.1, power=2)
        names, labels = operations(kernels["observe_kernel"].compiled()[0])
        loops = [
            [re.split(r"[. ]", x)[0] for x in names[labels[target[1]] : end]]
            for end, name in enumerate(names)
            if (target := re.search(r"BRA.*`\((\.L_x_\d+)\)", name))
            and labels.get(target[1], end + 1) <= end
        ]
        loop = min((x for x in loops if "HGMMA" in x), key=len)
        counts = {x: loop.count(x) for x in ("HGMMA", "MUFU", "LDGSTS")}
        spills = sum(name.startswith(("STL", "LDL")) for name in names)
        print(json.dumps({"size": len(loop), "spills": spills, **counts}), flush=True)


@pytest.mark.parametrize("number", [1, slow(len(COMPILED))])
def test_kernel_compiles_well_for_hopper(number: int) -> None:
    """Nothing spills, keys are copied ahead of their use, and a tile takes few instructions."""
    need_compiler()
    reports = [json.loads(line) for line in run_alone(__file__, str(number))]
    for (bits, (rank, kept)), report in zip(COMPILED[:number], reports, strict=True):
        rows = 64 if rank * (bits or 16) > 1024 else 128
        columns = min(64, 4 * kept)
        assert report["spills"] == 0, report
        assert report["HGMMA"] == rows // 64 * rank // 16, report
        if kept == 8:  # else queries are read in the innermost loop, not keys
            # A warp's tile; each of its exponentials takes 5 more instructions.
            assert report["MUFU"] == rows * columns // 128 and report["LDGSTS"], report
            assert report["size"] <= 650, report


if __name__ == "__main__":
    compile_all(COMPILED[: int(sys.argv[1])])
