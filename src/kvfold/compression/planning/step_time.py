"""Predicted time of a decode step: bytes, products and launches, times what each was measured to
take.

Shapes: B sequences of T tokens each, a row a token; Hk KV heads, d head dim, r rank of a key
latent.
data/step_time.json has a device's coefficients; tools/fit_step_time.py makes it of what `kvfold
bench` measured, and says how far off it is. A step is every layer's `attention_work`, weights read
at the device's rate, and what it takes to launch layers and to choose tokens.
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

DEFAULT = "NVIDIA H200"  # whose coefficients serve where a device has none
BATCH, CONTEXT = 64, 8192  # of a step, where none are stated
PIECE = 64  # most 16-bit words of a row that kernels read at a time, where they do by pieces
ONE_PASS = 4096  # rows from which on Hopper reads them in one pass: `ops.one_pass.ROWS`
TIMED_HEADS = (
    8  # KV heads of all layers that were timed in two passes; with 2 they took twice as long
)
BYTES = "bytes"  # of `attention_work`: no work that adds up, but the least that it takes
ON_CHIP = 256  # numbers of a key latent whose maps kernels hold on chip


@dataclass(frozen=True, kw_only=True)
class Load:
    """The step that is asked about: sequences, and tokens that each has stored."""

    batch: int = setting(BATCH, "Sequences.", least=1)
    context: int = setting(CONTEXT, "Tokens.", least=1)

    def __post_init__(self) -> None:
        check(self)

    @property
    def rows(self) -> int:
        return self.batch * self.context

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step's milliseconds. device: whose coefficients; estimated: whether rows are read by
    kernels that were not timed for the table, or not with as many KV heads."""

    ms: float
    device: str
    estimated: bool


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """What work takes on a device. read: TB/s that a pure read reaches; attention: microseconds by
    the names of `attention_work`, estimated: those of them that rest on kernels since changed or
    on single figures; layer, sequence: microseconds a step beside attention and reading weights."""

    read: float
    attention: Mapping[str, float]
    estimated: Sequence[str]
    layer: float
    sequence: float

    def attention_us(self, work: Mapping[str, float]) -> float:
        """Of a layer, and no less than reading its bytes takes."""
        own = sum(self.attention[name] * us for name, us in work.items() if name != BYTES)
        return max(own, work.get(BYTES, 0.0))

    def step_us(self, weights: int, attention_us: float, layers: int, batch: int) -> float:
        """weights: bytes; attention_us: of all layers."""
        return (
            weights / self.read / 1e6 + attention_us + self.layer * layers + self.sequence * batch
        )


@lru_cache
def tables() -> dict[str, Coefficients]:
    """By device."""
    return {name: Coefficients(**x) for name, x in json.loads(packaged("step_time.json")).items()}


def load_of(config: Any, batch: int | None = None, context: int | None = None) -> Load:
    """The step that is stated, or BATCH x CONTEXT, of fewer tokens where the model has positions
    for fewer. Raises SettingError for more tokens than that."""
    longest = position_limit(config)
    if context is None:
        context = min(CONTEXT, longest or CONTEXT)
    elif longest is not None and context > longest:
        raise SettingError(
            f"`context` must be at most {longest}, the model's positions; got {context}"
        )
    return Load(batch=BATCH if batch is None else batch, context=context)


def predict(
    config: Any, spec: CacheSpec, load: Load, *, bits: int | None = None, device: str = DEFAULT
) -> Prediction | None:
    """The time of a decode step of a model that stores what `spec` says, in 16-bit numbers, or the
    bits that it plans, or `bits`; None where kernels do not serve all of its layers, or were not
    timed: with caps of scores.

    Every layer is taken to read all tokens. device: as CUDA calls it; DEFAULT serves for others.
    """
    shapes = layer_shapes(config, spec)
    whole = fastest_layout(config, spec, bits) if load.rows >= ONE_PASS else None
    tracked = [shape.window is not None for shape in shapes]
    layout = cache_layout(spec, itemsize=DTYPE.itemsize, bits=bits, tracked=tracked)
    capped = any(shape.softcap is not None for shape in shapes)
    if capped or not kernels(shapes, layout, DTYPE).complete:
        return None
    name = device if device in tables() else DEFAULT
    table = tables()[name]
    layout, one_pass = whole or layout, whole is not None
    work = [
        attention_work(layer, layout.of_layer(i), spec.geometry, load.rows, table.read, one_pass)
        for i, layer in enumerate(spec.layers)
    ]
    attention = sum(map(table.attention_us, work))
    us = table.step_us(step_bytes(config, spec), attention, len(work), load.batch)
    unlike = not one_pass and spec.geometry.num_kv_heads != TIMED_HEADS
    estimated = unlike or any(each.get(x) for each in work for x in table.estimated)
    return Prediction(ms=us / 1e3, device=name, estimated=estimated)


