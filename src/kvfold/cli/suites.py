"""kvfold eval --suite: questions with checked answers, in either engine, beside the original."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from kvfold.cli import common, serve_vllm
from kvfold.cli.options import STORAGE, Place, Storage
from kvfold.config import CacheConfig, check, setting
from kvfold.evaluation.suites import SUITES, find_file, read_suite
from kvfold.evaluation.suites.base import Question
from kvfold.utils.errors import SettingError
from kvfold.utils.files import check_apart, finite, write_json

if TYPE_CHECKING:
    from kvfold.evaluation.suites.engines import Answering
    from kvfold.evaluation.suites.run import SuiteResult

TITLES = ", ".join(f"{name} ({suite.title})" for name, suite in SUITES.items())
Names = Annotated[tuple[str, ...], Parameter(consume_multiple=1, negative="", show_default=False)]
EngineName = Annotated[
    Literal["kvfold", "vllm"], Parameter(help="Answers suites. vllm: vLLM, see docs/vllm.md.")
]
Questions = dict[str, list[Question]]  # by the suite's name


@Parameter(name="*", group="Suites")
@dataclass(frozen=True, kw_only=True)
class Asked:
    """Suites of questions with checked answers."""

    suite: Names = setting(
        (),
        f"Questions to answer and check: {TITLES}; as NAME=FILE, or NAME,NAME with --suite-data.",
    )
    suite_data: Path | None = setting(
        None, "Folder of the suites' files, under the names that they are published as."
    )
    suite_rows: int | None = setting(None, "The first so many questions of each.", least=1)
    suite_tokens: int | None = setting(
        None, "Most tokens of an answer; by default 512 of code and 400 of math.", least=1
    )
    against: str | None = setting(
        None, "The original, to say which answers changed: a model, or a .json of an earlier run."
    )
    engine: EngineName = "kvfold"
    max_sequences: int = setting(64, "Questions that are answered at once.", least=1)

    def __post_init__(self) -> None:
        check(self)
        if self.suite:
            return
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default:
                raise SettingError(
                    f"`{field.name}` is about questions that are checked: give `suite` too"
                )

    @property
    def files(self) -> dict[str, Path]:
        """File by suite. Raises ValueError for an unknown suite, and one without a file."""
        found: dict[str, Path] = {}
        for item in (x for word in self.suite for x in word.split(",") if x):
            name, _, path = item.partition("=")
            if name not in SUITES:
                raise SettingError(f"`suite`: unknown suite {name!r}; suites: {', '.join(SUITES)}")
            if name in found:
                raise SettingError(f"`suite`: {name} is given twice; give it once")
            if not path and self.suite_data is None:
                raise SettingError(
                    f"`suite`: {name} has no file: write {name}=FILE, or give `suite_data`, the "
                    f"folder of {SUITES[name].files[0]}"
                )
            found[name] = Path(path) if path else find_file(name, self.suite_data or Path())
        return found


ASKED = Asked()


def evaluate(
    model: str,
    asked: Asked,
    storage: Storage,
    place: Place,
    json: Path | None,
    maps: str | None = None,
) -> None:
    """Ask a model, with maps beside it or without, and, where there is one to compare with, the
    original; print, write the JSON."""
    from kvfold.evaluation.suites.run import changes

    if json is not None:
        check_apart({"--json": json}, {"--suite": list(asked.files.values())})
    questions = {
        name: read_suite(name, path, asked.suite_rows) for name, path in asked.files.items()
    }
    against = asked.against
    if against is not None and against.endswith(".json"):
        before = read_results(Path(against), questions)
        check_alike(before, questions, model, asked)
    elif against is not None:
        check_model(against, asked, STORAGE, place)
    check_model(model, asked, storage, place, maps)
    if against is not None and not against.endswith(".json"):
        before = answers(against, questions, asked, STORAGE, place)
        show(against, before)
    results = answers(model, questions, asked, storage, place, maps)
    show(model, results)
    record: dict[str, Any] = {
        "model": model,
        "maps": maps,
        "engine": asked.engine,
        "suites": {name: result.record() for name, result in results.items()},
    }
    if against is not None:
        compared = {name: changes(before[name], result) for name, result in results.items()}
        for name, found in compared.items():
            print(f"{name}, against {against}: {in_words(found)}")
        record["against"] = {
            "model": against,
            "suites": {name: result.record() for name, result in before.items()},
            "changes": {name: dataclasses.asdict(found) for name, found in compared.items()},
        }
    if json is not None:
        settings = dataclasses.asdict(asked) | dataclasses.asdict(place)
        settings |= {"cache": dataclasses.asdict(storage)}
        settings |= {"suite": {name: str(path) for name, path in asked.files.items()}}
        settings |= {"suite_data": asked.suite_data and str(asked.suite_data)}
        record |= {"settings": settings, "versions": versions(asked, place)}
        write_json(json, finite(record))


def check_model(
    model: str, asked: Asked, storage: Storage, place: Place, maps: str | None = None
) -> None:
    """Raises ValueError where this model cannot be served so, before one is loaded."""
    beside = common.load_maps(maps)
    config = common.load_config(model, beside)
    if asked.engine == "vllm":
        vllm_settings(config, maps, storage, place)
    else:
        paged = dataclasses.replace(storage, paged=True)
        common.cache_config(config, paged, place, beside=beside)


def answers(
    model: str,
    questions: Questions,
    asked: Asked,
    storage: Storage,
    place: Place,
    maps: str | None = None,
) -> "dict[str, SuiteResult]":
    """Results of a model by suite."""
    from kvfold.evaluation.suites.run import prompts_of, run_suite

    tokenizer = common.load_tokenizer(model)
    longest = max(
        max(map(len, prompts_of(SUITES[name], rows, tokenizer)))
        + (asked.suite_tokens or SUITES[name].max_new_tokens)
        for name, rows in questions.items()
    )
    start = by_vllm if asked.engine == "vllm" else by_kvfold
    with (
        start(model, tokenizer, longest, asked, storage, place, maps) as engine,
        common.progress() as progress,
    ):
        return {
            name: run_suite(
                name, rows, engine, max_new_tokens=asked.suite_tokens, progress=progress
            )
            for name, rows in questions.items()
        }


@contextmanager
def by_kvfold(
    model: str,
    tokenizer: Any,
    longest: int,
    asked: Asked,
    storage: Storage,
    place: Place,
    maps: str | None,
) -> "Iterator[Answering]":
    """kvfold's engine with a model, of requests of at most `longest` tokens, until the block
    ends."""
    import gc

    import torch

    from kvfold.engine.api.llm import LLM
    from kvfold.evaluation.perplexity import max_positions
    from kvfold.evaluation.suites.engines import ByKVFold

    beside = common.load_maps(maps)
    config = common.load_config(model, beside)
    paged = dataclasses.replace(storage, paged=True)
    cache = common.cache_config(config, paged, place, beside=beside)
    loaded = common.load(model, place)
    cache = common.with_policy(loaded, tokenizer, cache)
    assert cache is not None
    llm = LLM(
        loaded,
        tokenizer=tokenizer,
        owned=True,
        maps=beside,
        max_sequences=asked.max_sequences,
        max_tokens=min(longest, max_positions(config) or longest),
        **dataclasses.asdict(cache),
    )
    del loaded
    try:
        yield ByKVFold(llm)
    finally:
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def by_vllm(
    model: str,
    tokenizer: Any,
    longest: int,
    asked: Asked,
    storage: Storage,
    place: Place,
    maps: str | None,
) -> "Iterator[Answering]":
    """vLLM with a model, the same."""
    import gc

    import vllm

    from kvfold.evaluation.perplexity import max_positions
    from kvfold.evaluation.suites.engines import ByVLLM
    from kvfold.hub.loading import resolve

    config = common.load_config(model, common.load_maps(maps))
    llm = vllm.LLM(
        model=str(resolve(model)),
        max_num_seqs=asked.max_sequences,
        max_model_len=min(longest, max_positions(config) or longest),
        **vllm_settings(config, maps, storage, place),
    )
    try:
        yield ByVLLM(llm, tokenizer)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def vllm_settings(config: Any, maps: str | None, storage: Storage, place: Place) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a model of this config, with maps or without. Raises ValueError
    for what is not served there, and where vLLM is not installed."""
    from kvfold.vllm_plugin.families import architecture

    if place.device is not None:
        raise SettingError(serve_vllm.NO_DEVICE)
    spec = common.saved_spec(config)
    cache = storage.config(planned=spec is not None and spec.planned) or CacheConfig()
    found = serve_vllm.cache_settings(cache, maps)
    if spec is not None:
        architecture(config)
    if find_spec("vllm") is None:
        raise ValueError('--engine vllm needs vllm: pip install "kvfold[vllm]", which has it')
    return {"dtype": place.dtype, **found}


