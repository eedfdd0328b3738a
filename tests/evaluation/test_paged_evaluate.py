"""Perplexity and retrieval on pages: the same numbers as transformers' cache, and honest bytes."""

import json
from functools import partial

import pytest
import torch
import transformers as hf

from commands import refused
from kvfold.cli.main import main
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.compare import from_json
from kvfold.evaluation.dense import DenseSession
from kvfold.evaluation.measure import Measurement, measure
from kvfold.evaluation.needle import evaluate_needle
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import perplexity, token_nll, window_perplexity
from kvfold.evaluation.reader import Reader
from kvfold.evaluation.tasks.late_question import LateQuestionTask
from kvfold.hub.loading import load, load_tokenizer
from kvfold.utils.tokens import encode, encode_prompt
from models import CONFIGS, tiny, tokens

PAGE, CTX = 8, 60


def paged_perplexity(runner, ids: torch.Tensor, chunk: int = 512, **how):
    return window_perplexity(partial(PagedSession, runner, chunk), ids, **how)


def runner_of(model, max_tokens: int = 128, **settings):
    config = CacheConfig(**{"kv_bytes": 2**21, "page": PAGE, **settings})
    return build_runner(model, config, num_slots=1, max_tokens=max_tokens)


# -- perplexity ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_without_bits_it_equals_transformers_cache(name: str) -> None:
    windows = tokens(3, CTX)
    wanted = perplexity(tiny(name), windows, chunk=17)
    found, held = paged_perplexity(runner_of(tiny(name)), windows, chunk=13)
    assert found.window_nll == pytest.approx(wanted.window_nll, rel=1e-4)
    assert found.perplexity_se == pytest.approx(wanted.perplexity_se, rel=1e-2)
    assert found.tokens == wanted.tokens == 3 * (CTX - 1)
    assert held.tokens == CTX - 1  # the last token is only predicted


def test_scoring_from_a_token_on_scores_that_and_all_after() -> None:
    windows, model = tokens(2, CTX), tiny("llama-gqa")
    with torch.no_grad():
        nll = token_nll(model(windows).logits[:, 19:-1], windows[:, 20:]).mean(1)
    found, held = paged_perplexity(runner_of(model), windows, scored_from=20)
    assert found.window_nll == pytest.approx(nll.tolist(), rel=1e-4)
    assert found.tokens == 2 * 40 and held.tokens == 20


def test_with_eviction_the_second_half_is_scored() -> None:
    windows = tokens(2, CTX)
    everything = {"evict": "snapkv-w8", "keep_tokens": 1.0}
    found, _ = paged_perplexity(runner_of(tiny("llama-gqa"), **everything), windows)
    wanted, _ = paged_perplexity(runner_of(tiny("llama-gqa")), windows, scored_from=CTX // 2)
    assert found.tokens == 2 * (CTX // 2)
    assert found.window_nll == pytest.approx(wanted.window_nll, rel=1e-4)
    half = {"evict": "snapkv-w8", "keep_tokens": 0.5}
    evicted, held = paged_perplexity(runner_of(tiny("llama-gqa"), **half), windows)
    assert abs(evicted.nll - found.nll) > 1e-3  # something was lost
    assert held.tokens == CTX // 2


@pytest.mark.parametrize("scored_from", [-1, CTX - 1, CTX])
def test_something_must_be_left_to_score(scored_from: int) -> None:
    with pytest.raises(ValueError, match="must leave 2 of a window's 60 tokens"):
        paged_perplexity(runner_of(tiny("llama-gqa")), tokens(1, CTX), scored_from=scored_from)


def test_logits_that_are_not_finite_are_refused() -> None:
    model = tiny("llama-gqa")
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        paged_perplexity(runner_of(model), tokens(1, CTX))


# -- footprint ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [None, 8, 4, 3, 2])
def test_footprint_counts_what_is_held(bits: int | None) -> None:
    model = tiny("llama-gqa")  # 2 layers of 2 heads of 12, in float32
    runner = runner_of(model, bits=bits)
    found, held = paged_perplexity(runner, tokens(1, 65))
    row = 4 * (24 * (bits or 16) + (0 if bits is None else 2 * 16))  # keys, values, two scales
    assert held.kept_fraction == pytest.approx(row / (16 * 96))
    pages = 8 * 4  # of 8 rows, in every group
    page_bytes = runner.pool.layout.groups[0].layout.page_bytes
    assert held.cache_bytes == pages * page_bytes == found.cache_bytes_allocated
    assert held.pool_fraction == pytest.approx((held.cache_bytes + 4 * pages) / (2 * 96 * 64))
    assert runner.pool.stats().high_water_bytes == held.cache_bytes
    assert runner.pool.stats().used_bytes == 0


def test_eviction_shows_in_all_three_numbers() -> None:
    windows = tokens(1, 128)
    whole, half = (
        paged_perplexity(
            runner_of(tiny("llama-gqa"), bits=4, evict="kv-compress", keep_tokens=keep), windows
        )[1]
        for keep in (1.0, 0.5)
    )
    assert half.kept_fraction == pytest.approx(whole.kept_fraction / 2)
    assert half.pool_fraction == pytest.approx(whole.pool_fraction / 2)
    assert half.cache_bytes == whole.cache_bytes // 2
    assert half.kept_fraction < half.pool_fraction


# -- needle -------------------------------------------------------------------------------------


class Both:
    """Two readers side by side, whose answers must agree."""

    def __init__(self, *readers) -> None:
        self.readers, self.asked = readers, 0

    def prefill(self, ids: list[int]) -> None:
        for reader in self.readers:
            reader.prefill(ids)

    def answer(self, question: list[int], num_tokens: int) -> list[int]:
        one, other = (reader.answer(question, num_tokens) for reader in self.readers)
        assert one == other
        self.asked += 1
        return one


def small_llama(**overrides) -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**sizes, **overrides})).eval()


