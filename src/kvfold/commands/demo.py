"""kvfold demo: the embedded model, compressed several ways, measured, saved, loaded, read aloud."""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.commands import common
from kvfold.commands.compare import print_rows
from kvfold.commands.options import PLACE

if TYPE_CHECKING:
    from kvfold.api import Job
    from kvfold.compress.statistics import Statistics
    from kvfold.evaluate.compare import Row
    from kvfold.spec import CacheSpec

MODEL = "reference:gqa"
RECIPES = ("palu-j", "zack", "fast", "lean", "small")
KEEPS = (0.5, 0.25)
SHOWN = (("zack", 0.25), ("small", 0.25))  # folded once more, for text; the last is saved
CALIBRATION_TOKENS = 12288
TEXT_TOKENS, CTX = 4096, 1024
NEEDLE_CONTEXTS, NEEDLE_LENGTH = 2, 1024
PROMPT = "The old house stood at the end of the road, and"
NEW_TOKENS, TEMPERATURE, SEED = 60, 0.7, 0


def demo(*, output: Path = Path("report.html")) -> None:
    """Compress the embedded model in several ways, print what it saves and costs, write a report.

    Parameters
    ----------
    output
        The report to write.
    """
    begin = time.perf_counter()
    common.check_outputs(html=output)
    print(f"{MODEL}: a small trained Llama inside kvfold; nothing is downloaded.")
    model, tokenizer = common.load(MODEL, PLACE)
    with common.progress() as progress:
        rows, statistics = measured(model, tokenizer, progress)
    print_rows(rows)
    examples = [("original", continuation(model, tokenizer))]
    for recipe, keep in SHOWN:
        job, spec, folded = fold_one(model, tokenizer, statistics, recipe, keep)
        examples.append((f"{recipe} at {keep:g}", continuation(folded, tokenizer)))
    for name, text in examples:
        print(f"\n{name}:\n{PROMPT} {text}")
    print("\n" + reload_check(folded, tokenizer, examples[-1][1]))
    write_html(output, rows, job, spec, examples)
    print(f"wrote {output} in {time.perf_counter() - begin:.0f} seconds")


def measured(
    model: Any, tokenizer: Any, progress: common.Progress | None
) -> tuple[list["Row"], "Statistics"]:
    """The comparison's rows, and the statistics all recipes were made from."""
    from kvfold import recipes
    from kvfold.api import Job
    from kvfold.evaluate import run
    from kvfold.text import packaged

    jobs = [
        Job(model, recipes.get(name), tokenizer, max_tokens=CALIBRATION_TOKENS) for name in RECIPES
    ]
    statistics = run.shared_statistics(jobs, progress)
    rows = run.compare(
        model,
        tokenizer,
        RECIPES,
        KEEPS,
        {"old books": packaged("filler.txt")},
        ctx=CTX,
        max_tokens=TEXT_TOKENS,
        needle=NEEDLE_CONTEXTS,
        lengths=(NEEDLE_LENGTH,),
        statistics=statistics,
        progress=progress,
    )
    return rows, statistics


def fold_one(
    model: Any, tokenizer: Any, statistics: "Statistics", recipe: str, keep: float
) -> tuple["Job", "CacheSpec", Any]:
    """One recipe's job, spec and folded model, from statistics at hand."""
    from kvfold import recipes
    from kvfold.api import Job
    from kvfold.compress import build
    from kvfold.evaluate import run

    job = Job(model, recipes.get(recipe), tokenizer)
    job.prepare(run.restricted(statistics, build.needs(job.recipe)))
    spec = job.plan(keep)
    return job, spec, run.folded_copy(job, spec)


def continuation(model: Any, tokenizer: Any) -> str:
    """What `model` writes after PROMPT, sampled with the same seed each time."""
    import torch

    from kvfold.text import encode_prompt

    torch.manual_seed(SEED)
    prompt = torch.tensor([encode_prompt(tokenizer, PROMPT)], device=model.device)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        temperature=TEMPERATURE,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True).strip()


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


def write_html(
    path: Path, rows: list["Row"], job: "Job", spec: "CacheSpec", examples: list[tuple[str, str]]
) -> None:
    from kvfold.commands.inspect import rank_map, spectra_of
    from kvfold.report import write_report

    recipe, keep = SHOWN[-1]
    row = next(row for row in rows if (row.recipe, row.keep) == (recipe, keep))
    ((increase, _),) = row.delta_nll.values()
    ((length, found),) = (row.needle or {}).items()
    summary = [
        ("model", MODEL),
        (f"{recipe}: bytes a token", f"{row.baseline_bytes_per_token:g} → {row.bytes_per_token:g}"),
        (f"{recipe}: loss increase, nats a token", f"{increase:+.4f}"),
        (f"{recipe}: hidden facts found in {length} tokens", f"{100 * found:.0f} %"),
    ]
    write_report(
        path,
        title="A small trained model with a smaller cache",
        summary=summary,
        rows=rows,
        ranks=rank_map(spec),
        spectra=spectra_of(job),
        examples=[(name, f"{PROMPT} {text}") for name, text in examples],
    )
