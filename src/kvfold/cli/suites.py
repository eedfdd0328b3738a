"""kvfold eval --suite: benchmarks with checked answers, in kvfold's engine or vLLM, and compared
with the original model."""

import dataclasses
import math
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
from kvfold.utils.progress import stage

if TYPE_CHECKING:
    from kvfold.evaluation.suites.engines import Answering
    from kvfold.evaluation.suites.run import Changes, SuiteResult
    from kvfold.evaluation.tasks.run import Score

TITLES = ", ".join(f"{name} ({suite.title})" for name, suite in SUITES.items())
Names = Annotated[tuple[str, ...], Parameter(consume_multiple=1, negative="", show_default=False)]
EngineName = Annotated[
    Literal["kvfold", "vllm"],
    Parameter(help="The engine that answers --suite; for vllm see docs/vllm.md."),
]
Questions = dict[str, list[Question]]  # by the suite's name


@Parameter(name="*", group="Suites")
@dataclass(frozen=True, kw_only=True)
class SuiteFlags:
    """Flags of benchmarks with checked answers."""

    suite: Names = setting(
        (),
        f"Benchmarks to run: {TITLES}. Write NAME=FILE, or only names with --set suite-data.",
    )
    suite_data: Path | None = setting(
        None, "Folder with the files of suites, under the names that they are published as."
    )
    suite_rows: int | None = setting(
        None,
        "Ask only this many questions of each suite, the first ones; of each task or data set, if"
        " the suite has several.",
        least=1,
    )
    suite_length: int | None = setting(
        None,
        "Tokens of a RULER question and its answer, by default 4096, and above which LongBench cuts"
        " the middle of a prompt, by default the model's positions.",
        least=1,
    )
    suite_tokens: int | None = setting(
        None,
        "Most tokens of an answer; by default "
        + ", ".join(f"{x.max_new_tokens} for {name}" for name, x in SUITES.items())
        + ".",
        least=1,
    )
    question: Literal["before", "after"] = setting(
        "before",
        "Whether the question of a long text is read before the text is evicted, or after, as in"
        " kvpress.",
    )
    against: str | None = setting(
        None,
        "Show which answers changed from the original: a model to ask too, or the JSON file of an"
        " earlier run.",
    )
    engine: EngineName = "kvfold"
    max_sequences: int = setting(64, "Questions that are answered at once.", least=1)

    def __post_init__(self) -> None:
        check(self)
        if self.suite:
            self._check_question()
            return
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default:
                raise SettingError(
                    f"`{field.name}` is a setting of `suite`: give `suite` too, or leave it out"
                )

    def _check_question(self) -> None:
        if self.question == "before":
            return
        if self.engine == "vllm":
            raise SettingError(
                "`question` is a setting of kvfold's engine: leave `engine` or `question` out"
            )
        if plain := [name for name in self.files if not SUITES[name].has_context]:
            long = ", ".join(name for name, suite in SUITES.items() if suite.has_context)
            raise SettingError(
                f"`question` is a setting of suites with long texts ({long}), and "
                f"{plain[0]} has none: leave it out"
            )

    @property
    def files(self) -> dict[str, Path | None]:
        """The file of every suite, by name; None if it needs none. Raises ValueError for an unknown
        suite, or one without a file that it needs."""
        files: dict[str, Path | None] = {}
        for item in (x for word in self.suite for x in word.split(",") if x):
            name, _, path = item.partition("=")
            if name not in SUITES:
                raise SettingError(f"`suite`: unknown suite {name!r}; suites: {', '.join(SUITES)}")
            if name in files:
                raise SettingError(f"`suite`: {name} is given twice; give it once")
            if not path and self.suite_data is None and SUITES[name].needs_files:
                raise SettingError(
                    f"`suite`: {name} has no file: write {name}=FILE, or give `suite_data`, the "
                    f"folder of {SUITES[name].files[0]}"
                )
            if path:
                files[name] = Path(path)
            else:
                files[name] = self.suite_data and find_file(name, self.suite_data)
        return files


SUITE_FLAGS = SuiteFlags()


