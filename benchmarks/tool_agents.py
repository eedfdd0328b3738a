"""Right calls of an agent in conversations of twenty turns with tools, against any server.

    kvfold serve reference:qwen2.5-coder-1.5b --port 8123 --max-tokens 8192 &
    python benchmarks/tool_agents.py --url http://127.0.0.1:8123/v1 --json tool-agents.json

vLLM needs --enable-auto-tool-choice, --tool-call-parser hermes and, to count what was found in its
prefix cache, --enable-prompt-tokens-details.

A conversation is a script of user turns, drawn from a seed. The agent sends a turn, runs the calls
that it gets, sends their results, and goes on until an answer has no calls. Its own answers stay in
the conversation, right or wrong. All answers are greedy.

right: the calls of a turn are those of the script, each with its name and all arguments, in one
answer or in several, and in any order. A conversation is right if all its turns are.
told: the last answer of a turn holds what a result said, such as the temperature.

With `--choice required` a grammar keeps an answer to one call while its turn needs more of them:
small models do not end a list of calls. Other answers have "auto" as before. With `--choice
scripted` these have "none": a model that calls functions although nothing is asked of it, as
Qwen2.5-Coder-1.5B does, then shows whether the calls that were asked for are right.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from openai import APIStatusError, OpenAI

from kvfold.cli import common
from kvfold.cli.bench_common import Results, say
from tool_calls import tools

Json = dict[str, Any]
Call = tuple[str, Json]  # a function's name and its arguments

TEXT: Json = {"type": "string"}
NUMBER: Json = {"type": "number"}
CURRENCY: Json = {"type": "string", "enum": ["USD", "EUR", "GBP", "JPY"]}
LIST: Json = {"type": "string", "enum": ["shopping", "packing", "reading"]}
FUNCTIONS: dict[str, tuple[str, Json]] = {
    "get_weather": ("Current weather of a city.", {"city": TEXT}),
    "add_to_list": ("Put an item on one of the user's lists.", {"list": LIST, "item": TEXT}),
    "read_file": ("Read the text of a file.", {"path": TEXT}),
    "multiply": ("Multiply two numbers.", {"a": NUMBER, "b": NUMBER}),
    "add": ("Add two numbers.", {"a": NUMBER, "b": NUMBER}),
    "set_alarm": (
        "Set an alarm, by the 24-hour clock.",
        {"hour": {"type": "integer"}, "minute": {"type": "integer"}},
    ),
    "convert_currency": (
        "Convert money to another currency.",
        {"amount": NUMBER, "source": CURRENCY, "target": CURRENCY},
    ),
    "send_email": ("Send an email.", {"to": TEXT, "subject": TEXT}),
}
SYSTEM = (
    "You are a helpful assistant. Call functions for weather, lists, files, arithmetic, alarms, "
    "currencies and emails, each time that the user asks for one: never make up their results. "
    "After the results, answer in one short sentence. Answer other messages without functions."
)


def words(text: str) -> list[str]:
    return text.split()


CITIES = words("Oslo Lima Cairo Paris Tokyo Rome Madrid Vienna Dublin Athens Berlin Nairobi")
ITEMS = words("milk bread apples rice soap socks tea sugar candles batteries honey cheese")
FOLDERS, NAMES = words("notes docs work home"), words("today ideas plan report draft todo")
PEOPLE = words("Ann Bob Carla David Emma Frank Grace Henry")
SUBJECTS = words("Lunch Invoice Holiday Meeting Budget Party")
SMALL_TALK = (
    "Say good morning in French.",
    "Thank you. Now just say the word OK.",
    "Name one colour of the rainbow.",
    "Wish me a nice day.",
)
# Kinds of the turns between the first, in which the user tells a name, and the last, which asks it.
MIDDLE = (
    *("weather",) * 3,
    *("list",) * 3,
    *("file",) * 3,
    *("multiply", "add", "alarm", "alarm", "currency", "email", "talk"),
    *("two", "chain"),
)
NUM_TURNS = len(MIDDLE) + 2
# --choice: tool_choice of answers while their turn needs more calls, and of others.
CHOICES = {
    "auto": ("auto", "auto"),
    "required": ("required", "auto"),
    "scripted": ("required", "none"),
}
MAX_TOKENS = 192  # of an answer
EXTRA_ANSWERS = 2  # that a turn may have beyond one for each call and one for its results


class World:
    """What the functions of one conversation read and change. Its methods are these functions."""

    def __init__(self, rng: random.Random) -> None:
        self.degrees = {city: rng.randrange(-20, 40) for city in CITIES}
        self.files = {f"{folder}/{name}.txt": "" for folder in FOLDERS for name in NAMES}
        for path in self.files:
            self.files[path] = rng.choice(ITEMS)
        self.lists: dict[str, list[str]] = {name: [] for name in LIST["enum"]}

    def run(self, name: str, arguments: Json) -> Json:
        """A function's result, or what is wrong with its arguments."""
        if name not in FUNCTIONS:
            return {"error": f"no function is called {name}"}
        known = FUNCTIONS[name][1]
        if arguments.keys() != known.keys():
            return {"error": f"{name} takes {', '.join(known)}; got {', '.join(arguments)}"}
        try:
            result: Json = getattr(self, name)(**arguments)
        except (KeyError, TypeError, AttributeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return result

    def get_weather(self, city: str) -> Json:
        return {"city": city, "celsius": self.degrees[city]}

    def add_to_list(self, list: str, item: str) -> Json:
        self.lists[list].append(item)
        return {"list": list, "items": self.lists[list]}

    def read_file(self, path: str) -> Json:
        return {"path": path, "text": self.files[path]}

    def multiply(self, a: float, b: float) -> Json:
        return {"result": a * b}

    def add(self, a: float, b: float) -> Json:
        return {"result": a + b}

    def set_alarm(self, hour: int, minute: int) -> Json:
        return {"alarm": f"{hour}:{minute:02}"}

    def convert_currency(self, amount: float, source: str, target: str) -> Json:
        rates = dict(zip(CURRENCY["enum"], (1, 2, 4, 8), strict=True))
        return {"amount": amount * rates[target] / rates[source], "currency": target}

    def send_email(self, to: str, subject: str) -> Json:
        return {"sent": True, "to": to, "subject": subject}


@dataclass(frozen=True)
class Turn:
    """A user's message, the calls that it needs, and a text that the answer to it holds."""

    kind: str
    text: str
    calls: Sequence[Call] = ()
    tells: str = ""


class Script:
    """Draws the turns of one conversation. A method is a kind of turn."""

    def __init__(self, seed: int, num_turns: int = NUM_TURNS) -> None:
        self.rng = random.Random(seed)
        self.world = World(self.rng)
        person = self.rng.choice(PEOPLE)
        middle: list[str] = []
        while len(middle) < num_turns - 2:
            middle += self.rng.sample(MIDDLE, len(MIDDLE))
        first = Turn("name", f"Hello, my name is {person}.")
        last = Turn("recall", "What is my name?", tells=person)
        turns = [getattr(self, kind)() for kind in middle[: num_turns - 2]]
        self.turns: list[Turn] = [first, *turns, last][-num_turns:]

    def weather(self) -> Turn:
        city = self.rng.choice(CITIES)
        asked = self.rng.choice(("What is the weather in {}?", "How warm is it in {} now?"))
        calls = [("get_weather", {"city": city})]
        return Turn("weather", asked.format(city), calls, str(self.world.degrees[city]))

    def list(self) -> Turn:
        name, item = self.rng.choice(LIST["enum"]), self.rng.choice(ITEMS)
        asked = self.rng.choice(("Put {} on my {} list.", "Add {} to my {} list."))
        calls = [("add_to_list", {"list": name, "item": item})]
        return Turn("list", asked.format(item, name), calls)

    def file(self) -> Turn:
        path = self.rng.choice([*self.world.files])
        asked = self.rng.choice(("Read the file {}.", "What is in the file {}?"))
        calls = [("read_file", {"path": path})]
        return Turn("file", asked.format(path), calls, self.world.files[path])

    def multiply(self) -> Turn:
        a, b = self.rng.randrange(101, 999), self.rng.randrange(11, 99)
        return Turn(
            "multiply", f"Multiply {a} by {b}.", [("multiply", {"a": a, "b": b})], f"{a * b}"
        )

    def add(self) -> Turn:
        a, b = self.rng.randrange(1001, 9999), self.rng.randrange(101, 999)
        return Turn("add", f"What is {a} plus {b}?", [("add", {"a": a, "b": b})], f"{a + b}")

    def alarm(self) -> Turn:
        hour, minute = self.rng.randrange(5, 24), self.rng.randrange(10, 60)
        calls = [("set_alarm", {"hour": hour, "minute": minute})]
        return Turn("alarm", f"Set an alarm for {hour}:{minute}.", calls)

    def currency(self) -> Turn:
        amount = self.rng.randrange(2, 50) * 8
        source, target = self.rng.sample(CURRENCY["enum"], 2)
        arguments = {"amount": amount, "source": source, "target": target}
        tells = f"{self.world.convert_currency(**arguments)['amount']:g}"
        asked = f"Convert {amount} {source} to {target}."
        return Turn("currency", asked, [("convert_currency", arguments)], tells)

    def email(self) -> Turn:
        to, subject = f"{self.rng.choice(PEOPLE).lower()}@example.org", self.rng.choice(SUBJECTS)
        asked = f"Send an email to {to} with the subject {subject}."
        return Turn("email", asked, [("send_email", {"to": to, "subject": subject})])

    def talk(self) -> Turn:
        return Turn("talk", self.rng.choice(SMALL_TALK))

    def two(self) -> Turn:
        cities = self.rng.sample(CITIES, 2)
        calls = [("get_weather", {"city": city}) for city in cities]
        asked = f"What is the weather in {cities[0]} and in {cities[1]}?"
        return Turn("two", asked, calls, str(self.world.degrees[cities[1]]))

    def chain(self) -> Turn:
        """The second call needs the result of the first."""
        path, name = self.rng.choice([*self.world.files]), self.rng.choice(LIST["enum"])
        calls = [
            ("read_file", {"path": path}),
            ("add_to_list", {"list": name, "item": self.world.files[path]}),
        ]
        asked = f"Read the file {path}, then put the item that is in it on my {name} list."
        return Turn("chain", asked, calls)


def same_calls(called: Iterable[Call], expected: Iterable[Call]) -> bool:
    """Whether two lists have the same calls, in any order."""
    left = list(expected)
    for call in called:
        if call not in left:
            return False
        left.remove(call)
    return not left


def read_object(text: str) -> Json:
    """A call's arguments. What is not a JSON object, which some servers pass on, is no arguments
    of any function."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"not an object": text}


@dataclass
class Used:
    """What the requests of a conversation took. cached_tokens: of its prompts, found in the prefix
    cache."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: Any) -> None:
        details = usage.prompt_tokens_details
        self.requests += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += (details and details.cached_tokens) or 0
        self.completion_tokens += usage.completion_tokens


@dataclass
class Agent:
    """Holds one conversation with a model.

    ask: sends messages and tool_choice, and returns the answer. said: texts and calls of the
    current turn's answers.
    """

    ask: Callable[[list[Any], str], Any]
    world: World
    choice: str
    messages: list[Any] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    said: list[Any] = field(default_factory=list)
    used: Used = field(default_factory=Used)

    def take(self, turn: Turn) -> Json:
        """Send a turn and run its calls, until an answer has none. Returns how it went."""
        self.messages.append({"role": "user", "content": turn.text})
        self.said, called, text = [], list[Call](), ""
        for _ in range(len(turn.calls) + 1 + EXTRA_ANSWERS):
            needed, unneeded = CHOICES[self.choice]
            calls, text = self._answer(needed if len(called) < len(turn.calls) else unneeded)
            called += calls
            if not calls:
                break
        return {
            "kind": turn.kind,
            "right": same_calls(called, turn.calls),
            "told": turn.tells in text.replace(",", ""),
        }

    def _answer(self, choice: str) -> tuple[list[Call], str]:
        """One answer, and the results of its calls. Returns its calls and its text."""
        answer = self.ask(self.messages, choice)
        self.used.add(answer.usage)
        message, calls = answer.choices[0].message, list[Call]()
        self.messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            function = call.function
            calls.append((function.name, arguments := read_object(function.arguments)))
            result = json.dumps(self.world.run(function.name, arguments))
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        self.said += [*calls, message.content] if message.content else calls
        return calls, message.content or ""


def converse(agent: Agent, turns: Sequence[Turn]) -> Iterator[Json]:
    """How each turn went; for wrong ones also what was asked, expected and said. After an error of
    the server, such as a conversation that is too long, all turns are wrong."""
    error = None
    for number, turn in enumerate(turns):
        went: Json = {"kind": turn.kind, "right": False, "told": False}
        if error is None:
            try:
                went = agent.take(turn)
            except APIStatusError as caught:
                error = str(caught)
        went |= {"turn": number}
        if not (went["right"] and went["told"]):
            went |= {"asked": turn.text, "expected": turn.calls, "tells": turn.tells}
            went |= {"said": agent.said} if error is None else {"error": error}
        yield went


class Benchmark:
    """Runs conversations, some at once, and writes each as it ends."""

    def __init__(self, client: Any, options: argparse.Namespace) -> None:
        self.client, self.options, self.lock = client, options, Lock()
        self.model = options.model or client.models.list().data[0].id
        settings = {**vars(options), "json": options.json and options.json.name}
        self.results = Results(
            options.json,
            "tool agents",
            settings,
            common.versions("cpu"),
            ("rows",),
            model=self.model,
        )
        self.num_turns, self.begin = 0, time.monotonic()

    @property
    def rows(self) -> list[Json]:
        return self.results.by_kind["rows"]

    def ask(self, messages: list[Any], choice: str) -> Any:
        return self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            tools=tools(FUNCTIONS),
            tool_choice=choice,
            parallel_tool_calls=choice == "auto",
            temperature=0,
            max_tokens=MAX_TOKENS,
        )

    def run(self) -> None:
        options = self.options
        total = options.conversations * options.turns
        with common.progress() as progress, ThreadPoolExecutor(options.at_once) as pool:

            def one(seed: int) -> None:
                self._conversation(seed, lambda: progress("turns", self.num_turns, total))

            list(pool.map(one, range(options.conversations)))

    def _conversation(self, seed: int, show: Callable[[], None]) -> None:
        script, begin = Script(seed, self.options.turns), time.monotonic()
        agent = Agent(self.ask, script.world, self.options.choice)
        turns: list[Json] = []
        for turn in converse(agent, script.turns):
            turns.append(turn)
            with self.lock:
                self.num_turns += 1
                show()
        wrong = [x["turn"] for x in turns if not x["right"]]
        row = {
            "seed": seed,
            "right": not wrong,
            "right_turns": len(turns) - len(wrong),
            "told_turns": sum(x["told"] for x in turns),
            "first_wrong": wrong[0] if wrong else None,
            **vars(agent.used),
            "seconds": round(time.monotonic() - begin, 2),
            "wrong": [x for x in turns if not x["right"]],
            "untold": [x for x in turns if x["right"] and not x["told"]],
        }
        with self.lock:
            self.results.metadata["totals"] = self.totals([*self.rows, row])
            self.results.add("rows", row)
            say(self.line(seed, row))

    def line(self, seed: int, row: Json) -> str:
        """A conversation that ended, all so far, and the time that is left."""
        totals, seconds = self.results.metadata["totals"], time.monotonic() - self.begin
        left = (
            seconds
            / self.num_turns
            * (self.options.conversations * self.options.turns - self.num_turns)
        )
        first = row["wrong"][0] if row["wrong"] else None
        end = "all right" if first is None else f"first wrong: {json.dumps(first)}"
        return (
            f"conversation {seed}: {end}\n"
            f"right calls in {totals['right']} of {totals['conversations']} conversations and "
            f"{totals['right_turns']} of {totals['turns']} turns; about {left:.0f} s left"
        )

    def totals(self, rows: Sequence[Json]) -> Json:
        """Sums over conversations. seconds: since the first began."""
        summed = ("right", "right_turns", "told_turns", *vars(Used()))
        return {
            "conversations": len(rows),
            "turns": len(rows) * self.options.turns,
            **{name: sum(x[name] for x in rows) for name in summed},
            "seconds": round(time.monotonic() - self.begin, 2),
        }


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True, help="of the API, with /v1")
    parser.add_argument("--model", help="by default the first that the server names")
    parser.add_argument("--choice", default="auto", choices=CHOICES)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=NUM_TURNS)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with OpenAI(base_url=options.url, api_key="none", timeout=3600, max_retries=0) as client:
        benchmark = Benchmark(client, options)
        benchmark.run()
    print(json.dumps(benchmark.totals(benchmark.rows)))


if __name__ == "__main__":
    main()
