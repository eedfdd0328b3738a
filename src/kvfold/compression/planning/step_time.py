"""Predicts the time of a decode step: its bytes, products and launches, times what each took when
it was measured.

A step is every layer's `attention_work`, the reading of all weights, and a time per layer and per
sequence. data/step_time.json has the coefficients of each device; benchmarks/fit_step_time.py fits
them to measurements by `kvfold bench`, and reports the errors of the fit. Shapes: B sequences of T
tokens each, one cache entry per token; Hk KV heads, d head dim, r rank of a key latent.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvfold.attention.selector import kernels
from kvfold.config import check, setting
from kvfold.layout import CacheSpec, Geometry, LayerSpec
from kvfold.layout.pages import Group, Segment, cache_layout, plain_spec
from kvfold.models.folded import layer_shapes
from kvfold.models.kernels import fastest_layout
from kvfold.models.rotary import position_limit
from kvfold.models.size import DTYPE, step_bytes
from kvfold.ops.backend import GPU
from kvfold.ops.common.pieces import latents_of
from kvfold.ops.decode import DECODE
from kvfold.ops.latent_decode import LATENT_DECODE
from kvfold.utils.errors import SettingError
from kvfold.utils.text import packaged

DEFAULT = "NVIDIA H200"  # its coefficients serve devices that have none
BATCH, CONTEXT = 64, 8192  # of the predicted step by default
TILE_WORDS = 64  # most 16-bit words of an entry that kernels read at once, if they read in tiles
ONE_PASS = 4096  # fewest entries that a Hopper GPU reads in one pass: `ops.one_pass.ROWS`
TIMED_HEADS = 8  # KV heads of the layers timed in two passes; layers of 2 took twice as long
BYTES = "bytes"  # a name of `attention_work` that is a lower bound, not a term of the sum
ON_CHIP = 256  # largest rank of a key latent whose maps kernels hold on chip


@dataclass(frozen=True, kw_only=True)
class DecodeLoad:
    """The decode step whose time is predicted: sequences, and tokens that each has stored."""

    batch: int = setting(BATCH, "Sequences.", least=1)
    context: int = setting(CONTEXT, "Tokens.", least=1)

    def __post_init__(self) -> None:
        check(self)

    @property
    def num_entries(self) -> int:
        """Cache entries of all sequences."""
        return self.batch * self.context

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time of a step in milliseconds.

    device: the one whose coefficients were used. estimated: whether the kernels were not timed, or
    not with as many KV heads.
    """

    ms: float
    device: str
    estimated: bool


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """What work costs on a device.

    read: bandwidth of a pure read in TB/s. attention: microseconds per unit, by the names of
    `attention_work`; estimated: those that were measured once, or with one recipe alone.
    layer, sequence: microseconds per step for each, apart from attention and reading weights.
    """

    read: float
    attention: Mapping[str, float]
    estimated: Sequence[str]
    layer: float
    sequence: float

    def attention_us(self, work: Mapping[str, float]) -> float:
        """Microseconds of a layer's attention; at least the time to read its bytes."""
        total = sum(self.attention[name] * count for name, count in work.items() if name != BYTES)
        return max(total, work.get(BYTES, 0.0))

    def step_us(self, weights: int, attention_us: float, layers: int, batch: int) -> float:
        """Microseconds of a step. weights: bytes; attention_us: of all layers."""
        return (
            weights / self.read / 1e6 + attention_us + self.layer * layers + self.sequence * batch
        )


@lru_cache
def tables() -> dict[str, Coefficients]:
    """The coefficients of every device."""
    return {name: Coefficients(**x) for name, x in json.loads(packaged("step_time.json")).items()}


def load_of(config: Any, batch: int | None = None, context: int | None = None) -> DecodeLoad:
    """The decode step to predict; by default BATCH sequences of CONTEXT tokens, or of fewer if the
    model has fewer positions. Raises SettingError for more tokens than positions."""
    longest = position_limit(config)
    if context is None:
        context = min(CONTEXT, longest or CONTEXT)
    elif longest is not None and context > longest:
        raise SettingError(
            f"`context` must be at most {longest}, the model's positions; got {context}"
        )
    return DecodeLoad(batch=BATCH if batch is None else batch, context=context)


