"""Keyformer: attention with Gumbel noise, against its formula; chunks and neighbours."""

import warnings

import pytest
import torch
from torch import Tensor

from kvfold.attention.fallback import Fallback
from kvfold.attention.metadata import PoolView
from kvfold.attention.selector import DECODE, PREFILL, SelectedBackends
from kvfold.cache.eviction.policies import get
from kvfold.cache.eviction.scorers.attention import as_observation, attention_scores
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.paged import PagedSession
from kvfold.ops.noise.reference import gumbel, splitmix
from models import tiny, tokens
from steps import logits_of

POLICY = get("keyformer")
HEADS, QUERIES, SLOTS, PROMPT, LAYER = 4, 9, 12, 7, 3


def scored(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [1, Hq, n, T], -inf where a query does not see, and positions of keys and queries."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, HEADS, QUERIES, SLOTS, generator=generator) * 3
    keys = torch.stack([torch.randperm(SLOTS, generator=generator) for _ in range(2)])[None]
    queries = torch.arange(3, 3 + QUERIES)[None]
    seen = queries[:, None, :, None] >= keys.repeat_interleave(2, 1)[:, :, None]
    return scores.masked_fill(~seen, -torch.inf), keys, queries


def mass(scores: Tensor, keys: Tensor, queries: Tensor, layer: int = LAYER) -> Tensor:
    weights, prompts = scores.softmax(-1), torch.full((len(scores),), PROMPT)
    where = keys, queries, prompts
    return attention_scores(weights, *where, as_observation(POLICY), [(0,), (1,)], layer)


def test_metrics_are_the_published_sums() -> None:
    """sum over queries of softmax((s + G) / tau), tau 1.01 at the first generated token."""
    scores, keys, queries = scored()
    wanted = torch.zeros(1, 2, SLOTS)
    for h in range(HEADS):
        for i, position in enumerate(queries[0].tolist()):
            key = splitmix(torch.tensor(h + (LAYER << 32)), torch.tensor(position))
            noise = gumbel(key[None], keys[0, h // 2])[0]
            tau = 1 + 0.01 * max(position - PROMPT + 1, 0)
            wanted[0, h // 2] += ((scores[0, h, i] + noise) / tau).softmax(-1)
    torch.testing.assert_close(mass(scores, keys, queries), wanted)


def test_noise_is_of_its_query_and_key() -> None:
    """Chunks add up, a sequence beside it changes nothing, another layer has other noise."""
    scores, keys, queries = scored()
    whole = mass(scores, keys, queries)
    parts = [mass(scores[:, :, at], keys, queries[:, at]) for at in (slice(0, 4), slice(4, None))]
    torch.testing.assert_close(sum(parts), whole)
    other = scored(1)
    both = [torch.cat(pair) for pair in zip((scores, keys, queries), other, strict=True)]
    assert torch.equal(mass(*both)[0], whole[0])
    assert not torch.allclose(mass(scores, keys, queries, LAYER + 1), whole)


def test_noise_is_standard_gumbel() -> None:
    """Of variance pi^2 / 6 over the keys of a query, and other everywhere."""
    flat = torch.zeros(1, 8, 64, 512)
    where = torch.arange(512).expand(1, 8, -1), torch.arange(512, 576)[None]
    found = POLICY.scorer.contribution(flat.softmax(-1), *where, torch.zeros(1, 64), 0).log()
    assert abs(float(found.var(-1).mean()) - torch.pi**2 / 6) < 0.02
    assert len(found.unique()) > 0.95 * found.numel()


def test_the_budget_s_last_tokens_stay() -> None:
    assert POLICY.protected_recent(100) == 30
    with pytest.raises(ValueError, match="heat must be at least 0, got -1"):
        POLICY.changed(heat=-1)


def runner_of(**settings):
    model = tiny("llama-gqa")
    config = CacheConfig(kv_bytes=2**22, page=4, evict="keyformer", keep_tokens=0.5, **settings)
    return build_runner(model, config, num_slots=2, max_tokens=96)


def test_chunks_of_a_prompt_do_not_matter() -> None:
    """Nor does a second prefill."""
    ids, found = tokens(1, 60)[0].tolist(), []
    for chunk in (60, 7, 7):
        runner = runner_of()
        with PagedSession(runner) as session:
            logits_of(session, ids, prompt=60, chunk=chunk)
            found.append(runner.eviction.tracked(session.sequence.slot)[0])
    torch.testing.assert_close(found[0], found[1])
    assert torch.equal(found[1], found[2])


def test_layers_draw_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, seen = runner_of(), set()
    compute = type(POLICY.scorer).contribution

    def recorded(self, *inputs):
        seen.add(inputs[-1])
        return compute(self, *inputs)

    monkeypatch.setattr(type(POLICY.scorer), "contribution", recorded)
    with PagedSession(runner) as session:
        logits_of(session, tokens(1, 9)[0].tolist(), prompt=9)
    assert seen == set(range(len(runner.attention.layers)))


class OnGpu(PoolView):
    """A view that says its pages are a GPU's, for what chooses backends without reading them."""

    device = torch.device("cuda")


def test_plain_pytorch_serves_it_and_says_so() -> None:
    """Weights as they are have no kernel; on a GPU one warning says which policies have."""
    attention = runner_of(bits=8).attention
    for chosen in (attention.selected.decode, attention.selected.observed):
        assert set(chosen) == {Fallback}
    on_gpu = OnGpu(attention.view.pool, attention.view.policy, attention.view.dtype)
    with pytest.warns(UserWarning, match="no kernel writes.*kv-compress, has kernels") as caught:
        SelectedBackends.select_all(attention.layers, on_gpu)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner_of(bits=8)


def test_others_keep_their_kernels() -> None:
    assert not get("h2o").scorer.needs_weights
    assert {x.returns_weights for x in (*DECODE, *PREFILL)} == {False, True}
