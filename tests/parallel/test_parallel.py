"""Prompts that several ranks read: as one process reads them, and with the bytes that are promised.

Shapes: T tokens, Hq query heads.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import kvfold
import model_types
from fold_cases import close, prepared
from kvfold import recipes
from kvfold.api import save
from kvfold.bench.variants import SHAPES, Variant, variant_layout
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.config import Ratios
from kvfold.engine.requests.params import SamplingParams
from kvfold.engine.requests.request import TokenLogprobs
from kvfold.hub.loading import load_tokenizer
from kvfold.layout import CacheSpec, Latent, LayerSpec
from kvfold.layout.pages import plain_spec
from kvfold.models.adapter import PAGED
from kvfold.models.families import family_of
from kvfold.models.fold import fold_plain
from kvfold.ops.backend import use_triton
from kvfold.parallel import SequenceParallel, wire_bytes
from kvfold.parallel.attend import attend
from kvfold.parallel.shares import SLACK, run_ends, shares_of
from kvfold.utils.errors import SettingError
from kvfold.utils.text import packaged, running
from kvfold.utils.tokens import windows
from kvfold.utils.versions import cache_argument
from lab.variants import VARIANTS
from matrix import matrix
from models import CONFIGS, tiny, tokens
from ranks import Ranks
from sequence_parallel import Bench, folded
from sidecar_cases import bytes_tokenizer

SIZES = (1, 2, 3, 5)
LENGTH = 47  # a multiple of none of them
IDS = tokens(1, LENGTH + 1)[0].tolist()
EIGHT = SHAPES["llama-3.1-8b"]
CASES = matrix(list(CONFIGS), [None, "fast", "small"])
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
        found = parallel.prefill(IDS[:LENGTH], keep_entries=True)
    with torch.no_grad():
        out = model(torch.tensor([IDS[LENGTH:]]), **cache_argument(parallel.cache(found)))
    return found.logits, out.logits[0, -1], sent


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_ranks_read_what_one_process_reads(pool: Ranks, name: str, recipe: str | None) -> None:
    check(pool, *model_of(name, recipe))


def test_heads_of_any_rank(pool: Ranks) -> None:
    """Some keep no keys, some no values."""
    latents = [
        Latent(side=side, heads=(head,), rank=rank)
        for side, ranks in (("k", (0, 7, 12, 1)), ("v", (12, 0, 5, 3)))
        for head, rank in enumerate(ranks)
    ]
    layer = LayerSpec(keys="post_rope", values="fused", latents=tuple(latents))
    model = tiny("llama-mha")
    spec = replace(plain_spec(family_of(model.config).geometry(model.config)), layers=(layer,) * 2)
    model = folded(model, spec)
    for attention in family_of(model.config).attentions(model):
        for parameter in attention.parameters():
            parameter.data.mul_(20)  # so that attention matters
        for i, rank in enumerate((0, 7, 12, 1)):
            attention.key_up.data[i, :, rank:] = attention.key_down.data[i, :, rank:] = 0
    check(pool, model, spec)


def check(pool: Ranks, model: Any, spec: CacheSpec) -> None:
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


# -- shares and bytes: no process, no model -----------------------------------------------------


def test_runs_are_the_best_of_all() -> None:
    """Of all ways to cut: the busiest has SLACK more than it must, and no other price is lower."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(60):
        size, parts = 1 + trial % 7, 1 + trial % 5
        work = torch.randint(0, 9, (size,), generator=generator).tolist()
        prices = torch.randint(1, 9, (size, size + 1), generator=generator).tolist()
        every = []
        for inner in combinations_with_replacement(range(size + 1), parts - 1):
            cuts = list(pairwise([0, *inner, size]))
            load = max(sum(work[a:b]) for a, b in cuts)
            every.append((load, sum(prices[a][b] for a, b in cuts if a < b), [*inner, size]))
        most = min(load for load, *_ in every) * (1 + SLACK)
        found = run_ends(work, parts, lambda a, b, prices=prices: prices[a][b])
        load, price = next(x[:2] for x in every if x[2] == found)
        assert load <= most and price == min(price for load, price, _ in every if load <= most)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 8, 16, 32, 40])