def read_results(path: Path, questions: Questions) -> "dict[str, SuiteResult]":
    """Results of these suites in a JSON file that --json wrote. Raises ValueError."""
    from kvfold.evaluation.suites.run import SuiteResult
    from kvfold.utils.text import json_object, read_text

    text = read_text(path)
    try:
        found = json_object(text)["suites"]
        return {name: SuiteResult.from_record(found[name]) for name in questions}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SettingError(
            f"`against`: {path} holds no results of {', '.join(questions)}; make it with "
            "kvfold eval --suite and --json"
        ) from None


def check_alike(
    before: "dict[str, SuiteResult]", questions: Questions, model: str, asked: Asked
) -> None:
    """Raises ValueError where a model's answers could not be compared with earlier ones."""
    from kvfold.evaluation.suites.run import check_alike

    chat = bool(common.load_tokenizer(model).chat_template)
    for name, rows in questions.items():
        limit = asked.suite_tokens or SUITES[name].max_new_tokens
        ids = [x.id for x in rows]
        check_alike(before[name], ids, suite=name, chat=chat, max_new_tokens=limit)


def show(model: str, results: "dict[str, SuiteResult]") -> None:
    """Results for people."""
    for name, result in results.items():
        total = len(result.answers)
        kinds = ", ".join(f"{kind} {count}" for kind, count in result.kinds.items())
        print(
            f"{name}, {model}: {result.right} of {total} right ({result.right / total:.1%}), "
            f"{result.num_tokens} tokens in {result.seconds:.1f} s; {kinds}"
        )
        for error, count in result.errors.items():
            print(f"  {count} requests failed: {error}")


def in_words(found: Any) -> str:
    """Changed answers for people."""
    return (
        f"{found.right} right, {found.right_before} before; "
        f"right to wrong {listed(found.to_wrong)}; wrong to right {listed(found.to_right)}; "
        f"{found.same_texts} texts equal"
    )


def listed(ids: Sequence[str]) -> str:
    return f"{len(ids)} ({', '.join(ids)})" if ids else "0"


def versions(asked: Asked, place: Place) -> dict[str, str | None]:
    """Versions and device, vLLM's too where it answered."""
    from kvfold.hub.loading import default_device

    found = common.versions(place.device or default_device())
    if asked.engine == "vllm":
        import vllm

        found["vllm"] = vllm.__version__
    return found
