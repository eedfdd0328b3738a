"""Suites: answers are found in what models write, judged, and paired with the original's.

The tests marked SUITE run over the registry, and a new suite needs no change here. KVFOLD_WRITE=1
writes the table of docs/suites.md.
"""

import gzip
import json
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import refused
from generated_pages import check_page, description, row
from kvfold import LLM
from kvfold.cli import suites as command
from kvfold.cli.main import main
from kvfold.evaluation.ruler.tasks import TASKS
from kvfold.evaluation.suites import SUITES, find_file, read_suite
from kvfold.evaluation.suites.base import LineSuite, Question
from kvfold.evaluation.suites.engines import ByKVFold, ByVLLM, Reply
from kvfold.evaluation.suites.gsm8k import number_of
from kvfold.evaluation.suites.humaneval import code_of
from kvfold.evaluation.suites.prompts import Prompt, prompts_of
from kvfold.evaluation.suites.run import SuiteResult, changes, run_suite
from kvfold.hub.loading import load_tokenizer

DATA = Path(__file__).parents[3] / "shared" / "data" / "tasks"
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}[assistant]"
PROMPT = '''from typing import List


def helper(x: int) -> int:
    return x + 1


def total(values: List[int]) -> int:
    """ The sum of values, each one larger.
    >>> total([1, 2])
    5
    """
'''
CODE = {
    "task_id": "HumanEval/0",
    "prompt": PROMPT,
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 5\n",
}
MATH = [
    {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "A thousand and one?", "answer": "#### 1,001"},
]
WHOLE = "def total(values: List[int]) -> int:\n    return sum(helper(x) for x in values)\n"
BODY = "    return sum(helper(x) for x in values)\n"
RIGHT = {
    "block": f"Here it is:\n\n```python\n{WHOLE}```\n\nIt adds one to each.",
    "block without a language": f"```\n{WHOLE}```",
    "block behind words": f"Sure: ```py\n{WHOLE}```",
    "block that never ends": f"```python\n{WHOLE}",
    "second block": f"```sh\npython total.py\n```\n```python\n{WHOLE}```",
    "block in a list": "1. So:\n   ```python\n"
    + "".join(f"   {line}\n" for line in WHOLE.splitlines())
    + "   ```",
    "own imports": f"```python\nfrom typing import List\n{WHOLE}```",
    "demonstration": f"```python\n{WHOLE}\nif __name__ == '__main__':\n    1 / 0\n```",
    "no block": f"{WHOLE}\nThis function adds one to each.",
    "words, no block": f"The function:\n\n{WHOLE}\nDone.",
    "body": BODY,
    "body, first line not indented": BODY.strip() + "\n",
    "body in a block": f"```python\n{BODY}```",
    "body of two lines": "    found = [helper(x) for x in values]\n    return sum(found)\n",
    "two lines, not indented": "```\nfound = [helper(x) for x in values]\nreturn sum(found)\n```",
    "two lines, the first not indented": "found = map(helper, values)\n    return sum(found)\n",
}
NUMBERS = {
    "She makes $18.00 a day. The answer is 18.": "18",
    "The answer is $1,450,000.": "1450000",
    "The answer is: **12**.": "12",
    r"The answer is \( 7 \).": "7",
    "The answer is -5.": "-5",
    "The answer is 9 * 2 = 18": "18",
    "The answer is 18. There are 3 ducks and 4 geese.": "18",
    "2 + 2 = 4\n#### 4\nand 5": "4",
    "So 5 - 3 = 2": "2",
    "from 3-4": "4",
    "It is 40%": "40",
    "It costs .5": "0.5",
    "It weighs 2.50 kg.": "2.5",
    r"\boxed{36}": "36",
    "1,2 and 3,4567": "4567",
}


class Fixed:
    """An engine whose answers are given, or errors."""

    name = "fixed"

    def __init__(self, replies: list[Reply]) -> None:
        self.replies = replies
        self.tokenizer = load_tokenizer("reference:gqa")

    def answer(self, prompts: Any, report: Any = None) -> list[Reply]:
        self.prompts = prompts
        return self.replies


SUITE = pytest.mark.parametrize("name", SUITES)
LINES = {name: suite for name, suite in SUITES.items() if isinstance(suite, LineSuite)}