@pytest.mark.parametrize(
    "name", ["bf16-full", "bf16-half-ragged", "lean-35", "small-25", "palu-g4"]
)
def test_every_head_has_one_rank(name: str, num_ranks: int) -> None:
    layer = variant_layout(EIGHT, VARIANTS[name]).spec.layers[0]
    shares = shares_of(layer, EIGHT, num_ranks)
    heads = [head for share in shares for head in share.heads]
    assert sorted(heads) == list(range(EIGHT.num_query_heads))
    assert len(shares) == num_ranks
    work = [sum(share.query_ranks) + share.output_width for share in shares]
    widest = max(a + b for x in shares for a, b in zip(x.query_ranks, x.output_ranks, strict=True))
    assert max(work) <= (sum(work) / num_ranks + widest) * (1 + SLACK)
    for share in shares:
        group = len(share.heads) // max(len(share.units), 1)
        owners = [share.kv[i] for i in share.units for _ in range(group)]
        assert owners == [head // EIGHT.queries_per_kv for head in share.heads]
        columns = [range(at, at + rank) for at, rank in (*share.keys, *share.values)]
        queries = range(sum(share.query_ranks))
        assert {i for own in (queries, *columns) for i in own} == set(range(share.width))


def test_ragged_heads_are_spread_evenly() -> None:
    """The busiest of 8 ranks has 6 % more than the mean; in the order of heads it would be 18 %."""
    geometry = SHAPES["llama-2-7b"]
    uneven = Variant(keys=(0.25, 0.5, 0.75), values=(0.25, 0.5, 1.0))
    layer = variant_layout(geometry, uneven).spec.layers[0]
    work = [sum(share.query_ranks) + share.output_width for share in shares_of(layer, geometry, 8)]
    assert max(work) <= 1.06 * sum(work) / 8


def test_bytes_of_the_8b_shape() -> None:
    """Uncompressed: 32 + 8 + 8 + 32 heads of 128 numbers, but for those that stay. At a half: half;
    and no recipe sends more than nothing compressed does."""
    plain, tokens = plain_spec(EIGHT), 32768
    half = variant_layout(EIGHT, VARIANTS["bf16-half"]).spec
    for num_ranks in (1, 2, 4, 8):
        want = tokens * 80 * 128 * (num_ranks - 1) // num_ranks * EIGHT.num_layers * 2
        assert wire_bytes(plain, tokens, num_ranks) == want
        assert wire_bytes(half, tokens, num_ranks) == want // 2
    shared = (64 + 2 * 16) * 128  # two ranks have each KV head
    assert wire_bytes(plain, tokens, 16) == tokens * shared * 15 // 16 * EIGHT.num_layers * 2
    for num_ranks in (2, 3, 5, 8, 16, 40):
        most = wire_bytes(plain, tokens, num_ranks)
        for name in ("lean-31", "small-10", "small-25", "swift-4x", "palu-g4", "lorc"):
            assert wire_bytes(variant_layout(EIGHT, VARIANTS[name]).spec, tokens, num_ranks) <= most


# -- attention of a share: no process -----------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*ndim > 0.*:DeprecationWarning")
@pytest.mark.parametrize("recipe", [None, "fast", "lean", "small"])
def test_kernels_see_what_pytorch_sees(recipe: str | None, monkeypatch: Any) -> None:
    """Triton's kernel, interpreted, in 16 bits: of KV heads that others have a part of, too, and of
    heads of different ranks."""
    model, spec = model_of("llama-gqa", recipe)
    if recipe is None:
        fold_plain(model, spec)
    layer = next(iter(family_of(model.config).attentions(model))).half().description
    torch.manual_seed(0)
    for share in shares_of(layer.spec, spec.geometry, 3)[:2]:
        messages = torch.randn(LENGTH, share.width).half()
        want, _ = attend(layer, share, messages)
        with monkeypatch.context() as patched:
            patched.setenv("KVFOLD_BACKEND", "triton")
            use_triton.cache_clear()
            with patch("kvfold.parallel.attend.attention", side_effect=AssertionError):
                got, _ = attend(layer, share, messages)
        use_triton.cache_clear()
        assert (got - want).norm() <= 2e-3 * want.norm()


# -- the benchmark ------------------------------------------------------------------------------


def measured(group: dist.ProcessGroup, tokens: int, **settings: Any) -> list[dict[str, Any]]:
    """Rows of benchmarks/sequence_parallel.py, whose ranks are all there are."""
    given = {"models": [], "shape": "tiny", "p": [0.5], "rounds": 2, "engines": [], **settings}
    given["tokens"] = [tokens]
    return Bench(argparse.Namespace(**given), torch.device("cpu")).measure(tokens)


def test_benchmark_of_random_weights(pool: Ranks) -> None:
    rows = pool.run(5, measured, 64)[0]
    places = [(row["name"], row["ranks"]) for row in rows]
    assert places == [("uncompressed", 5), ("uncompressed", 1), ("p 0.5", 5), ("p 0.5", 1)]
    whole, alone, half, _ = rows
    assert half["wire_bytes"] * 2 == whole["wire_bytes"] > 0 == alone["wire_bytes"]
    assert all(row["seconds"] > 0 and row["loss"] is None for row in rows)


def test_benchmark_of_an_engine(pool: Ranks) -> None:
    rows = pool.run(5, partial(measured, p=[], engines=[4]), 64)[0]
    plain, engine = (x for x in rows if x["ranks"] == 5)
    assert plain["context_bytes"] == 0 < engine["context_bytes"]
    assert engine["handover_seconds"] > 0 < engine["first_token_seconds"]


def test_benchmark_of_a_model(pool: Ranks) -> None:
    """Its loss is what one process finds, however many ranks read."""
    rows = pool.run(5, partial(measured, models=["reference:gqa"]), 64)[0]
    ids = windows(load_tokenizer("reference:gqa"), running(packaged("filler.txt")), 64, 256)
    model = kvfold.reference("gqa")
    with torch.no_grad():
        losses = [float(model(x[None], labels=x[None]).loss) for x in ids[1:3]]
    for row in rows:
        assert row["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_benchmark_of_an_exchange_of_two_ranks(pool: Ranks, tmp_path: Path) -> None:
    """A model with low-rank entries is read in both ways, and one rank loses what all do."""
    model, tokenizer = kvfold.reference("gqa"), load_tokenizer("reference:gqa")
    compressor = Compressor(model, recipes.get("zack"))
    ids = windows(tokenizer, running(packaged("filler.txt")), 64, 256)
    prepared = compressor.prepare(calibrate(model, compressor.family, ids, compressor.needs))
    ratios = Ratios(low_rank_keys=0.75, low_rank_values=0.75, important=0.2, important_last=0.2)
    prepared.fold(prepared.plan_hybrid(ratios), {})
    save(model, tokenizer, tmp_path / "hybrid")
    rows = pool.run(5, partial(measured, models=[str(tmp_path / "hybrid")]), 64)[0]
    full, low_rank, alone, low_rank_alone = rows
    assert low_rank["name"].endswith("low-rank exchange")
    assert low_rank["wire_bytes"] < 0.85 * full["wire_bytes"]
    assert full["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert low_rank["loss"] == pytest.approx(low_rank_alone["loss"], rel=1e-4)
    assert low_rank["loss"] != pytest.approx(full["loss"], rel=1e-3)


# -- mistakes -----------------------------------------------------------------------------------


def told_of_engine(group: dist.ProcessGroup, how: str, model: Any) -> str:
    """What the first of two ranks is told about a mistake with an engine."""
    settings: dict[str, Any] = {"kv_bytes": 12288} if how == "pool" else {}
    if how == "evicts":
        settings = {"evict": "h2o", "keep_tokens": 0.5}
    llm = kvfold.LLM(model, max_sequences=1, max_tokens=64, **settings)
    try:
        parallel = SequenceParallel(model if how == "model" else llm, group)
        found = parallel.prefill(IDS[:LENGTH], keep_entries=how != "rows")
        if how == "cache":
            parallel.cache(found)
        parallel.context(found, rank=2 if how == "rank" else 0)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ("evicts", "model evicts tokens by what it sees of their attention"),
        ("model", "model: a context is for an engine, and this is a model alone"),
        ("cache", "model: an engine's entries are for its own pages: use context"),
        ("rows", "prompt has no cache entries: prefill it with keep_entries=True"),
        ("rank", "rank must be in 0..1, got 2"),
        ("pool", "kv_bytes: a pool of 12288 bytes has no room for a context of 47 tokens"),
    ],
)
def test_engines_that_cannot_go_on(pool: Ranks, how: str, want: str) -> None:
    told = pool.run(2, told_of_engine, how, tiny("llama-gqa"))
    assert told[0].startswith(want)
    assert told[1] == ("" if how == "pool" else told[0])


def told(group: dist.ProcessGroup, how: str, model: Any, other: Any = IDS) -> str:
    """What a rank is told about a mistake; other: ids of all ranks but the first."""
    rank = dist.get_rank(group)
    ids = other if rank else IDS
    try:
        if how == "models" and rank == 1:
            model = model.double()
        parallel = SequenceParallel(model, group)
        found = parallel.prefill(ids)
        parallel.cache(found)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_differ_are_told(pool: Ranks) -> None:
    model = tiny("llama-gqa")
    for how, want in (
        ("models", "rank 1 has another model than rank 0: load the same one on every rank"),
        ("rows", "prompt has no cache entries: prefill it with keep_entries=True"),
    ):
        assert pool.run(2, told, how, model) == [want] * 2


@pytest.mark.parametrize(
    "other", [[*IDS[:3], 5, *IDS[4:]], IDS[:1], [3, 97], "The old house", None]
)
def test_ids_of_one_rank_alone_all_are_told(pool: Ranks, other: Any) -> None:
    """Nobody waits for who has bad ones."""
    want = "rank 1 has other ids than rank 0: give every rank the whole prompt"
    assert pool.run(2, told, "ids", tiny("llama-gqa"), other) == [want] * 2


def test_ids_are_the_same_whatever_holds_them(pool: Ranks) -> None:
    other = torch.tensor(IDS, dtype=torch.int32)
    want = "prompt has no cache entries: prefill it with keep_entries=True"
    assert pool.run(2, told, "rows", tiny("llama-gqa"), other) == [want] * 2


ONE = "ids must be the token ids of one prompt"
LIMITS = "ids must be 2 tokens at least, one a rank, and 256 at most, the model's positions; got "


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        (IDS[:1], LIMITS + "1"),
        (IDS * 6, LIMITS + "288"),
        ([3, 97], "ids must be of the model's 97 tokens; got some from 3 to 97"),
        ([3, -1], "ids must be of the model's 97 tokens; got some from -1 to 3"),
        ("The old house", f"{ONE}; got 'The old house'"),
        ([IDS], f"{ONE}, whole numbers in one dimension; got torch.int64 of shape (1, 48)"),
        ([0.5, 1], f"{ONE}, whole numbers in one dimension; got torch.float32 of shape (2,)"),
    ],
)
def test_ids_that_are_no_prompt(pool: Ranks, ids: Any, want: str) -> None:
    with pytest.raises(SettingError, match=f"^{re.escape(want)}$"):
        pool.run(2, last_logits, tiny("llama-gqa"), ids)


