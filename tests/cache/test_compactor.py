"""Attention of a prompt's tokens close by, and the policy that looks at it."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from eviction_view_cases import folded, runner_of
from kvfold.cache.eviction.base import EntriesView
from kvfold.cache.eviction.policies import get
from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.attention import mean_pool
from kvfold.cache.eviction.scorers.compactor import Local, local_attention, standard
from kvfold.evaluation.paged import PagedSession
from models import tokens

PROMPT, CHUNK = 45, 16


@dataclass(frozen=True, kw_only=True)
class Curious(Local):
    """Keeps what it saw, and likes all rows alike."""

    needs = frozenset({"local", "keys", "queries"})
    seen: list[tuple[EntriesView, list[tuple[Tensor, ...]]]] = field(default_factory=list)

    def score(self, view: EntriesView) -> Tensor:
        layers = range(len(view.layers))
        self.seen.append((view, [(view.keys(i), view.queries(i)[0]) for i in layers]))
        return torch.zeros_like(view.metrics)

    def num_too_young(self, window: int | None) -> int:
        return 0


def test_a_token_sees_its_own_chunk_alone_and_all_of_it() -> None:
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    found = local_attention(q, k, 4)
    for start, stop in ((0, 4), (4, 8), (8, 9)):
        for head in range(2):
            own = q[:, 2 * head : 2 * head + 2, start:stop]
            weights = (own @ k[:, head, None, start:stop].mT).softmax(-1)
            torch.testing.assert_close(found[:, head, start:stop], weights.mean(1).sum(1))


@pytest.mark.parametrize(
    "name, recipe",
    [("llama-gqa", None), ("opt", None), ("llama3-scaling", "zack"), ("opt", "lean")],
)
def test_metrics_are_of_the_keys_and_queries_that_the_model_computed(name, recipe) -> None:
    scorer = Curious(chunk=CHUNK)
    policy = Policy(scorer=scorer, window=PROMPT)
    runner = runner_of(folded(name, recipe, 0.5), policy)
    session = PagedSession(runner).__enter__()
    session.read(tokens(1, PROMPT)[0].tolist(), prompt=PROMPT)
    session.compress()
    ((view, seen),) = scorer.seen
    groups = [(i, heads) for i, each in enumerate(view.layers) for heads in each]
    for g, (layer, heads) in enumerate(groups):
        k, q = seen[layer]
        wanted = local_attention(q, k, CHUNK)[:, list(heads)].sum(1)
        torch.testing.assert_close(view.metrics[:, g], wanted, rtol=1e-3, atol=1e-5)


def test_what_was_generated_stays() -> None:
    policy = get("compactor").changed(sinks=0, recent_share=0.0)
    runner = runner_of(folded("llama-gqa", None, 0.5), policy)
    session = PagedSession(runner).__enter__()
    session.read(tokens(1, PROMPT)[0].tolist(), prompt=PROMPT)
    for token in range(5, 13):
        session.read([token])
    metrics, positions, valid = runner.eviction.tracked(session.sequence.open_slot)
    assert torch.equal(metrics > 0, valid & (positions < PROMPT))
    session.compress()
    _, positions, valid = runner.eviction.tracked(session.sequence.open_slot)
    assert int((valid & (positions >= PROMPT)).sum()) == 8 * valid.shape[1]
    assert int(valid.sum()) < (PROMPT + 8) * valid.shape[1]
    runner.pool.check_integrity()


def test_means_close_gaps_and_know_order() -> None:
    x = torch.tensor([[[1.0, 5.0, torch.nan, 3.0, 100.0]]])
    valid = torch.tensor([[[True, True, False, True, True]]])
    positions = torch.tensor([[[7, 2, 0, 9, 1]]])
    found = mean_pool(x, positions, valid, 3, in_order=False)  # 100 5 1 3
    assert found[valid].tolist() == pytest.approx([3, 106 / 3, 2, 52.5])
    together = mean_pool(x[..., :2], positions[..., :2], valid[..., :2], 3, in_order=True)
    assert together.flatten().tolist() == [3, 3]


def test_standard_scores_are_of_the_scored_rows() -> None:
    x, scored = torch.randn(2, 3, 20) * 5 + 2, torch.rand(2, 3, 20) < 0.7
    x[~scored] = torch.nan
    found = standard(x, scored)
    for own, there in zip(found, scored, strict=True):
        assert float(own[there].mean()) == pytest.approx(0, abs=1e-5)
        assert float(own[there].std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_a_chunk_has_tokens() -> None:
    with pytest.raises(ValueError, match="chunk must be at least 1 token, got 0"):
        get("compactor").changed(chunk=0)
