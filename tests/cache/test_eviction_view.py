"""A policy's view of stored rows: the keys, values and queries that the model computed."""

import pytest
import torch

from eviction_view_cases import PROMPT, WINDOW, Curious, folded, runner_of
from kvfold.cache.eviction import policies
from kvfold.cache.eviction.budget import Budget
from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.attention import Attention
from kvfold.cache.eviction.scorers.expected import expected
from kvfold.engine.runner.eviction import Held
from kvfold.engine.runner.runner import ModelRunner
from kvfold.evaluation.paged import PagedSession
from kvfold.utils.versions import CACHE
from models import tiny, tokens
from steps import logits_of

pytestmark = pytest.mark.gpu

CASES = [
    *((name, None) for name in ("llama-gqa", "qwen3", "opt")),
    *(("llama3-scaling", name) for name in ("zack", "palu-g", "palu-j", "fast", "lean", "small")),
    ("opt", "lean"),
]


def curious(model, **settings) -> tuple[ModelRunner, Curious]:
    scorer = Curious(continual=True)
    return runner_of(model, Policy(scorer=scorer, window=WINDOW, **settings)), scorer


def fed(runner: ModelRunner, prompts: list[int]) -> list[PagedSession]:
    """Sequences, prefilled in chunks that are no multiple of the window."""
    sessions = [PagedSession(runner).__enter__() for _ in prompts]
    for i, (session, length) in enumerate(zip(sessions, prompts, strict=True)):
        logits_of(session, tokens(1, length, seed=i)[0].tolist(), prompt=length, chunk=10)
    return sessions


@pytest.mark.parametrize("name, recipe", CASES)
def test_queries_and_keys_make_the_metrics(name: str, recipe: str | None) -> None:
    """Attention of the window's queries to the keys, in whatever space they are stored."""
    runner, scorer = curious(folded(name, recipe, 0.5))
    runner.compress([x.sequence for x in fed(runner, [PROMPT, PROMPT - 8])])
    (view,), (seen,) = scorer.views, scorer.seen
    group_of = [(i, heads) for i, groups in enumerate(view.layers) for heads in groups]
    for g, (layer, heads) in enumerate(group_of):
        k, _, q, where = seen[layer]
        assert where.tolist() == [list(range(n - WINDOW, n)) for n in (PROMPT, PROMPT - 8)]
        maps = runner.attention.layers[layer]
        group = maps.geometry.queries_per_kv
        k = k.repeat_interleave(group, 1)
        causal = view.positions[:, g, None] <= where[..., None]
        visible = (causal & view.valid[:, g, None])[:, None]
        weights = (q @ k.mT * maps.scale).masked_fill(~visible, -torch.inf).softmax(-1).sum(2)
        mine = weights.unflatten(1, (-1, group))[:, list(heads)].sum((1, 2))
        torch.testing.assert_close(mine, view.metrics[:, g] * view.valid[:, g])