@pytest.mark.parametrize("agnostic", [True, False])
def test_needle_answers_equal_transformers(agnostic: bool) -> None:
    runner = runner_of(small_llama(), max_tokens=512)
    paged = Reader(partial(PagedSession, runner, 100), agnostic=agnostic)
    both = Both(Reader(partial(DenseSession, small_llama())), paged)
    tokenizer = load_tokenizer("reference:gqa")
    (result,) = evaluate_needle(
        small_llama(), tokenizer, lengths=[400], num_contexts=2, reader=both
    )
    assert both.asked == result.num_questions == 8
    assert paged.footprint.kept_fraction == 1.0
    paged.close()
    assert runner.pool.stats().used_bytes == 0


@pytest.mark.parametrize("agnostic", [True, False])
def test_a_compressed_context_answers_each_question_alike(agnostic: bool) -> None:
    """A question leaves no trace, so its answer does not depend on those before it."""
    runner = runner_of(tiny("llama-gqa"), evict="snapkv-w8", keep_tokens=0.5)
    reader = Reader(partial(PagedSession, runner), agnostic=agnostic)
    questions = [[5, 6, 7], [50, 8], [9]]
    reader.prefill(tokens(1, 64)[0].tolist())
    first = [reader.answer(question, 4) for question in questions]
    again = [reader.answer(question, 4) for question in reversed(questions)]
    assert first == again[::-1]
    assert reader.footprint.kept_fraction == pytest.approx(0.5, abs=0.1)
    reader.close()
    assert runner.pool.stats().used_bytes == 0


# -- the command line ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "plain"
    small_llama().save_pretrained(path)
    load_tokenizer("reference:gqa").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "sliding"
    torch.manual_seed(0)
    config = small_llama().config.to_dict() | {"sliding_window": 64}
    config = {key: config[key] for key in config if key not in ("architectures", "model_type")}
    hf.MistralForCausalLM(hf.MistralConfig(**config)).save_pretrained(path)
    load_tokenizer("reference:gqa").save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The ship went out to sea, and nobody saw it again. " * 60, encoding="utf-8")
    return path


def measured(tmp_path, *arguments) -> dict:
    """The JSON of a command."""
    target = tmp_path / "out.json"
    assert main([*map(str, arguments), "--json", str(target)]) == 0
    return json.loads(target.read_text())


def test_eval_on_pages_without_bits_equals_eval(plain, text, tmp_path) -> None:
    options = ["--text", text, "--ctx", 128, "--max-tokens", 256]
    dense = measured(tmp_path, "eval", plain, *options)
    paged = measured(tmp_path, "eval", plain, *options, "--paged")
    assert paged["nll"] == pytest.approx(dense["nll"], rel=1e-5)
    assert paged["tokens"] == dense["tokens"] and paged["kept_fraction"] == 1.0
    assert dense["pool_fraction"] is None and paged["pool_fraction"] > 1


def test_eval_at_four_bits(plain, text, tmp_path, capsys) -> None:
    options = ["--text", text, "--ctx", 129, "--max-tokens", 258, "--bits", 4]
    found = measured(tmp_path, "eval", plain, *options)
    assert found["kept_fraction"] == pytest.approx((4 * 8 + 16) / (16 * 8))  # a scale every 8
    assert found["bytes_per_token"] == pytest.approx(48)
    assert found["baseline_bytes_per_token"] == 128
    pages = 4 * 4  # of 32 rows: codes of keys and values, then scales
    assert found["cache_bytes_allocated"] == pages * (128 + 128 + 128)
    assert found["pool_fraction"] == pytest.approx(pages * (384 + 4) / (128 * 128))
    assert found["settings"]["cache"]["bits"] == 4
    out = capsys.readouterr().out
    assert "cache: 0.3750 kept, 48 of 128 bytes per token; 0.3789 in pages" in out