def evaluate(
    model: str,
    flags: SuiteFlags,
    storage: Storage,
    place: Place,
    json: Path | None,
    maps: str | None = None,
) -> None:
    """Run suites on a model with or without maps, and on the original if there is one to compare
    with. Prints the results and writes the JSON."""
    from kvfold.evaluation.suites.run import changes

    if json is not None:
        check_apart({"--json": json}, {"--suite": [x for x in flags.files.values() if x]})
    against = flags.against
    earlier = against is not None and against.endswith(".json")
    if against is not None and earlier:
        before = read_results(Path(against), list(flags.files))
    elif against is not None:
        check_model(against, flags, STORAGE, place)
    check_model(model, flags, storage, place, maps)
    questions = read_questions(model, flags)
    if earlier:
        check_alike(before, questions, model, flags, maps)
    elif against is not None:
        before = answers(against, questions, flags, STORAGE, place)
        show(against, before)
    results = answers(model, questions, flags, storage, place, maps)
    show(model, results)
    record: dict[str, Any] = {
        "model": model,
        "maps": maps,
        "engine": flags.engine,
        "notes": {name: SUITES[name].notes(path) for name, path in flags.files.items()},
        "suites": {name: result.record() for name, result in results.items()},
    }
    if against is not None:
        compared = {name: changes(before[name], result) for name, result in results.items()}
        for name, changed in compared.items():
            print(f"{name}, against {against}: {in_words(changed)}")
        record["against"] = {
            "model": against,
            "suites": {name: result.record() for name, result in before.items()},
            "changes": {name: dataclasses.asdict(x) for name, x in compared.items()},
        }
    if json is not None:
        settings = dataclasses.asdict(flags) | dataclasses.asdict(place)
        settings |= {"cache": dataclasses.asdict(storage)}
        settings |= {"suite": {name: path and str(path) for name, path in flags.files.items()}}
        settings |= {"suite_data": flags.suite_data and str(flags.suite_data)}
        record |= {"settings": settings, "versions": versions(flags, place)}
        write_json(json, finite(record))


def read_questions(model: str, flags: SuiteFlags) -> Questions:
    """The questions of every suite. Prints what differs from the published benchmark."""
    tokenizer = common.load_tokenizer(model)
    how = {"length": flags.suite_length, "tokenizer": tokenizer}
    questions = {}
    with common.progress() as progress:
        for name, path in flags.files.items():
            for note in SUITES[name].notes(path):
                print(f"{name}: {note}")
            report = stage(progress, f"{name} questions")
            questions[name] = read_suite(name, path, flags.suite_rows, report=report, **how)
    return questions


def check_model(
    model: str, flags: SuiteFlags, storage: Storage, place: Place, maps: str | None = None
) -> None:
    """Raises ValueError if a model cannot be served with these settings, or has too few positions
    for questions of their length, before it is loaded."""
    from kvfold.evaluation.perplexity import max_positions

    sidecar = common.load_maps(maps)
    config = common.load_config(model, sidecar)
    most = max_positions(config)
    for suite in (SUITES[name] for name in flags.files):
        length = suite.default_length and (flags.suite_length or suite.default_length)
        if length and most and length > most:
            raise SettingError(
                f"`suite_length`: {suite.title}'s questions of {length} tokens exceed the model's "
                f"{most} positions; use {most} or less"
            )
    if flags.engine == "vllm":
        vllm_settings(config, maps, storage, place)
    else:
        paged = dataclasses.replace(storage, paged=True)
        common.cache_config(config, paged, place, maps=sidecar)


def answers(
    model: str,
    questions: Questions,
    flags: SuiteFlags,
    storage: Storage,
    place: Place,
    maps: str | None = None,
) -> "dict[str, SuiteResult]":
    """A model's results by suite."""
    from kvfold.evaluation.suites.prompts import prompts_of
    from kvfold.evaluation.suites.run import run_suite

    tokenizer = common.load_tokenizer(model)
    limits = {"max_new_tokens": flags.suite_tokens, "length": length_of(model, flags, maps)}
    longest = max(
        len(prompt.ids) + prompt.max_new_tokens
        for name, rows in questions.items()
        for prompt in prompts_of(SUITES[name], rows, tokenizer, **limits)
    )
    start = by_vllm if flags.engine == "vllm" else by_kvfold
    with (
        start(model, tokenizer, longest, flags, storage, place, maps) as engine,
        common.progress() as progress,
    ):
        return {
            name: run_suite(name, rows, engine, **limits, progress=progress)
            for name, rows in questions.items()
        }


def length_of(model: str, flags: SuiteFlags, maps: str | None = None) -> int | None:
    """Tokens of a prompt and its answer above which suites cut prompts: `suite_length`, but no more
    than the model's positions."""
    from kvfold.evaluation.perplexity import max_positions

    most = max_positions(common.load_config(model, common.load_maps(maps)))
    return min(filter(None, (flags.suite_length, most)), default=None)


