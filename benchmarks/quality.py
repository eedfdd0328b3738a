"""Model, texts and cases of the quality benchmarks; rows survive an interruption."""

import argparse
import json
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from kvfold.calibration.text import GPU_TOKENS
from kvfold.cli.common import named_texts, versions
from kvfold.compression.compressor import Prepared, shared_statistics
from kvfold.evaluation.comparison import compressors_of
from kvfold.evaluation.measure import text_windows
from kvfold.evaluation.needle import evaluate_needle
from kvfold.evaluation.reader import Reader
from kvfold.evaluation.session import Sessions
from kvfold.hub.loading import load, load_tokenizer
from kvfold.utils.files import finite, write_json


class Case(Protocol):
    """One row, which the file has under its name."""

    @property
    def name(self) -> str: ...


def parser(doc: str, *, model: str, ctx: int, windows: int) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=doc.splitlines()[0])
    found.add_argument("--model", default=model)
    found.add_argument("--dtype", default="float32")
    found.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE")
    found.add_argument("--ctx", type=int, default=ctx)
    found.add_argument("--windows", type=int, default=windows)
    found.add_argument("--stats", type=Path, metavar="FILE", help="read or written")
    found.add_argument("--calib", nargs="*", metavar="FILE", help="instead of the packaged text")
    found.add_argument("--calib-tokens", type=int, default=GPU_TOKENS)
    found.add_argument("--only", nargs="+", help="cases whose names begin with one of these")
    found.add_argument("--json", type=Path, required=True, metavar="FILE")
    return found


class Bench:
    """A model and its texts; the same for every case."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.model = load(arguments.model, dtype=arguments.dtype)
        self.tokenizer = load_tokenizer(arguments.model)
        ctx, most = arguments.ctx, arguments.windows * arguments.ctx
        texts = named_texts(arguments.text)
        self.texts = text_windows(self.model, self.tokenizer, texts, ctx=ctx, max_tokens=most)

    def prepare(self, recipes: Iterable[str]) -> None:
        """The bases of every recipe, from one pass of calibration or the file of --stats."""
        names, given = list(dict.fromkeys(recipes)), self.arguments
        how = {"calib": given.calib, "max_tokens": given.calib_tokens}
        made = compressors_of(self.model, self.tokenizer, names, **how)
        self.prepared: dict[str, Prepared] = {}
        if made:
            statistics = shared_statistics(made, path=given.stats)
            self.prepared = {x.recipe.name: x.prepare(statistics) for x in made}

    def wanted(self, cases: Iterable[Case]) -> list[Any]:
        """Those of --only that the file does not hold yet."""
        path = self.arguments.json
        known = json.loads(path.read_text())["rows"] if path.exists() else []
        self.rows = {row["name"]: row for row in known}
        only = tuple(self.arguments.only or ("",))
        return [x for x in cases if x.name.startswith(only) and x.name not in self.rows]

    def needle(self, sessions: Sessions, agnostic: bool = True) -> dict[int, Any]:
        """Facts found by length of context; none where no lengths are asked for."""
        if not self.arguments.lengths:
            return {}
        with closing(Reader(sessions, agnostic=agnostic)) as reader:
            results = evaluate_needle(
                self.model,
                self.tokenizer,
                lengths=self.arguments.lengths,
                num_contexts=self.arguments.contexts,
                reader=reader,
            )
        return {result.length: asdict(result) for result in results}

    def run(
        self, cases: Iterable[Any], row: Callable[[Any], dict[str, Any]], **more: Any
    ) -> Iterable[dict[str, Any]]:
        """Rows as they are measured; the file is written after each."""
        settings = {key: plain(value) for key, value in vars(self.arguments).items()}
        report = {"settings": settings, "versions": versions(self.model.device), **more}
        for case in cases:
            self.rows[case.name] = row(case)
            rows = list(self.rows.values())
            write_json(self.arguments.json, finite({**report, "rows": rows}))
            yield self.rows[case.name]


def plain(value: Any) -> Any:
    """A setting for the record; files by their names."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return Path(value).name if isinstance(value, str | Path) else value