def example_file(name: str, folder: Path, **changes: str) -> Path:
    """The file of a suite with its example, some values changed."""
    example = LINES[name].example
    path = folder / LINES[name].files[-1].replace("*", example.get("dataset", "200"))
    path.write_text(json.dumps(dict(example) | changes), encoding="utf-8")
    return path


def example_questions(name: str, folder: Path) -> list[Question]:
    """The question of a suite's example; of one without files, the first of each task."""
    path = example_file(name, folder) if name in LINES else None
    tokenizer = load_tokenizer("reference:gqa")
    return read_suite(name, path, 1, length=1024, tokenizer=tokenizer)


@pytest.mark.parametrize("name", LINES)
def test_a_suite_reads_its_example(name: str, tmp_path: Path) -> None:
    suite, path = LINES[name], example_file(name, tmp_path)
    assert len(read_suite(name, path)) == len(read_suite(name, find_file(name, tmp_path))) == 1
    for key in suite.keys if suite.texts is None else suite.texts:
        with pytest.raises(ValueError, match=f"suite {name}: .* line 1: {key} is '  '"):
            read_suite(name, example_file(name, tmp_path, **{key: "  "}))
    for key in suite.keys:
        fewer = {x: value for x, value in suite.example.items() if x != key}
        path.write_text(json.dumps(fewer), encoding="utf-8")
        with pytest.raises(ValueError, match=f"a line of {suite.title} has the keys"):
            read_suite(name, path)


@SUITE
def test_a_suite_asks_and_judges_its_example(name: str, tmp_path: Path) -> None:
    suite = SUITES[name]
    question = example_questions(name, tmp_path)[0]
    for chat in (True, False):
        message = suite.message(question, chat)
        assert message.question.strip() and bool(message.context) == suite.has_context
        assert (message.max_new_tokens or 1) <= suite.max_new_tokens
    right, empty = suite.judge([question, question], [suite.solution(question), ""])
    assert right.score == 1 and empty.score == 0 and right.kind and empty.kind


@SUITE
def test_a_suite_runs_in_kvfolds_engine(name: str, tmp_path: Path, llm: LLM) -> None:
    questions = example_questions(name, tmp_path)[::4]
    result = run_suite(name, questions, ByKVFold(llm), max_new_tokens=3)
    assert len(result.answers) == len(questions) and not result.errors
    assert SuiteResult.from_record(json.loads(json.dumps(result.record()))) == result


@SUITE
def test_a_context_is_told_from_its_question(name: str, tmp_path: Path) -> None:
    """Also in a chat, whose template writes before and after both."""
    suite, tokenizer = SUITES[name], load_tokenizer("reference:gqa")
    questions = example_questions(name, tmp_path)
    for template in (None, CHAT):
        tokenizer.chat_template = template
        for question, prompt in zip(
            questions, prompts_of(suite, questions, tokenizer), strict=True
        ):
            message = suite.message(question, bool(template))
            texts = (prompt.ids[: prompt.context], prompt.ids[prompt.context :])
            before, after = (tokenizer.decode(x, skip_special_tokens=True) for x in texts)
            begin, end = ("[user]", "[end][assistant]") if template and message.chat else ("", "")
            assert before + after == (
                begin + message.context + message.question + end + message.reply
            )
            assert bool(prompt.context) == suite.has_context
            if suite.has_context:  # a token of the context may go with the question
                assert len(before) > len(begin + message.context) - 20
                assert message.question in after