@pytest.mark.parametrize("question", [[], ["--see-question"]])
def test_eval_with_eviction_and_needle(plain, tmp_path, monkeypatch, question) -> None:
    monkeypatch.setattr("kvfold.evaluation.measure.NEEDLE_LENGTHS", (512,))
    options = ["--evict", "snapkv", "--keep-tokens", ".5", "--needle", "--needle-contexts", 1]
    found = measured(tmp_path, "eval", plain, *options, *question)
    assert found["needle"]["512"]["num_questions"] == 4
    assert found["kept_fraction"] == pytest.approx(0.5, abs=0.07)  # half, rounded up to pages
    assert found["pool_fraction"] > found["kept_fraction"]
    assert found["cache_bytes_allocated"] is None  # no text was measured


def test_compare_at_four_bits(plain, text, tmp_path) -> None:
    options = ["--recipes", "small", "--keep", ".5", "--text", text, "--ctx", 128]
    options += ["--calib-tokens", 4096, "--bits", 4]
    found = measured(tmp_path, "compare", plain, *options)
    original, small = found["rows"]
    assert original["kept_fraction"] == 1.0 and original["pool_fraction"] > 1  # 16 bits, as fp32
    assert small["kept_fraction"] == pytest.approx((4 * 32 + 2 * 16) / (16 * 64))
    assert small["kept_fraction"] < small["pool_fraction"] < original["pool_fraction"]
    assert 0 < small["cache_bytes_allocated"] < original["cache_bytes_allocated"]
    assert len(small["window_nll"]["text"]) == len(original["window_nll"]["text"])
    assert found["settings"]["cache"]["bits"] == 4


def test_compare_scores_the_same_tokens_with_eviction(plain, text, tmp_path) -> None:
    options = ["--recipes", "zack", "--keep", "1", "--text", text, "--ctx", 128, "--align", 1]
    options += ["--calib-tokens", 4096, "--evict", "random", "--keep-tokens", "1"]
    original, zack = measured(tmp_path, "compare", plain, *options)["rows"]
    assert zack["window_nll"]["text"] == pytest.approx(original["window_nll"]["text"], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "5"], "--bits must be one of 16, 8, 6, 4, 3, 2, 1; got 5"),
        (["--bits", "0"], "--bits must be one of"),
        (["--page", "0"], "--set page must be at least 1 row, got 0"),
        (["--sub-group", "4", "--bits", "4"], "--set sub-group must be at least 8"),
        (["--kv-bytes", "0"], "--set kv-bytes must be at least 1, got 0"),
        (["--kv-bytes", "100"], "--set kv-bytes must be at least"),
        (
            ["--kv-bytes", "20000"],
            "--set kv-bytes: a pool of 19968 bytes has no room for 127 tokens",
        ),
        (["--evict", "foo", "--keep-tokens", ".5"], "--evict must be one of kv-compress, "),
        (["--evict", "snapkv"], "give --keep-tokens, such as 0.5, or --set max-cache-tokens"),
        (["--evict", "snapkv", "--keep-tokens", "0"], "--keep-tokens must be in (0, 1]"),
        (
            ["--evict", "snapkv", "--max-cache-tokens", "0"],
            "max-cache-tokens must be at least 1",
        ),
        (["--keep-tokens", ".5"], "need a policy that says what goes"),
        (["--max-cache-tokens", "64"], "need a policy that says what goes"),
        (["--evict", "h2o", "--keep-tokens", ".5", "--max-cache-tokens", "9"], "give one"),
        (
            ["--evict", "snapkv", "--keep-tokens", ".5", "--ctx", "2"],
            "--set ctx must be at least 3",
        ),
    ],
)
def test_eval_refuses(plain, text, capsys, options, message) -> None:
    arguments = ["--text", text, "--ctx", 128, "--max-tokens", 256, *options]
    if "--ctx" in options:
        del arguments[2:4]
    assert message in refused(capsys, "eval", plain, *arguments)


def test_eviction_beside_a_sliding_window_is_refused(sliding, text, capsys) -> None:
    options = ["--text", text, "--ctx", 128, "--evict", "snapkv", "--keep-tokens", ".5"]
    assert "sliding window already drops" in refused(capsys, "eval", sliding, *options)


@pytest.fixture
def rows(tmp_path):
    """Five rows of both kinds."""
    found = [{"prompt": text, "answer": "three"} for text in ("one two", "The ship went")]
    choices = {"choices": [" two", " three four", " out to sea"], "label": 2}
    found += [{"context": text, **choices} for text in ("one", "The ship went")]
    found += [{"contexts": ["one", "The ship"], "choices": [" went", " went"], "label": 1}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, found)), encoding="utf-8")
    return path


