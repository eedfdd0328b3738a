"""Perplexity, tasks and result rows, against brute force on tiny random models."""

import gzip
import io
import json
import logging
import lzma
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as hf
from rich.console import Console
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from kvfold.cli.compare import print_rows
from kvfold.config import CacheConfig
from kvfold.evaluation.compare import Row, against, from_json, labels, paired, table, to_json
from kvfold.evaluation.comparison import conditions
from kvfold.evaluation.dense import DenseSession, cache_bytes
from kvfold.evaluation.measure import Measurement
from kvfold.evaluation.perplexity import mean_and_se, paired_difference, perplexity
from kvfold.evaluation.reader import Reader
from kvfold.evaluation.tasks import read_tasks
from kvfold.evaluation.tasks.choice import ChoiceTask, split_choices
from kvfold.evaluation.tasks.generation import GenerationTask
from kvfold.evaluation.tasks.late_question import LateQuestionTask
from kvfold.evaluation.tasks.run import run_tasks
from kvfold.utils.text import documents, read_texts, running
from kvfold.utils.tokens import windows

LETTERS = [chr(code) for code in range(32, 127)]
VOCAB = {token: i for i, token in enumerate(["<s>", "</s>", *LETTERS, "ab", "th"])}
SHAPE = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LLAMA = {**SHAPE, "num_key_value_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**LLAMA),
    "opt": lambda: hf.OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32),
    "sliding": lambda: hf.MistralConfig(**LLAMA, sliding_window=8),
}


def tiny(name):
    """Random model with logits far from uniform, so that a wrong position or mask shows."""
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def letters(bos="<s>"):
    """One token a character, but "ab" and "th" are single tokens."""
    backend = Tokenizer(BPE(VOCAB, [("a", "b"), ("t", "h")]))
    backend.decoder = decoders.Fuse()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token="</s>",
        add_bos_token=bos is not None,
        model_max_length=8,
    )


def some_ids(n, ctx):
    return torch.randint(2, len(VOCAB), (n, ctx), generator=torch.Generator().manual_seed(0))


def dense_nll(model, ids):
    """Loss [n, T - 1] of one forward without a cache."""
    with torch.no_grad():
        logs = model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
    return -logs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


# -- text ---------------------------------------------------------------------------------------


def test_texts_are_read_in_order_and_unpacked(tmp_path):
    (tmp_path / "a.txt").write_text("first", encoding="utf-8")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress("zweité".encode()))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    text = read_texts([tmp_path / name for name in ("a.txt", "b.txt.xz", "c.txt.gz")])
    assert documents(text) == ["first", "zweité", "third"]
    assert running(text) == "first\n\nzweité\n\nthird"
    assert read_texts(tmp_path / "a.txt") == "first"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "no such file"),
        ("blank.txt", b" \n", "empty"),
        ("latin.txt", "é".encode("latin-1"), "not utf-8 text at byte 0"),
        ("zeros.txt", b"a\0b", "not text"),
        ("broken.txt.xz", b"not xz", "cannot be read"),
        ("cut.txt.xz", lzma.compress(b"some text" * 99)[:-20], "cannot be read"),
    ],
)
def test_bad_text_files_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: {message}"):
        read_texts([tmp_path / name])


@pytest.fixture
def warnings(caplog):
    """Records of transformers' logger, whatever verbosity the other tests run at."""
    before = hf.logging.get_verbosity()
    logger = logging.getLogger("transformers")
    hf.logging.set_verbosity_warning()
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    hf.logging.set_verbosity(before)


def test_windows_start_with_bos_and_hold_the_text_in_order(warnings):
    text = "the cab is about to stop there, perhaps. " * 40
    tokenizer = letters()
    ids = windows(tokenizer, text, 16, max_tokens=100)
    assert ids.shape == (6, 16) and ids.dtype == torch.long and (ids[:, 0] == 0).all()
    whole = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert ids[:, 1:].flatten().tolist() == whole[:90]
    assert not warnings.records  # this tokenizer's model_max_length is 8


