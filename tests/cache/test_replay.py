"""A context read once more, and what it says of its rows."""

import pytest
import torch

from eviction_view_cases import folded
from kvfold import LLM
from kvfold.cache.eviction.budget import Budget
from kvfold.cache.eviction.policies import get
from kvfold.cache.eviction.scorers.keys import key_difference, leverage
from kvfold.cache.eviction.scorers.rescoring import LEAST, max_attention, rank
from kvfold.config import CacheConfig
from kvfold.engine.requests.request import CacheParams, SamplingParams
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.eviction import Held
from kvfold.evaluation.paged import PagedSession
from kvfold.models.families import family_of
from kvfold.utils.chat import reply_words
from models import tiny, tokens

PROMPT = 45


def test_weights_are_the_largest_of_a_softmax_over_what_is_seen() -> None:
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8)
    seen = torch.rand(1, 1, 3, 9) < 0.6
    seen[..., 0] = True
    found = max_attention(q, k, seen, 0.5)
    for head in range(2):
        most = torch.zeros(9)
        for own in (2 * head, 2 * head + 1):
            for n in range(3):
                at = seen[0, 0, n].nonzero()[:, 0]
                most[at] = most[at].maximum((k[0, head, at] @ q[0, own, n] * 0.5).softmax(0))
        torch.testing.assert_close(found[0, head], most)


def test_scores_are_capped_where_the_model_s_are() -> None:
    q, k = 3 * torch.randn(1, 2, 3, 8), torch.randn(1, 1, 9, 8)
    seen = torch.ones(1, 1, 3, 9, dtype=torch.bool)
    found = max_attention(q, k, seen, 0.5, softcap=0.7)
    wanted = (0.7 * torch.tanh(q @ k.mT * 0.5 / 0.7)).softmax(-1).amax((1, 2))
    torch.testing.assert_close(found[0, 0], wanted[0])


def session_of(runner, ids: list[int]) -> PagedSession:
    session = PagedSession(runner).__enter__()
    session.read(ids, prompt=len(ids))
    return session


def metrics_of(runner, ids: list[int], **fields: int):
    policy = get("kvzip").changed(**fields)
    runner.policy = runner.rescorer.policy = policy
    session = session_of(runner, ids)
    session.sequence.cache = CacheParams(keep_tokens=1.0)
    runner.rescorer.score(session.sequence)
    metrics, _, valid = runner.eviction.tracked(session.sequence.open_slot)
    runner.pool.check_integrity()
    return session, metrics, valid


@pytest.fixture
def runner():
    config = CacheConfig(kv_bytes=2**23, page=4, evict="kvzip", keep_tokens=0.5)
    return build_runner(tiny("llama-gqa"), config, num_slots=2, max_tokens=160)


def test_a_replay_takes_no_pages_and_scores_every_row(runner) -> None:
    ids = tokens(1, PROMPT)[0].tolist()
    before = session_of(runner, ids)
    held = runner.pool.stats().free_bytes
    before.__exit__()
    session, metrics, valid = metrics_of(runner, ids, chunk=16)
    assert runner.pool.stats().free_bytes == held
    assert (metrics[valid] >= LEAST).all() and (metrics[valid] <= 1).all()
    later = session.read(tokens(1, 3, seed=9)[0].tolist())
    metrics, positions, valid = runner.eviction.tracked(session.sequence.open_slot)
    assert (metrics[valid & (positions >= PROMPT)] == 0).all(), "rows that came later have none"
    plain = session_of(runner, ids).read(tokens(1, 3, seed=9)[0].tolist())
    torch.testing.assert_close(later, plain, msg="a replay changes nothing else")


def test_metrics_are_those_of_the_model_reading_its_context_twice(runner) -> None:
    """One piece, whose softmax covers everything: the attention of a dense model."""
    ids = tokens(1, PROMPT)[0].tolist()
    _, metrics, _ = metrics_of(runner, ids, chunk=PROMPT)
    model = tiny("llama-gqa")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([ids + ids]), output_attentions=True).attentions
    for layer, own in enumerate(weights):  # [1, Hq, 2 PROMPT, 2 PROMPT]
        most = own[0, :, PROMPT:, :PROMPT].amax(1).unflatten(0, (2, -1)).amax(1)
        torch.testing.assert_close(
            metrics[0, 2 * layer : 2 * layer + 2], most, atol=1e-5, rtol=1e-3
        )