@contextmanager
def by_kvfold(
    model: str,
    tokenizer: Any,
    longest: int,
    flags: SuiteFlags,
    storage: Storage,
    place: Place,
    maps: str | None,
) -> "Iterator[Answering]":
    """Context manager: kvfold's engine with a model, for requests of at most `longest` tokens."""
    import gc

    import torch

    from kvfold.engine.api.llm import LLM
    from kvfold.evaluation.perplexity import max_positions
    from kvfold.evaluation.suites.engines import ByKVFold

    sidecar = common.load_maps(maps)
    config = common.load_config(model, sidecar)
    paged = dataclasses.replace(storage, paged=True)
    cache = common.cache_config(config, paged, place, maps=sidecar)
    loaded = common.load(model, place)
    cache = common.with_policy(loaded, tokenizer, cache)
    assert cache is not None
    llm = LLM(
        loaded,
        tokenizer=tokenizer,
        owned=True,
        maps=sidecar,
        max_sequences=flags.max_sequences,
        max_tokens=min(longest, max_positions(config) or longest),
        **dataclasses.asdict(cache),
    )
    del loaded
    try:
        yield ByKVFold(llm, question_after=flags.question == "after")
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
    flags: SuiteFlags,
    storage: Storage,
    place: Place,
    maps: str | None,
) -> "Iterator[Answering]":
    """Context manager: vLLM with a model, for requests of at most `longest` tokens."""
    import gc

    import vllm

    from kvfold.evaluation.perplexity import max_positions
    from kvfold.evaluation.suites.engines import ByVLLM
    from kvfold.hub.loading import resolve

    config = common.load_config(model, common.load_maps(maps))
    llm = vllm.LLM(
        model=str(resolve(model)),
        max_num_seqs=flags.max_sequences,
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
    """Arguments of `vllm.LLM` for a model of this config. Raises ValueError for settings that vLLM
    does not serve, and if vLLM is not installed."""
    from kvfold.vllm_plugin.families import architecture

    if place.device is not None:
        raise SettingError(serve_vllm.NO_DEVICE)
    spec = common.saved_spec(config)
    cache = storage.config(planned=spec is not None and spec.planned) or CacheConfig()
    settings = serve_vllm.cache_settings(cache, maps)
    if spec is not None:
        architecture(config)
    if find_spec("vllm") is None:
        raise ValueError('vLLM is not installed: pip install "kvfold[vllm]"')
    return {"dtype": place.dtype, **settings}


def read_results(path: Path, names: Sequence[str]) -> "dict[str, SuiteResult]":
    """The results of these suites in a JSON file that --json wrote. Raises ValueError for another
    file."""
    from kvfold.evaluation.suites.run import SuiteResult
    from kvfold.utils.text import json_object, read_text

    text = read_text(path)
    try:
        records = json_object(text)["suites"]
        return {name: SuiteResult.from_record(records[name]) for name in names}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SettingError(
            f"`against`: {path} holds no results of {', '.join(names)}; make it with "
            "kvfold eval --suite and --json"
        ) from None


def check_alike(
    before: "dict[str, SuiteResult]",
    questions: Questions,
    model: str,
    flags: SuiteFlags,
    maps: str | None = None,
) -> None:
    """Raises ValueError if a model's answers cannot be compared with earlier ones: other questions,
    or other prompts."""
    from kvfold.evaluation.suites.run import check_alike

    chat = bool(common.load_tokenizer(model).chat_template)
    for name, rows in questions.items():
        suite = SUITES[name]
        check_alike(
            before[name],
            [x.id for x in rows],
            suite=name,
            chat=chat,
            max_new_tokens=flags.suite_tokens or suite.max_new_tokens,
            length=length_of(model, flags, maps) if suite.truncates else None,
        )


def show(model: str, results: "dict[str, SuiteResult]") -> None:
    """Print the results of a model."""
    for name, result in results.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in result.kinds.items())
        print(
            f"{name}, {model}: {percent(result.score)}, {result.right} of {len(result.answers)} "
            f"right, {result.num_tokens} tokens in {result.seconds:.1f} s; {kinds}"
        )
        for group, score in result.groups.items():
            if group:
                print(f"  {group}: {percent(score)} of {score.num_examples}")
        if result.truncated:
            print(f"  {result.truncated} prompts cut to {result.length} tokens")
        for error, count in result.errors.items():
            print(f"  {count} requests failed: {error}")


def percent(score: "Score") -> str:
    """A mean score with its standard error, in percent."""
    error = "" if math.isnan(score.error) else f" ± {100 * score.error:.1f}"
    return f"{100 * score.mean:.1f}{error} %"


def in_words(changes: "Changes") -> str:
    """Changed answers as a sentence."""
    error = "" if math.isnan(changes.difference_se) else f" ± {100 * changes.difference_se:.1f}"
    return (
        f"{100 * changes.difference:+.1f}{error} points; {changes.right} right, "
        f"{changes.right_before} before; worse {listed(changes.worse)}; better "
        f"{listed(changes.better)}; {changes.same_texts} texts equal"
    )


def listed(ids: Sequence[str], most: int = 20) -> str:
    """The number of ids, and the first of them."""
    shown = ", ".join([*ids[:most], *(["..."] if len(ids) > most else [])])
    return f"{len(ids)} ({shown})" if ids else "0"


def versions(flags: SuiteFlags, place: Place) -> dict[str, str | None]:
    """Versions and device, with vLLM's version if it is the engine."""
    from kvfold.hub.loading import default_device

    versions = common.versions(place.device or default_device())
    if flags.engine == "vllm":
        import vllm

        versions["vllm"] = vllm.__version__
    return versions