def test_windows_without_bos_are_all_text():
    tokenizer = letters(bos=None)
    assert windows(tokenizer, "abcabc", 2).tolist() == [
        [VOCAB["ab"], VOCAB["c"]],
        [VOCAB["ab"], VOCAB["c"]],
    ]


@pytest.mark.parametrize(
    ("ctx", "max_tokens", "message"),
    [
        (16, None, "4 tokens are available but one window of ctx=16 needs 15"),
        (16, 10, "max_tokens: 10 is less than one window of ctx=16"),
        (1, None, "ctx: 1 is too small"),
    ],
)
def test_too_short_a_text_says_what_is_missing(ctx, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        windows(letters(), "wxyz", ctx, max_tokens)


# -- perplexity ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", ["llama", "opt", "sliding"])
def test_chunked_perplexity_equals_one_dense_forward(name, chunk):
    model, ids = tiny(name), some_ids(3, 40)
    result = perplexity(model, ids, chunk=chunk, batch=2)
    expected = dense_nll(model, ids).mean(1)
    assert result.window_nll == pytest.approx(expected.tolist(), abs=1e-5)
    assert result.nll == pytest.approx(float(expected.mean()), abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.nll))
    assert result.perplexity_se == pytest.approx(result.perplexity * result.nll_se)
    assert result.nll_se == pytest.approx(float(expected.std() / 3**0.5), abs=1e-5)
    assert result.tokens == 3 * 39


def test_bytes_are_those_of_the_cache_of_one_batch():
    model, ids = tiny("llama"), some_ids(3, 40)
    result = perplexity(model, ids, chunk=7, batch=2)
    layers, heads, head_dim, itemsize = 2, 2, 8, 4
    assert result.cached_tokens == 2 * 40
    assert result.cache_bytes_allocated == layers * 2 * heads * 80 * head_dim * itemsize


def test_a_view_costs_the_storage_it_keeps_alive_once():
    cache = hf.DynamicCache()
    rows = torch.zeros(1, 1, 100, 8)
    cache.update(rows, rows, 0)
    cache.layers[0].keys = rows[:, :, :5, :4]
    cache.layers[0].values = rows[:, :, :5, 4:]
    assert cache_bytes(cache) == rows.nbytes


def test_training_mode_is_put_back_and_dropout_is_off():
    model, ids = tiny("opt").train(), some_ids(1, 20)
    first, second = (perplexity(model, ids).nll for _ in range(2))
    assert model.training and first == second


def test_progress_counts_windows():
    seen = []
    perplexity(tiny("llama"), some_ids(3, 8), batch=2, progress=lambda *done: seen.append(done))
    assert seen == [(2, 3), (3, 3)]


def test_unusable_input_is_refused():
    model = tiny("llama")
    with pytest.raises(ValueError, match="ctx: 97 tokens exceed the model's 96 positions"):
        perplexity(model, some_ids(1, 97))
    for options in ({"chunk": 0}, {"batch": 0}):
        with pytest.raises(ValueError, match="is not positive"):
            perplexity(model, some_ids(1, 8), **options)
    with pytest.raises(ValueError, match="ids: shape"):
        perplexity(model, some_ids(0, 8))
    model.lm_head.weight.data[5] = math.nan
    with pytest.raises(ValueError, match="logits are not finite"):
        perplexity(model, some_ids(1, 8))


def test_paired_difference_removes_what_windows_share():
    ids = some_ids(3, 20)
    a, b = perplexity(tiny("llama"), ids), perplexity(tiny("opt"), ids)
    gaps = torch.tensor(a.window_nll).double() - torch.tensor(b.window_nll).double()
    mean, se = paired_difference(a, b)
    assert mean == pytest.approx(float(gaps.mean()), abs=1e-6)
    assert se == pytest.approx(float(gaps.std() / 3**0.5), abs=1e-6)
    with pytest.raises(ValueError, match="same windows"):
        paired_difference(a, perplexity(tiny("opt"), ids[:2]))


