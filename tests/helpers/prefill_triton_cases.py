"""What tests of prefill triton share with others."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")
from kvfold.ops.prefill import KVView, Seen  # noqa: E402
from kvfold.ops.prefill import triton as prefill_triton  # noqa: E402
from kvfold.ops.prefill.plan import Cut, Widths  # noqa: E402
from kvfold.ops.prefill.reference import prefill as prefill_reference  # noqa: E402

GPU = torch.cuda.is_available()


DEVICE = torch.device("cuda" if GPU else "cpu")


LIMIT, LSE = 1e-3, 1e-3


CUT = Cut(pairs=16, rows=16, warps=4, stages=1)


RAGGED = ((16, 32), (24, 48), (48, 8), (40, 16))  # key and value rank


@pytest.fixture(autouse=True)
def poisoned():
    """What is allocated and not written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Case:
    """What `prefill` takes."""

    q: Tensor
    keys: KVView
    values: KVView
    seen: Seen
    scale: float = 0.3

    @classmethod
    def of(
        cls,
        ranks=((32, 32),),
        counts=((40,),),
        num_queries=40,
        group=1,
        first=0,
        owner=None,
        positions=False,
        window=None,
        seed=0,
    ) -> "Case":
        """Rows [keys of all heads, values of all heads], NaN beyond every count; queries at
        `first` and after. counts [B][G]; positions: random, with gaps, in no order."""
        torch.manual_seed(seed)
        owner = tuple(range(len(ranks))) if owner is None else owner
        counts = torch.tensor(counts, device=DEVICE)
        batch, size = len(counts), int(counts.max()) + 5
        widths = [rank[side] for side in (0, 1) for rank in ranks]
        starts = [sum(widths[:i]) for i in range(len(widths) + 1)]
        rows = torch.randn(batch, size, max(starts[-1], 1), device=DEVICE).half()
        for i, head in enumerate(2 * list(range(len(ranks)))):
            outside = torch.arange(size, device=DEVICE) >= counts[:, owner[head], None]
            rows[..., starts[i] : starts[i + 1]][outside] = torch.nan
        keys, values = (
            KVView(rows, tuple(starts[at : at + len(ranks)]), tuple(widths[at : at + len(ranks)]))
            for at in (0, len(ranks))
        )
        q = torch.randn(batch, len(ranks) * group, num_queries, max(keys.ranks), device=DEVICE)
        for head, rank in enumerate(keys.ranks):
            q[:, head * group : (head + 1) * group, :, rank:] = 0
        where = None
        if positions:
            spread = [torch.randperm(2 * size)[:size] for _ in range(counts.numel())]
            where = torch.stack(spread).view(*counts.shape, size).int().to(DEVICE)
        queries = first + torch.arange(num_queries, device=DEVICE).repeat(batch, 1)
        seen = Seen(counts=counts, owner=owner, positions=where, queries=queries, window=window)
        return cls(q.half(), keys, values, seen)

    def expected(self) -> tuple[Tensor, Tensor]:
        keys, values = (replace(x, data=x.data.double()) for x in (self.keys, self.values))
        return prefill_reference(self.q.double(), keys, values, self.seen, self.scale)

    def check(self, cut: Cut | Callable[[Widths], Cut] = CUT) -> tuple[Tensor, Tensor]:
        place = self.q, self.keys, self.values, self.seen, self.scale
        of = (lambda _: cut) if isinstance(cut, Cut) else cut
        launch = partial(prefill_triton.prefill, *place, cut=of)
        if GPU:
            compile_ahead(launch)
        out, lse = launch()
        want, want_lse = self.expected()
        assert out.dtype is self.q.dtype and out.shape == want.shape
        assert lse.dtype is torch.float32 and lse.shape == want_lse.shape
        error = (out.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-9)
        assert float(error.max() if error.numel() else 0) <= LIMIT
        nothing = want_lse.isinf()
        assert torch.equal(lse.isinf(), nothing) and not out[nothing].any()
        assert ((lse - want_lse)[~nothing].abs() <= LSE).all()
        return out, lse


class Compiling:
    """Stands for the kernel in launches, which then only compile it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return partial(self.kernel.warmup, grid=grid)


def compile_ahead(launch: Callable) -> None:
    """What every class needs, on all cores: one after the other they take a second each."""
    kernel = Compiling(prefill_triton.prefill_kernel)
    with (
        mock.patch.object(prefill_triton, "prefill_kernel", kernel),
        ThreadPoolExecutor() as threads,
        triton.AsyncCompileMode(threads),
    ):
        launch()