def test_tasks_on_pages_equal_transformers(plain, rows, tmp_path) -> None:
    """At 16 bits: outputs and scores, and what a model answers where a cache may drop tokens."""
    (dense,) = measured(tmp_path, "eval", plain, "--tasks", rows)["tasks"].values()
    assert dense["rows"] == 5 and len(dense["outputs"]) == 2
    evict = ["--evict", "snapkv", "--keep-tokens", 1]
    for options in (["--paged"], ["--page", 8, "--chunk", 3], evict):
        (paged,) = measured(tmp_path, "eval", plain, "--tasks", rows, *options)["tasks"].values()
        assert paged == dense


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-sliding"])
@pytest.mark.parametrize("settings", [{}, {"bits": 4, "residual": 16}], ids=["", "residual"])
def test_endings_weigh_on_pages_what_they_do_alone(name: str, settings: dict) -> None:
    """Where pages cannot go back too: behind a sliding window, or packed together."""
    if settings and name == "mistral-sliding":
        pytest.skip("a residual beside a sliding window is refused")
    context, endings = tokens(1, 40)[0].tolist(), [[5], [6, 7], [5, 8, 9]]
    runner = runner_of(tiny(name), **settings)
    reader = Reader(partial(PagedSession, runner, 16))
    reader.prefill(context)
    found = [reader.log_likelihood(ending) for ending in endings]
    assert found == [reader.log_likelihood(ending) for ending in endings]  # nothing is left behind
    assert reader.session is None or runner.can_rewind
    reader.close()
    assert runner.pool.stats().used_bytes == 0
    if not settings:
        dense = Reader(partial(DenseSession, tiny(name)))
        dense.prefill(context)
        wanted = [dense.log_likelihood(ending) for ending in endings]
        assert found == pytest.approx(wanted, rel=1e-4)


def test_tasks_are_answered_from_what_eviction_leaves(plain, tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "one two three " * 60, "answer": "four"}))
    options = ["--tasks", rows, "--bits", 4, "--evict", "snapkv", "--keep-tokens", ".5"]
    found = measured(tmp_path, "eval", plain, *options)
    assert found["exact_match"] == 0
    assert found["kept_fraction"] == pytest.approx(0.5 * 0.375, rel=0.2)  # half, at 4 bits


def test_a_question_comes_after_its_context_was_evicted(plain, tmp_path) -> None:
    """The same words as one prompt are compressed together, which keeps other rows."""
    context, question = "The ship went out to sea. " * 12, "Where did the ship go? It went"
    row, path = {"answer": "x", "max_new_tokens": 24}, tmp_path / "rows.jsonl"

    def told(**words: str) -> dict:
        path.write_text(json.dumps(row | words))
        evict = ["--evict", "snapkv-w8", "--keep-tokens", ".25", "--page", 8]
        return measured(tmp_path, "eval", plain, "--tasks", path, *evict)

    asked, one = told(context=context, question=question), told(prompt=context + question)
    model, tokenizer = load(plain), load_tokenizer(plain)
    runner = runner_of(model, 512, evict="snapkv-w8", keep_tokens=0.25, page=8)
    with PagedSession(runner) as session:
        ids = encode_prompt(tokenizer, context)
        session.read(ids, prompt=len(ids))
        session.compress()
        wanted = session.greedy(session.read(encode(tokenizer, question)), 24)
    ((found,), (other,)) = (next(iter(x["tasks"].values()))["outputs"] for x in (asked, one))
    assert found == tokenizer.decode(wanted).strip() != other
    # A row says when its question comes, whatever the needle's contexts are told.
    tasks = {"asked": [LateQuestionTask(context=context, question=question, **row)]}
    cache = CacheConfig(evict="snapkv-w8", keep_tokens=0.25, page=8, kv_bytes=2**21)
    what = Measurement(tasks=tasks, cache=cache, agnostic=False)
    assert measure(model, tokenizer, what).tasks["asked"].outputs == (found,)


def test_compare_answers_tasks(plain, rows, text, tmp_path, capsys) -> None:
    options = ["--recipes", "small", "--keep", ".5", "--text", text, "--ctx", 128, "--tasks", rows]
    options += ["--calib-tokens", 4096, "--bits", 4, "--html", tmp_path / "out.html"]
    found = measured(tmp_path, "compare", plain, *options)
    assert "rows: accuracy, %." in " ".join(capsys.readouterr().out.split())
    assert "rows, exact_match" in (tmp_path / "out.html").read_text()
    alone = measured(tmp_path, "eval", plain, "--tasks", rows)
    original, small = found["rows"]
    ((name, scores),) = original["tasks"].items()
    assert name == str(rows) and scores["accuracy"] == alone["accuracy"]
    assert small["tasks"][name].keys() == scores.keys()
    assert from_json(found["rows"])[0].tasks == original["tasks"]
