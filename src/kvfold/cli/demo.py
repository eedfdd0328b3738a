"""kvfold demo: compresses a model in several ways, measures each, and writes a report."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvfold import recipes
from kvfold.cli import common
from kvfold.cli.compare import print_rows
from kvfold.cli.options import PLACE
from kvfold.config import CacheConfig
from kvfold.utils.errors import SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.calibration.statistics import Statistics
    from kvfold.compression.compressor import Prepared
    from kvfold.evaluation.compare import Row
    from kvfold.evaluation.measure import Measured, Measurement

MODEL = "reference:gqa"
RECIPES = ("palu-j", "zack", "fast", "lean", "small")
KEEPS = (0.5, 0.25)
SIZE_RECIPE = "small"
HALF: dict[str, Any] = {"evict": "kv-compress", "keep_tokens": 0.5}
# Curve, name, factor, and the cache's settings. The last model is saved and loaded again.
SIZES: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("--factor", "--factor 4", 4, {}),
    ("--factor", "--factor 8", 8, {}),
    ("--factor", "--factor 14", 14, {}),
    ("--factor", "--factor 20", 20, {}),
    ("evicted", "--factor 8, half of the tokens evicted", 8, HALF),
)
CALIBRATION_TOKENS = 12288
TEXT, TEXT_TOKENS, CTX = "old books", 4096, 1024
NEEDLE_CONTEXTS, NEEDLE_LENGTH = 2, 1024
FACT_CONTEXTS, FACT_LENGTH = 5, 512  # of SIZES
QUESTION = "What is the text above about?"  # of models that chat
SHOWN_CHARACTERS = 300  # of the prompt
INTRO = (
    "A model keeps what it has read in its KV cache. Here is how much smaller kvfold compress"
    f" --fold makes that by recipe {SIZE_RECIPE} and the flags below, and what it costs: perplexity"
    " on text, and numbers hidden in a text, asked for after the cache was compressed. All is"
    " measured in this run."
)
NEW_TOKENS, TEMPERATURE, SEED = 60, 0.7, 0


def demo(
    *,
    model: Annotated[str, Parameter(help="As in other commands.")] = MODEL,
    output: Path = Path("report.html"),
) -> None:
    """Compress a small model in several ways, and print and plot the size and loss of each.

    Uses a model inside kvfold by default, so that nothing is downloaded. Takes a few minutes.

    Parameters
    ----------
    output
        File for the report.
    """
    begin = time.perf_counter()
    common.check_outputs(html=output)
    print(greeting(model))
    from kvfold.cli.inspect import rank_map, spectra_of
    from kvfold.compression.compressor import Compressor
    from kvfold.engine.runner.build import check_served
    from kvfold.evaluation.report import write_report
    from kvfold.hub.checkpoint import spec_of

    loaded, tokenizer = common.load(model, PLACE), common.load_tokenizer(model)
    check_served(loaded.config, None, None, CacheConfig())
    what = measurement(loaded, tokenizer)
    with common.progress() as progress:
        rows, statistics = measured(loaded, tokenizer, what, progress)
    print_rows(rows)
    prepared = Compressor(loaded, recipes.get(SIZE_RECIPE), tokenizer).prepare(statistics)
    with common.progress() as progress:
        sizes = list(measured_sizes(prepared, what, progress))
    summary = [(size.name, headline(size)) for size in sizes]
    for name, lines in summary:
        print(f"{name}: {', '.join(lines)}")
    shown, ids = prompt(tokenizer, what.windows[TEXT][-1])
    examples = []
    with common.progress() as progress:
        for done, x in enumerate(sizes, start=1):
            examples.append((x.name, continuation(x.model, tokenizer, x.cache, ids)))
            progress("examples", done, len(sizes))
    print(f"\n{shown}")
    for name, text in examples:
        print(f"\n{name}:\n{text}")
    print("\n" + reload_check(sizes[-1].model, tokenizer))
    spec = spec_of(sizes[-1].model)
    assert spec is not None  # no model is too small for the first of SIZES
    embedded = "A small trained model with a smaller cache"
    write_report(
        output,
        title=embedded if model == MODEL else f"{model} with a smaller cache",
        intro=INTRO,
        summary=[(name, "\n".join(lines)) for name, lines in summary],
        rows=rows,
        sizes=[size.row for size in sizes],
        ranks=rank_map(spec),
        spectra=spectra_of(prepared),
        prompt=shown,
        examples=examples,
    )
    print(f"wrote {output} in {time.perf_counter() - begin:.0f} seconds")


def greeting(model: str) -> str:
    """A line about the model."""
    if model == MODEL:
        return f"{MODEL}: a small trained Llama inside kvfold; nothing is downloaded."
    config = common.load_config(model)
    return f"{model}: {config.model_type} of {config.num_hidden_layers} layers"


def measurement(model: Any, tokenizer: Any) -> "Measurement":
    """What the table's methods are measured on."""
    from kvfold.evaluation.measure import Measurement, text_windows
    from kvfold.evaluation.perplexity import max_positions
    from kvfold.utils.text import packaged

    limit = max_positions(model) or CTX
    texts, ctx = {TEXT: packaged("filler.txt")}, min(CTX, limit)
    return Measurement(
        windows=text_windows(model, tokenizer, texts, ctx=ctx, max_tokens=TEXT_TOKENS),
        needle=NEEDLE_CONTEXTS if limit >= NEEDLE_LENGTH else 0,
        lengths=(NEEDLE_LENGTH,),
    )