def test_one_window_has_no_standard_error():
    mean, se = mean_and_se([2.5])
    assert mean == 2.5 and math.isnan(se)


# -- tasks --------------------------------------------------------------------------------------


def brute_scores(model, tokenizer, task):
    """Log-likelihood of each choice from one dense forward over context and choice."""
    scores = []
    for context, choice in zip(task.contexts, task.choices, strict=True):
        shared, (ending,) = split_choices(tokenizer, context, [choice])
        losses = dense_nll(model, torch.tensor([shared + ending]))
        scores.append(-float(losses[0, len(shared) - 1 :].sum()))
    return scores


CHOICES = [
    ChoiceTask(contexts=("What floats?",) * 3, choices=(" a boat", " b", " the stone"), label=0),
    ChoiceTask(contexts=("Sun so Ann", "Sun so Eve"), choices=(" slept", " slept"), label=0),
    ChoiceTask(contexts=("one", "two", "one"), choices=(" x", " long ending", " yz"), label=0),
]


@pytest.mark.parametrize("name", ["llama", "opt", "sliding"])
@pytest.mark.parametrize("task", CHOICES, ids=["shared", "own", "mixed"])
def test_choices_score_as_dense_forwards_do(name, task):
    model, tokenizer = tiny(name), letters()
    scores = brute_scores(model, tokenizer, task)
    per_byte = [s / len(c) for s, c in zip(scores, task.choices, strict=True)]
    for label in range(len(scores)):
        row = ChoiceTask(contexts=task.contexts, choices=task.choices, label=label)
        result = run_tasks(model, tokenizer, [row], chunk=3)
        assert result.record()["accuracy"] == float(scores[label] == max(scores))
        assert result.record()["accuracy_per_byte"] == float(per_byte[label] == max(per_byte))
        assert result.record()["exact_match"] is None


def test_choice_scores_do_not_leak_between_choices():
    for name in ("llama", "opt", "sliding"):
        model, tokenizer, task = tiny(name), letters(), CHOICES[0]
        reader, (prompt,) = Reader(partial(DenseSession, model, 5)), task.prompts(tokenizer)
        reader.prefill(prompt.context)
        scores = [reader.log_likelihood(ending) for ending in prompt.endings]
        assert scores == pytest.approx(brute_scores(model, tokenizer, task), abs=1e-4)


def test_a_token_across_the_border_counts_with_the_choices():
    shared, endings = split_choices(letters(), "xa", ["b", "c"])
    assert shared == [0, VOCAB["x"]]
    assert endings == [[VOCAB["ab"]], [VOCAB["a"], VOCAB["c"]]]


