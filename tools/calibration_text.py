"""Does it matter which text a basis is measured on? (ZACK §4.3 Tables 4-5, §6.6 Fig. 18)

For every pair of heads' rotation R from the packaged text and from another text: epsilon, the mean
absolute element of R, and delta, the mean absolute difference of elements (columns' signs aligned,
since singular vectors have none). Then the loss on held-out text with either calibration.

    python tools/calibration_text.py --text wiki=wiki.txt --text book=book.txt \\
        --heldout heldout.txt --json benchmarks/results/calibration-text.json
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold import recipes
from kvfold.calibration.calibrate import calibrate
from kvfold.calibration.statistics import Statistics
from kvfold.calibration.text import calibration_windows
from kvfold.cli.common import versions
from kvfold.compression.compressor import Compressor
from kvfold.evaluation.perplexity import paired_difference, perplexity
from kvfold.hub.loading import load, load_tokenizer
from kvfold.utils.files import write_json
from kvfold.utils.text import read_text, running
from kvfold.utils.tokens import windows

LOSS_RECIPES, LOSS_KEEPS = ("zack", "small"), (0.5, 0.25)
TOKENS = (4096, 8192, 16384, 32768)


def statistics_of(model: Any, tokenizer: Any, calib: Sequence[str] | None, tokens: int) -> Any:
    """Statistics for every recipe that is compared, from one text."""
    made = {name: Compressor(model, recipes.get(name), tokenizer) for name in LOSS_RECIPES}
    needs = set().union(*(one.needs for one in made.values()))
    rows = calibration_windows(tokenizer, model.config, list(calib) if calib else None, tokens)
    family = next(iter(made.values())).family
    return calibrate(model, family, rows, needs), made


def rotations(zack: Compressor, statistics: Statistics) -> dict[str, list[Tensor]]:
    """ZACK's R of every layer and head: `qk` and `vw`, each [d, d]."""
    found: dict[str, list[Tensor]] = {"qk": [], "vw": []}
    for one in zack.prepare(statistics).candidates:
        found["qk" if one.side == "k" else "vw"].append(one.basis.down)
    return found


def difference(ours: list[Tensor], theirs: list[Tensor]) -> dict[str, float]:
    """epsilon, delta and their ratio over all heads."""
    epsilon = torch.stack([r.abs().mean() for r in theirs]).mean()
    deltas = []
    for a, b in zip(ours, theirs, strict=True):
        signs = (a * b).sum(0).sign()
        deltas.append((a - b * signs).abs().mean())
    delta = torch.stack(deltas).mean()
    return {"epsilon": float(epsilon), "delta": float(delta), "ratio": float(delta / epsilon)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="reference:gqa")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--heldout", required=True, metavar="FILE")
    parser.add_argument("--json", required=True, metavar="FILE")
    parser.add_argument("--windows", type=int, default=24)
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model), load_tokenizer(arguments.model)
    model = model.float()
    ids = windows(tokenizer, running(read_text(arguments.heldout)), 1024, 1024 * arguments.windows)
    original = perplexity(model, ids, batch=4)
    texts = {"packaged": None, **{n: [f] for n, f in (t.split("=", 1) for t in arguments.text)}}
    measured: dict[str, dict[int, dict[str, list[Tensor]]]] = {}
    losses = []
    for name, files in texts.items():
        measured[name] = {}
        for tokens in TOKENS if name == "packaged" else TOKENS[-1:]:
            statistics, compressors = statistics_of(model, tokenizer, files, tokens)
            measured[name][tokens] = rotations(compressors["zack"], statistics)
            if tokens != TOKENS[-1]:
                continue
            for recipe, compressor in compressors.items():
                prepared = compressor.prepare(statistics)
                for keep in LOSS_KEEPS:
                    folded = prepared.folded_copy(prepared.plan(keep, 1))
                    result = perplexity(folded, ids, batch=4)
                    loss, error = paired_difference(result, original)
                    row = {"text": name, "recipe": recipe, "keep": keep, "loss": loss, "se": error}
                    losses.append(row)
                    print(row, flush=True)
    pairs = [
        {"text": name, "tokens": tokens, "pair": pair, **difference(ours[pair], theirs[pair])}
        for name in texts
        if name != "packaged"
        for tokens, ours in measured["packaged"].items()
        for theirs in [measured[name][TOKENS[-1]]]
        for pair in ("qk", "vw")
    ]
    for pair in pairs:
        print(pair)
    report = {
        "model": arguments.model,
        "versions": versions(model.device),
        "rotations": pairs,
        "loss": losses,
    }
    write_json(Path(arguments.json), report)


if __name__ == "__main__":
    main()
