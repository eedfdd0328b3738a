"""Which rows one pass reads, and how they fill a multiprocessor's shared memory."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from kvfold.layout.pages import Group, Segment
from kvfold.ops.common.pieces import Place, latents_of
from kvfold.ops.common.plan import padded_width

ROOM = 227 * 1024  # bytes of shared memory that a program may have
WARPS = 12  # most items of values, of 64 numbers of a row
PAGES = (16, 32, 64)  # rows of one; the more, the faster
STAGES, MOST_STAGES = 2, 8  # pages at once
BUFFERS = 2  # of weights
REBUILT_COLUMNS = 32  # query heads of a group whose keys are rebuilt: as many as eight warps score


def padded(heads: int, queries: int, rebuilt: bool) -> int | None:
    """Query heads of a KV head, with padding, as a program of `heads` KV heads takes them: 4 or 8,
    so that they fill its columns, at most half of them padding; None where they cannot."""
    columns = (REBUILT_COLUMNS,) if rebuilt else (16, 32)
    sizes = (n for n in (4, 8) if queries <= n <= 2 * queries and heads * n in columns)
    return next(sizes, None)


def unread(groups: Sequence[Group], queries: int, head_dim: int | None = None) -> str | None:
    """Why one pass does not serve these rows; None where it does: groups alike, each with keys a
    head, alike but for their place, and one value latent. head_dim: of keys that are rebuilt before
    RoPE, of a single group; None: keys are scored as they are stored."""
    first, *rest = groups
    if any(_shape(x) != _shape(first) for x in rest):
        return "groups of unlike layouts"
    layout, heads = first.layout, len(first.heads)
    keys, values = latents_of(first, "k"), latents_of(first, "v")
    if layout.itemsize != 2:
        return f"queries of {8 * layout.itemsize} bits"
    if padded(heads, queries, head_dim is not None) is None:
        return f"{heads} KV heads of {queries} query heads each"
    if head_dim is not None and (rest or padded_width(head_dim // 2) < 32):
        return f"keys of {head_dim} numbers rebuilt for {len(groups)} groups"
    if (
        any(x.side == "kv" or x.bits > 8 or x.per_channel for x in layout.segments)
        or layout.has_zero_points
    ):
        return "rows other than codes without zeros, keys and values apart"
    if [x[0].heads for x in keys] != [(h,) for h in first.heads] or len(values) != 1:
        return "other latents than keys of every head, and values of all"
    if len({tuple((x.bits, x.width) for x in own) for own in keys}) > 1:
        return "keys of other runs from head to head"
    if any(x.row_bytes % 4 for own in keys for x in own) or any(
        x.row_bytes % 16 for x in values[0]
    ):
        return "runs of keys that are no multiple of 4 bytes, or of values, of 16"
    if layout.tracked:
        return "rows with metrics, which want the weights that two passes leave"
    pages = PAGES if head_dim is None else PAGES[1:]
    if layout.page not in pages or len(items(values[0])) > WARPS:
        return f"pages of {layout.page} rows, or more values than warps hold"
    if stages(first, queries, head_dim) < STAGES:
        return "pages larger than half of a multiprocessor's memory"
    return None


def _shape(group: Group) -> tuple[Any, ...]:
    """What groups have in common whose pages are read alike."""
    layout = group.layout
    each = ((Place.of(group, x), x.side, x.bits, x.width) for x in layout.segments)
    return len(group.heads), layout.page, layout.scale, layout.tracked, *each


@lru_cache(maxsize=4096)
def serves(
    groups: tuple[Group, ...], queries: int, device: torch.device, head_dim: int | None = None
) -> bool:
    """Whether the kernel reads a layer's rows, and runs: on Hopper, with a PyTorch that compiles
    CUDA C++."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return hasattr(torch.cuda, "_compile_kernel") and unread(groups, queries, head_dim) is None


def weighers_scale(group: Group, rebuilt: bool) -> bool:
    """Whether weights are left as they are, once, and warps that weigh multiply them by the scales
    of their run: faster where runs are several or keys are rebuilt (4.6 times smaller 156 us a
    layer, not 162); of a single run it is slower (150, not 143)."""
    return rebuilt or len(latents_of(group, "v")[0]) > 1


def items(values: Sequence[Segment]) -> list[tuple[int, int, int, int]]:
    """Run, first word / 16, which bytes of words, and the run's column, of 64 numbers each."""
    found, column = [], 0
    for run, x in enumerate(values):
        words = x.row_bytes // 2
        for block in range(0, -(-words // 16), 2 if x.bits == 8 else 1):
            found += [(run, block, half, column) for half in range(2 if x.bits == 2 else 1)]
        column += x.width
    return found


def items_read(group: Group) -> list[tuple[int, ...]]:
    """`items` as the kernel reads them: `Item` of tools.cu."""
    (values,) = latents_of(group, "v")
    found = []
    for run, *own in items(values):
        place = Place.of(group, values[run])
        found.append((*own, values[run].bits, place.words, 2 * place.start, place.scale, 0))
    return found


def read_bytes(group: Group) -> int:
    """Bytes of a page up to its last scale, in whole 16."""
    layout = group.layout
    end = layout.blocks.scales.offset + layout.page * layout.scales_per_row * layout.scale
    return -(-end // 16) * 16


def products(keys: Sequence[Segment]) -> int:
    """16 numbers of a key's latent each: four threads load 4 bytes of a run at a time."""
    return sum(-(-x.row_bytes // 16) * (8 // x.bits) for x in keys)


def fast_pairs(head_dim: int) -> int:
    """Pairs of a key's numbers that are rebuilt; the others turn slowly."""
    return padded_width(head_dim // 2) // 2


def columns_of(group: Group, queries: int, rebuilt: bool) -> int:
    """Query heads of a group, with padding."""
    size = padded(len(group.heads), queries, rebuilt)
    assert size is not None, "rows that one pass does not serve"
    return len(group.heads) * size


def map_bytes(group: Group, queries: int, head_dim: int) -> int:
    """Of the maps that rebuild keys, of how these turn within 16 rows, and of scoring warps'
    queries, turns and sums."""
    fast, made = fast_pairs(head_dim), products(latents_of(group, "k")[0])
    warps = columns_of(group, queries, True) // 4
    own = 16 * fast + 64 + 512 * made + group.layout.page // 4 * fast
    return len(group.heads) * (made * 64 * fast + 8 * fast) + 128 * fast + warps * own


def fixed_bytes(group: Group, queries: int, head_dim: int | None) -> int:
    """Shared memory beside pages: buffers of weights, what rebuilds keys, and what is small."""
    columns = columns_of(group, queries, head_dim is not None)
    scorers = columns // (8 if head_dim is None else 4)
    number = len(items(latents_of(group, "v")[0]))
    each = columns * (2 * group.layout.page + 16) + 4 * columns + 4 * scorers
    beside = 4 * columns + 16 * (MOST_STAGES + BUFFERS) + 48 + 32 * number  # masses, barriers ..
    maps = 0 if head_dim is None else map_bytes(group, queries, head_dim)
    return BUFFERS * each + beside + maps


def stages(group: Group, queries: int, head_dim: int | None) -> int:
    return min(MOST_STAGES, (ROOM - fixed_bytes(group, queries, head_dim)) // read_bytes(group))


def shared_bytes(group: Group, queries: int, head_dim: int | None) -> int:
    pages = stages(group, queries, head_dim) * read_bytes(group)
    return pages + fixed_bytes(group, queries, head_dim)