def test_the_page_and_help_have_every_suite(capsys) -> None:
    table = row("Suite", "Data set", "Files", "Longest answer", "How it asks and judges")
    table += row("---", "---", "---", "---", "---")
    for name, suite in SUITES.items():
        files = ", ".join(f"`{file}`" for file in suite.files)
        files += "" if suite.needs_files else " (optional)"
        tokens = f"{suite.max_new_tokens} tokens"
        table += row(f"`{name}`", suite.title, files, tokens, description(type(suite)))
    check_page("suites.md", "suites", Path(__file__), table)
    assert main(["eval", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, suite in SUITES.items():
        assert f"{name} ({suite.title})" in shown


def code(count: int) -> list[Question]:
    return [Question(id=f"HumanEval/{i}", fields=CODE) for i in range(count)]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rows = [CODE | {"task_id": f"HumanEval/{i}"} for i in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "gsm8k.jsonl").write_text("\n\n".join(map(json.dumps, MATH)))
    return tmp_path


def test_a_function_is_found_in_what_models_write() -> None:
    verdicts = SUITES["code"].judge(code(len(RIGHT)), list(RIGHT.values()))
    wrong = {name: x for name, x in zip(RIGHT, verdicts, strict=True) if not x.score}
    assert not wrong


def test_functions_that_are_wrong() -> None:
    answers = ["", "    pass", "I cannot.", "```python\ndef other(): pass\n```", f"{WHOLE}1 / 0"]
    answers += [PROMPT + "    import os\n    os.fork()", PROMPT + "    open('x', 'w')"]
    verdicts = SUITES["code"].judge(code(len(answers)), answers)
    assert not any(x.score for x in verdicts)
    assert [x.kind for x in verdicts[-2:]] == ["forked", "wrote"]


def test_a_longer_fence_may_hold_a_shorter_one() -> None:
    assert code_of("````python\ndef f():\n    '```'\n````", "f") == "def f():\n    '```'\n"


@pytest.mark.parametrize(("text", "number"), NUMBERS.items())
def test_a_number_is_found_in_what_models_write(text: str, number: str) -> None:
    assert number_of(text) == Decimal(number)


def test_numbers_are_judged_by_value() -> None:
    questions = [Question(id=str(i), fields=row) for i, row in enumerate(MATH)]
    judge = SUITES["math"].judge
    assert [x.score for x in judge(questions, ["It is 4.0", "1001"])] == [1, 1]
    assert [x.kind for x in judge(questions, ["It is 5", "none"])] == ["wrong", "no number"]


def test_files_are_read_and_found(files: Path) -> None:
    assert [x.id for x in read_suite("math", find_file("math", files))] == ["line 1", "line 3"]
    assert len(read_suite("code", find_file("code", files), 2)) == 2
    with pytest.raises(ValueError, match=r"has no HumanEval.jsonl.gz or HumanEval.jsonl"):
        find_file("code", files / "nowhere")


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data/tasks is not on this machine")
def test_the_published_files_and_their_solutions() -> None:
    questions = read_suite("code", find_file("code", DATA))
    some = questions[::8]
    answers = [x.fields["canonical_solution"] for x in some]
    assert len(questions) == 164 and all(x.score for x in SUITES["code"].judge(some, answers))
    questions = read_suite("math", find_file("math", DATA))
    verdicts = SUITES["math"].judge(questions, [x.fields["answer"] for x in questions])
    assert len(questions) == 1319 and all(x.score for x in verdicts)


def test_one_request_that_fails_is_one_wrong_answer() -> None:
    replies = [
        Reply(text=BODY, token_ids=(1, 2), finish_reason="eos"),
        Reply(text=BODY, token_ids=(1,), error="the prompt has 17 tokens"),
        Reply(text=BODY, error="the prompt has 4 tokens"),
        Reply(text="pass", token_ids=(3,), finish_reason="length"),
    ]
    result = run_suite("code", code(4), Fixed(replies), max_new_tokens=7)
    assert [x.score for x in result.answers] == [1, 0, 0, 0]
    assert result.kinds == {"error": 2, "passed": 1, "failed": 1}
    assert result.errors == {"the prompt has N tokens": 2}
    assert (result.right, result.num_tokens) == (1, 4)
    record = json.loads(json.dumps(result.record()))
    assert record["finish_reasons"] == {"error": 2, "eos": 1, "length": 1}
    assert record["answers"][0]["text"] == BODY
    assert SuiteResult.from_record(record) == result


def test_answers_that_changed() -> None:
    def result(*texts: str) -> SuiteResult:
        replies = [Reply(text=x, finish_reason="eos") for x in texts]
        return run_suite("math", questions, Fixed(replies))

    questions = [Question(id=f"line {i}", fields=MATH[0]) for i in range(4)]
    found = changes(result("4", "4", "5", "6"), result("4", "5", "4", "6"))
    assert (found.worse, found.better) == (("line 1",), ("line 2",))
    assert found.difference == 0 and found.difference_se == pytest.approx((2 / 3 / 4) ** 0.5)
    assert (found.right_before, found.right, found.same_texts) == (2, 2, 2)
    one = result("4", "4", "4", "4")
    with pytest.raises(ValueError, match="differ in max_new_tokens"):
        changes(one, replace(one, max_new_tokens=3))
    with pytest.raises(ValueError, match="different questions of suite math: 4 before and 3 now"):
        changes(one, replace(one, answers=one.answers[1:]))


def test_a_chat_template_is_used_where_there_is_one() -> None:
    engine = Fixed([Reply()])
    run_suite("code", code(1), engine)
    assert engine.prompts == prompts_of(SUITES["code"], code(1), engine.tokenizer)
    (prompt,) = engine.prompts
    assert engine.tokenizer.decode(prompt.ids, skip_special_tokens=True) == PROMPT
    assert "\ndef " in prompt.stop and prompt.max_new_tokens == 512
    engine.tokenizer.chat_template = "{{ messages[0]['content'] }} So:"
    run_suite("code", code(1), engine)
    (prompt,) = engine.prompts
    text = engine.tokenizer.decode(prompt.ids, skip_special_tokens=True)
    assert text.startswith("Complete this Python function") and text.endswith("``` So:")
    assert prompt.stop == ()


@pytest.fixture(scope="module")
def llm() -> LLM:
    sizes = {"max_sequences": 2, "max_tokens": 1024, "kv_bytes": 2**24}
    return LLM("reference:gqa", device="cpu", **sizes)


def test_kvfolds_engine_goes_on_where_a_prompt_is_too_long(llm: LLM) -> None:
    told: list[tuple[int, int]] = []
    prompts = [list(range(3, 9)), [3] * 1100, list(range(9, 20))]
    asked = [Prompt(ids=x, max_new_tokens=4) for x in prompts]
    found = ByKVFold(llm).answer(asked, report=lambda *x: told.append(x))
    assert [x.error is None for x in found] == [True, False, True]
    expected = [x.token_ids for x in llm.generate([prompts[0], prompts[2]], sampling(4))]
    assert [x.token_ids for x in found if x.error is None] == expected
    assert told[0] == (0, 3) and told[-1] == (3, 3)


def sampling(count: int) -> Any:
    from kvfold import SamplingParams

    return SamplingParams(max_new_tokens=count)


def test_kvfolds_engine_reports_errors_by_request(llm: LLM, monkeypatch) -> None:
    from kvfold.evaluation.suites import engines

    def failing(outputs: Any) -> Any:
        found = completion_of(outputs)
        return replace(found, finish_reason="error", error="the model's logits are not finite")

    completion_of = engines.completion_of
    monkeypatch.setattr(engines, "completion_of", failing)
    (found,) = ByKVFold(llm).answer([Prompt(ids=[3, 4], max_new_tokens=2)])
    assert found.error == "the model's logits are not finite"


class FakeVLLM:
    """What `vllm.LLM` is asked for, and an answer for each prompt."""

    made: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        type(self).made = options
        sizes = SimpleNamespace(max_model_len=options["max_model_len"])
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=sizes),
            engine_core=SimpleNamespace(shutdown=lambda: None),
        )

    def generate(self, prompts: Any, wanted: Any, use_tqdm: bool) -> list[Any]:
        assert all(len(x["prompt_token_ids"]) < self.made["max_model_len"] for x in prompts)
        assert all(x["temperature"] == 0 for x in wanted) and len(wanted) == len(prompts)
        reasons = ["stop", "abort", "length"]
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(text="It is 4", token_ids=[5, 6], finish_reason=reason)]
            )
            for _, reason in zip(prompts, reasons, strict=False)
        ]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(LLM=FakeVLLM, SamplingParams=dict, __version__="0")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(command, "find_spec", lambda _: object())


