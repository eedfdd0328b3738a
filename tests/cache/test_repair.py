"""Rows that stay are fitted to attention to all rows, and engines attend to the fitted ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from eviction_view_cases import folded
from fuzz_cases import same_up_to_rounding
from kvfold import LLM, CacheParams, SamplingParams
from kvfold.attention.metadata import PoolView
from kvfold.cache.eviction import repair as fits
from kvfold.cache.eviction.repair import KEYS, MOST, VALUES, WEIGHTS, ridge_solve
from kvfold.config import CacheConfig
from kvfold.engine.runner import repair
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.paged import PagedSession
from kvfold.models.families import family_of
from kvfold.models.folded import attention_windows
from kvfold.ops.common.attention import attention, capped, rotate
from kvfold.utils.errors import SettingError
from models import CONFIGS, tiny, tokens
from paged_eviction_cases import survivors
from repair_cases import fit_to_attention
from steps import logits_of
from tolerance import logit_rounding

PROMPT, MORE, PAGE = 60, 12, 4
FAMILIES = [name for name, of in CONFIGS.items() if not any(attention_windows(of()))]
FITTED = "kvfold_test_fitted"


def rows(heads: int = 3, count: int = 24, d: int = 8, asked: int = 40) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, n, d, generator=generator) for n in (asked, count, count))
    q[..., 0] += 3  # queries of a model have something in common
    return q, k, v


def some(*counts: int, of: int = 24) -> Tensor:
    """Which rows stay: so many of each head."""
    generator = torch.Generator().manual_seed(1)
    found = torch.zeros(len(counts), of, dtype=torch.bool)
    for own, count in zip(found, counts, strict=True):
        own[torch.randperm(of, generator=generator)[:count]] = True
    return found


def solved(a: Tensor, b: Tensor, ridge: float) -> Tensor:
    """The same by the normal equations."""
    gram = a.mT @ a
    held = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=a.dtype)
    return torch.linalg.inv(gram + held) @ (a.mT @ b)


def plain(q: Tensor, k: Tensor, v: Tensor, stays: Tensor, softcap: float | None):
    """Keys and values of the rows that stay of one head, in fp64, as the paper's code has it."""
    q, k, v = q.double(), k.double(), v.double()
    weights = capped(q @ k.mT, softcap).exp()
    total = weights.sum(1, keepdim=True)
    y = weights @ v / total
    share = weights[:, stays] / total
    w = 1 + solved(share, 1 - share.sum(1, keepdim=True), WEIGHTS)[:, 0]
    bias = w.clamp(min=1e-9).log().clamp(-MOST, MOST)
    u = solved(q, torch.ones(len(q), 1).double(), KEYS)[:, 0]
    k, v = k[stays] + bias[:, None] * u, v[stays]
    a = capped(q @ k.mT, softcap).softmax(-1)
    return k, v + solved(a, y - a @ v, VALUES)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("asked", [10, 40])
def test_a_fit_is_that_of_each_head_alone(asked: int, softcap: float | None) -> None:
    (q, k, v), stays = rows(asked=asked), some(12, 5, 20)
    valid = torch.ones_like(stays)
    found = fit_to_attention(q, k, v, valid, stays, 20, softcap)
    for head in range(len(q)):
        inside = found.inside[head]
        assert found.places[head, inside].tolist() == stays[head].nonzero()[:, 0].tolist()
        wanted = plain(q[head], k[head], v[head], stays[head], softcap)
        for x, y in zip((found.keys, found.values), wanted, strict=True):
            torch.testing.assert_close(x[head, inside].double(), y, rtol=1e-4, atol=1e-4)


def test_rows_that_are_not_there_do_not_count() -> None:
    (q, k, v), stays = rows(), some(12, 5, 0)
    valid = stays | some(20, 20, 20)
    valid[2] = False
    found = fit_to_attention(q, k, v, valid, stays, 12)
    k[~valid], v[~valid] = 1e3, -1e3
    again = fit_to_attention(q, k, v, valid, stays, 12)
    for x, y in zip(found, again, strict=True):
        torch.testing.assert_close(x[found.inside], y[found.inside])


