"""An exchange of two ranks: what one process computes with truncated queries, keys and values.

Shapes: T tokens, Hq query heads, R numbers of a cache entry.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fold_cases import close
from kvfold.attention.base import AttentionContext, LayerAttention
from kvfold.bench.variants import SHAPES, Variant, variant_layout
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.config import Ratios
from kvfold.layout import CacheSpec, MixedRanks
from kvfold.models.adapter import PAGED
from kvfold.models.copies import shared_copy
from kvfold.models.families import family_of
from kvfold.ops.common.attention import LOG2_E
from kvfold.parallel import SequenceParallel, wire_bytes
from kvfold.parallel.attend import attend
from kvfold.parallel.shares import shares_of
from kvfold.utils.errors import SettingError
from kvfold.utils.versions import cache_argument
from models import CONFIGS, tiny, tokens
from ranks import Ranks
from steps import even

SIZES = (1, 2, 3, 5)
LENGTH, LAYERS, ALIGN = 47, 4, 2
IDS = tokens(1, LENGTH)[0].tolist()
RATIOS = Ratios(
    keys=0.2,
    low_rank_keys=0.6,
    values=0.2,
    low_rank_values=0.4,
    important=0.2,
    important_last=0.6,
)
ALONE = (0, 1, 2, 3)  # every layer ranks its tokens


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(SIZES, tmp_path_factory.mktemp("ranks"), preload=__name__)
    yield found
    found.stop()


def hybrid(
    name: str = "llama-gqa", ratios: Ratios = RATIOS, leaders: tuple[int, ...] = ALONE
) -> tuple[Any, CacheSpec]:
    """A random model of LAYERS layers with low-rank entries, and what it stores."""
    config = CONFIGS[name]()
    config.num_hidden_layers = LAYERS
    if name == "qwen3":
        config.layer_types = config.layer_types[:1] * LAYERS
    with patch.dict(CONFIGS, {name: lambda: config}):
        model = tiny(name)
    compressor = Compressor(model, even("zack"))
    statistics = calibrate(model, compressor.family, tokens(8, 64), compressor.needs)
    prepared = compressor.prepare(statistics)
    spec = prepared.plan_hybrid(ratios, ALIGN)
    assert spec.hybrid is not None
    important = tuple(spec.hybrid.important[leader] for leader in leaders)
    spec = replace(spec, hybrid=replace(spec.hybrid, leaders=leaders, important=important))
    prepared.fold(spec, {})
    return model, spec


class Truncated(AttentionContext):
    """One process: the queries and entries of tokens that an earlier layer's attention ranked low
    lose their last numbers. sources: for each layer, the layer that ranks its tokens."""

    def __init__(self, spec: CacheSpec, sources: list[int | None]) -> None:
        self.spec, self.sources, self.importance = spec, sources, {}

    def attend(self, layer: LayerAttention, q: Tensor, rows: Tensor) -> Tensor:
        """q [1, Hq, T, r], rows [1, T, R]."""
        source, low_rank, hybrid = self.sources[layer.index], self.spec.low_rank, self.spec.hybrid
        assert low_rank is not None and hybrid is not None
        unimportant = torch.zeros(LENGTH, dtype=torch.bool)
        if source is not None:
            count = LENGTH - -(-round(hybrid.important[layer.index] * LENGTH * 1e6) // 10**6)
            unimportant[self.importance[source].argsort()[:count]] = True
        ranks = dict(zip(layer.spec.latents, low_rank.layers[layer.index].latents, strict=True))
        outputs, worth = [], torch.zeros(LENGTH, dtype=torch.float64)
        for head in range(q.shape[1]):
            kv = head // layer.geometry.queries_per_kv
            key, value = (
                next(x for x in latents if kv in x.heads)
                for latents in (layer.spec.key_latents, layer.spec.value_latents)
            )
            sides = q[0, head], *(rows[0, :, layer.spec.columns(x)] for x in (key, value))
            query, k, v = (x.double().clone() for x in sides)
            for x, latent in ((query, key), (k, key), (v, value)):
                x[unimportant, ranks[latent].rank :] = 0
            scores = query[:, : key.rank] @ k.mT * layer.scale
            scores = scores.masked_fill(~torch.ones(LENGTH, LENGTH).bool().tril(), -torch.inf)
            worth += scores.exp().sum(-1)
            outputs.append(scores.softmax(-1) @ v)
        self.importance[layer.index] = worth
        return torch.cat(outputs, 1)[None].to(q.dtype)


def truncated(model: Any, spec: CacheSpec, sources: list[int | None]) -> Tensor:
    """Logits after the last token."""
    model, family = shared_copy(model).eval(), family_of(model.config)
    model.config._attn_implementation = PAGED
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=torch.tensor([IDS]),
            position_ids=torch.arange(LENGTH)[None],
            **cache_argument(Truncated(spec, sources)),
            use_cache=False,
        ).last_hidden_state
        return family.logits(model, hidden[0, -1])


def read(group: dist.ProcessGroup, model: Any, low_rank: bool = True) -> tuple[Tensor, int]:
    """A rank's logits after all tokens, and the bytes that it sent to others."""
    sent, whole = 0, dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, outputs: Any, inputs: Any, group: Any) -> None:
        nonlocal sent
        sent += (sum(inputs) - inputs[dist.get_rank(group)]) * given.itemsize
        whole(output, given, outputs, inputs, group=group)

    parallel = SequenceParallel(model, group, low_rank_exchange=low_rank)
    with patch.object(dist, "all_to_all_single", counted):
        return parallel.prefill(IDS).logits, sent


