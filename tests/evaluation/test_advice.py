"""Losses that `kvfold advise` shows are those of benchmarks/results, and it chooses as it says."""

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

import kvfold
from kvfold.bench.synthetic_engine import config_of
from kvfold.cli.main import app, main
from kvfold.cli.settings import expanded
from kvfold.evaluation import advice
from kvfold.evaluation.gpu_memory import Room
from kvfold.hub import reference

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = Path(kvfold.__file__).parent / "data" / "measured_losses.json"
TEXTS = ("wiki", "python")
PLANNED = [f"{name} {factor}x" for name, factors in advice.PLANS.items() for factor in factors]


def rows_of(file: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{file}.json").read_text())["rows"]


def nats_of(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """What a row of `benchmarks/real_quality.py` loses."""
    row, original = (next(x for x in rows if x["name"] == y) for y in (name, "original"))
    lost = {x: row["texts"][x]["nll"] - original["texts"][x]["nll"] for x in TEXTS}
    return {x: round(nats, 6) for x, nats in lost.items()}


def qwen() -> dict[str, dict[str, float]]:
    """`swift` is planned for speed there, in four layouts, as the default is."""
    suites, layouts = rows_of("suites-qwen"), rows_of("layouts-qwen2.5-coder-1.5b")
    first: dict[str, dict[str, float]] = {}
    for row in suites:
        if "nats" in row:
            first.setdefault(row["setting"], row["nats"])
    names = {f"--bits {x}": f"bits-{x}" for x in advice.BITS}
    names |= {x: x.replace(" ", "-") for x in PLANNED if not x.startswith("swift")}
    found = {x: {y: round(first[row][y], 6) for y in TEXTS} for x, row in names.items()}
    swift = [x for x in PLANNED if x.startswith("swift")]
    return found | {x: nats_of(layouts, f"{x}, 4 layouts") for x in swift}


def smollm2() -> dict[str, dict[str, float]]:
    rows = rows_of("quality-smollm2-packaged")
    names = {f"--bits {x}": f"int{x}, rotated" for x in advice.BITS} | {x: x for x in PLANNED}
    return {name: nats_of(rows, row) for name, row in names.items()}


def test_the_table_is_what_was_measured() -> None:
    expected = {
        "qwen2.5-coder-1.5b": {
            "short": "Qwen2.5-1.5B",
            "parameters": 1_543_714_304,
            "nats": qwen(),
        },
        "smollm2": {"short": "SmolLM2-135M", "parameters": 134_515_008, "nats": smollm2()},
    }
    if os.environ.get("KVFOLD_WRITE"):
        TABLE.write_text(json.dumps(expected, indent=2) + "\n")
    assert json.loads(TABLE.read_text()) == expected
    assert expected.keys() == reference.MODELS.keys()


def option(name: str, requests: int, slow: int = 0) -> advice.Option:
    room = Room(
        context=1,
        num_kept=1,
        requests=requests,
        request_bytes=1,
        step_ms=None,
        step_estimated=False,
        tokens_per_s=None,
    )
    return advice.Option(
        name=name, flags=None, memory=cast(Any, None), room=room, smaller=1, slow=slow
    )


OPTIONS = [
    option("original", 10),
    option("--bits 8", 20),
    option("--bits 4", 40),
    option("swift 4x", 40),
    option("swift 5x", 50),
    option("lean 6x", 45, slow=1),
    option("small 6x", 60, slow=8),
    option("small 8x", 80, slow=8),
    option("these options", 100),
]


@pytest.mark.parametrize(
    ("limit", "sequences", "name"),
    [
        (2, None, "swift 4x"),  # --bits 4 holds as many and loses more
        (1, None, "--bits 8"),
        (5, None, "swift 5x"),
        (0, None, "original"),
        (2, 10, "original"),
        (2, 11, "--bits 8"),
        (2, 21, "swift 4x"),
        (2, 41, "small 6x"),
        (4, 51, "small 6x"),
        (4, 41, "swift 5x"),
        (2, 61, None),
        (5, 61, "small 8x"),
    ],
)
def test_the_choice(limit: float, sequences: int | None, name: str | None) -> None:
    measured = advice.measured_models()[0]
    chosen = advice.choose(OPTIONS, measured, limit, sequences)
    assert (None if chosen is None else chosen.name) == name


def test_the_nearest_model_comes_first_and_a_measured_one_alone() -> None:
    def names(model: str, config: Any) -> list[str]:
        return [x.key for x in advice.nearest_models(model, config)]

    qwen_first = ["qwen2.5-coder-1.5b", "smollm2"]
    assert names("x", config_of("llama-3.1-8b")) == qwen_first
    assert names("x", config_of("tiny")) == qwen_first[::-1]
    assert names("reference:smollm2", config_of("tiny")) == ["smollm2"]
    assert names("Qwen/Qwen2.5-Coder-1.5B-Instruct", config_of("tiny")) == qwen_first[:1]


def check_parses(commands: list[list[str]]) -> None:
    """The commands of kvfold have flags that exist, with values that are legal."""
    for program, *words in commands:
        if program == "kvfold":
            reader, flags = expanded(app, words)
            reader.parse_args(flags, exit_on_error=False, print_error=False)


def test_the_command_says_whose_figures_they_are(capsys, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    call = ["advise", "random:tiny", "--context", "512"]
    assert main([*call, "--json", str(path)]) == 0
    out, found = capsys.readouterr().out, json.loads(path.read_text())
    assert "OTHER models' figures" in out and max(map(len, out.splitlines())) <= 80
    rows = {x["setting"]: x for x in found["rows"]}
    assert rows["--bits 8"]["step_ms"] and rows["original"]["step_ms"]
    assert all(x["step_ms"] is None for x in rows.values() if x["reconstructs_keys"])
    assert found["advice"] == "--bits 8" and found["loss_percent"] == 2
    assert found["commands"][-1][:3] == ["vllm", "serve", "MODEL"]
    check_parses(found["commands"])
    assert "* Take --bits 8: " in out and "Within the same loss small " in out
    assert main([*call, "--sequences", "1"]) == 0
    assert "* Take the original: " in capsys.readouterr().out
    assert main([*call, "--loss", "0.5%", "--set", "share=0.5", "--json", str(path)]) == 0
    check_parses(json.loads(path.read_text())["commands"])
    assert "--gpu-memory-utilization 0.5" in capsys.readouterr().out
    assert main([*call, "--gpu", "1GB"]) == 0
    (last,) = capsys.readouterr().out.split("\n\n")[-1:]
    no_room = "The weights and the work space leave no room: take a larger --gpu."
    assert " ".join(last.split()) == no_room
