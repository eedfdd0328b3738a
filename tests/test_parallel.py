"""Prompts that several ranks read: as one process reads them, and with the bytes that are promised.

Shapes: T tokens, Hq query heads.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kvfold import recipes
from kvfold.attention.base import LayerMaps
from kvfold.bench.variants import SHAPES, Variant, variant_layout
from kvfold.errors import SettingError
from kvfold.models.families import family_of
from kvfold.models.fold import fold_plain
from kvfold.ops.backend import use_triton
from kvfold.parallel import SequenceParallel, attend, wire_bytes
from kvfold.parallel.shares import SLACK, key_rank, runs, shares_of, token_counts, value_rank
from kvfold.spec.layout import plain_spec
from models import CONFIGS, tiny, tokens
from ranks import Ranks
from test_fold import close, prepared

SIZES = (1, 2, 3, 5)
LENGTH = 47  # a multiple of none of them
IDS = tokens(1, LENGTH + 1)[0].tolist()
EIGHT = SHAPES["llama-3.1-8b"]
CASES = [(name, recipe) for name in CONFIGS for recipe in (None, "fast", "small")]
CASES += [("llama-gqa", x) for x in recipes.RECIPES if x not in ("fast", "small")]
CASES += [("llama-mha", "zack"), ("llama-mha", "lean"), ("llama-mha", "palu-g"), ("opt", "palu-j")]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(SIZES, tmp_path_factory.mktemp("ranks"), preload=__name__)
    yield found
    found.stop()


def model_of(name: str, recipe: str | None) -> tuple[Any, Any]:
    """A tiny model, folded to half where a recipe is named, and what it stores."""
    if recipe is None:
        model = tiny(name)
        return model, plain_spec(family_of(model.config).geometry(model.config))
    bases = prepared(name, recipe)
    spec = bases.plan(1.0 if recipe == "kvquant" else 0.5, 1)
    bases.fold(spec, {})
    return bases.compressor.model, spec


def read(group: dist.ProcessGroup, model: Any) -> tuple[Tensor, Tensor, int]:
    """A rank's logits after LENGTH tokens, those after one more, fed to the model itself with the
    cache of all ranks, and the bytes that it sent to others."""
    sent, whole = 0, dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, outputs: Any, inputs: Any, group: Any) -> None:
        nonlocal sent
        sent += (sum(inputs) - inputs[dist.get_rank(group)]) * given.itemsize
        assert len(given) == sum(inputs)
        whole(output, given, outputs, inputs, group=group)

    parallel = SequenceParallel(model, group)
    with patch.object(dist, "all_to_all_single", counted):
        found = parallel.prefill(IDS[:LENGTH], keep_rows=True)
    with torch.no_grad():
        out = model(torch.tensor([IDS[LENGTH:]]), past_key_values=parallel.cache(found))
    return found.logits, out.logits[0, -1], sent


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_ranks_read_what_one_process_reads(pool: Ranks, name: str, recipe: str | None) -> None:
    model, spec = model_of(name, recipe)
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0, -2:]
    for size in SIZES:
        found = pool.run(size, read, model)
        for logits, after, _ in found:
            close(logits, want[0])
            close(after, want[1])
        assert sum(sent for *_, sent in found) == wire_bytes(spec, LENGTH, size, itemsize=4)


def test_prompts_of_any_length(pool: Ranks) -> None:
    """A token a rank, at least."""
    model = tiny("llama-gqa")
    for length in (5, 6):
        with torch.no_grad():
            want = model(torch.tensor([IDS[:length]])).logits[0, -1]
        for logits in pool.run(5, last_logits, model, IDS[:length]):
            close(logits, want)


def last_logits(group: dist.ProcessGroup, model: Any, ids: Any) -> Tensor:
    return SequenceParallel(model, group).prefill(ids).logits


# -- what is sent, and by whom attention is done: no process, no tensor --------------------------


def test_runs_are_the_best_of_all() -> None:
    """Among all ways to cut: the busiest has SLACK more than the least, and no price is lower."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(60):
        size, parts = 1 + trial % 7, 1 + trial % 5
        work = torch.randint(0, 9, (size,), generator=generator).tolist()
        prices = torch.randint(1, 9, (size + 1, size + 1), generator=generator).tolist()

        def loads(ends: list[int], work: list[int] = work) -> list[int]:
            return [sum(work[a:b]) for a, b in pairwise([0, *ends])]

        def price(ends: list[int], prices: Any = prices) -> int:
            return sum(prices[a][b] for a, b in pairwise([0, *ends]) if a < b)

        every = [
            [*inner, size] for inner in combinations_of(range(size + 1), parts - 1)
        ]
        most = min(max(loads(ends)) for ends in every) * (1 + SLACK)
        want = min(price(ends) for ends in every if max(loads(ends)) <= most)
        found = runs(work, parts, lambda a, b, prices=prices: prices[a][b])
        assert len(found) == parts and found[-1] == size
        assert max(loads(found)) <= most and price(found) == want
