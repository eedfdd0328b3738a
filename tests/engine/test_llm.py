"""Text in, text out: `LLM` on tiny models and on the embedded one."""

import gc
import re
import weakref
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

import kvfold
from kvfold import LLM, CacheParams, SamplingParams
from kvfold.cli.main import main
from llm_cases import compressed
from matrix import matrix
from models import greedy, tiny, tokens
from stub import in_threads

NEW = 8
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
SMALL = {"max_sequences": 3, "max_tokens": 96, "page": 8, "kv_bytes": 2**20}
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (3, 17, 30)]


class Letters:
    """Token i reads as letter i mod 26; text starts with token 3."""

    bos_token_id = 3

    def __call__(
        self, text: str, add_special_tokens: bool = True, **_: object
    ) -> dict[str, list[int]]:
        start = [self.bos_token_id] if add_special_tokens else []
        return {"input_ids": [*start, *(26 + ord(letter) - ord("a") for letter in text)]}

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + i % 26) for i in ids)


def llm_of(name: str = "llama-gqa", **settings) -> LLM:
    return LLM(tiny(name), tokenizer=Letters(), **{**SMALL, **settings})


def used(llm: LLM) -> int:
    llm.runner.pool.check_integrity()
    return llm.runner.pool.stats().used_bytes


# -- what comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "recipe"),
    matrix(
        ["llama-gqa", "qwen3", "phi3", "gemma2-sliding", "opt", "gpt-neox"],
        ["zack", "lorc", "palu-g", "fast", "swift", "lean", "small"],
        diagonals=2,
    ),
)
def test_the_engine_equals_transformers_on_compressed_models(name: str, recipe: str) -> None:
    model = compressed(name, recipe, keep=0.6)
    wanted = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    found = LLM(model, **SMALL, chunk=11).generate(PROMPTS, GREEDY)
    compared = 0
    for completion, (expected, margins) in zip(found, wanted, strict=True):
        for ours, theirs, margin in zip(completion.token_ids, expected, margins, strict=True):
            if margin < 1e-3:
                break
            assert ours == theirs
            compared += 1
    assert compared > NEW


def test_text_and_ids_are_the_same_prompt() -> None:
    llm = llm_of()
    (one,), (two,) = llm.generate("hello", GREEDY), llm.generate(llm.encode("hello"), GREEDY)
    assert one == two
    assert llm.encode("hello") == [3, 33, 30, 37, 37, 40]  # the start token first
    assert one.text == Letters().decode(list(one.token_ids)) and len(one.token_ids) == NEW
    assert one.finish_reason == "length" and one.logprobs is None and one.error is None