def greedy_text(model, tokenizer, prompt, num_new):
    ids = [0, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    start = len(ids)
    for _ in range(num_new):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert 1 not in ids[start:], "pick another prompt: this one ends at once"
    return tokenizer.decode(ids[start:])


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_generation_is_greedy_and_as_long_as_the_answer(name):
    model, tokenizer = tiny(name), letters()
    text = greedy_text(model, tokenizer, "once upon", 6).strip()
    rows = [
        GenerationTask(prompt="once upon", answer=text),
        GenerationTask(prompt="once upon", answer=text[1:4], max_new_tokens=6),
        GenerationTask(prompt="once upon", answer="no such"),
    ]
    result = run_tasks(model, tokenizer, rows, chunk=4)
    assert result.record()["exact_match"] == pytest.approx(1 / 3)
    assert result.record()["contains"] == pytest.approx(2 / 3)
    assert result.record()["exact_match_se"] == pytest.approx(1 / 3)
    assert (
        result.outputs[1] == text
        and result.num_examples == 3
        and result.record()["accuracy"] is None
    )


@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_a_question_after_its_context_is_one_prompt_where_nothing_goes(name):
    """The second and third row share a context; the sliding window reads it again for each."""
    model, tokenizer = tiny(name), letters()
    pairs = [("once", " upon"), ("The ship", " went"), ("The ship", " is")]
    row = {"answer": "x", "max_new_tokens": 6}
    one = [GenerationTask(prompt=context + question, **row) for context, question in pairs]
    two = [
        LateQuestionTask(context=context, question=question, **row) for context, question in pairs
    ]
    result = run_tasks(model, tokenizer, two, chunk=4)
    assert result == run_tasks(model, tokenizer, one, chunk=4)
    assert len(set(result.outputs)) == 3


def test_questions_about_one_context_read_it_once() -> None:
    model, made = tiny("llama"), []

    def new_cache() -> hf.DynamicCache:
        made.append(hf.DynamicCache(config=model.config))
        return made[-1]

    asked = [
        LateQuestionTask(context=context, question=question, answer="x")
        for context, question in (("one", " a"), ("one", " b"), ("two", " b"), ("one", " a"))
    ]
    run_tasks(
        model, letters(), asked, reader=Reader(partial(DenseSession, model, new_cache=new_cache))
    )
    assert len(made) == 3


def test_generation_stops_before_end_of_text():
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.eye(len(VOCAB))[1])
    row = GenerationTask(prompt="a", answer="b", max_new_tokens=5)
    assert run_tasks(model, letters(), [row]).outputs == ("",)


def test_long_contexts_lose_their_left_and_are_counted():
    model, tokenizer = tiny("llama"), letters()
    long = "xy" * 100
    kept = long[-(96 - 1 - 2) :]  # BOS and the two tokens of " b" or " c" stay in 96 positions
    task = ChoiceTask(contexts=(long, long), choices=(" b", " c"), label=0)
    scores = brute_scores(
        model, tokenizer, ChoiceTask(contexts=(kept, kept), choices=task.choices, label=0)
    )
    result = run_tasks(model, tokenizer, [task, CHOICES[0]])
    assert result.truncated == 1
    first = run_tasks(model, tokenizer, [task])
    assert first.record()["accuracy"] == float(scores[0] > scores[1])
    with pytest.raises(ValueError, match="leaves no context"):
        run_tasks(model, tokenizer, [GenerationTask(prompt="a", answer="z" * 95)])
    with pytest.raises(ValueError, match="with its question, leaves no context"):
        run_tasks(
            model, tokenizer, [LateQuestionTask(context="a", question="y" * 90, answer="z" * 5)]
        )


def test_tasks_are_answered_through_the_cache_that_is_given() -> None:
    model, made = tiny("llama"), []

    def new_cache() -> hf.DynamicCache:
        made.append(hf.DynamicCache(config=model.config))
        return made[-1]

    reader = Reader(partial(DenseSession, model, new_cache=new_cache))
    result = run_tasks(model, letters(), [CHOICES[0]], reader=reader)
    assert result == run_tasks(model, letters(), [CHOICES[0]])
    assert len(made) == len(set(CHOICES[0].contexts)) and made[0].get_seq_length() > 0