def test_models_that_ranks_cannot_share(pool: Ranks) -> None:
    long = tiny("llama-gqa")
    long.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    served = tiny("llama-gqa")
    served.config._attn_implementation = PAGED
    for model, want in (
        (long, "model has rope_type 'dynamic', whose angles depend on how long a prompt is"),
        (served, "model belongs to an engine already"),
    ):
        with pytest.raises(SettingError, match=want):
            pool.run(2, last_logits, model, IDS)


def test_groups_that_cannot_be_used(pool: Ranks) -> None:
    model = tiny("llama-gqa")
    with pytest.raises(SettingError, match="group: this process is in no process group"):
        SequenceParallel(model)
    told = pool.run(2, outside, model)[1]
    assert told.startswith("group: this process, rank 1 of 5, is none of its ranks")
    mixed = {
        "is_initialized": lambda: True,
        "get_rank": lambda _: 0,
        "get_backend": lambda _: "nccl",
    }
    with patch.multiple(dist, **mixed), pytest.raises(SettingError, match="make it with 'gloo'"):
        SequenceParallel(model, object())


def outside(group: dist.ProcessGroup, model: Any) -> str:
    """What a rank is told of a group without it."""
    if dist.get_rank(group) == 0:
        return ""
    with pytest.raises(SettingError) as found:
        SequenceParallel(model, dist.GroupMember.NON_GROUP_MEMBER)
    return str(found.value)