def check(pool: Ranks, model: Any, spec: CacheSpec, sources: list[int | None]) -> None:
    want, full = truncated(model, spec, sources), pool.run(1, read, model, False)[0][0]
    assert (want - full).abs().max() > 1e-2 * want.abs().max(), "truncation matters"
    heads = spec.geometry.num_kv_heads
    for size in SIZES:
        found = pool.run(size, read, model)
        for logits, _ in found:
            close(logits, want)
        sent, told = sum(x for _, x in found), wire_bytes(spec, LENGTH, size, 4, True)
        assert sent == (told if heads % size == 0 else pytest.approx(told, rel=0.1))
        if size > 1:
            assert sent < 0.95 * wire_bytes(spec, LENGTH, size, 4)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "qwen3", "opt"])
def test_all_ranks_compute_what_one_process_does(pool: Ranks, name: str) -> None:
    check(pool, *hybrid(name), [None, 0, 1, 2])


def test_layers_that_follow_a_leader(pool: Ranks) -> None:
    check(pool, *hybrid(leaders=(0, 1, 1, 1)), [None, 0, 1, 1])


def test_unimportant_tokens_without_keys(pool: Ranks) -> None:
    ratios = replace(RATIOS, low_rank_keys=0.96, important=0.0)
    model, spec = hybrid(ratios=ratios)
    assert spec.low_rank is not None
    assert not any(x.rank for layer in spec.low_rank.layers for x in layer.key_latents)
    check(pool, model, spec, [None, 0, 1, 2])


def test_without_unimportant_tokens_nothing_changes(pool: Ranks) -> None:
    model, _ = hybrid(ratios=replace(RATIOS, important=1.0, important_last=1.0))
    for size in (1, 2):
        both = pool.run(size, read, model), pool.run(size, read, model, False)
        for (low_rank, _), (full, _) in zip(*both, strict=True):
            close(low_rank, full)


def test_bytes_of_the_8b_shape() -> None:
    """Half of the numbers for 3 of 4 tokens in all layers but the first, the outputs whole."""
    geometry, tokens = SHAPES["llama-3.1-8b"], 32768
    spec = variant_layout(geometry, Variant(keys=(1.0,), values=(1.0,))).spec
    layers = geometry.num_layers
    mixed = MixedRanks(
        ranks=((64,) * 16,) * layers, important=(0.25,) * layers, leaders=tuple(range(layers))
    )
    spec = replace(spec, hybrid=mixed)
    for num_ranks in (2, 4, 8):
        saved = tokens * 3 // 4 * (32 + 8 + 8) * 64 * (layers - 1) * 2 * (num_ranks - 1)
        rankings = (layers - 1) * 2 * tokens * 4 * (num_ranks - 1)
        full = wire_bytes(spec, tokens, num_ranks)
        # Of a message's bytes one in num_ranks stays where it is.
        want = full - saved // num_ranks + rankings
        assert wire_bytes(spec, tokens, num_ranks, low_rank_exchange=True) == want


def test_attention_of_some_queries_at_a_time() -> None:
    """Outputs and log-sum-exps do not depend on how many scores are computed at once."""
    model, spec = hybrid()
    layer = next(iter(family_of(model.config).attentions(model))).description
    share = shares_of(layer.spec, spec.geometry, 2)[0]
    received = torch.randn(LENGTH, share.width, generator=torch.Generator().manual_seed(0))
    want, _ = attend(layer, share, received)
    scores = [
        received[:, at : at + rank] @ received[:, first : first + rank].mT * layer.scale
        for at, rank, (first, _) in zip(
            accumulate(share.query_ranks, initial=0),
            share.query_ranks,
            (share.keys[head // layer.geometry.queries_per_kv] for head in share.heads),
            strict=False,
        )
    ]
    unseen = ~torch.ones(LENGTH, LENGTH).bool().tril()
    want_lse = torch.stack(scores).masked_fill(unseen, -torch.inf).logsumexp(-1) * LOG2_E
    for at_once in (2**19, LENGTH * 10):
        with patch("kvfold.parallel.attend.SCORES", at_once):
            out, lse = attend(layer, share, received, need_lse=True)
        close(out, want)
        close(lse, want_lse)


# -- mistakes -----------------------------------------------------------------------------------


def told(group: dist.ProcessGroup, model: Any, first: bool, others: bool) -> str:
    """What a rank is told about its setting."""
    try:
        SequenceParallel(model, group, low_rank_exchange=others if dist.get_rank(group) else first)
    except ValueError as error:
        return str(error)
    return ""


def test_models_of_one_rank_are_refused(pool: Ranks) -> None:
    want = "low_rank_exchange=True: all tokens of this model have one rank: compress it with hybrid"
    assert all(x.startswith(want) for x in pool.run(2, told, tiny("llama-gqa"), True, True))


def test_bytes_of_one_rank_are_refused() -> None:
    spec = variant_layout(SHAPES["tiny"], Variant()).spec
    with pytest.raises(SettingError, match="all tokens of this model have one rank"):
        wire_bytes(spec, LENGTH, 2, low_rank_exchange=True)


def test_rankings_by_attention_are_refused(pool: Ranks) -> None:
    model, _ = hybrid(ratios=replace(RATIOS, by="attention"))
    want = "this model ranks tokens by the attention that they receive (by='attention')"
    assert all(want in x for x in pool.run(2, told, model, True, True))


def test_ranks_with_other_settings_are_told(pool: Ranks) -> None:
    want = "rank 1 has another low_rank_exchange than rank 0: give every rank the same"
    assert pool.run(2, told, tiny("llama-gqa"), True, False) == [want] * 2
