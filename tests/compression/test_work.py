"""What compressing is said to take, beside what it takes."""

import re

import pytest

import kvfold
from cli_cases import plain  # noqa: F401  (a fixture: a random Llama as a checkpoint)
from kvfold import recipes
from kvfold.calibration.text import CPU_TOKENS
from kvfold.compression import work
from kvfold.compression.compressor import Compressor
from kvfold.evaluation import answers, maps
from kvfold.hub.loading import load, load_tokenizer

SAID = re.compile(
    r"calibrating on 1024 tokens: about \d+ s, \d+ MB of memory, \d+ MB of disk and \d+ MB more"
    r" until it is done; tokens decide the time: `max_tokens`"
)


@pytest.mark.parametrize("fold", [True, False])
def test_disk_is_what_the_output_takes_at_most(plain, tmp_path, monkeypatch, fold) -> None:
    monkeypatch.setattr(work, "SMALL_FILES", 2**19)
    seen, said, output = [], [], tmp_path / "out"
    monkeypatch.setattr("kvfold.api.check_disk", lambda _, found: seen.append(found))
    settings = {"fold": fold, "check": False, "output": output, "say": said.append}
    kvfold.compress(str(plain), recipe="swift", max_tokens=1024, **settings)
    size = sum(x.stat().st_size for x in output.iterdir())
    assert size / 4 < seen[0].disk - 2**19 + 2**17 and size <= seen[0].disk
    assert said[0] == f"loading {plain}" and SAID.fullmatch(said[1]) and len(said) == 2


@pytest.mark.parametrize("name", ["zack", "fast", "swift", "lean", "small"])
def test_statistics_take_at_most_what_is_said(plain, name) -> None:
    model = load(str(plain), device="cpu")
    compressor = Compressor(model, recipes.get(name), load_tokenizer(str(plain)), max_tokens=1024)
    stored = compressor.measure(compressor.needs).layers.values()
    moments = [moment for layer in stored for moment in layer.values()]
    size = sum(8 * (x.second.numel() + x.first.numel()) for x in moments)
    assert size <= 2 * work.statistics_bytes(compressor)


def test_more_tokens_take_longer_and_reused_statistics_are_not_announced(
    plain,
    tmp_path,
) -> None:
    model = load(str(plain), device="cpu")
    few, many = (
        work.work_of(Compressor(model, recipes.get("swift"), max_tokens=tokens), fold=False)
        for tokens in (1024, 2**20)
    )
    assert many.seconds > 50 * few.seconds and many.memory == few.memory
    assert Compressor(model, recipes.get("swift")).max_tokens == CPU_TOKENS
    stats, said = tmp_path / "stats", []
    for name in ("first", "second"):
        settings = {"statistics": stats, "output": tmp_path / name, "check": False}
        kvfold.compress(str(plain), keep=0.5, max_tokens=1024, say=said.append, **settings)
    assert [x.split()[0] for x in said] == ["loading", "calibrating", "loading"]


@pytest.mark.parametrize("fold", [True, False])
def test_the_check_of_the_result_reports_its_progress(plain, tmp_path, fold) -> None:
    seen: list[tuple[str, int, int]] = []
    settings = {"fold": fold, "max_tokens": 1024, "progress": lambda *stage: seen.append(stage)}
    kvfold.compress(str(plain), "swift", output=tmp_path / "out", **settings)
    stages = list(dict.fromkeys(name for name, _, _ in seen))
    ends = ["check answer"] if fold else ["check answer", "check loss"]
    starts = ["original answer"] if fold else []
    assert stages == [*starts, "calibrate", "bases", *ends]
    for name in (*starts, *ends):
        (total,) = {total for stage, _, total in seen if stage == name}
        assert [done for stage, done, _ in seen if stage == name] == [*range(total + 1)]
        windows = 2 * maps.WINDOWS
        answer = (1 if fold else maps.ANSWERS) * answers.FEW
        assert total == (windows if name == "check loss" else answer)


@pytest.mark.parametrize("checked", [answers, maps])
def test_the_check_counts_in_the_estimate(plain, tmp_path, monkeypatch, checked) -> None:
    model = load(str(plain), device="cpu")
    compressor = Compressor(model, recipes.get("swift"), max_tokens=1024)
    monkeypatch.setattr(work, "products_a_second", lambda _: 1e9)
    monkeypatch.setattr(work, "step_seconds", lambda _: 2.0)
    check = checked.check_work(model)
    without, estimate = (work.work_of(compressor, False, check=x) for x in (None, check))
    assert "checking" not in without.words
    assert estimate.words.startswith("calibrating on 1024 tokens and checking the result: about ")
    windows = estimate.products - without.products
    assert (windows > 0) == (checked is maps)
    assert estimate.seconds - without.seconds == pytest.approx(2.0 * check.steps + windows / 1e9)


def test_a_step_takes_longer_with_more_layers(plain, monkeypatch) -> None:
    model = load(str(plain), device="cpu")
    monkeypatch.setattr(work, "PROBE_SECONDS", 1e-3)
    monkeypatch.setattr(work, "_timed", lambda *_: 1e-3)
    few = work.step_seconds(model)
    model.config.num_hidden_layers += 10
    assert work.step_seconds(model) - few == pytest.approx(10 * work.LAYER_SECONDS)