def test_tasks_are_read_from_packed_files(tmp_path):
    rows = [
        {"prompt": "p", "answer": "a", "id": 7},
        {"context": "c", "choices": ["x", "y"], "label": 1},
        {"contexts": ["c", "d"], "choices": ["x", "x"], "label": 0},
        {"context": "c", "question": "q", "answer": "a", "max_new_tokens": 3},
        {"context": "c", "question": "q", "answer": "a", "prompt": "p"},
    ]
    path = tmp_path / "rows.jsonl.xz"
    path.write_bytes(lzma.compress("\n\n".join(map(json.dumps, rows)).encode()))
    assert read_tasks(path) == [
        GenerationTask(prompt="p", answer="a"),
        ChoiceTask(contexts=("c", "c"), choices=("x", "y"), label=1),
        ChoiceTask(contexts=("c", "d"), choices=("x", "x"), label=0),
        LateQuestionTask(context="c", question="q", answer="a", max_new_tokens=3),
        GenerationTask(prompt="p", answer="a"),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "q", "answer": "a"}', r"keys question, answer; legal examples: .*prompt"),
        ("{}", "keys none; legal examples"),
        ('{"prompt": "p"', "not a JSON object; legal examples"),
        ("[1]", "not a JSON object; legal examples"),
        (
            '{"context": "c", "contexts": ["c"], "choices": ["x", "y"], "label": 0}',
            "keys context, contexts, choices",
        ),
        ('{"prompt": "p", "answer": 5}', "answer is '5'; it must be a string"),
        ('{"prompt": "p", "answer": " "}', "answer is ' '"),
        ('{"prompt": "p", "answer": "a", "max_new_tokens": 0}', "max_new_tokens is '0'"),
        ('{"context": "c", "choices": ["x"], "label": 0}', "choices is"),
        (
            '{"context": "c", "choices": ["x", "y"], "label": 2}',
            "label is '2'; it must be an integer from 0 to 1",
        ),
        ('{"contexts": ["c"], "choices": ["x", "y"], "label": 0}', "contexts is"),
        ('{"context": "c", "question": 5, "answer": "a"}', "question is '5'; it must be a string"),
        ('{"context": " ", "question": "q", "answer": "a"}', "context is ' '; it must be a string"),
        ('{"context": "c", "question": "q", "answer": ""}', "answer is ''; it must be a string"),
    ],
)
def test_malformed_rows_are_named(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "answer": "a"}\n' + row + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"rows.jsonl line 2: {message}"):
        read_tasks(path)


def test_public_data_sets_parse():
    folder = Path(os.environ.get("KVFOLD_DATA", "")) / "tasks"
    if not os.environ.get("KVFOLD_DATA") or not folder.is_dir():
        pytest.skip("set KVFOLD_DATA to a folder with tasks/*.jsonl")
    for name in ("arc_easy", "openbookqa", "piqa", "winogrande"):
        tasks = read_tasks(folder / f"{name}.jsonl")
        assert len(tasks) > 100 and all(isinstance(task, ChoiceTask) for task in tasks)
    with pytest.raises(ValueError, match=r"HumanEval.jsonl.gz line 1: keys task_id, prompt"):
        read_tasks(folder / "HumanEval.jsonl.gz")


# -- rows ---------------------------------------------------------------------------------------

ROW = Row(
    recipe="small",
    keep=0.25,
    kept_fraction=0.246,
    bytes_per_token=756,
    baseline_bytes_per_token=3072,
    cache_bytes_allocated=3 * 2**20,
    perplexity={"wiki": 18.78},
    delta_nll={"wiki": (0.0089, 0.0007)},
    needle={512: 0.99, 4096: 0.96},
    seconds=17.4,
    window_nll={"wiki": (2.5, 3.5)},
)


