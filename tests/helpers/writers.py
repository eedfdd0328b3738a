"""What writes files, for `test_killed_writers.py`: by name, a function of a folder that gives one
which writes a value to OUT in `place` of that folder, and one which reads it."""

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvfold.api import save
from kvfold.calibration.statistics import Statistics
from kvfold.calibration.statistics.moments import Moment
from kvfold.cli import demo
from kvfold.cli.main import main
from kvfold.engine.requests.packed import PackedContext
from kvfold.evaluation.report import write_report
from kvfold.hub.loading import load, load_config
from kvfold.maps.plain import Means, full_spec, plain_maps
from kvfold.maps.sidecar import Sidecar
from kvfold.models.families import family_of
from kvfold.utils.files import write_json

OUT = "out"
Writer = tuple[Callable[[int], None], Callable[[], Any]]


def out(folder: Path) -> Path:
    return folder / "place" / OUT


def of_json(folder: Path) -> Writer:
    return lambda x: write_json(out(folder), [x] * 9), lambda: json.loads(out(folder).read_text())


def of_packed(folder: Path) -> Writer:
    settings: dict[str, Any] = {"page": 8}
    made = {"key": {"model": "a", "layout": "b"}, "settings": settings}
    made["report"] = {"full_bytes": 1}

    def write(x: int) -> None:
        pages = (torch.full((4, 4096), x, dtype=torch.uint8),)
        rows = np.array([x, 2])
        PackedContext(token_ids=(x, 4), lengths=rows, pages=pages, origin=made).save(out(folder))

    return write, lambda: PackedContext.load(out(folder)).token_ids


def of_statistics(folder: Path) -> Writer:
    def write(x: int) -> None:
        moment = Moment.of(torch.full((9, 40), float(x)))
        Statistics({}, {0: {"hidden": moment}}).save(out(folder))

    return write, lambda: float(Statistics.load(out(folder), {})[0, "hidden"].second.sum())


def of_report(folder: Path) -> Writer:
    def write(x: int) -> None:
        write_report(out(folder), title=str(x), summary=[], rows=[], ranks=None)

    return write, lambda: out(folder).read_text()


def of_checkpoint(folder: Path) -> Writer:
    model = load("reference:gqa")

    def write(x: int) -> None:
        model.config.rms_norm_eps = x / 8
        save(model, None, out(folder))

    return write, lambda: load(str(out(folder))).config.rms_norm_eps


def run(*words: str) -> None:
    """A command. Raises OSError with what it says where it is refused."""
    said = io.StringIO()
    with redirect_stderr(said):
        code = main(words)
    if code == 2:
        raise OSError(said.getvalue())
    assert code == 0, said.getvalue()


def of_maps(folder: Path) -> Writer:
    config = load_config("reference:gqa")
    geometry = family_of(config).geometry(config)
    zeros = torch.zeros(geometry.num_kv_heads, geometry.head_dim)

    def write(x: int) -> None:
        names = [f"layer.{i}" for i in range(geometry.num_layers)]
        maps = dict.fromkeys(names, plain_maps(Means(zeros, zeros)))
        base = {name: [0.0] for name in names}
        about = {"recipe": {"name": "swift"}, "model": str(x)}
        whole = full_spec(geometry, geometry.num_layers)
        Sidecar(maps=maps, spec=whole, base=base, provenance=about).save(out(folder))

    return write, lambda: Sidecar.load(out(folder)).source


def once(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is called the first time alone, and returns the same ever after."""
    returned: list[Any] = []

    def called(*arguments: Any) -> Any:
        if not returned:
            returned.append(call(*arguments))
        return returned[0]

    return called


def of_demo(folder: Path) -> Writer:
    """The demo, of one recipe and size on little text, which is measured once: autograd does not
    work in a forked process."""
    sizes = demo.measured_sizes
    few: dict[str, Any] = {"RECIPES": ("small",), "KEEPS": (0.5,), "SIZES": demo.SIZES[:1]}
    vars(demo).update(few)
    demo.CALIBRATION_TOKENS, demo.TEXT_TOKENS, demo.CTX = 4096, 256, 128
    demo.NEEDLE_CONTEXTS = demo.FACT_CONTEXTS = 0
    demo.NEW_TOKENS = 2
    demo.measured = once(demo.measured)
    demo.measured_sizes = once(lambda *arguments: list(sizes(*arguments)))

    def write(x: int) -> None:
        demo.INTRO = f"value {x}"
        run("demo", "--output", str(out(folder)))

    def read() -> str | None:
        found = re.search(r"value (\d)", out(folder).read_text())
        return found and found[0]

    return write, read


def command(*words: str, flag: str = "--json") -> Callable[[Path], Writer]:
    """A command of kvfold that reads or computes another value; of its JSON without times."""

    def of(folder: Path) -> Writer:
        def write(x: int) -> None:
            text = folder / "text.txt"
            text.write_text(f"The ship went out to sea {x} times. " * 40)
            named = [word.replace("TEXT", str(text)).replace("VALUE", str(x)) for word in words]
            run(*named, flag, str(out(folder)))

        def read() -> Any:
            if flag == "--output":
                return PackedContext.load(out(folder)).token_ids
            found = json.loads(out(folder).read_text())
            return found.get("nll") or found["rows"]

        return write, read

    return of


WRITERS: dict[str, Callable[[Path], Writer]] = {
    "json": of_json,
    "packed": of_packed,
    "statistics": of_statistics,
    "report": of_report,
    "checkpoint": of_checkpoint,
    "maps": of_maps,
    "kvfold demo": of_demo,
    "kvfold pack": command(
        *("pack", "reference:gqa", "--context", "TEXT", "--no-sample", "--factor", "2"),
        flag="--output",
    ),
    "kvfold eval": command(
        *("eval", "reference:gqa", "--text", "TEXT", "--ctx", "32", "--max-tokens", "64")
    ),
    "kvfold advise": command("advise", "reference:gqa", "--context", "20VALUE"),
}
REPLACES = dict.fromkeys(WRITERS, True) | dict.fromkeys(
    ("checkpoint", "maps", "kvfold demo"), False
)