def test_vllm_goes_on_where_a_prompt_is_too_long(vllm) -> None:
    engine = ByVLLM(FakeVLLM(max_model_len=8), load_tokenizer("reference:gqa"))
    prompts = [Prompt(ids=x, max_new_tokens=3) for x in ([1] * 7, [1] * 8, [2])]
    found = engine.answer(prompts)
    assert [x.error for x in found] == [
        None, "the prompt has more tokens than the 7 that vLLM takes", "ended for abort",
    ]  # fmt: skip
    assert found[0].token_ids == (5, 6)


def test_the_command_in_vllm(files: Path, vllm, capsys) -> None:
    json_file = files / "result.json"
    words = ["eval", "reference:gqa", "--suite", f"math={files / 'gsm8k.jsonl'}", "--bits", "4"]
    words += ["--engine", "vllm", "--json", str(json_file), "--max-sequences", "7"]
    assert main(words) == 0
    made = FakeVLLM.made
    assert made.pop("model").endswith("/gqa") and made.pop("max_model_len") > 400
    assert made == {
        "max_num_seqs": 7, "dtype": "auto",
        "additional_config": {"kvfold": {"bits": 4}},
    }  # fmt: skip
    record = json.loads(json_file.read_text())
    assert record["suites"]["math"]["right"] == 1 and record["versions"]["vllm"] == "0"
    assert "1 requests failed: ended for abort" in capsys.readouterr().out