# -- engines ------------------------------------------------------------------------------------


SERVED = {
    "16 bits": ("llama-gqa", None, {}),
    "4 bits": ("llama-gqa", None, {"bits": 4}),
    "shared values": ("llama-gqa", "swift", {}),
    "rebuilt keys": ("llama-gqa", "small", {"bits": 8}),
    "without RoPE": ("opt", "fast", {}),
}


def continued(
    group: dist.ProcessGroup, model: Any, maps: Any, settings: dict[str, Any], to: int
) -> list[list[TokenLogprobs]]:
    """Log-probabilities of an answer by the LLM of rank `to`: after a prompt that all ranks read,
    and after one that it reads alone; nothing on the other ranks."""
    llm = kvfold.LLM(model, maps=maps, max_sequences=2, max_tokens=80, **settings)
    parallel = SequenceParallel(llm, group)
    found = parallel.prefill(IDS[:LENGTH], keep_entries=True)
    context = parallel.context(found, rank=to)
    if context is None:
        return []
    params = SamplingParams(max_new_tokens=8, min_tokens=8, logprobs=3)
    question = [5, 7, 11]
    [after] = llm.generate([question], params, context=context)
    assert context.token_ids == tuple(IDS[:LENGTH])
    [alone] = llm.generate([[*IDS[:LENGTH], *question]], params)
    return [list(after.logprobs), list(alone.logprobs)]


