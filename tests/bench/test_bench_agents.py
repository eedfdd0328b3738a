"""kvfold bench agents: conversations that grow, their turns, and how many a server bears."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from commands import refused
from kvfold.bench.serve_load import Conversations, Goals, Prompts, length
from kvfold.cli.main import main
from kvfold.utils.errors import SettingError
from serving import serving, small_llm

from kvfold.bench.agents import Agents, result  # isort: skip
from kvfold.bench.serve_client import Outcome, _read  # isort: skip


def settings(*pairs: str) -> list[str]:
    return [x for pair in pairs for x in ("--set", pair)]


SHORT = ["--longest", "200"]
SHORT += settings("shortest=60", "shared=32", "turn-tokens=12", "answer-tokens=4")
TIMES = settings("pause=.05", "seconds=4", "settle=0")


def turn(first: float, end: float, tokens: int = 11, **more) -> Outcome:
    return Outcome(
        at=0.0, prompt_tokens=50, output_tokens=tokens, events=[first, end], ended=end, **more
    )


def test_lengths_lie_around_their_median() -> None:
    drawn = sorted(length(random.Random(i), 600) for i in range(2000))
    assert drawn[0] == 200 and drawn[-1] == 1500
    assert drawn[1000] == pytest.approx(600, rel=0.1)


def test_turns_that_keep_to_the_goals_are_counted() -> None:
    """A turn without an answer keeps to none."""
    goals = Goals(ttft_ms=1000, tpot_ms=50)
    quick = [turn(0.5, 0.9)] * 19
    row = result(7, [*quick, turn(0.5, 1.5)], goals, seconds=10.0)
    assert (row["first_within"], row["token_within"], row["borne"]) == (1.0, 0.95, True)
    assert row["agents"] == 7 and row["output_tokens_per_s"] == 22.0
    assert row["requests_per_s"] == 2.0 and row["ttft_ms"]["p50"] == 500
    assert row["context_tokens"] == 50
    lost = turn(0.5, 0.9, error="HTTP 500")
    row = result(7, [*quick, lost, lost], goals, seconds=10.0)
    assert row["first_within"] == pytest.approx(19 / 21) and not row["borne"]
    assert row["errors"] == {"HTTP 500": 2}
    assert not result(7, [], goals, seconds=10.0)["borne"]


def test_a_context_begins_with_what_all_share() -> None:
    prompts = Prompts(list(range(1000)), seed=0)
    agents = Agents.__new__(Agents)
    agents.prompts, agents.settings = prompts, Conversations()
    one, two = agents._context("0", 9000), agents._context("1", 9000)
    assert len(one) == len(two) == 9000 and one[:2048] == two[:2048] and one[2048:] != two[2048:]


def test_an_answer_is_the_tokens_that_the_server_generated() -> None:
    """They are in its prefix cache; the text alone may be other tokens."""
    agents = Agents.__new__(Agents)
    agents.prompts = Prompts(list(range(1000)), seed=0)
    outcome = Outcome(at=0.0, prompt_tokens=50)
    for event in (b'{"text": "", "token_ids": [7]}', b'{"text": "ab", "token_ids": [8, 9]}'):
        assert _read(b'{"choices": [' + event + b"]}", outcome, start=0.0)
    assert asyncio.run(agents._units(outcome)) == [7, 8, 9] and len(outcome.events) == 2


def test_agents_of_a_server(tmp_path: Path, capsys) -> None:
    """Contexts grow, and their beginnings are in the prefix cache."""
    path, plot = tmp_path / "agents.json", tmp_path / "agents.svg"
    with serving(small_llm(max_tokens=256)) as served:
        words = ["bench", "agents", served.url, "--agents", "1,3"]
        run = [*words, *SHORT, *TIMES, "--json", str(path)]
        loose = settings("ttft-ms=1e6", "tpot-ms=1e6", f"plot={plot}")
        assert main([*run, *loose]) == 0
        report = json.loads(path.read_text())
        assert [row["agents"] for row in report["rows"]] == [1, 3]
        assert all(row["borne"] and row["completed"] for row in report["rows"])
        assert all(60 <= row["context_tokens"] <= 200 for row in report["rows"])
        assert report["settings"]["prompts"] == "token ids" and plot.stat().st_size
        assert "borne: 3 agents, the most that were tried" in capsys.readouterr().out
        lines = served.client.get("/metrics").text.splitlines()
        (hits,) = (x for x in lines if x.startswith("vllm:prefix_cache_hits_total{"))
        assert float(hits.split()[-1]) > 0
        assert main([*run, *settings("ttft-ms=1e-3")]) == 0
        assert len(json.loads(path.read_text())["rows"]) == 1, "it stops at what is not borne"
        assert "no number of agents was borne" in capsys.readouterr().out
        said = refused(capsys, *words)
        assert "--longest must be at most the model's 256 tokens; got 65536" in said


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(SettingError, match="shared must be below shortest; got 90 and 80"):
        Conversations(shortest=80, shared=90)
    with pytest.raises(SettingError, match="longest must hold a context and a turn, 10067 tokens"):
        Conversations(longest=9000)


@pytest.mark.parametrize("numbers", ["4,2", "0,1", "a"])
def test_numbers_that_do_not_rise(numbers: str, capsys) -> None:
    said = refused(capsys, "bench", "agents", "http://127.0.0.1:1", "--agents", numbers)
    assert "--agents" in said
