"""Scores of rows that are learned from hidden states, saved, and written as rows are stored."""

import pytest
import torch

import kvfold
from eviction_view_cases import folded
from kvfold import LLM, CacheParams, SamplingParams, recipes
from kvfold.compression.compressor import Compressor
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation import ruler
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.scores import LEAST, TEACHER, RegressionSums, learn_scores, readings
from kvfold.hub.checkpoint import mark
from kvfold.hub.loading import load_tokenizer
from kvfold.layout.pages import plain_spec
from kvfold.models.families import family_of
from kvfold.models.fold import fold_plain
from kvfold.utils.errors import SettingError
from models import tiny, tokens
from paged_eviction_cases import dense, survivors

PROMPT, MORE, PAGE = 60, 12, 4


def learned(recipe: str = "zack", keep: float = 1.0, name: str = "llama-gqa"):
    model = folded(name, recipe, keep)
    learn_scores(model, None, tokens(6, 96))
    return model


def session_of(model, evict: str = "learned") -> PagedSession:
    config = CacheConfig(kv_bytes=2**22, page=PAGE, evict=evict, keep_tokens=0.5)
    return PagedSession(build_runner(model, config, num_slots=3, max_tokens=160)).__enter__()


def metrics_of(session: PagedSession):
    return session.runner.eviction.tracked(session.sequence.open_slot)


def test_a_ridge_regression_finds_the_map() -> None:
    x, wanted = torch.randn(400, 6).double(), torch.randn(3, 7).double()
    ones = torch.cat((x, torch.ones(400, 1)), 1)
    sums = RegressionSums(torch.zeros(7, 7).double(), torch.zeros(7, 3).double())
    for part in ones.split(150):
        sums.add(part, part @ wanted.mT)
    torch.testing.assert_close(sums.solved(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("recipe, name", [("zack", "llama-gqa"), ("small", "opt")])
def test_scores_are_like_those_of_a_second_reading(recipe: str, name: str) -> None:
    """Of every row, prompts' in chunks and generated ones alike, on text that was learned from."""
    model = learned(recipe, 0.6, name)
    ids = tokens(6, 96)[2].tolist()
    session = session_of(model)
    session.chunk = 17
    session.read(ids[:70], prompt=70)
    for token in ids[70:]:
        session.read([token])
    found, _, valid = metrics_of(session)
    teacher = session_of(model, TEACHER)
    teacher.read(ids, prompt=96)
    teacher.runner.rescorer.score(teacher.sequence)
    wanted, _, _ = metrics_of(teacher)
    assert valid.all() and (found > 0).all()
    for own, of in zip(found[0].log(), wanted[0].clamp(min=LEAST).log(), strict=True):
        assert float(torch.corrcoef(torch.stack((own, of)))[0, 1]) > 0.25


def test_what_is_read_is_like_a_prompt() -> None:
    """BOS between documents, as in calibration's windows, would teach what no prompt has."""
    model, tokenizer = kvfold.reference("gqa"), load_tokenizer("reference:gqa")
    compressor = Compressor(model, recipes.get("zack"), tokenizer, max_tokens=4096)
    found = readings(compressor)
    assert found.numel() <= 4096 and len(found) > 1
    assert (found[:, 0] == tokenizer.bos_token_id).all()
    assert (found[:, 1:] != tokenizer.bos_token_id).all()
    assert (compressor.windows()[:, 1:] == tokenizer.bos_token_id).any()


@pytest.mark.slow
def test_scores_fit_a_prompt_that_was_not_read() -> None:
    """Of a layer in the middle, whose scores learned from calibration's windows do not."""
    model, tokenizer = kvfold.reference("gqa"), load_tokenizer("reference:gqa")
    compressor = Compressor(model, recipes.get("zack"), tokenizer, max_tokens=4096)
    fold_plain(model, spec := plain_spec(family_of(model.config).geometry(model.config)))
    mark(model, spec, {})
    learn_scores(model, tokenizer, readings(compressor))
    (row, *_) = ruler.examples("keys", tokenizer, length=768, contexts=1)
    ids, found = list(row.prompts(tokenizer)[0].context), {}
    for name in ("learned", TEACHER):
        config = CacheConfig(evict=name, keep_tokens=0.5)
        runner = build_runner(model, config, num_slots=1, max_tokens=1024, tokenizer=tokenizer)
        with PagedSession(runner) as session:
            session.read(ids, prompt=len(ids))
            if name != "learned":
                runner.rescorer.score(session.sequence)
            found[name] = metrics_of(session)[0][0, :, 4:].clamp(min=LEAST).log()
    both = zip(found["learned"], found[TEACHER], strict=True)
    alike = [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in both]
    assert sum(alike[6:]) / len(alike[6:]) > 0.25, alike


def test_logits_equal_a_masked_dense_model() -> None:
    """Also after a second round, in which generated rows go too."""
    session, ids = session_of(learned()), tokens(1, PROMPT + MORE)
    session.read(ids[0, :PROMPT].tolist(), prompt=PROMPT)
    session.compress()
    kept = survivors(session)
    assert any(len(x) < PROMPT for x in kept)
    found = torch.stack([session.read([token]) for token in ids[0, PROMPT:].tolist()])
    wanted = dense("llama-gqa", ids, kept, session.runner.pool.layout.groups)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    session.sequence.cache = CacheParams(max_cache_tokens=12)
    session.compress()
    assert any(x and x[-1] >= PROMPT and len(x) <= 12 for x in survivors(session))


def test_scores_are_saved_and_loaded(tmp_path) -> None:
    model = learned()
    kvfold.api.save(model, None, tmp_path / "made")
    again = kvfold.load(tmp_path / "made")
    for a, b in zip(model.model.layers, again.model.layers, strict=True):
        assert torch.equal(a.self_attn.score_map, b.self_attn.score_map)
    asked = SamplingParams(max_new_tokens=8, ignore_eos=True)
    cache = {"evict": "learned", "keep_tokens": 0.4, "page": PAGE, "kv_bytes": 2**22}
    prompts = tokens(2, 50).tolist()
    first, second = (
        LLM(x, max_tokens=96, **cache).generate(prompts, asked) for x in (model, again)
    )
    assert [x.token_ids for x in first] == [x.token_ids for x in second]


def test_compress_learns_where_it_is_asked(tmp_path) -> None:
    made = kvfold.compress(
        "reference:mha",
        "zack",
        keep=0.5,
        max_tokens=4096,
        learn_scores=True,
        output=tmp_path / "x",
        fold=True,
    )
    assert made.config.quantization_config.provenance["scores"]["tokens"] == 4096
    llm = LLM(str(tmp_path / "x"), evict="learned", keep_tokens=0.5, max_tokens=512)
    assert llm.generate(["The lighthouse keeper"], SamplingParams(max_new_tokens=3))[0].token_ids
    assert load_tokenizer(str(tmp_path / "x"))


def test_mistakes_are_explained() -> None:
    for model in (tiny("llama-gqa"), folded("llama-gqa", "zack", 0.5)):
        with pytest.raises(SettingError, match="no learned scores; compress it with"):
            session_of(model)
    with pytest.raises(SettingError, match="learn_scores: this model's sliding window"):
        kvfold.compress(tiny("mistral-sliding"), "zack", learn_scores=True, fold=True)
    with pytest.raises(SettingError, match="nothing is evicted from a cache with low-rank entries"):
        kvfold.compress(
            tiny("llama-gqa"), "zack", hybrid=kvfold.Ratios(), learn_scores=True, fold=True
        )
