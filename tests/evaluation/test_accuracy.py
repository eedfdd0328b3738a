"""A budget of accuracy: what it keeps, how sure that is, and what cannot be measured."""

import json
import math

import pytest
import torch
import transformers as hf

import kvfold
from answered_questions import answered, write
from cli_cases import TINY, printed
from commands import refused
from kvfold.evaluation.accuracy import check_count, check_original, kept_accuracy, search_share
from kvfold.evaluation.tasks import read_tasks
from kvfold.evaluation.tasks.run import run_tasks
from kvfold.hub.checkpoint import provenance_of
from kvfold.hub.loading import load, load_tokenizer
from kvfold.maps.sidecar import CARD, Sidecar

COUNT = 24
SHARE = 0.8


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a random model, and questions that it answers right."""
    here = tmp_path_factory.mktemp("here")
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)).eval()
    model.lm_head.weight.data.mul_(8)  # so that it is sure of what it says
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(50)  # so that attention decides
    tokenizer = load_tokenizer("reference:gqa")
    model.save_pretrained(here / "model")
    tokenizer.save_pretrained(here / "model")
    write(answered(model, tokenizer, COUNT), here / "questions.jsonl")
    return here


def compress(here, output, *more):
    words = ["compress", here / "model", "--max-tokens", "1024", "--output", here / output]
    return [*words, "--set", f"tasks={here / 'questions.jsonl'}", *more]


def accuracy_of(model, here):
    tasks = read_tasks(here / "questions.jsonl")
    return run_tasks(model, load_tokenizer("reference:gqa"), tasks).scores["accuracy"].mean


def test_a_folded_model_keeps_the_share(here, capsys):
    more = ["--fold", "--recipe", "zack", "--budget", f"accuracy>={SHARE}", "--set", "align=1"]
    out = printed(capsys, *compress(here, "folded", *more, "--set", "no-check"))
    section = json.loads((here / "folded" / "config.json").read_text())["quantization_config"]
    provenance = section["provenance"]
    record = provenance["accuracy"]
    assert provenance["budget"] == f"accuracy>={SHARE}" and provenance["ratio"] is None
    assert record["original"] == 1 and record["questions"] == COUNT
    assert SHARE <= record["accuracy"] < 1 and 0 < provenance["keep"] < 1
    assert accuracy_of(load(str(here / "folded")), here) == record["accuracy"]
    said = (
        f"accuracy {record['accuracy']:.3f} ± {record['accuracy_error']:.3f} on {COUNT} questions"
    )
    assert said in out and said in (here / "folded" / "README.md").read_text()


def test_a_larger_share_takes_a_larger_cache(here):
    sizes = {}
    for share in (0.6, 0.9):
        model = kvfold.compress(
            str(here / "model"),
            "zack",
            fold=True,
            budget=f"accuracy>={share}",
            tasks=[here / "questions.jsonl"],
            max_tokens=1024,
            align=1,
        )
        sizes[share] = provenance_of(model)["keep"]
    assert sizes[0.6] < sizes[0.9]


def test_maps_keep_the_share(here, capsys):
    more = ["--budget", f"accuracy>={SHARE}", "--set", "align=1", "--set", "no-check"]
    printed(capsys, *compress(here, "maps", *more))
    sidecar = Sidecar.load(here / "maps")
    record = sidecar.provenance["accuracy"]
    assert "ratio" not in sidecar.provenance and record["accuracy"] >= SHARE
    card = (here / "maps" / CARD).read_text()
    assert f"{100 * record['reached']:.1f} % of the original's" in card
    model = load(str(here / "model"))
    kvfold.attach(model, sidecar)
    assert accuracy_of(model, here) == record["accuracy"]


@pytest.mark.parametrize(
    ("budget", "more", "words"),
    [
        ("accuracy>=0.99", [], "24 questions are too few for 0.99 of an accuracy"),
        ("accuracy>=1", [], "'accuracy>=SHARE' with a share below 1"),
        ("ppl<=1.01", [], "--set tasks are the questions of a budget of accuracy"),
        ("accuracy>=0.8", ["--fold", "--set", "fastest"], "leave --set tasks out"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(here, capsys, budget, more, words):
    assert words in refused(capsys, *compress(here, "new", "--budget", budget, *more))
    assert not (here / "new").exists()


def test_a_budget_of_accuracy_needs_questions(capsys):
    words = ["compress", "reference:gqa", "--output", "new", "--budget", "accuracy>=0.9"]
    assert "give files of them with --set tasks" in refused(capsys, *words)
    words += ["--fold", "--set", "fastest"]
    assert "'ppl<=RATIO'" in refused(capsys, *words)
    words = ["compress", "reference:gqa", "--fold", "--output", "new"]
    assert "'ppl<=RATIO'" in refused(capsys, *words, "--set", "hybrid=accuracy>=0.9")


def test_the_smallest_size_whose_answers_are_right_often_enough():
    original, asked = (1.0,) * 80 + (0.0,) * 20, []

    def scores_at(keep):
        asked.append(keep)
        right = round(80 * min(1, keep / 0.5))  # of the first 80
        return (1.0,) * right + (0.0,) * (80 - right) + (0.0,) * 19 + (1.0,)

    keep, kept = search_share(scores_at, original, 0.9, tolerance=0.01)
    assert kept.lost <= 0.08 < sum(original) / 100 - sum(scores_at(keep - 0.02)) / 100
    assert all(one >= keep or sum(scores_at(one)) < 72 for one in asked[:-1])
    assert (kept.original, kept.questions, kept.share) == (0.8, 100, 0.9)
    assert kept.accuracy == pytest.approx(0.8 - kept.lost) and kept.reached >= 0.9 - 1e-9


def test_the_standard_error_is_of_the_answers_that_changed():
    original, other = (1.0,) * 6 + (0.0,) * 4, (1.0,) * 4 + (0.0,) * 5 + (1.0,)
    kept = kept_accuracy(original, other, 0.9)  # two are lost, one is won
    differences = torch.tensor(original) - torch.tensor(other)
    error = float(differences.std()) / math.sqrt(10)
    assert kept.lost == pytest.approx(0.1) and kept.lost_error == pytest.approx(error)
    assert kept.reached == pytest.approx(5 / 6)
    assert kept.reached_error == pytest.approx(error / 0.6)
    assert kept.needed == math.ceil(10 * (error / 0.06) ** 2)
    assert kept_accuracy(original, original, 0.9).needed is None


def test_a_loss_of_less_than_a_question_cannot_be_measured():
    check_original((1.0,) * 50 + (0.0,) * 50, 0.25, 0.98)  # a loss of one question
    with pytest.raises(ValueError, match=r"50 of 100 questions right, .* at least 200"):
        check_original((1.0,) * 50 + (0.0,) * 50, 0.25, 0.99)
    tasks = [None] * 10
    check_count(tasks, 0.9)
    with pytest.raises(ValueError, match=r"10 questions.*at least 20"):
        check_count(tasks, 0.95)


def test_guesses_cannot_be_measured():
    with pytest.raises(ValueError, match=r"0\.520 ± 0\.050, and guesses have 0\.500"):
        check_original((1.0,) * 52 + (0.0,) * 48, 0.5, 0.95)
    with pytest.raises(ValueError, match="questions that this model can answer"):
        check_original((0.0,) * 100, 0.0, 0.5)