def test_a_batch_is_in_order_and_equals_one_by_one() -> None:
    llm = llm_of()
    prompts = ["abc", PROMPTS[1], "q", PROMPTS[2], PROMPTS[0]]  # more than there are slots
    together = llm.generate(prompts, GREEDY)
    assert together == [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert used(llm) == 0 and not llm.engine.has_work
    assert llm.generate([]) == []


def test_logprobs_come_for_every_token() -> None:
    sampling = SamplingParams(max_new_tokens=3, logprobs=2, ignore_eos=True)
    (found,) = llm_of().generate(["abc"], sampling)
    assert [len(entry.top) for entry in found.logprobs] == [2, 2, 2]
    assert all(entry.chosen == entry.top[0][1] for entry in found.logprobs)  # greedy


def test_seeds_decide_what_is_sampled() -> None:
    llm = llm_of()
    sampling = [SamplingParams(max_new_tokens=16, temperature=1.5, seed=s) for s in (7, 7, 8)]
    first, again, other = (llm.generate(["abc", "abc"], params) for params in sampling)
    assert first == again and first[0] == first[1]
    assert first[0].token_ids != other[0].token_ids


def test_a_stop_string_ends_the_text_before_it() -> None:
    llm = llm_of()
    (whole,) = llm.generate("abc", SamplingParams(max_new_tokens=20, ignore_eos=True))
    stop = whole.text[5:7]
    sampling = SamplingParams(max_new_tokens=20, stop=(stop,), ignore_eos=True)
    (cut,) = llm.generate("abc", sampling)
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
    streamed = "".join(output.text for output in llm.stream("abc", sampling))
    assert streamed == cut.text


def test_the_end_token_ends_and_is_not_text() -> None:
    plain = llm_of()
    (whole,) = plain.generate("abc", GREEDY)
    model = tiny("llama-gqa")
    end = whole.token_ids[4]
    model.generation_config.eos_token_id = [end]
    (cut,) = LLM(model, tokenizer=Letters(), **SMALL).generate(
        "abc", SamplingParams(max_new_tokens=NEW)
    )
    count = whole.token_ids.index(end) + 1
    assert cut.finish_reason == "eos" and cut.token_ids == whole.token_ids[:count]
    assert cut.text == whole.text[: count - 1]


def test_chat_goes_by_the_template() -> None:
    llm = LLM("reference:gqa", device="cpu", max_tokens=256)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat("Who went to sea?")
    llm.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    asked = [{"role": "user", "content": "Who went to sea?"}]
    answer = llm.chat(asked, GREEDY)
    (wanted,) = llm.generate("user: Who went to sea?\n", GREEDY)
    assert answer.text and llm.chat("Who went to sea?", GREEDY) == answer
    assert wanted.finish_reason == answer.finish_reason
    with pytest.raises(ValueError, match=r"messages\[0\] must be"):
        llm.chat([{"role": "user"}])
    with pytest.raises(ValueError, match="chat needs a tokenizer"):
        LLM(tiny("llama-gqa"), **SMALL).chat("hello")


def test_every_prompt_may_have_settings_of_its_own() -> None:
    llm = llm_of()
    each = [replace(GREEDY, max_new_tokens=n) for n in (1, 5, 3)]
    found = llm.generate(PROMPTS, each)
    assert [len(x.token_ids) for x in found] == [1, 5, 3]
    (whole,) = llm.generate([PROMPTS[1]], GREEDY)
    assert whole.token_ids[:5] == found[1].token_ids
    with pytest.raises(ValueError, match=r"sampling must be one for all .* got 2 for 3"):
        llm.generate(PROMPTS, each[:2])


def test_stops_of_one_prompt_do_not_keep_the_others_waiting() -> None:
    """All are read as they come, so that none runs on after its stop string."""
    llm = llm_of()
    (whole,) = llm.generate("abc", GREEDY)
    stop = SamplingParams(max_new_tokens=200, ignore_eos=True, stop=[whole.text[2]])
    steps = count()
    step = llm.engine.scheduler.schedule
    llm.engine.scheduler.schedule = lambda: (next(steps), step())[1]
    first, second = llm.generate(["abc", "abc"], stop)
    assert first == second and first.finish_reason == "stop"
    assert next(steps) <= 2 + len(first.token_ids)


def test_a_detokenizer_that_fails_ends_one_request() -> None:
    class Picky(Letters):
        def decode(self, ids: list[int]) -> str:
            if refused in ids:
                raise KeyError(refused)
            return super().decode(ids)

    refused = -1
    llm = LLM(tiny("llama-gqa"), tokenizer=Picky(), **SMALL)
    first, second = llm.generate(PROMPTS[:2], GREEDY)
    refused = next(token for token in first.token_ids[1:] if token not in second.token_ids)
    streamed = list(llm.stream(PROMPTS[0], GREEDY))
    assert streamed[-1].finish_reason == "error"
    assert streamed[-1].error == f"its tokens could not be decoded: KeyError: {refused}"
    assert "".join(x.text for x in streamed) == first.text[: len(streamed) - 1]
    failed, served = llm.generate(PROMPTS[:2], GREEDY)
    assert failed.finish_reason == "error" and served == second
    assert used(llm) == 0


# -- streams ------------------------------------------------------------------------------------


def test_a_stream_gives_what_generate_gives() -> None:
    llm = llm_of()
    (whole,) = llm.generate(PROMPTS[1], GREEDY)
    outputs = list(llm.stream(PROMPTS[1], GREEDY))
    assert tuple(t for output in outputs for t in output.token_ids) == whole.token_ids
    assert "".join(output.text for output in outputs) == whole.text
    assert [output.finish_reason for output in outputs] == [None] * (NEW - 1) + ["length"]


def test_leaving_a_stream_early_frees_its_pages() -> None:
    llm = llm_of()
    stream = llm.stream(PROMPTS[2], GREEDY)
    next(stream)
    assert used(llm) > 0
    stream.close()
    assert used(llm) == 0
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream(PROMPTS[1], GREEDY):
            1 / 0  # noqa: B018
    assert used(llm) == 0
    assert llm.generate(PROMPTS[0], GREEDY)[0].finish_reason == "length"


def test_streams_read_in_turns_lose_nothing() -> None:
    llm = llm_of()
    wanted = [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    found: list[list[int]] = [[], []]
    for pair in zip(*streams, strict=True):
        for ids, output in zip(found, pair, strict=True):
            ids += output.token_ids
    between = llm.stream(PROMPTS[2], GREEDY)
    first = next(between)
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == wanted[0]
    rest = [*first.token_ids, *(t for output in between for t in output.token_ids)]
    assert [tuple(ids) for ids in (*found, rest)] == wanted


def test_all_is_freed_with_the_last_reference() -> None:
    """At once, not when the garbage collector comes by: a pool is most of a GPU."""
    llm = llm_of()
    llm.runner.graphs = llm.runner._graphs()  # as on a GPU
    stream = llm.stream(PROMPTS[0], GREEDY)
    llm.runner.graphs = None
    next(stream)
    llm.runner.graphs = llm.runner._graphs()
    freed = [weakref.ref(x) for x in (llm.runner.pool.arena, llm.runner)]
    gc.disable()
    try:
        del llm, stream
        assert not any(x() is not None for x in freed)
    finally:
        gc.enable()


def test_streams_that_are_never_read_are_cancelled() -> None:
    llm = llm_of()
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert llm.engine.has_work
    del stream
    gc.collect()
    llm.engine.step()
    assert not llm.engine.has_work and used(llm) == 0


def test_a_stream_checks_its_prompt_at_once() -> None:
    with pytest.raises(ValueError, match="got 97"):
        llm_of().stream([97])


def test_added_requests_lose_nothing_beside_generate() -> None:
    llm = llm_of()
    wanted = [x.token_ids for x in llm.generate(PROMPTS, GREEDY)]
    ids = [llm.add(prompt, GREEDY) for prompt in PROMPTS[:2]]
    assert llm.generate([PROMPTS[2]], GREEDY)[0].token_ids == wanted[2]
    found: dict[int, list[int]] = {id: [] for id in ids}
    while llm.engine.has_work:
        for output in llm.engine.step():
            found[output.id] += output.token_ids
    assert [tuple(tokens) for tokens in found.values()] == wanted[:2]


def test_threads_share_an_llm() -> None:
    llm = llm_of()
    wanted = [x.token_ids for x in llm.generate(PROMPTS, GREEDY)]

    def work(number: int) -> None:
        for i in range(4):
            which = (number + i) % 3
            if i % 2:
                (found,) = llm.generate([PROMPTS[which]], GREEDY)
                assert found.token_ids == wanted[which]
            else:
                outputs = llm.stream(PROMPTS[which], GREEDY)
                assert tuple(t for x in outputs for t in x.token_ids) == wanted[which]

    in_threads(4, work)
    assert used(llm) == 0 and not llm.engine.has_work


# -- limits and mistakes ------------------------------------------------------------------------


def test_outputs_end_where_positions_do() -> None:
    llm = llm_of(max_tokens=32)
    (found,) = llm.generate(PROMPTS[2], SamplingParams(max_new_tokens=100, ignore_eos=True))
    assert len(PROMPTS[2]) + len(found.token_ids) == 33  # the last token is never fed
    assert found.finish_reason == "length"
    (one,) = llm.generate([list(range(3, 35))], GREEDY)
    assert len(one.token_ids) == 1


def test_a_refused_prompt_leaves_nothing_queued() -> None:
    llm = llm_of(max_tokens=32)
    with pytest.raises(ValueError, match="33 tokens, and max_tokens is 32"):
        llm.generate([PROMPTS[0], list(range(3, 36))], GREEDY)
    llm.engine.step()
    assert not llm.engine.has_work and used(llm) == 0


@pytest.mark.parametrize("change", ["data", "copied", "state", "step"])
def test_a_model_that_changed_is_not_served_by_halves(change: str) -> None:
    """Attention is copied, all else is shared: answers would be neither the old nor the new."""
    model = tiny("llama-gqa")
    llm = LLM(model, max_tokens=64)
    before = llm.generate([PROMPTS[0]], GREEDY)
    weight = model.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        if change == "data":
            weight.data += 0.1
        elif change == "copied":
            weight.data = weight.data * 1.1
        elif change == "state":
            model.load_state_dict({k: 1.1 * x for k, x in model.state_dict().items()})
    if change == "step":
        model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match=r"model: .* has changed since this LLM was made"):
        llm.generate([PROMPTS[0]], GREEDY)
    assert LLM(model, max_tokens=64).generate([PROMPTS[0]], GREEDY) != before or change == "copied"


def test_a_model_that_only_runs_is_served_on() -> None:
    model = tiny("llama-gqa")
    llm = LLM(model, max_tokens=64)
    before = llm.generate([PROMPTS[0]], GREEDY)
    model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
    assert llm.generate([PROMPTS[0]], GREEDY) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 257}, r"max_tokens must be in 1..256, the model's positions; got 257"),
        ({"max_tokens": 0}, "max_tokens must be in 1..256"),
        ({"bits": 5}, "bits must be one of .*; got 5"),
        ({"page": 0}, "page must be at least 1 row"),
        ({"evict": "foo"}, "evict must be one of kv-compress, .*; got 'foo'"),
        ({"keep_tokens": 0.5}, "need a policy"),
        ({"evict": "snapkv", "keep_tokens": 1.5}, r"keep_tokens must be in \(0, 1\]"),
        ({"evict": "snapkv", "keep_tokens": 0.5, "max_cache_tokens": 9}, "give one"),
        ({"kv_bytes": 100}, "kv_bytes must be at least"),
    ],
)
def test_settings_that_cannot_work(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm_of(**settings)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least 1 token"),
        ([97], r"token ids must be in 0..96; got 97"),
        ([-1], "got -1"),
        ([5.9], r"whole numbers, token ids; got \[5.9\]"),
        ([None], "whole numbers"),
        (["a"], "whole numbers"),
    ],
)
def test_prompts_that_cannot_be_served(prompt: list[int], message: str) -> None:
    llm = llm_of()
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt])