def predict(
    config: Any,
    spec: CacheSpec,
    load: DecodeLoad,
    *,
    bits: int | None = None,
    device: str = DEFAULT,
) -> Prediction | None:
    """Predict the time of a decode step of a model with this plan.

    bits: of all numbers; None: the planned ones, or 16. device: CUDA's name of it; DEFAULT stands
    in for devices without coefficients. Every layer is assumed to read all tokens. Returns None
    where kernels do not serve all layers, or were not timed (capped scores).
    """
    shapes = layer_shapes(config, spec)
    one_pass_layout = fastest_layout(config, spec, bits) if load.num_entries >= ONE_PASS else None
    tracked = [shape.window is not None for shape in shapes]
    layout = cache_layout(spec, itemsize=DTYPE.itemsize, bits=bits, tracked=tracked)
    capped = any(shape.softcap is not None for shape in shapes)
    if capped or not kernels(shapes, layout, DTYPE).complete:
        return None
    name = device if device in tables() else DEFAULT
    table = tables()[name]
    layout, one_pass = one_pass_layout or layout, one_pass_layout is not None
    work = [
        attention_work(
            layer, layout.groups_of_layer(i), spec.geometry, load.num_entries, table.read, one_pass
        )
        for i, layer in enumerate(spec.layers)
    ]
    attention = sum(map(table.attention_us, work))
    us = table.step_us(step_bytes(config, spec), attention, len(work), load.batch)
    other_heads = not one_pass and spec.geometry.num_kv_heads != TIMED_HEADS
    estimated = other_heads or any(layer.get(x) for layer in work for x in table.estimated)
    return Prediction(ms=us / 1e3, device=name, estimated=estimated)


def reconstruction_cost(name: str, config: Any, spec: CacheSpec) -> str | None:
    """A sentence for users on what reconstructing keys costs in every decode step; None for plans
    whose keys are scored as they are stored."""
    if all(layer.keys != "pre_rope" for layer in spec.layers):
        return None
    load, coded = load_of(config), any(x.codebooks for y in spec.layers for x in y.latents)
    compressed = None if coded else predict(config, spec, load)
    original = predict(config, plain_spec(spec.geometry), load)
    if compressed is None or original is None:
        return f"{name} trades time for memory: every decode step reconstructs all cached keys"
    times = compressed.ms / original.ms
    trade = "trades time for memory" if times > 1 else "reconstructs all cached keys"
    return (
        f"{name} {trade}: a decode step takes about {times:.{1 if times < 10 else 0}f} times the"
        f" original's (predicted for {load} on an {compressed.device})"
    )