def test_nothing_changes_where_all_rows_stay() -> None:
    q, k, v = rows()
    every = torch.ones(3, 24, dtype=torch.bool)
    found = fit_to_attention(q, k, v, every, every, 24)
    torch.testing.assert_close(found.keys, k, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.values, v, atol=1e-5, rtol=0)


def test_a_fit_is_nearer_to_what_attention_gave() -> None:
    (q, k, v), stays = rows(), some(12, 12, 12)
    wanted, mass = (q @ k.mT).softmax(-1) @ v, (q @ k.mT).logsumexp(-1)

    def errors(k: Tensor, v: Tensor) -> tuple[float, float]:
        scores = q @ k.mT
        output = (scores.softmax(-1) @ v - wanted).square().sum()
        return float(output), float(((scores.logsumexp(-1) - mass).exp() - 1).square().sum())

    found = fit_to_attention(q, k, v, torch.ones_like(stays), stays, 12)
    before = errors(*(x.take_along_dim(found.places[..., None], 1) for x in (k, v)))
    after = errors(found.keys, found.values)
    assert after[0] < before[0] / 2 and after[1] < before[1]


@pytest.mark.parametrize("shape", [(40, 12), (12, 40)])
def test_a_ridge_has_one_least_square(shape: tuple[int, int]) -> None:
    a, b = torch.randn(*shape).double(), torch.randn(shape[0], 3).double()
    torch.testing.assert_close(ridge_solve(a, b, 0.1), solved(a, b, 0.1))
    wider = torch.nn.functional.pad(a, (0, 5))
    torch.testing.assert_close(ridge_solve(wider, b, 0.1)[: shape[1]], solved(a, b, 0.1))


def runner_of(model, evict: str = "kvzip-keys", keep: float = 0.5, slots: int = 4, **settings):
    how = {"kv_bytes": 2**22, "page": PAGE, "evict": evict, "keep_tokens": keep, "repair": True}
    return build_runner(model, CacheConfig(**how | settings), num_slots=slots, max_tokens=160)


def read(runner, ids: Tensor, chunk: int = 17) -> PagedSession:
    """A sequence that has read its prompt."""
    session = PagedSession(runner).__enter__()
    logits_of(session, ids[0, :PROMPT].tolist(), prompt=PROMPT, chunk=chunk)
    return session


def _fitted(module, query, key, value, attention_mask, scaling=None, softcap=None, **_):
    """Attention in which tokens behind the prompt see `module.kept` [Hk] positions of it alone, as
    they are fitted to queries of the prompt that are `module.turned` behind it."""
    scale, group = scaling or module.scaling, query.shape[1] // key.shape[1]
    out, _ = attention(query, key, value, None, scale, softcap=softcap)
    at, tables = module.turned
    asked = query[0, :, at]
    asked = (asked if tables is None else rotate(asked, *tables)) * scale
    behind = []
    for head, kept in enumerate(module.kept):
        stays = torch.zeros(PROMPT, dtype=torch.bool)
        stays[kept] = True
        own = slice(head * group, (head + 1) * group)
        k, v = key[0, head], value[0, head]
        fit = plain(asked[own].flatten(0, 1), k[:PROMPT], v[:PROMPT], stays, softcap)
        k, v = (
            torch.cat((x.float(), y[PROMPT:]))[None, None] for x, y in zip(fit, (k, v), strict=True)
        )
        more = k.shape[2] - len(kept)
        mask = torch.cat((torch.ones(more, len(kept)), torch.ones(more, more).tril()), 1).bool()
        behind.append(
            attention(query[:, own, PROMPT:], k, v, mask[None, None], scale, softcap=softcap)[0]
        )
    out[:, :, PROMPT:] = torch.cat(behind, 1)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(FITTED, _fitted)