@pytest.mark.parametrize("like", [np.array, torch.tensor, tuple])
def test_token_ids_may_be_of_any_whole_kind(like) -> None:
    llm = llm_of()
    (wanted,) = llm.generate([PROMPTS[1]], GREEDY)
    assert llm.generate(like(PROMPTS[1]), GREEDY) == [wanted]
    assert llm.generate([like(PROMPTS[1])], GREEDY) == [wanted]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stop": ["zzz", 5]}, r"stop must be a tuple of strings; got \['zzz', 5\]"),
        ({"stop": 5}, "stop must be a tuple of strings; got 5"),
        ({"stop": ""}, "stop must be strings"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be .* got 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens must be .* got True"),
        ({"temperature": "1"}, "temperature must be .* got '1'"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"top_p": 0}, "top_p must be in"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**63}, "seed must be"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
    ],
)
def test_settings_of_a_request_are_checked_when_it_is_made(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


def test_settings_of_another_kind_are_refused() -> None:
    for wrong in ({"sampling": {"temperature": 1.0}}, {"cache": 0.5}):
        with pytest.raises(ValueError, match=r"must be a .*Params; got"):
            llm_of().generate(PROMPTS[0], **wrong)


def test_text_needs_a_tokenizer() -> None:
    llm = LLM(tiny("llama-gqa"), **SMALL)
    with pytest.raises(ValueError, match="pass tokenizer="):
        llm.generate("hello")
    with pytest.raises(ValueError, match=r"stop=\('x',\) needs a tokenizer"):
        llm.generate(PROMPTS[0], SamplingParams(stop=("x",)))
    assert llm.generate(PROMPTS[0], GREEDY)[0].text == ""


def test_a_model_serves_several_llms() -> None:
    model = tiny("llama-gqa")
    wanted = [LLM(tiny("llama-gqa"), **SMALL, bits=x).generate(PROMPTS, GREEDY) for x in (16, 4)]
    whole, packed = (LLM(model, **SMALL, bits=x) for x in (16, 4))
    assert [packed.generate(PROMPTS, GREEDY), whole.generate(PROMPTS, GREEDY)] == wanted[::-1]


# -- the three axes -----------------------------------------------------------------------------


def test_eviction_needs_a_budget_from_somewhere() -> None:
    llm = llm_of(evict="kv-compress")
    with pytest.raises(ValueError, match="needs a budget"):
        llm.generate(PROMPTS[2], GREEDY)
    assert len(llm.generate(PROMPTS[2], GREEDY, cache=CacheParams(keep_tokens=1))) == 1
    with pytest.raises(ValueError, match="evicts nothing"):
        llm_of().generate(PROMPTS[2], GREEDY, cache=CacheParams(max_cache_tokens=16))


@pytest.mark.parametrize("whose", ["the LLM's", "the request's"])
def test_a_request_holds_its_budget_after_its_prompt(whose: str) -> None:
    prompt = tokens(1, 80)[0].tolist()
    mine = {"max_cache_tokens": 24} if whose == "the LLM's" else {}
    own = None if mine else CacheParams(max_cache_tokens=24)
    llm = llm_of(evict="kv-compress", **mine)
    stream, held = llm.stream(prompt, SamplingParams(max_new_tokens=4), cache=own), []
    for _ in stream:
        held.append(used(llm) // llm.runner.pool.layout.page_bytes)
    assert held[0] == 80 // SMALL["page"]  # pages a group: the prompt, then 24 rows and a new one
    assert max(held[1:3]) <= 24 // SMALL["page"] + 1


def test_summary_adds_up() -> None:
    model = compressed("llama-gqa", "small", factor=6.0)
    llm = LLM(model, **SMALL, evict="snapkv", keep_tokens=0.5)
    rows = dict(llm.summary())
    assert rows.pop("prefix caching") == "on"
    layout, geometry = llm.runner.pool.layout, llm.runner.pool.layout.spec.geometry
    full = 2 * geometry.full_numbers
    number = {name: float(re.search(r"[\d.]+", value).group()) for name, value in rows.items()}
    assert number["a token, uncompressed"] == full
    assert number["pool"] == 1.0 and "8-entry pages" in rows["pool"]
    assert number["dimensions kept"] == layout.spec.bytes_per_token()
    assert number["bits"] == pytest.approx(layout.bits_per_token / 8, abs=0.5)
    assert number["bits"] <= full / 6 < number["dimensions kept"]
    assert number["in pages"] == pytest.approx(layout.page_bytes / 8, abs=0.5)
    assert number["fits"] == 2**20 * 8 // layout.page_bytes
    assert "3 requests of 96" in rows["fits"] and number["tokens kept"] == 0.5
    assert rows["tokens kept"].endswith("never fewer than 32 tokens")
    assert "tokens kept" not in dict(llm_of().summary())


@pytest.mark.parametrize(
    ("bits", "dtype", "told"),
    [
        (None, torch.float32, "unquantised numbers in float32 (4 B each), "),
        (None, torch.bfloat16, ""),
        (4, torch.float32, ""),
    ],
)
def test_summary_says_why_pages_take_more_than_16_bits(
    bits: int | None, dtype: torch.dtype, told: str
) -> None:
    rows = dict(LLM(tiny("llama-gqa").to(dtype), **SMALL, bits=bits).summary())
    assert rows["in pages"].endswith(f" B, with {told}rounding and what eviction needs")


def test_summary_says_that_kv_bytes_counts_windows() -> None:
    kv_bytes = 6 * 2**20
    llm = llm_of(bits=4, window=4096, max_sequences=2, kv_bytes=kv_bytes)
    rows, layout = dict(llm.summary()), llm.runner.pool.layout
    size, total = re.findall(r"([\d.]+) MiB", rows["exact window"])
    assert rows["exact window"].endswith(" MiB, which kv_bytes counts with the pool")
    assert (size, total) == ("1.5", "4.5") and layout.window_bytes == 3 * 2**19
    assert rows["pool"].startswith("1.5 MiB of")


def test_summary_says_what_has_kernels_on_a_gpu() -> None:
    llm = llm_of(bits=3)
    assert "layers with kernels" not in dict(llm.summary())
    llm.runner.pool.device = torch.device("cuda")
    assert "0 of 2 layers in decoding" in dict(llm.summary())["layers with kernels"]


@pytest.mark.parametrize(("policy", "served"), [("h2o", "2 of 2"), ("keyformer", "0 of 2")])
def test_summary_counts_kernels_that_serve_the_policy(policy: str, served: str) -> None:
    llm = llm_of(evict=policy, keep_tokens=0.5, bits=4)
    llm.runner.pool.device = torch.device("cuda")
    assert f"{served} layers in decoding" in dict(llm.summary())["layers with kernels"]


def test_few_bits_change_little() -> None:
    sampling = SamplingParams(max_new_tokens=1, logprobs=0, ignore_eos=True)
    chosen = [
        llm_of(bits=bits).generate(PROMPTS[2], sampling)[0].logprobs[0].chosen for bits in (16, 8)
    ]
    assert chosen[0] != chosen[1] and chosen[0] == pytest.approx(chosen[1], abs=0.02)


def test_all_axes_at_once() -> None:
    model = compressed("llama-gqa", "small", keep=0.5)
    llm = LLM(model, **SMALL, bits=4, evict="snapkv", keep_tokens=0.5)
    assert llm.runner.pool.layout.kept_fraction < 0.5 * 5 / 16  # 4 bits and some for scales
    (found,) = llm.generate(tokens(1, 80)[0].tolist(), GREEDY)
    assert found.error is None and len(found.token_ids) == NEW and used(llm) == 0


# -- a planned checkpoint -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The embedded model with dimensions and bits planned together, on disk."""
    path = tmp_path_factory.mktemp("models") / "planned"
    kvfold.compress("reference:gqa", "small", factor=6, max_tokens=4096, output=path, fold=True)
    return path


def test_a_planned_checkpoint_generates_text(planned) -> None:
    llm = LLM(planned, device="cpu", dtype="float32", max_sequences=2, max_tokens=128)
    assert llm.runner.pool.layout.spec.planned
    assert llm.runner.pool.layout.kept_fraction <= 1 / 6
    whole = LLM("reference:gqa", device="cpu", dtype="float32", max_tokens=128)
    prompt, sampling = "The old house stood at the end of the", SamplingParams(max_new_tokens=4)
    (found,), (wanted,) = llm.generate(prompt, sampling), whole.generate(prompt, sampling)
    assert found.token_ids[0] == wanted.token_ids[0] and found.text.strip()


def test_generate_runs_a_planned_checkpoint_on_pages(planned, capsys) -> None:
    assert main(["generate", str(planned), "--prompt", "The old", "--max-new-tokens", "6"]) == 0
    captured = capsys.readouterr()
    assert "bits: " in captured.err and "fits: " in captured.err
    llm = LLM(planned, device="cpu", dtype="float32", max_tokens=64)
    (found,) = llm.generate([llm.encode("The old")], SamplingParams(max_new_tokens=6))
    assert captured.out.strip() == found.text.strip()
