"""benchmarks/answer_divergence.py: nothing is lost without compression, and less with more bits."""

from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import answer_divergence
import kvfold
from answer_divergence import Answers, Setting
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.trial import run_tokens
from kvfold.evaluation.dense import DenseSession
from kvfold.hub.loading import load, load_tokenizer
from kvfold.layout.pages import cache_layout
from kvfold.maps.sidecar import Sidecar
from published_quantisers import Kivi, moments
from windowed import Window, spec_of, windowed

PROMPTS = [list(range(40, 90)), [*range(40, 60), *range(100, 150)]]


@pytest.fixture(scope="module")
def model() -> Any:
    return load("reference:gqa", dtype="float32")


@pytest.fixture(scope="module")
def answers(model: Any) -> Answers:
    return Answers.of(model, PROMPTS, answer_divergence.answered(model, PROMPTS, 8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Maps of two recipes in a folder."""
    folder = tmp_path_factory.mktemp("maps")
    for recipe, factor in (("small", 6), ("swift", 4)):
        kvfold.compress(
            "reference:gqa",
            recipe=recipe,
            factor=factor,
            output=folder / f"maps-{recipe}-{factor}x",
            max_tokens=4096,
            check=False,
        )
    return folder


def kl(name: str, model: Any, answers: Answers, folder: Path | None = None) -> float:
    found = Setting(name, Namespace(folder=folder, model="reference:gqa")).measured(model, answers)
    loss: float = found["all"]["kl"][0]
    return loss


def test_what_answers_lose_grows_with_fewer_bits(model: Any, answers: Answers) -> None:
    assert answers.logp[0].shape[0] == len(answers.tokens[0]) == 8
    lost = [kl(x, model, answers) for x in ("original", "bits-8", "bits-4", "bits-2")]
    assert abs(lost[0]) < 1e-5
    assert all(less < more for less, more in pairwise(lost)), lost
    assert kl("bits-2+96", model, answers) < 0.01 * lost[-1], "all tokens are still in 16 bits"


def test_answers_are_what_the_original_says(model: Any, answers: Answers) -> None:
    with DenseSession(model) as session:
        greedy = session.greedy(session.read(PROMPTS[1]), 8)
    assert greedy == answers.tokens[1]
    unwanted = answer_divergence.answered(model, PROMPTS[1:], 8, end=greedy[2])
    assert unwanted[0][:2] == greedy[:2]
    assert greedy[2] not in unwanted[0]


@pytest.mark.parametrize("name", ["bits-4", "bits-4+32", "maps-small-6x", "maps-swift-4x+32"])
def test_many_tokens_at_once_read_what_pages_give_single_ones(
    model: Any, answers: Answers, folder: Path, name: str
) -> None:
    """Steps of the engine give nearly the same logits, one token at a time."""
    setting = Setting(name, Namespace(folder=folder, model="reference:gqa"))
    sidecar = Sidecar.load(setting.maps) if setting.maps else None
    residual = setting.window.tokens or None
    config = CacheConfig(bits=None if sidecar else 4, residual=residual, kv_bytes=2**26)
    runner = build_runner(model, config, num_slots=1, max_tokens=96, maps=sidecar)
    steps = run_tokens(runner, PROMPTS[1:], [answers.tokens[1][:-1]])
    paged = torch.cat(list(steps)).float().log_softmax(-1)
    with windowed(model, sidecar, setting.bits, setting.window) as read:
        own = list(answers.read(read))[1]
    lost = (paged - answers.logp[1]).abs().mean()
    assert (own - paged).abs().mean() < 0.1 * lost, "a few codes may be rounded otherwise"


@pytest.mark.parametrize("base", ["bits-2", "maps-small-6x", "maps-swift-4x"])
def test_windows_of_all_tokens_lose_nothing(
    model: Any, answers: Answers, folder: Path, base: str
) -> None:
    assert kl(f"{base}~whole-100", model, answers, folder) < 1e-5
    assert kl(f"{base}~whole-0-100", model, answers, folder) < 1e-5
    lost = [kl(f"{base}~whole-{n}", model, answers, folder) for n in (40, 20, 0)]
    assert all(less < more for less, more in pairwise(lost)), lost


def test_windows_of_stored_numbers_keep_what_maps_leave_out(
    model: Any, answers: Answers, folder: Path
) -> None:
    lost = [
        kl(f"maps-small-6x~{x}", model, answers, folder)
        for x in ("stored-100", "stored8-100", "stored-0")
    ]
    assert 1e-4 < lost[0] < lost[2]
    assert lost[1] == pytest.approx(lost[0], rel=0.3)


def test_the_engine_decodes_with_a_window(model: Any, answers: Answers, folder: Path) -> None:
    for name in ("bits-4", "maps-swift-4x"):
        lost = [kl(f"{name}{x}", model, answers, folder) for x in ("@100", "@16", "~whole-16", "")]
        assert lost[0] < 1e-5
        assert lost[1] == pytest.approx(lost[2], rel=0.1)
        assert lost[2] < lost[3]


def test_published_quantisers_are_settings(model: Any, answers: Answers) -> None:
    ids = torch.arange(240)[None] + 40
    made = moments(model, ids)

    def lost(name: str) -> dict[str, Any]:
        given = Namespace(folder=Path(), model="reference:gqa")
        return Setting(name, given).measured(model, answers, made)

    found = [lost(x) for x in ("oscar-2~whole-100", "oscar-2~whole-20", "oscar-2")]
    kls = [x["all"]["kl"][0] for x in found]
    assert kls[0] < 1e-5
    assert all(less < more for less, more in pairwise(kls)), kls
    assert [x["smaller"]["1024"] for x in found[1:]] == [
        pytest.approx(16 / (16 * n / 1024 + 2.25 * (1 - n / 1024)), abs=1e-3) for n in (20, 0)
    ]
    assert abs(found[0]["nats"][0]) < 1e-5
    assert found[2]["nats"] == pytest.approx(
        [sum(found[2]["nats_prompts"]) / 2, found[2]["nats"][1]], abs=1e-5
    )


def test_kivi_is_read_as_the_engine_decodes_it(model: Any, answers: Answers) -> None:
    assert kl("kivi-2", model, answers) < 1e-5, "128 recent tokens are in 16 bits"
    ids, rest = list(range(40, 190)), list(range(60, 68))
    config = CacheConfig(bits=2, format="kivi", kv_bytes=2**26)
    runner = build_runner(model, config, num_slots=1, max_tokens=192)
    steps = torch.cat(list(run_tokens(runner, [ids], [rest])))
    window = Window(kind="residual", tokens=128)
    read_by = []
    for quantiser in (Kivi(2), None):
        with windowed(model, None, 16, window, quantiser) as read:
            read_by.append(read(ids + rest)[len(ids) - 1 :])
    apart = [(x - steps).abs().mean() for x in read_by]
    assert apart[0] < 0.1 * apart[1]
    given = Namespace(folder=Path(), model="reference:gqa")
    found = Setting("kivi-2", given).measured(model, answers)
    layout = cache_layout(spec_of(model, None), bits=2, format="kivi")
    rest = layout.bits_per_token / spec_of(model, None).geometry.full_numbers
    bits = (16 * 128 + rest * (1024 - 64.5)) / 1024
    assert found["smaller"]["1024"] == pytest.approx(16 / bits, abs=1e-3)


@pytest.mark.parametrize("name", ["kivi-2@8", "kvquant-3~whole-8", "oscar-3", "gear-2"])
def test_unknown_settings_are_refused(name: str) -> None:
    with pytest.raises(SystemExit, match=name):
        Setting(name, Namespace(folder=Path(), model="reference:gqa"))


def test_pieces_of_a_text_are_prompts_and_answers(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The ship sails at noon. " * 40, encoding="utf-8")
    given = Namespace(model="reference:gqa", text=file, context=20, tokens=12, count=2)
    prompts, tokens = answer_divergence.prepared(None, given)
    assert [len(x) for x in (*prompts, *tokens)] == [20, 20, 12, 12]
    ids = load_tokenizer("reference:gqa").encode("The ship sails at noon. " * 40)
    assert (prompts[0] + tokens[0])[:30] == ids[:30]


def test_sizes_count_the_window(model: Any, folder: Path) -> None:
    spec = spec_of(model, None)
    entries = 128 / (4 * 128 + 16) * 16  # with a scale of 16 bits for 128 numbers
    stored = cache_layout(spec, bits=4).bits_per_token
    assert Window(kind="whole").smaller(spec, stored, 1024) == pytest.approx(entries)
    found = Window(kind="whole", tokens=192, first=64).smaller(spec, stored, 1024)
    assert found == pytest.approx(1 / (0.25 + 0.75 / entries))
    found = Window(kind="residual", tokens=256).smaller(spec, stored, 1024)
    assert found == pytest.approx(1 / (0.25 + (1 - 128.5 / 1024) / entries))
    small = spec_of(model, Sidecar.load(folder / "maps-small-6x"))
    stored = cache_layout(small).bits_per_token
    assert Window().smaller(small, stored, 1024) == pytest.approx(6, rel=0.02)
    numbers = sum(x.row_width for x in small.layers) / small.geometry.full_numbers
    all_stored = Window(tokens=1024).smaller(small, stored, 1024)
    assert all_stored == pytest.approx(1 / numbers)


def test_tokens_before_all_prompts_are_read_once(model: Any, folder: Path) -> None:
    sidecar, ids = Sidecar.load(folder / "maps-small-6x"), list(range(60, 140))
    found = list[torch.Tensor]()
    for window in (Window(kind="residual", tokens=32), Window(kind="whole", tokens=7, first=2)):
        with windowed(model, sidecar, None, window) as read:
            found.append(read(ids)[50:])
            read.remember(ids[:50])
            found.append(read(ids[50:]))
            assert torch.equal(read(ids[50:]), found[-1])
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found[2], found[3], atol=1e-3, rtol=1e-3)
    assert (found[0] - found[2]).abs().max() > 0.1


@pytest.mark.parametrize("text", ["whole", "whole-x", "half-4", "whole-1-2-3"])
def test_windows_are_written_one_way(text: str) -> None:
    with pytest.raises(SystemExit, match="KIND-TOKENS"):
        Window.parse(text)


def test_positions_are_in_quarters() -> None:
    lost = torch.arange(8.0)[:, None].expand(8, 2)
    found = answer_divergence.summary(lost, torch.zeros(8, 2))
    quarters = [found[x]["kl"][0] for x in ("1 to 2", "3 to 4", "5 to 6", "7 to 8")]
    assert quarters == [0.5, 2.5, 4.5, 6.5]
    assert found["growth"] == [6, 0]
    assert found["worst"] == 7


def test_settings_are_paired_by_prompt() -> None:
    rows = [
        {"setting": "a", "prompts": [1.0, 2.0], "nats_prompts": [1.0, 1.0]},
        {"setting": "b", "prompts": [3.0, 4.0], "nats_prompts": [4.0, 4.0]},
    ]
    found = answer_divergence.difference(rows, ["b", "a"])
    assert found == {"setting": "b", "less": "a", "kl": [2, 0], "nats": [3, 0]}


def test_a_question_stands_after_solved_ones() -> None:
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(3)]
    turns = answer_divergence.chat(rows[2], rows[:2])
    assert [x["content"] for x in turns] == ["q0", "a0", "q1", "a1", "q2"]
    assert [x["role"] for x in turns][::4] == ["user", "user"]
