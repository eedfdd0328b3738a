"""How many scripted conversations with tools a server answers with the right call.

    kvfold serve reference:qwen2.5-coder-1.5b --port 8123 &
    python benchmarks/tool_calls.py --url http://127.0.0.1:8123/v1 --output tool_calls.json

Each conversation is one question, eight functions, and one right call: the function's name and all
of its arguments are compared. Greedy. With `--choice required` a grammar keeps the answer's form.
"""

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

FUNCTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "get_weather": ("Current weather of a city.", {"city": "string"}),
    "add": ("Add two numbers.", {"a": "number", "b": "number"}),
    "send_email": ("Send an email.", {"to": "string", "subject": "string"}),
    "set_alarm": ("Set an alarm.", {"hour": "integer", "minute": "integer"}),
    "read_file": ("The text of a file.", {"path": "string"}),
    "convert_currency": (
        "Convert money to another currency.",
        {"amount": "number", "source": "string", "target": "string"},
    ),
    "translate": ("Translate a text.", {"text": "string", "language": "string"}),
    "list_files": ("The files in a folder.", {"folder": "string"}),
}
QUESTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("What is the weather in Oslo?", "get_weather", {"city": "Oslo"}),
    ("Is it raining in Lima?", "get_weather", {"city": "Lima"}),
    ("How warm is it in Cairo now?", "get_weather", {"city": "Cairo"}),
    ("Add 17 and 25.", "add", {"a": 17, "b": 25}),
    ("What is 3.5 plus 4?", "add", {"a": 3.5, "b": 4}),
    ("Compute the sum of 120 and 8.", "add", {"a": 120, "b": 8}),
    (
        "Send an email to ann@example.org with the subject Lunch.",
        "send_email",
        {"to": "ann@example.org", "subject": "Lunch"},
    ),
    (
        "Mail bob@example.org, subject: Invoice.",
        "send_email",
        {"to": "bob@example.org", "subject": "Invoice"},
    ),
    ("Set an alarm for 7:30 in the morning.", "set_alarm", {"hour": 7, "minute": 30}),
    ("Wake me at 6:15 am.", "set_alarm", {"hour": 6, "minute": 15}),
    ("Set an alarm at 22:05.", "set_alarm", {"hour": 22, "minute": 5}),
    ("Read the file notes.txt.", "read_file", {"path": "notes.txt"}),
    ("What does /etc/hosts say?", "read_file", {"path": "/etc/hosts"}),
    ("Show me the text of src/main.py.", "read_file", {"path": "src/main.py"}),
    (
        "Convert 100 USD to EUR.",
        "convert_currency",
        {"amount": 100, "source": "USD", "target": "EUR"},
    ),
    (
        "How many JPY are 50 GBP?",
        "convert_currency",
        {"amount": 50, "source": "GBP", "target": "JPY"},
    ),
    (
        "Translate 'good morning' to French.",
        "translate",
        {"text": "good morning", "language": "French"},
    ),
    ("Translate 'thank you' to German.", "translate", {"text": "thank you", "language": "German"}),
    ("List the files in /tmp.", "list_files", {"folder": "/tmp"}),
    ("Which files are in the folder docs?", "list_files", {"folder": "docs"}),
]


def tools(functions: Mapping[str, tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Functions (description, JSON schemas of its arguments) by name, as a request has them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                },
            },
        }
        for name, (description, properties) in functions.items()
    ]


OFFERED = tools(
    {
        name: (description, {key: {"type": kind} for key, kind in types.items()})
        for name, (description, types) in FUNCTIONS.items()
    }
)


def ask(client: Any, model: str, choice: str, case: tuple[str, str, Any]) -> dict[str, Any]:
    """Ask one question. Returns the answer and whether it is the right call."""
    question, name, arguments = case
    begin = time.monotonic()
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        tools=OFFERED,
        tool_choice=choice,
        temperature=0,
        max_tokens=96,
    )
    message = answer.choices[0].message
    calls = [(x.function.name, json.loads(x.function.arguments)) for x in message.tool_calls or ()]
    row = {
        "question": question,
        "calls": calls,
        "content": message.content,
        "finish_reason": answer.choices[0].finish_reason,
        "right_function": [x for x, _ in calls] == [name],
        "right": calls == [(name, arguments)],
        "seconds": time.monotonic() - begin,
    }
    print(json.dumps(row), flush=True)
    return row


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--choice", default="auto", choices=("auto", "required"))
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--output")
    options = parser.parse_args(arguments)
    with OpenAI(base_url=options.url, api_key="none", timeout=3600, max_retries=0) as client:
        model = client.models.list().data[0].id
        with ThreadPoolExecutor(options.at_once) as pool:
            rows = list(pool.map(lambda x: ask(client, model, options.choice, x), QUESTIONS))
    result = {"model": model, "choice": options.choice, "rows": rows}
    for score in ("right_function", "right"):
        result[score] = sum(row[score] for row in rows)
        print(f"{score}: {result[score]} of {len(rows)}")
    if options.output:
        with open(options.output, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