def test_vllm_is_not_installed(files: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    words = ["eval", "reference:gqa", "--suite", f"math={files / 'gsm8k.jsonl'}"]
    assert 'pip install "kvfold[vllm]"' in refused(capsys, *words, "--engine", "vllm")


def test_the_command_beside_an_earlier_run(files: Path, capsys) -> None:
    first, second = files / "first.json", files / "second.json"
    words = ["eval", "reference:gqa", "--suite-rows", "2", "--suite-tokens", "3"]
    words += ["--max-sequences", "2", "--kv-bytes", str(2**24), "--device", "cpu"]
    both = ["--suite", "code,math", "--suite-data", str(files)]
    assert main([*words, *both, "--json", str(first)]) == 0
    assert main([*words, *both, "--bits", "8", "--against", str(first), "--json", str(second)]) == 0
    out = capsys.readouterr().out
    assert f"math, against {first}: +0.0 ± 0.0 points; 0 right, 0 before; worse 0; better 0" in out
    record = json.loads(second.read_text())
    assert record["against"]["changes"]["code"]["right"] == 0
    assert len(record["against"]["suites"]["code"]["answers"]) == 2
    assert record["settings"]["cache"]["bits"] == 8


def test_the_command_beside_the_original(files: Path, capsys) -> None:
    words = ["eval", "reference:gqa", "--suite", f"math={files / 'gsm8k.jsonl'}"]
    words += ["--suite-tokens", "3", "--max-sequences", "2", "--kv-bytes", str(2**24)]
    assert main([*words, "--against", "reference:gqa", "--device", "cpu"]) == 0
    assert "2 texts equal" in capsys.readouterr().out


# -- long texts --------------------------------------------------------------------------------


NEWS = {"input": "", "answers": ["a b c"], "dataset": "multi_news", "all_classes": None}
TREC = {
    "input": "Question: Who?\nType:",
    "context": "Question: Where?\nType: place",
    "answers": ["person"],
    "dataset": "trec",
    "all_classes": ["person", "place"],
}


def test_a_folder_has_several_data_sets(tmp_path: Path) -> None:
    for name, fields in {"trec": TREC, "longbench-multi_news": NEWS | {"context": "x"}}.items():
        (tmp_path / f"{name}.jsonl").write_text(2 * f"{json.dumps(fields)}\n")
    questions = read_suite("longbench", find_file("longbench", tmp_path), 1)
    assert [x.id for x in questions] == ["multi_news line 1", "trec line 1"]
    replies = [Reply(text="a b", finish_reason="eos"), Reply(text="\nperson\nplace")]
    result = run_suite("longbench", questions, Fixed(replies))
    assert [round(x.score, 4) for x in result.answers] == [0.8, 1]  # words: 2 of 2, and of 3
    assert result.score.mean == pytest.approx(0.9) and result.right == 1
    assert result.record()["groups"]["trec"]["mean"] == 1
    worse = run_suite("longbench", questions, Fixed([replies[0], Reply(text="place")]))
    found = changes(result, worse)
    assert found.difference == pytest.approx(-0.5) and found.worse == ("trec line 1",)
    assert found.groups["multi_news"].mean == 0


def test_a_mean_is_over_groups() -> None:
    """Also its error: of groups [0, 1] and [1, 0, 1, 1]."""
    questions = [Question(id=str(i), fields=MATH[0], group="aabbbb"[i]) for i in range(6)]
    result = run_suite("math", questions, Fixed([Reply(text=x) for x in "544544"]))
    found = {x: (y.mean, y.error) for x, y in result.groups.items()}
    assert found == {"a": (0.5, 0.5), "b": (0.75, 0.25)} and result.score.num_examples == 6
    assert result.score.mean == 0.625
    assert result.score.error == pytest.approx((0.5**2 + 0.25**2) ** 0.5 / 2)


def test_a_prompt_loses_its_middle(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(400)]
    path = tmp_path / "multi_news.jsonl"
    path.write_text(json.dumps(NEWS | {"context": " ".join(words)}))
    suite, questions = SUITES["longbench"], read_suite("longbench", path)
    tokenizer = load_tokenizer("reference:gqa")
    for template in (None, CHAT):
        tokenizer.chat_template = template
        (whole,) = prompts_of(suite, questions, tokenizer)
        (cut,) = prompts_of(suite, questions, tokenizer, length=512 + 300)
        assert cut.truncated and not whole.truncated
        assert len(whole.ids) > 300 >= len(cut.ids) > 290
        text = tokenizer.decode(cut.ids, skip_special_tokens=True)
        assert "You are given several news passages" in text and "w0 w1 w2" in text
        assert "w398 w399\n\nNow, write a one-page summary of all the news.\n\nSummary:" in text
        assert "w150" not in text
        after = tokenizer.decode(cut.ids[cut.context :], skip_special_tokens=True)
        assert after.strip().startswith("Now, write") and template in (None, CHAT)
        (same,) = prompts_of(suite, questions, tokenizer, length=512 + len(whole.ids))
        assert not same.truncated and same == whole


def test_lines_are_judged_by_the_last_number() -> None:
    question = Question(id="line 1", fields=dict(SUITES["longeval"].example))
    answers = ["<1> is not it; it is <48213>.", "48213, not 1", "I do not know", "9" * 5000]
    verdicts = SUITES["longeval"].judge([question] * 4, answers)
    assert [x.score for x in verdicts] == [1, 0, 0, 0] and verdicts[2].kind == "no number"


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data/tasks is not on this machine")
def test_the_published_files_of_long_texts() -> None:
    for name, count in (("longbench", 200), ("longeval", 50)):
        questions = read_suite(name, find_file(name, DATA))
        message = SUITES[name].message(questions[0], chat=True)
        assert len(questions) == count and len(message.context) > 10 * len(message.question)
    correct = [x.fields["correct_line"] for x in questions]
    assert all(x.score == 1 for x in SUITES["longeval"].judge(questions, correct))


def test_a_question_comes_after_its_text_was_evicted(tmp_path: Path, capsys) -> None:
    """The same prompts, and other answers than with the question before."""
    path, texts = example_file("longeval", tmp_path), {}
    words = ["eval", "reference:gqa", "--suite", f"longeval={path}", "--device", "cpu"]
    words += ["--evict", "snapkv", "--keep-tokens", "0.3"]
    for setting in ("suite-tokens=8", "page=8", "max-sequences=2", f"kv-bytes={2**24}"):
        words += ["--set", setting]
    for question in ("before", "after"):
        file = tmp_path / f"{question}.json"
        assert main([*words, "--set", f"question={question}", "--json", str(file)]) == 0
        (answer,) = json.loads(file.read_text())["suites"]["longeval"]["answers"]
        texts[question] = answer["text"]
    assert texts["before"] != texts["after"]
    llm = LLM("reference:gqa", device="cpu", max_sequences=2, max_tokens=512, kv_bytes=2**24,
              evict="snapkv", keep_tokens=0.3, page=8)  # fmt: skip
    (prompt,) = prompts_of(SUITES["longeval"], read_suite("longeval", path), llm.tokenizer)
    assert 0 < prompt.context < len(prompt.ids)
    (reply,) = ByKVFold(llm, question_after=True).answer([replace(prompt, max_new_tokens=8)])
    assert reply.text == texts["after"]


def test_ruler_needs_no_files(tmp_path: Path, monkeypatch, capsys) -> None:
    few = {name: TASKS[name] for name in ("niah_single_1", "fwe", "qa_1")}
    monkeypatch.setattr("kvfold.evaluation.suites.ruler.TASKS", few)
    words = ["eval", "reference:gqa", "--suite", "ruler", "--device", "cpu"]
    sizes = {"suite-rows": 1, "suite-length": 600, "suite-tokens": 2, "kv-bytes": 2**24}
    for name, value in {**sizes, "max-sequences": 4}.items():
        words += ["--set", f"{name}={value}"]
    assert main([*words, "--json", str(tmp_path / "ruler.json")]) == 0
    out = capsys.readouterr().out
    assert "ruler: without qa_1 (squad.json is not given)" in out and "  niah_single_1: " in out
    record = json.loads((tmp_path / "ruler.json").read_text())
    assert [*record["suites"]["ruler"]["groups"]] == ["niah_single_1", "fwe"]
    assert len(record["notes"]["ruler"]) == 3