@pytest.mark.parametrize("policy", ["kvzip+", "kvgrad"])
@pytest.mark.parametrize("name", ["llama-gqa", "opt"])
def test_metrics_are_of_what_attention_adds(name: str, policy: str) -> None:
    """A dense model's attention times |W_O v| over |x|, or times the gradient's norm by what
    attention adds, one piece that covers everything."""
    ids = tokens(1, PROMPT)[0].tolist()
    model, config = tiny(name), CacheConfig(kv_bytes=2**23, page=4, evict=policy, keep_tokens=0.5)
    runner = build_runner(tiny(name), config, num_slots=2, max_tokens=160)
    session = session_of(runner, ids)
    runner.rescorer.score(session.sequence)
    metrics, _, _ = runner.eviction.tracked(session.sequence.open_slot)
    model.set_attn_implementation("eager")
    family, seen = family_of(model.config), {}
    layers, added = list(family.attentions(model)), []
    heads, d = model.config.num_attention_heads, 12
    groups = heads // (getattr(model.config, "num_key_value_heads", None) or heads)
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: seen.update({i: (kwargs["hidden_states"], *args)[0]}),
            with_kwargs=True,
        )
        layer.register_forward_hook(lambda _, __, out: added.append(out[0]))
    family.layers(model)[-1].register_forward_hook(lambda _, __, out: added.append(out))
    with torch.enable_grad():
        found = model(torch.tensor([ids + ids]), output_attentions=True).attentions
        last = added.pop()
        last = last[0] if isinstance(last, tuple) else last
        gradients = torch.autograd.grad(last[:, PROMPT:].square().sum(), added)
    with torch.no_grad():
        for i, layer in enumerate(layers):
            x = seen[i][0]
            w_o = getattr(layer, family.output_name).weight
            v = layer.v_proj(x).unflatten(-1, (-1, d))  # [2 PROMPT, Hk, d]
            wanted = torch.zeros(heads // groups, PROMPT)
            for h in range(heads):
                alone = v[:PROMPT, h // groups] @ w_o[:, h * d : (h + 1) * d].T
                worth = found[i][0, h, PROMPT:, :PROMPT] * alone.norm(dim=-1)
                asks = 1 / x.norm(dim=-1) if policy == "kvzip+" else gradients[i][0].norm(dim=-1)
                worth = worth * asks[PROMPT:, None]
                wanted[h // groups] = wanted[h // groups].maximum(worth.amax(0))
            size = len(wanted)
            torch.testing.assert_close(
                metrics[0, size * i : size * (i + 1)], wanted, atol=1e-5, rtol=1e-3
            )


def test_gradients_of_large_hidden_states_are_finite_in_half_precision() -> None:
    """Some of a model's are in the thousands; the gradient by the last ones is twice as large."""
    ids, found = tokens(1, PROMPT)[0].tolist(), []
    for dtype in (torch.float32, torch.float16):
        model = tiny("llama-gqa")
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(4e4 / model.model.embed_tokens.weight.abs().max())
        config = CacheConfig(kv_bytes=2**23, page=4, evict="kvgrad", keep_tokens=0.5)
        runner = build_runner(model.to(dtype), config, num_slots=1, max_tokens=160)
        session = session_of(runner, ids)
        runner.rescorer.score(session.sequence)
        metrics, _, _ = runner.eviction.tracked(session.sequence.open_slot)
        found.append(metrics[..., :PROMPT])
    assert found[1].isfinite().all()
    torch.testing.assert_close(found[1], found[0], rtol=0.1, atol=0.01 * float(found[0].max()))


@pytest.mark.parametrize("name", ["llama-gqa", "opt"])
@pytest.mark.parametrize("recipe", [None, "zack", "lean", "small", "fast"])
def test_output_norms_are_of_what_each_head_alone_adds(name: str, recipe: str | None) -> None:
    """However values are stored: attention that takes each row whole, by one head."""
    config = CacheConfig(kv_bytes=2**22, page=4, evict="kvzip+", keep_tokens=0.5)
    model = build_runner(folded(name, recipe, 0.6), config, num_slots=1, max_tokens=64).model
    layer = next(family_of(model.config).attentions(model))
    maps = layer.description
    rows = torch.randn(1, 7, maps.spec.row_width)
    v = maps.value_columns.spread(maps.value_columns.gather(rows))
    found = maps.output_norms(rows)
    for head in range(4):
        out = torch.zeros(1, 4, *v.shape[2:])
        out[:, head] = v[:, head // maps.geometry.queries_per_kv]
        added = maps.merge_heads(out) @ layer.o_proj.weight.T
        torch.testing.assert_close(found[:, head], added.norm(dim=-1), rtol=1e-3, atol=1e-5)


def test_rows_are_scored_once_and_again_from_where_they_were_forgotten(runner) -> None:
    session, metrics, _ = metrics_of(runner, tokens(1, PROMPT)[0].tolist(), chunk=16)
    runner.rescorer.score(session.sequence)
    again, _, _ = runner.eviction.tracked(session.sequence.open_slot)
    assert torch.equal(metrics, again)
    session.sequence.rewind(20)
    assert session.sequence.num_scored == 20
    session.sequence.restart()
    assert session.sequence.num_scored == 0


@pytest.mark.parametrize("policy", ["kvzip", "kvgrad"])
def test_a_reading_ends_with_the_positions_that_a_model_has_learned(policy: str) -> None:
    """OPT has as many as its longest text; a reading behind one of most of them has them too."""
    config = CacheConfig(kv_bytes=2**23, page=4, evict=policy, keep_tokens=0.5)
    runner = build_runner(tiny("opt"), config, num_slots=1, max_tokens=256)
    session = session_of(runner, tokens(1, 250)[0].tolist())
    asked, forward = [], runner.rescorer.forward
    runner.rescorer.forward = lambda *x: asked.append(x[1].tolist()) or forward(*x)
    runner.rescorer.score(session.sequence)
    assert asked[0] == list(range(256 - len(asked[0]), 256)) and len(asked[0]) <= 250
    metrics, _, valid = runner.eviction.tracked(session.sequence.open_slot)
    assert (metrics[valid] > 0).all()


def by_position(runner, session: PagedSession) -> list[dict[int, float]]:
    """What rows are worth, of every group."""
    metrics, positions, valid = (x[0] for x in runner.eviction.tracked(session.sequence.open_slot))
    each = zip(positions, metrics, valid, strict=True)
    return [dict(zip(p[v].tolist(), m[v].tolist(), strict=True)) for p, m, v in each]


def test_rows_keep_their_scores_as_others_go_and_come(runner) -> None:
    session, _, _ = metrics_of(runner, tokens(1, PROMPT)[0].tolist(), chunk=16)
    before = by_position(runner, session)
    session.sequence.cache = CacheParams(max_cache_tokens=24)
    for i in range(3):
        session.compress()
        runner.pool.check_integrity()
        assert not runner.needs_compression(session.sequence)
        found = by_position(runner, session)
        for own, known in zip(found, before, strict=True):
            assert len(own) < len(known) or not i
            assert all(known.get(p, worth) == worth for p, worth in own.items())
            assert min(own.values()) >= LEAST, "a row that came later was not scored"
        before = [known | own for own, known in zip(found, before, strict=True)]
        for token in tokens(1, 9, seed=i)[0].tolist():
            session.read([token])


def test_a_long_answer_stays_near_its_budget() -> None:
    how = {"kv_bytes": 2**23, "page": 4, "max_sequences": 2, "max_tokens": 160}
    prompt, long = tokens(1, PROMPT)[0].tolist(), SamplingParams(max_new_tokens=60, ignore_eos=True)
    llm, most = LLM(tiny("llama-gqa"), evict="kvzip", keep_tokens=1, **how), []
    for every in (None, 10):
        request, _ = llm.request(prompt, long, CacheParams(max_cache_tokens=24, every=every))
        llm.engine.submit(request)
        most.append(0)
        while llm.engine.has_work:
            llm.engine.step()
            if request.num_outputs > 2 and request.slot is not None:
                most[-1] = max(most[-1], llm.runner.pool.host_lengths[request.slot].mean())
    assert most[0] == 24 + 58 and 24 < most[1] <= 24 + 10
    assert llm.engine.scheduler.compressions.num_done == 1 + 6


def test_a_reading_without_what_follows_is_one_where_nothing_did(runner) -> None:
    """And one that sees everything is another."""
    ids = tokens(1, PROMPT)[0].tolist()
    for whole in (False, True):
        session, metrics, _ = metrics_of(runner, ids, chunk=16, sees_suffix=whole)
        session.__exit__()
        short, wanted, _ = metrics_of(runner, ids[:32], chunk=16, sees_suffix=whole)
        short.__exit__()
        assert torch.allclose(metrics[..., :32], wanted, rtol=1e-4) is not whole
        assert (metrics[..., :PROMPT] > 0).all()


def test_what_came_later_is_not_seen_where_rows_lie_in_no_order(runner) -> None:
    ids = tokens(1, PROMPT)[0].tolist()
    found = []
    for more in (0, 20):
        session, _, _ = metrics_of(runner, ids, chunk=64, sees_suffix=False)
        session.sequence.cache = CacheParams(max_cache_tokens=24)
        session.compress()
        session.read(tokens(1, more, seed=3)[0].tolist()) if more else None
        start = by_position(runner, session)
        runner.rescorer.policy = runner.policy.changed(chunk=PROMPT)
        with torch.inference_mode():
            runner.rescorer._rescore(session.sequence, range(PROMPT))
        both = zip(start, by_position(runner, session), strict=True)
        found.append([{p: y[p] - x[p] for p in x if p < PROMPT} for x, y in both])
        session.__exit__()
    for a, b in zip(*found, strict=True):
        assert a.keys() == b.keys() and min(a.values()) > 0
        assert all(a[p] == pytest.approx(b[p], rel=1e-3, abs=1e-6) for p in a)


def test_words_come_before_every_piece(runner) -> None:
    class Letters:
        chat_template = None

        def __call__(self, text: str, **how: object) -> dict[str, list[int]]:
            return {"input_ids": [3 + ord(c) % 90 for c in text]}

    replay = runner.rescorer
    replay.tokenizer, replay.reply = Letters(), reply_words(Letters())
    session = session_of(runner, tokens(1, PROMPT)[0].tolist())
    scorer, ids = replay.scorer, session.sequence.token_ids
    first, second = (replay._question(session.sequence, range(x, 40)) for x in (0, 20))
    assert len(first) == len(scorer.prompt) + 1
    assert len(second) == len(scorer.follow) + scorer.lead + 1
    assert second[len(scorer.follow) : -1] == ids[20 - scorer.lead : 20]


def test_what_a_template_says_before_a_reply() -> None:
    class Chat:
        chat_template = "yes"

        def get_chat_template(self, **how: object) -> str:
            return self.chat_template

        def apply_chat_template(self, asked, **how: object) -> str:
            return f"<u>{asked[0]['content']}</u><a>"

    assert reply_words(Chat()) == "</u><a>"


def test_key_measures_tell_the_odd_one_out() -> None:
    k = torch.randn(1, 1, 1, 8) + 0.05 * torch.randn(1, 2, 40, 8)
    k[0, 0, 7] = -k[0, 0, 7]
    k[:, :, 30:] = 0  # no row
    for measure in (key_difference, leverage):
        assert measure(k)[0, 0, :30].argmax() == 7


def test_a_piece_has_tokens() -> None:
    with pytest.raises(ValueError, match="chunk must be at least 1 token, got 0"):
        get("kvzip").changed(chunk=0)


def test_ranks_are_shares_of_the_scored_rows() -> None:
    x = torch.tensor([[[3.0, 1.0, torch.nan], [2.0, 1.0, 9.0]]])
    scored = torch.tensor([[[True, True, False], [True, True, True]]])
    assert rank(x, scored)[scored].tolist() == pytest.approx([0.6, 0, 0.4, 0.2, 0.8])


def test_rows_stay_for_their_reading_or_for_their_key() -> None:
    config = CacheConfig(kv_bytes=2**23, page=4, evict="kvzip-keys", keep_tokens=0.5)
    runner = build_runner(tiny("llama-gqa"), config, num_slots=2, max_tokens=160)
    session = session_of(runner, tokens(1, PROMPT)[0].tolist())
    runner.rescorer.score(session.sequence)
    held = [Held(session.sequence.open_slot, PROMPT, Budget(pages=1), None)]
    view = runner.eviction._view(held, runner.policy)
    found = runner.policy.scorer.score(view)
    apart = view.by_layer(lambda layer: key_difference(view.keys(layer)))
    alone = runner.policy.changed(key_rank_penalty=1.0).scorer.score(view)
    by_key = found > alone
    assert by_key.any() and not by_key.all()
    for mine, of in ((~by_key, view.metrics), (by_key, apart)):
        order = of[mine].argsort()
        assert (found[mine][order].diff() >= 0).all()
    assert float(apart[by_key].mean()) > float(apart[~by_key].mean())
    with pytest.raises(ValueError, match=r"key_rank_penalty must be in \[0, 1\], got 2"):
        runner.policy.changed(key_rank_penalty=2)