def dense(name: str, ids: Tensor, session: PagedSession, most: int) -> Tensor:
    """Logits behind the prompt of the original model, with the rows that a sequence still holds
    fitted to at most so many queries of a KV head."""
    model = tiny(name)
    family, config = family_of(model.config), model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    at = torch.arange(0, PROMPT, -(-PROMPT // (most // (config.num_attention_heads // heads))))
    tables = None
    if (rotary := family.rotary(model)) is not None:
        turn = PROMPT + torch.arange(len(at)) - at
        tables = tuple(x[0] for x in rotary(torch.zeros(1), turn[None]))
    layers = list(family.attentions(model))
    for layer in layers:
        layer.turned, layer.kept = (at, tables), [[]] * heads
    groups = session.runner.pool.layout.groups
    for group, kept in zip(groups, survivors(session), strict=True):
        layers[group.layer].kept[group.heads[0]] = [x for x in kept if x < PROMPT]
    model.set_attn_implementation(FITTED)
    with torch.no_grad():
        return model(ids).logits[0, PROMPT:]


@pytest.mark.parametrize("most", [512, 24])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_a_dense_model_with_fitted_rows(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "QUERIES", most)
    ids = tokens(1, PROMPT + MORE)
    session = read(runner_of(tiny(name)), ids)
    (prompt,) = session.runner.repair.prompts.values()
    states = sum(x.nbytes for x in prompt.states.values())
    geometry = session.runner.pool.layout.spec.geometry
    assert 0 < states <= repair.state_bytes(geometry, PROMPT, 4) < 3 * states
    session.compress()
    session.runner.pool.check_integrity()
    logits = [logits_of(session, ids[0, PROMPT : PROMPT + 5].tolist())]
    logits += [logits_of(session, [token]) for token in ids[0, PROMPT + 5 :].tolist()]
    wanted = dense(name, ids, session, most)
    # Rounding of a matrix G = a^T a + held that is factored moves x by G^-1, and a x by the root of
    # G's condition, which is at most 1 + n / ridge; the least ridge is that of keys.
    config = session.runner.model.config
    root = (1 + geometry.head_dim / KEYS) ** 0.5
    off = logit_rounding(config, PROMPT + MORE, wanted) * root
    torch.testing.assert_close(torch.cat(logits), wanted, rtol=0, atol=off)


@pytest.mark.parametrize("evict", sorted({"kvzip", "h2o", "snapkv", "keydiff", "streaming"}))
def test_any_policy_s_rows_are_fitted(evict: str) -> None:
    """And those of a model that is turned by an orthogonal basis, whose fit is the same."""
    ids = tokens(1, PROMPT + MORE)
    for model in (tiny("llama-gqa"), folded("llama-gqa", "zack", 1.0)):
        session = read(runner_of(model, evict), ids)
        session.compress()
        found = logits_of(session, ids[0, PROMPT:].tolist())
        wanted = dense("llama-gqa", ids, session, 512)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_entries_of_all_layers_may_be_written_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs."""
    ids, found = tokens(1, PROMPT + MORE), []
    write = repair.Remaining.write

    def at_once(entries: repair.Remaining, view: PoolView) -> None:
        every = SimpleNamespace(spans=[slice(0, len(view.layout.groups))], pool=view.pool)
        write(entries, every)

    for how in write, at_once:
        monkeypatch.setattr(repair.Remaining, "write", how)
        session = read(runner_of(tiny("llama-gqa")), ids)
        session.compress()
        found.append(logits_of(session, ids[0, PROMPT:].tolist()))
    assert torch.equal(*found)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    "recipe, settings",
    [
        (None, {}),
        ("zack", {}),
        ("fast", {}),
        ("fast", {"bits": 8}),
        (None, {"bits": 4}),
        ("kvquant-z", {"format": "kvquant", "bits": 4}),
    ],
)
def test_less_is_lost(
    recipe: str | None, settings: dict, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that keeps all rows, whatever they are made of, and layers fitted one by one."""
    if heads == 1:
        monkeypatch.setattr(repair, "FITTED", 1)
        monkeypatch.setattr(fits, "SCORES", 100)
    keep = 1.0 if recipe == "kvquant-z" else 0.6
    ids, model = tokens(1, PROMPT + MORE), folded("llama-gqa", recipe, keep)
    found = []
    for keep, how in ((1.0, False), (0.25, False), (0.25, True)):
        session = read(runner_of(model, keep=keep, **settings, repair=how), ids)
        session.compress()
        found.append(logits_of(session, ids[0, PROMPT:].tolist()).log_softmax(-1))
    whole, *less = found
    before, after = (float((whole.exp() * (whole - x)).sum(-1).mean()) for x in less)
    assert after < 0.8 * before


def settings_of(**more) -> dict:
    fixed = {"evict": "kvzip-keys", "keep_tokens": 0.5, "repair": True, "page": PAGE, "chunk": 16}
    return fixed | {"kv_bytes": 2**22, "max_sequences": 4, "max_tokens": 160} | more


def test_requests_beside_each_other_have_the_tokens_of_each_alone() -> None:
    """Some compressed again as they go on, some not at all, and slots that others had before."""
    model, asked = tiny("llama-gqa"), SamplingParams(max_new_tokens=40, logprobs=5)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (60, 33, 47, 9, 52, 71)]
    own = [None, CacheParams(keep_tokens=0.3, every=8), CacheParams(keep_tokens=1.0)] * 2
    each = list(zip(prompts, own, strict=True))
    alone = [LLM(model, **settings_of()).generate([x], asked, cache=y)[0] for x, y in each]
    llm = LLM(model, **settings_of())
    together = llm.generate(prompts, asked, cache=own)
    for one, beside in zip(alone, together, strict=True):
        assert same_up_to_rounding(one, beside) == len(one.token_ids)
    llm.runner.pool.check_integrity()
    plain = LLM(model, **settings_of(repair=False)).generate(prompts, asked, cache=own)
    changed = [x.token_ids != y.token_ids for x, y in zip(plain, together, strict=True)]
    assert any(changed[i] for i in (0, 1, 3, 4)) and not changed[2] and not changed[5]


def test_who_has_a_slot_has_hidden_states_and_nobody_else() -> None:
    llm = LLM(tiny("llama-gqa"), **settings_of())
    prompt = tokens(1, 40)[0].tolist()
    llm.generate([prompt] * 3, SamplingParams(max_new_tokens=4))
    llm.generate([prompt], SamplingParams(max_new_tokens=4), cache=CacheParams(keep_tokens=1.0))
    assert not llm.runner.repair.prompts


def test_prefixes_are_not_shared() -> None:
    llm = LLM(tiny("llama-gqa"), **settings_of())
    assert "`repair` needs" in llm.shares_no_prefix
    asked = SamplingParams(max_new_tokens=8)
    first = llm.generate([tokens(1, 60)[0].tolist()], asked)[0]
    again = llm.generate([tokens(1, 60)[0].tolist()], asked)[0]
    assert first.token_ids == again.token_ids and not llm.engine.scheduler.prefix_cache.num_hits
    with pytest.raises(SettingError, match="would change tokens: repair needs the queries of all"):
        LLM(tiny("llama-gqa"), prefix_caching=True, **settings_of())


def test_without_it_nothing_is_kept() -> None:
    runner = runner_of(tiny("llama-gqa"), repair=False)
    assert runner.repair is runner.eviction.repair is None


@pytest.mark.parametrize("recipe", ["lean", "swift", "small", "palu-m", "palu-j", "lorc"])
def test_rows_that_heads_share_are_refused(recipe: str) -> None:
    model = folded("llama-gqa", recipe, 0.5)
    with pytest.raises(SettingError, match="a head cannot change its entries alone"):
        runner_of(model)