@pytest.mark.parametrize("width", ["40", "80", "160"])
@pytest.mark.parametrize("name", ["small", "zdc .5 --evict h2o --keep-tokens .5 --page 16"])
def test_table_shows_every_number_on_any_terminal(name, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    print_rows([replace(ROW, recipe=name, pool_fraction=0.251, seconds=1717.0)])
    text = capsys.readouterr().out
    numbers = ("0.25", "0.246", "4.1×", "756", "18.78", "+0.0089", "±0.0007", "99", "96", "1717")
    for number in (name.split()[0], "512", "4K", "0.251", *numbers):
        assert number in text
    assert "3 MiB" in text and "…" not in text


def test_table_names_the_dtype_of_pages_that_are_wider_than_16_bits() -> None:
    def shown(dtype: str | None) -> str:
        console = Console(width=160, record=True, file=io.StringIO())
        console.print(table([replace(ROW, pool_fraction=2.0, dtype=dtype)]))
        return " ".join(console.export_text().split())

    assert "bytes of fp32 pages" in shown("float32") and shown("float32").count("fp32") == 2
    assert "fp" not in shown("bfloat16") and "fp" not in shown(None)


def test_rows_survive_json():
    row = Row(**{**vars(ROW), "delta_nll": {"wiki": (0.1, math.nan)}, "needle": None})
    plain = json.loads(json.dumps(to_json([ROW, row]), allow_nan=False))
    assert plain[1]["delta_nll"] == {"wiki": [0.1, None]}
    first, second = from_json(plain)
    assert first == ROW and math.isnan(second.delta_nll["wiki"][1])
    with pytest.raises(ValueError, match="unknown keys color"):
        from_json([{**plain[0], "color": 1}])


def test_rows_are_read_from_text_and_from_a_record() -> None:
    text = json.dumps({"model": "m", "rows": to_json([ROW])})
    assert from_json(text) == from_json(json.loads(text)) == [ROW]
    assert from_json(json.dumps(to_json([ROW]))) == [ROW]
    for bad in ("{}", "3", '["a"]'):
        with pytest.raises(ValueError, match="no rows: give a list of them, or a record that has"):
            from_json(bad)
    with pytest.raises(ValueError, match="Expecting value"):
        from_json("no JSON")


def test_losses_are_paired_with_any_row() -> None:
    def row(recipe: str, keep: float, losses: list[float]) -> Row:
        delta = {"wiki": (sum(losses) / 2, 0.0)}
        named = {"recipe": recipe, "keep": keep, "window_nll": {"wiki": losses}}
        return replace(ROW, **named, perplexity={"wiki": 2.0}, delta_nll=delta)

    rows = [row("zack", 0.5, [1.0, 2.0]), row("zack", 0.25, [1.5, 2.7]), row("4 bits", 1, [0, 0])]
    assert labels([(x.recipe, x.keep) for x in rows]) == ["zack 0.5", "zack 0.25", "4 bits"]
    first, second, third = against(rows, "zack 0.5")
    assert first.delta_nll == {} and second.delta_nll["wiki"] == pytest.approx((0.6, 0.1))
    assert third.delta_nll["wiki"] == pytest.approx((-1.5, 0.5))
    assert against(rows, "4 bits")[0].delta_nll["wiki"] == pytest.approx((1.5, 0.5))
    assert against(rows[:1], "4 bits") == rows[:1]  # stopped before that row was measured


def test_conditions_say_what_was_scored_and_how() -> None:
    windows = {"wiki": torch.zeros(3, 64, dtype=torch.long)}
    what, evicts = Measurement(windows=windows), CacheConfig(evict="h2o", keep_tokens=0.5)
    assert conditions(what, [None], torch.bfloat16, 8) == (
        "wiki: scored on all of 3 windows of 64 tokens. Computed in bfloat16; ranks are multiples"
        " of 8 unless bits are planned."
    )
    assert conditions(what, [None, evicts], torch.float32, None) == (
        "wiki: scored on tokens 32 to 63 of 3 windows of 64, in every row, since some evict."
        " Computed in float32. Pages hold numbers that are not quantised in float32: 2 in the"
        " column pool where a 16-bit model has 1."
    )


def test_rows_from_before_tasks_are_read() -> None:
    (row,) = to_json([ROW])
    del row["tasks"]
    assert from_json([row]) == [ROW]
    del row["keep"]
    with pytest.raises(ValueError, match="missing or unknown keys keep"):
        from_json([row])


def test_any_two_rows_are_paired_by_window():
    other = Row(**{**vars(ROW), "window_nll": {"wiki": (2.0, 3.2)}})
    assert paired(ROW, other, "wiki") == (pytest.approx(0.4), pytest.approx(0.1))


def test_line_ends_of_windows_are_those_of_unix(tmp_path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"One line.\r\nAnd one more.\r\n")
    assert read_texts(path) == "One line.\nAnd one more.\n"
