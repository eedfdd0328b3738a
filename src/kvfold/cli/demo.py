"""kvfold demo: a model, compressed several ways, measured, saved, loaded, read aloud."""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvfold import recipes
from kvfold.cli import common
from kvfold.cli.compare import print_rows
from kvfold.cli.options import PLACE

if TYPE_CHECKING:
    from kvfold.compression.statistics import Statistics
    from kvfold.evaluation.compare import Row

MODEL = "reference:gqa"
RECIPES = ("palu-j", "zack", "fast", "lean", "small")
KEEPS = (0.5, 0.25)
SHOWN = (("zack", 0.25), ("small", 0.25))  # folded once more, for text; the last is saved
CALIBRATION_TOKENS = 12288
TEXT_TOKENS, CTX = 4096, 1024
NEEDLE_CONTEXTS, NEEDLE_LENGTH = 2, 1024
QUESTION = "What is the capital of France, and what is it known for?"  # of models that chat
PROMPT = "The old house stood at the end of the road, and"
NEW_TOKENS, TEMPERATURE, SEED = 60, 0.7, 0


def demo(
    *,
    model: Annotated[str, Parameter(help="As in other commands.")] = MODEL,
    output: Path = Path("report.html"),
) -> None:
    """Compress the embedded model in several ways, print what it saves and costs, write a report.

    Parameters
    ----------
    output
        The report to write.
    """
    begin = time.perf_counter()
    common.check_outputs(html=output)
    print(greeting(model))
    loaded, tokenizer = common.load(model, PLACE), common.load_tokenizer(model)
    with common.progress() as progress:
        rows, statistics = measured(loaded, tokenizer, progress)
    print_rows(rows)
    from kvfold.cli.inspect import rank_map, spectra_of
    from kvfold.compression.compressor import Compressor
    from kvfold.report import write_report

    examples = [("original", continuation(loaded, tokenizer))]
    for recipe, keep in SHOWN:
        prepared = Compressor(loaded, recipes.get(recipe), tokenizer).prepare(statistics)
        spec = prepared.plan(keep)
        folded = prepared.folded_copy(spec)
        examples.append((f"{recipe} at {keep:g}", continuation(folded, tokenizer)))
    asked, _ = prompt(tokenizer)
    for name, text in examples:
        print(f"\n{name}:\n{asked}{text}")
    print("\n" + reload_check(folded, tokenizer, examples[-1][1]))
    embedded = "A small trained model with a smaller cache"
    write_report(
        output,
        title=embedded if model == MODEL else f"{model} with a smaller cache",
        summary=headlines(model, rows),
        rows=rows,
        ranks=rank_map(spec),
        spectra=spectra_of(prepared),
        examples=[(name, asked + text) for name, text in examples],
    )
    print(f"wrote {output} in {time.perf_counter() - begin:.0f} seconds")


def greeting(model: str) -> str:
    if model == MODEL:
        return f"{MODEL}: a small trained Llama inside kvfold; nothing is downloaded."
    config = common.load_config(model)
    return f"{model}: {config.model_type} of {config.num_hidden_layers} layers"


def measured(
    model: Any, tokenizer: Any, progress: common.Progress | None
) -> tuple[list["Row"], "Statistics"]:
    """The comparison's rows, and the statistics all recipes were made from."""
    from kvfold.compression.compressor import shared_statistics
    from kvfold.evaluation import comparison
    from kvfold.evaluation.measure import Measurement, text_windows
    from kvfold.evaluation.perplexity import max_positions
    from kvfold.text import packaged

    names = applicable(model)
    compressors = comparison.compressors_of(model, tokenizer, names, max_tokens=CALIBRATION_TOKENS)
    statistics = shared_statistics(compressors, progress)
    limit = max_positions(model) or CTX
    texts, ctx = {"old books": packaged("filler.txt")}, min(CTX, limit)
    what = Measurement(
        windows=text_windows(model, tokenizer, texts, ctx=ctx, max_tokens=TEXT_TOKENS),
        needle=NEEDLE_CONTEXTS if limit >= NEEDLE_LENGTH else 0,
        lengths=(NEEDLE_LENGTH,),
    )
    rows = comparison.compare(compressors, KEEPS, what, statistics=statistics, progress=progress)
    return rows, statistics


def applicable(model: Any) -> list[str]:
    """Those of RECIPES that a model's family allows."""
    from kvfold.compression.compressor import check
    from kvfold.models.families import family_of

    geometry, found = family_of(model.config).geometry(model.config), []
    for name in RECIPES:
        try:
            check(recipes.get(name), geometry, model.config.model_type)
        except ValueError:
            continue
        found.append(name)
    return found


def prompt(tokenizer: Any) -> tuple[str, list[int]]:
    """QUESTION for a model that chats, else PROMPT: as it is shown before what the model writes,
    and as token ids."""
    from kvfold.text import encode_chat, encode_prompt

    if tokenizer.chat_template:
        return f"{QUESTION}\n", encode_chat(tokenizer, QUESTION)
    return f"{PROMPT} ", encode_prompt(tokenizer, PROMPT)


def continuation(model: Any, tokenizer: Any) -> str:
    """A continuation of the prompt by `model`: its likeliest answer, or text sampled with the same
    seed each time."""
    import torch

    torch.manual_seed(SEED)
    ids = torch.tensor([prompt(tokenizer)[1]], device=model.device)
    sampling = {"do_sample": True, "temperature": TEMPERATURE}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        pad_token_id=tokenizer.eos_token_id,
        **({"do_sample": False} if tokenizer.chat_template else sampling),
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()


def reload_check(folded: Any, tokenizer: Any, expected: str) -> str:
    """Save, load with transformers alone, and say whether it writes the same."""
    from transformers import AutoModelForCausalLM

    from kvfold.api import save

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small"
        save(folded, tokenizer, path)
        loaded = AutoModelForCausalLM.from_pretrained(path).to(folded.device)
        text = continuation(loaded, tokenizer)
    if text != expected:
        raise RuntimeError(f"the saved model writes other text than the one saved: {text!r}")
    name = "AutoModelForCausalLM.from_pretrained"
    return f"saved as a checkpoint and loaded with {name}: it writes the same text."


def headlines(model: str, rows: list["Row"]) -> list[tuple[str, str]]:
    """Savings and costs of the last of SHOWN, as (label, value)."""
    recipe, keep = SHOWN[-1]
    row = next(row for row in rows if (row.recipe, row.keep) == (recipe, keep))
    ((increase, _),) = row.delta_nll.values()
    found = [
        (f"{recipe}: hidden facts found in {length} tokens", f"{100 * share:.0f} %")
        for length, share in (row.needle or {}).items()
    ]
    return [
        ("model", model),
        (f"{recipe}: bytes a token", f"{row.baseline_bytes_per_token:g} → {row.bytes_per_token:g}"),
        (f"{recipe}: loss increase, nats a token", f"{increase:+.4f}"),
        *found,
    ]
