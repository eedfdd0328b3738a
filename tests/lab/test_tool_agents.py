"""benchmarks/tool_agents.py counts exactly what a scripted server does right and wrong."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="the openai package is not installed")
import tool_agents
from tool_agents import NUM_TURNS, Call, Script, World, same_calls

Json = dict[str, Any]
Answer = tuple[list[Call], str]
MODEL = "scripted"


class Model:
    """Answers as the scripts want. wrong: changes the calls of a turn's first answer, by the
    turn's text."""

    def __init__(self, one_by_one: bool = False) -> None:
        self.one_by_one = one_by_one
        self.wrong: dict[str, Callable[[list[Call]], list[Call]]] = {}
        self.turns = {x.text: x for seed in range(2) for x in Script(seed).turns}
        self.choices: list[str] = []

    def answer(self, body: Json) -> Answer:
        self.choices.append(body["tool_choice"])
        assert body["parallel_tool_calls"] is (body["tool_choice"] == "auto")
        messages = body["messages"]
        last = max(i for i, x in enumerate(messages) if x["role"] == "user")
        turn, answered = self.turns[messages[last]["content"]], messages[last + 1 :]
        results = [x["content"] for x in answered if x["role"] == "tool"]
        rest = list(turn.calls)[len(results) :]
        if not answered and turn.text in self.wrong:
            return self.wrong[turn.text](rest), ""
        calls = rest[:1] if self.one_by_one or turn.kind == "chain" else rest
        name = messages[1]["content"]  # the last turn asks for it
        return (calls, "") if calls else ([], f"{name} {turn.tells} {' '.join(results)}")

    def completion(self, body: Json) -> Json:
        calls, text = self.answer(body)
        message: Json = {"role": "assistant", "content": text or None}
        if calls:
            message["tool_calls"] = [
                {
                    "id": str(i),
                    "type": "function",
                    "function": {"name": x, "arguments": json.dumps(y)},
                }
                for i, (x, y) in enumerate(calls)
            ]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        usage |= {"prompt_tokens_details": {"cached_tokens": 5}}
        return {"id": "1", "object": "chat.completion", "created": 1, "model": MODEL} | {
            "choices": [choice],
            "usage": usage,
        }


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def url(model: Model) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

        def do_POST(self) -> None:
            self.send(
                model.completion(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            )

        def send(self, answer: Json) -> None:
            content = json.dumps(answer).encode()
            self.send_response(400 if "error" in answer else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def run(url: str, path: Path, *more: str) -> Json:
    file = path / "results.json"
    tool_agents.main(["--url", url, "--json", str(file), "--conversations", "2", *more])
    return json.loads(file.read_text())


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_model_without_mistakes_has_all_right(
    url: str, model: Model, tmp_path: Path, one_by_one: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model.one_by_one = one_by_one
    found = run(url, tmp_path, "--at-once", "2")
    totals = found["totals"]
    assert totals["right"] == totals["conversations"] == 2
    assert totals["right_turns"] == totals["told_turns"] == totals["turns"] == 2 * NUM_TURNS
    calls = [len(x.calls) for seed in range(2) for x in Script(seed).turns]
    # A turn of two calls at once has an answer with both; each turn ends with one without calls.
    expected = sum(calls) + len(calls) - (0 if one_by_one else 2)
    assert totals["requests"] == expected == len(model.choices)
    assert totals["prompt_tokens"] == 10 * expected and totals["cached_tokens"] == 5 * expected
    assert sorted(x["seed"] for x in found["rows"]) == [0, 1]
    assert all(x["first_wrong"] is None and not x["wrong"] for x in found["rows"])
    assert found["model"] == MODEL and found["settings"]["choice"] == "auto"
    assert set(model.choices) == {"auto"}
    err = capsys.readouterr().err
    assert "right calls in 2 of 2 conversations and 40 of 40 turns; about 0 s left" in err


@pytest.mark.parametrize(("choice", "others"), [("required", "auto"), ("scripted", "none")])
def test_calls_are_required_where_a_turn_needs_them(
    url: str, model: Model, tmp_path: Path, choice: str, others: str
) -> None:
    assert run(url, tmp_path, "--choice", choice)["totals"]["right"] == 2
    turns = [x for seed in range(2) for x in Script(seed).turns]
    needs = sum(2 if x.kind == "chain" else bool(x.calls) for x in turns)
    assert model.choices.count("required") == needs
    assert set(model.choices) == {"required", others}


def test_each_mistake_makes_its_turn_wrong(url: str, model: Model, tmp_path: Path) -> None:
    turns = Script(1).turns
    weather, alarm = (next(x for x in turns if x.kind == y) for y in ("weather", "alarm"))
    model.wrong = {
        weather.text: lambda calls: [(calls[0][0], {"city": "Nowhere"})],
        alarm.text: lambda _: [],
        turns[-1].text: lambda _: [("get_weather", {"town": "Oslo"})],
    }
    rows = {x["seed"]: x for x in run(url, tmp_path)["rows"]}
    wrong = {x["turn"]: x for x in rows[1]["wrong"]}
    expected = [turns.index(weather), turns.index(alarm), NUM_TURNS - 1]
    assert set(expected) <= wrong.keys()
    assert all(turns[x].text in model.wrong for x in wrong), "the same texts may come again"
    assert rows[1]["first_wrong"] == min(wrong) and not rows[1]["right"]
    assert rows[1]["right_turns"] == NUM_TURNS - len(wrong)
    first = wrong[expected[0]]
    assert first["asked"] == weather.text and first["said"][0] == [
        "get_weather",
        {"city": "Nowhere"},
    ]
    assert first["expected"] == [["get_weather", weather.calls[0][1]]]
    assert rows[0]["wrong"][-1]["turn"] == NUM_TURNS - 1  # all scripts ask for the name


def test_an_error_of_the_server_ends_a_conversation(
    url: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = {"error": {"message": "too long", "type": "a", "param": None, "code": None}}
    answer = model.completion
    monkeypatch.setattr(
        model, "completion", lambda x: error if len(x["messages"]) > 20 else answer(x)
    )
    found = run(url, tmp_path)
    assert found["totals"]["right"] == 0 and 0 < found["totals"]["right_turns"] < 20
    assert "too long" in found["rows"][0]["wrong"][0]["error"]
    assert found["rows"][0]["wrong"][-1]["turn"] == NUM_TURNS - 1


def test_scripts_differ_and_have_all_kinds() -> None:
    scripts = [Script(seed) for seed in range(50)]
    assert len({tuple(x.text for x in script.turns) for script in scripts}) == 50
    assert scripts[7].turns == Script(7).turns
    kinds = [sorted(x.kind for x in script.turns) for script in scripts]
    assert all(x == kinds[0] and len(x) == NUM_TURNS == 20 for x in kinds)
    assert len(Script(3, 45).turns) == 45 and len(Script(3, 4).turns) == 4
    for script in scripts:
        for turn in script.turns:
            results = [script.world.run(*call) for call in turn.calls]
            assert all("error" not in x for x in results), results
            if turn.calls and turn.tells:
                assert turn.tells in str(results[-1]).replace(".0", ""), turn


def test_calls_are_compared_exactly() -> None:
    a, b = ("f", {"x": 1}), ("f", {"x": 2})
    assert same_calls([a, b], [b, a]) and same_calls([("f", {"x": 1.0})], [a])
    for wrong in ([a], [a, a], [a, b, b], [a, ("g", {"x": 2})], [a, ("f", {"x": "2"})]):
        assert not same_calls(wrong, [a, b])


def test_functions_name_what_is_wrong() -> None:
    world = Script(0).world
    assert isinstance(world, World)
    for name, arguments, words in (
        ("run", {}, "no function is called run"),
        ("add", {"a": 1}, "add takes a, b; got a"),
        ("get_weather", {"city": "Atlantis"}, "Atlantis"),
        ("multiply", {"a": "1", "b": "2"}, "TypeError"),
    ):
        assert words in world.run(name, arguments)["error"]
    assert tool_agents.read_object("[1]") == {"not an object": "[1]"}