@pytest.mark.parametrize("name, recipe", CASES)
def test_values_are_the_model_s(name: str, recipe: str | None) -> None:
    """At full rank, where they are not left to W_O, but for what its bias adds to all of them; and
    so are keys, where they are not stored in another space."""
    ids = tokens(1, PROMPT, seed=0)
    with torch.no_grad():
        wanted = tiny(name)(ids, use_cache=True)[CACHE].layers
    runner, scorer = curious(folded(name, recipe, 1.0))
    runner.compress([x.sequence for x in fed(runner, [PROMPT])])
    for layer, (k, v, *_) in enumerate(scorer.seen[0]):
        spec = runner.attention.layers[layer].spec
        if spec.values != "fused":
            off = wanted[layer].values - v
            always = off[:, :, :1] if spec.has_value_up else torch.zeros_like(off)
            torch.testing.assert_close(off, always.expand_as(off), rtol=1e-3, atol=1e-4)
        if spec.keys in ("plain", "pre_rope"):
            torch.testing.assert_close(k, wanted[layer].keys, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("recipe", ["zack", "fast"])
def test_nothing_lies_beyond_a_head_s_rank(recipe: str) -> None:
    """Where heads differ in rank, others' numbers fill up what is gathered."""
    runner, scorer = curious(folded("llama3-scaling", recipe, 0.5))
    runner.compress([x.sequence for x in fed(runner, [PROMPT])])
    ragged = False
    for layer, (k, v, *_) in enumerate(scorer.seen[0]):
        maps = runner.attention.layers[layer]
        stored = [(v, maps.value_columns)] if maps.spec.values == "fused" else []
        stored += [(k, maps.key_columns)] if maps.spec.keys != "pre_rope" else []
        for x, columns in stored:
            ragged |= not columns.uniform
            for head, latent in enumerate(columns.heads):
                assert not x[:, head, :, columns.ranks[latent] :].any()
    assert ragged


@pytest.mark.parametrize("recipe", [None, "zack", "lean"])
def test_rows_that_moved_are_the_same_rows(recipe: str | None) -> None:
    """A second round sees the survivors' keys and values at their positions, zeros where no row
    is, and the queries since."""
    runner, scorer = curious(folded("llama3-scaling", recipe, 0.5), scope="all")
    (session,) = fed(runner, [PROMPT])
    session.compress()
    logits_of(session, [5, 6, 7])
    session.compress()
    (first, second), (before, after) = scorer.views, scorer.seen
    g = 0
    for layer, groups in enumerate(second.layers):
        assert after[layer][3].tolist() == [list(range(PROMPT - 4, PROMPT + 3))]
        for heads in groups:
            for x, y in zip(before[layer][:2], after[layer][:2], strict=True):
                x, y = x[0, list(heads)], y[0, list(heads)]
                assert not y[:, ~second.valid[0, g]].any()
                old = second.valid[0, g] & (second.positions[0, g] < PROMPT)
                assert torch.equal(y[:, old], x[:, second.positions[0, g, old].long()])
            g += 1
    assert not torch.equal(first.positions, second.positions)


def test_a_sequence_that_went_back_has_fewer_queries() -> None:
    """Later queries lie in the rows of the earliest, which are gone."""
    runner, scorer = curious(tiny("llama-gqa"))
    (session,) = fed(runner, [PROMPT])
    mark = session.mark()
    logits_of(session, [5, 6])
    session.rewind(mark)
    session.compress()
    q, where = scorer.seen[0][0][2:]
    assert where.tolist() == [[-1, -1, *range(PROMPT - WINDOW + 2, PROMPT)]]
    assert not q[:, :, :2].any() and q[:, :, 2:].all()


def test_queries_of_who_had_the_slot_before_are_gone() -> None:
    runner, scorer = curious(tiny("llama-gqa"))
    for q in runner.attention.recent.queries.values():
        q.fill_(float("nan"))
    (session,) = fed(runner, [WINDOW - 2])
    runner.compress([session.sequence])
    q, where = scorer.seen[0][0][2:]
    assert where.tolist() == [[-1, -1, *range(WINDOW - 2)]]
    assert not q[:, :, :2].any() and q.isfinite().all()


def test_nobody_keeps_queries_that_nobody_needs() -> None:
    policy = Policy(scorer=Attention(), window=WINDOW)
    assert runner_of(tiny("llama-gqa"), policy).attention.recent is None


def test_expected_attention_is_that_of_gaussian_queries() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 4000, 4) * 0.7 + 0.3, torch.randn(1, 12, 4)
    asked = torch.ones(1, 4000, dtype=torch.bool)
    scored = torch.arange(12)[None] > 1
    found = expected(q, k, asked, scored, 0.5)[0]
    drawn = torch.randn(400_000, 4) * 0.7 + 0.3
    wanted = (drawn @ k[0, 2:].T * 0.5).exp().mean(0)
    assert float(found[:2].sum()) == 0
    torch.testing.assert_close(found[2:], wanted / wanted.sum(), rtol=0.1, atol=1e-3)
    half = asked & (torch.arange(4000) < 2000)
    again = expected(q.where(half[:, None, :, None], 0), k, half, scored, 0.5)
    torch.testing.assert_close(again, expected(q[:, :, :2000], k, half[:, :2000], scored, 0.5))


@pytest.mark.parametrize("recipe", [None, "zack", "small"])
def test_expected_attention_reads_a_pool(recipe: str | None) -> None:
    """By hand of what the view gives, at the model's scale."""
    policy = policies.get("expected-attention")
    runner = runner_of(folded("llama3-scaling", recipe, 0.6), policy)
    (session,) = fed(runner, [PROMPT])
    held = Held(session.sequence.open_slot, PROMPT, Budget(pages=1), None)
    view = runner.eviction._view([held], policy)
    found = policy.scorer.score(view)
    group = 0
    for layer, groups in enumerate(view.layers):
        k, v, (q, _) = view.keys(layer), view.values(layer), view.queries(layer)
        q = q[:, :, -PROMPT:]  # fewer than the window: zeros come first
        for heads in groups:
            wanted = torch.zeros(PROMPT)
            for head in heads:
                s = q[0, 2 * head : 2 * head + 2] @ k[0, head, 4:].T / 16**0.5
                worth = (s.mean(1) + s.var(1, correction=0) / 2).softmax(-1).mean(0)
                wanted[4:] += (worth + policy.scorer.epsilon) * v[0, head, 4:].norm(dim=-1)
            torch.testing.assert_close(found[0, group, 4:], wanted[4:], rtol=1e-3, atol=1e-6)
            group += 1