def measured(
    model: Any, tokenizer: Any, what: "Measurement", progress: common.Progress | None
) -> tuple[list["Row"], "Statistics"]:
    """The results of the comparison, and the statistics that all recipes use."""
    from kvfold.compression.compressor import shared_statistics
    from kvfold.evaluation import comparison

    names = applicable(model)
    compressors = comparison.compressors_of(model, tokenizer, names, max_tokens=CALIBRATION_TOKENS)
    statistics = shared_statistics(compressors, progress)
    rows = comparison.compare(compressors, KEEPS, what, statistics=statistics, progress=progress)
    return rows, statistics


@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """A compressed model, the cache it was measured with, and the results."""

    name: str
    model: Any
    cache: CacheConfig
    row: "Row"
    result: "Measured"


def measured_sizes(
    prepared: "Prepared", what: "Measurement", progress: common.Progress | None
) -> Iterator[MeasuredSize]:
    """Measure the original and SIZES on the paged cache, on the second halves of the same windows
    and the same hidden facts. Sizes that the model is too small for are left out, and evicted ones
    if it cannot evict."""
    from kvfold.evaluation.comparison import ORIGINAL, result_row
    from kvfold.evaluation.measure import measure

    model, tokenizer = prepared.compressor.model, prepared.compressor.tokenizer
    facts, half = FACT_CONTEXTS if what.needle else 0, what.windows[TEXT].shape[1] // 2
    what = replace(what, needle=facts, lengths=(FACT_LENGTH,), scored_from=half)
    original = measure(model, tokenizer, replace(what, cache=CacheConfig()), progress, ORIGINAL)
    row = result_row(model, ORIGINAL, 1.0, original)
    yield MeasuredSize(name=ORIGINAL, model=model, cache=CacheConfig(), row=row, result=original)
    for recipe, name, factor, options in SIZES:
        cache = CacheConfig(**options)
        try:
            folded = prepared.folded_copy(prepared.plan_factor(factor))
            result = measure(folded, tokenizer, replace(what, cache=cache), progress, name)
        except SettingError:
            continue
        row = result_row(folded, recipe, 1 / factor, result, original)
        yield MeasuredSize(name=name, model=folded, cache=cache, row=row, result=result)


def headline(measured_size: MeasuredSize) -> list[str]:
    """The size and loss of a model, in words."""
    from kvfold.evaluation.compare import format_increase

    row, lines = measured_size.row, []
    size = row.bytes_per_token
    if row.delta_nll:
        lines += [f"{row.baseline_bytes_per_token / size:.1f}x smaller"]
        lines += map(format_increase, row.delta_nll.values())
    else:
        lines += [f"{size:.0f} bytes a token", f"perplexity {row.perplexity[TEXT]:.1f}"]
    for needle in measured_size.result.needle.values():
        total = needle.num_questions
        lines.append(f"{needle.exact * total:.0f} of {total} hidden facts found")
    return lines


def applicable(model: Any) -> list[str]:
    """The RECIPES that work for a model's family."""
    from kvfold.compression.compressor import check
    from kvfold.models.families import family_of

    geometry, names = family_of(model.config).geometry(model.config), []
    for name in RECIPES:
        try:
            check(recipes.get(name), geometry, model.config.model_type)
        except ValueError:
            continue
        names.append(name)
    return names


def prompt(tokenizer: Any, window: "Tensor") -> tuple[str, list[int]]:
    """A prompt from the second half of a window, with QUESTION if the model has a chat template:
    its end, to be shown, and its token ids."""
    from kvfold.utils.chat import encode_chat
    from kvfold.utils.tokens import encode_prompt

    text = tokenizer.decode(window[len(window) // 2 :], skip_special_tokens=True)
    if tokenizer.chat_template:
        text = f"{text}\n\n{QUESTION}"
        ids = encode_chat(tokenizer, text)
    else:
        ids = encode_prompt(tokenizer, text)
    return f"… {text[-SHOWN_CHARACTERS:].partition(' ')[2]}", ids


def continuation(model: Any, tokenizer: Any, cache: CacheConfig, ids: list[int]) -> str:
    """What a model writes after `ids`: greedy with a chat template, else sampled with a fixed
    seed."""
    from kvfold.engine.api.llm import LLM
    from kvfold.engine.requests.request import SamplingParams

    most, chats = len(ids) + NEW_TOKENS, bool(tokenizer.chat_template)
    llm = LLM(model, tokenizer=tokenizer, max_sequences=1, max_tokens=most, **asdict(cache))
    temperature = 0.0 if chats else TEMPERATURE
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=temperature, seed=SEED)
    return llm.generate([ids], sampling)[0].text.strip()


def reload_check(model: Any, tokenizer: Any) -> str:
    """Save a model, load it with transformers, and check that its weights are the same.

    Texts are not compared: loaded weights lie elsewhere in memory, so sums round differently, and
    tokens with nearly equal eviction scores may be evicted in another order.
    """
    from transformers import AutoModelForCausalLM

    from kvfold.api import save

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small"
        save(model, tokenizer, path)
        loaded = AutoModelForCausalLM.from_pretrained(path).to(model.device).state_dict()
        expected = model.state_dict()
        if wrong := [name for name, x in expected.items() if not x.equal(loaded[name])]:
            raise RuntimeError(f"weights changed when the model was saved and loaded: {wrong}")
    name = "AutoModelForCausalLM.from_pretrained"
    return f"saved as a checkpoint and loaded with {name}: its weights are the same."