def check_continued(pool: Ranks, model: Any, maps: Any, settings: dict[str, Any]) -> None:
    """In few bits an engine alone attends to quantised entries of the prompt, and ranks to what
    they were quantised from; but then all numbers of ranks find the same."""
    within, first = {16: 1e-4, 8: 0.01, 4: 0.3}[settings.get("bits", 16)], None
    for size in SIZES:
        to = size // 2
        told = pool.run(size, continued, model, maps, settings, to)
        assert [bool(x) for x in told] == [rank == to for rank in range(size)]
        after, alone = told[to]
        first = first or after
        for x, y, z in zip(after, alone, first, strict=True):
            assert x.top[0][0] == y.top[0][0]
            assert x.chosen == pytest.approx(y.chosen, abs=within)
            assert x.chosen == pytest.approx(z.chosen, abs=5e-3 if settings else 1e-4)


@pytest.mark.parametrize("name", SERVED)
def test_an_engine_goes_on(pool: Ranks, name: str) -> None:
    model_name, recipe, settings = SERVED[name]
    check_continued(pool, model_of(model_name, recipe)[0], None, settings)


@pytest.mark.parametrize("name", ["stablelm", "qwen3_moe", "gpt2"])
def test_an_engine_with_maps_goes_on(pool: Ranks, name: str, tmp_path) -> None:
    model = model_types.tiny(name)
    tokenizer = bytes_tokenizer(tmp_path)
    maps = kvfold.compress(model, keep=0.5, align=1, tokenizer=tokenizer, max_tokens=1024)
    check_continued(pool, model, maps, {})