def attention_work(
    layer: LayerSpec,
    groups: Sequence[Group],
    geometry: Geometry,
    rows: int,
    read: float,
    one_pass: bool = False,
) -> dict[str, float]:
    """The work of a layer's decode attention over `rows` cache entries, by kind.

    The names are those of data/step_time.json. A tier that a kernel reads by itself is a run there.

    - launch: 1.
    - stored, rebuilt: microseconds to read the bytes at `read` TB/s, for kernels that score keys as
      they are stored, and for those that reconstruct keys.
    - codes: millions of numbers to unpack.
    - products: billions of multiply-adds to reconstruct keys, 2 d r per entry and KV head. wide:
      the part of them beyond rank ON_CHIP, for kernels that take all numbers at once.
    - runs, rebuilt_runs: millions of tiles of tiers, of every KV head's keys and of values, for
      the two kinds of kernels; with _16 where all tiers have 16 bits. unpacked: the same for
      kernels that reconstruct keys and read an entry at once.

    With `one_pass`, that is by `ops.one_pass`, the names are instead: launch; whole: millions of
    entries, weighted by `_entry_work`; whole_runs: times the tiers of a head's keys and of values;
    even_runs: times the value tiers of an even number of 16 bytes; whole_rebuilt: times the KV
    heads whose keys are reconstructed; beside: 1, for the rest of the step; BYTES: microseconds to
    read the bytes at `read` TB/s.
    """
    rebuilds, groups = layer.keys == "pre_rope", tuple(groups)
    if one_pass:
        return _in_one_pass(groups, rows, geometry.queries_per_kv, rebuilds, read)
    kernel = LATENT_DECODE.which(GPU, layer, groups) if rebuilds else DECODE.which(GPU, groups)
    layouts = [group.layout for group in groups]
    segments = [x for layout in layouts for x in layout.segments]
    us = _bytes_us(groups, rows, read)
    work = {
        "launch": 1.0,
        "rebuilt" if rebuilds else "stored": us,
        "codes": rows * sum(x.width for x in segments if x.quantized) / 1e6,
    }
    in_tiles = kernel != "triton"
    if rebuilds:
        ranks = [x.rank for x in layer.key_latents for _ in x.heads]
        per_rank = 2 * geometry.head_dim * rows / 1e9
        work["products"] = per_rank * sum(ranks)
        work["wide"] = per_rank * sum(max(0, rank - ON_CHIP) for rank in ranks) * (not in_tiles)
    separate = [x for x in segments if in_tiles or (rebuilds and x.quantized)]
    work[_kind(rebuilds, in_tiles, separate)] = rows / 1e6 * sum(_num_tiles(x) for x in separate)
    return work


def _bytes_us(groups: Sequence[Group], rows: int, read: float) -> float:
    """Microseconds to read the bytes of so many entries at `read` TB/s."""
    entry_bytes = (
        sum(x.row_bytes for x in layout.segments) + layout.scale * layout.scales_per_row
        for layout in (group.layout for group in groups)
    )
    return rows * sum(entry_bytes) / read / 1e6


def _in_one_pass(
    groups: Sequence[Group], rows: int, queries: int, rebuilds: bool, read: float
) -> dict[str, float]:
    """`attention_work` of the one-pass kernel. queries: query heads per KV head."""
    runs = even = 0
    for group in groups:
        (values,) = latents_of(group, "v")
        runs += len(latents_of(group, "k")[0]) + len(values)
        even += sum(run.row_bytes % 32 == 0 for run in values)
    millions = rows / 1e6 * _entry_work(groups[0], queries, rebuilds)
    counts = {"whole": millions * len(groups), "whole_runs": millions * runs}
    if rebuilds:
        counts["whole_rebuilt"] = millions * sum(len(group.heads) for group in groups)
    counts["even_runs"] = millions * even
    return {"launch": 1.0, **counts, "beside": 1.0, BYTES: _bytes_us(groups, rows, read)}


def _entry_work(group: Group, queries: int, rebuilds: bool) -> float:
    """The work of an entry in one pass, relative to 8 KV heads of 4 query heads each, which was
    timed.

    Counted from the kernel's instructions. A warp scores 8 query heads (padding included), for
    which it unpacks the keys of one or two KV heads; a warp that accumulates values multiplies them
    for every 16 query heads; the other half of the work is the same for all shapes.
    """
    if rebuilds:
        return 1.0  # 32 query heads, always
    from kvfold.ops.one_pass.rows import columns_of

    columns = columns_of(group, queries, rebuilds)
    unpacked = 8 * len(group.heads) / columns
    return (2 + unpacked + columns / 16) / 6


def _kind(rebuilds: bool, in_tiles: bool, separate: Sequence[Segment]) -> str:
    """The name in `attention_work` of tiers that are read separately."""
    if rebuilds and not in_tiles:
        return "unpacked"
    packed = not separate or any(x.quantized for x in separate)
    return "rebuilt_" * rebuilds + "runs" + "_16" * (not packed)


def _num_tiles(tier: Segment) -> int:
    """Tiles of a tier that kernels read: once per KV head for keys, once for values."""
    readers = len(tier.heads) * ("k" in tier.side) + ("v" in tier.side)
    return -(-tier.row_bytes // (2 * TILE_WORDS)) * readers