def rebuilt_keys(name: str, config: Any, spec: CacheSpec) -> str | None:
    """What a recipe's reconstructed keys cost at every decode step, for users; None where keys are
    scored as they are stored."""
    if all(layer.keys != "pre_rope" for layer in spec.layers):
        return None
    load, coded = load_of(config), any(x.codebooks for y in spec.layers for x in y.latents)
    own = None if coded else predict(config, spec, load)
    whole = predict(config, plain_spec(spec.geometry), load)
    if own is None or whole is None:
        return f"{name} trades time for memory: every decode step reconstructs all cached keys"
    times = own.ms / whole.ms
    trade = "trades time for memory" if times > 1 else "reconstructs all cached keys"
    return (
        f"{name} {trade}: a decode step takes about {times:.{1 if times < 10 else 0}f} times the"
        f" original's (predicted for {load} on an {own.device})"
    )


def attention_work(
    layer: LayerSpec,
    groups: Sequence[Group],
    geometry: Geometry,
    rows: int,
    read: float,
    one_pass: bool = False,
) -> dict[str, float]:
    """What a layer's decode attention over so many rows does. one_pass: by `ops.one_pass`.

    launch: 1. stored, rebuilt: microseconds that its bytes take at `read` TB/s, of kernels that
    score what is stored and of those that rebuild keys. codes: millions of numbers that are
    unpacked. products: billions of multiplications and additions, 2 d r a row and KV head, that
    rebuild keys, wide: those of the numbers beyond ON_CHIP, where all come at once. Millions of
    runs of equal bits that are read by themselves, of every KV head's keys and of values: runs, or
    rebuilt_runs by kernels that rebuild keys, with _16 where none has fewer bits; unpacked, by
    those that rebuild keys of rows they read at once. In one pass nothing counts but launch, whole:
    millions of rows (weighed by `_row_work`), by their runs of a head's keys and of values:
    whole_runs, even_runs: of values with an even number of 16 bytes, whole_rebuilt: of every KV
    head whose keys are rebuilt, beside: 1, for what a step has beside that pass, and BYTES:
    microseconds that its bytes take at `read` TB/s.
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
    in_pieces = kernel != "triton"
    if rebuilds:
        ranks = [x.rank for x in layer.key_latents for _ in x.heads]
        each = 2 * geometry.head_dim * rows / 1e9
        work["products"] = each * sum(ranks)
        work["wide"] = each * sum(max(0, rank - ON_CHIP) for rank in ranks) * (not in_pieces)
    alone = [x for x in segments if in_pieces or (rebuilds and x.quantized)]
    work[_kind(rebuilds, in_pieces, alone)] = rows / 1e6 * sum(_pieces(x) for x in alone)
    return work


def _bytes_us(groups: Sequence[Group], rows: int, read: float) -> float:
    each = (
        sum(x.row_bytes for x in layout.segments) + layout.scale * layout.scales_per_row
        for layout in (group.layout for group in groups)
    )
    return rows * sum(each) / read / 1e6


def _in_one_pass(
    groups: Sequence[Group], rows: int, queries: int, rebuilds: bool, read: float
) -> dict[str, float]:
    runs = even = 0
    for group in groups:
        (values,) = latents_of(group, "v")
        runs += len(latents_of(group, "k")[0]) + len(values)
        even += sum(run.row_bytes % 32 == 0 for run in values)
    millions = rows / 1e6 * _row_work(groups[0], queries, rebuilds)
    own = {"whole": millions * len(groups), "whole_runs": millions * runs}
    if rebuilds:
        own["whole_rebuilt"] = millions * sum(len(group.heads) for group in groups)
    own["even_runs"] = millions * even
    return {"launch": 1.0, **own, "beside": 1.0, BYTES: _bytes_us(groups, rows, read)}


def _row_work(group: Group, queries: int, rebuilds: bool) -> float:
    """What a row takes in one pass, of what it takes where 8 KV heads have 4 query heads each.

    Counted from the kernel's instructions, as no other shape was timed: a warp scores 8 query heads
    (padding included), for which it unpacks the keys of so many KV heads, one or two; a warp that
    weighs values multiplies them for every 16 query heads; the other half is the same for all.
    """
    if rebuilds:
        return 1.0  # 32 query heads, always
    from kvfold.ops.one_pass.rows import columns_of

    columns = columns_of(group, queries, rebuilds)
    unpacked = 8 * len(group.heads) / columns
    return (2 + unpacked + columns / 16) / 6


def _kind(rebuilds: bool, in_pieces: bool, alone: Sequence[Segment]) -> str:
    """What runs that are read by themselves are called in `attention_work`."""
    if rebuilds and not in_pieces:
        return "unpacked"
    packed = not alone or any(x.quantized for x in alone)
    return "rebuilt_" * rebuilds + "runs" + "_16" * (not packed)


def _pieces(run: Segment) -> int:
    """Of a run, those that each KV head's keys take and those that values take."""
    readers = len(run.heads) * ("k" in run.side) + ("v" in run.side)
    return -(-run.row_bytes // (2 * PIECE)) * readers
