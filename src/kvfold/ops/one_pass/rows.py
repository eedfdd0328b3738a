"""Which layouts the one-pass kernel supports, and how it divides shared memory.

The kernel runs on Hopper only; `serves` decides whether it is chosen for a layer. Words such as
item, segment and split: see `ops.decode`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from kvfold.layout.pages import Group, Segment
from kvfold.ops.common.pieces import Place, latents_of
from kvfold.ops.common.plan import padded_width

ROOM = 227 * 1024  # bytes of shared memory per program
WARPS = 12  # most value items: 64 numbers of an entry each
PAGES = (16, 32, 64)  # supported entries per page; larger is faster
STAGES, MOST_STAGES = 2, 8  # fewest and most pages in shared memory at a time
BUFFERS = 2  # buffers of weights
# Query heads per group with reconstructed keys: four for each of eight warps.
RECONSTRUCTED_COLUMNS = 32


def padded(heads: int, queries: int, reconstructed: bool) -> int | None:
    """Return the query heads per KV head including padding, 4 or 8; None if the kernel does not
    support the number.

    The heads fill the columns of a program of `heads` KV heads; at most half of them are padding.
    """
    columns = (RECONSTRUCTED_COLUMNS,) if reconstructed else (16, 32)
    sizes = (n for n in (4, 8) if queries <= n <= 2 * queries and heads * n in columns)
    return next(sizes, None)


def unsupported_reason(
    groups: Sequence[Group], queries: int, head_dim: int | None = None
) -> str | None:
    """Say why the one-pass kernel does not support these groups; None if it does.

    All groups must have the same layout, with keys of every KV head in the same segments and one
    value latent. queries: query heads per KV head. head_dim: of keys that are reconstructed before
    RoPE, which needs a single group; None: keys are used as stored.
    """
    first, *rest = groups
    if any(_shape(x) != _shape(first) for x in rest):
        return "groups of unequal layouts"
    layout, heads = first.layout, len(first.heads)
    keys, values = latents_of(first, "k"), latents_of(first, "v")
    if layout.itemsize != 2:
        return f"queries of {8 * layout.itemsize} bits"
    if padded(heads, queries, head_dim is not None) is None:
        return f"{heads} KV heads of {queries} query heads each"
    if head_dim is not None and (rest or padded_width(head_dim // 2) < 32):
        return f"keys of {head_dim} numbers reconstructed for {len(groups)} groups"
    if (
        any(x.side == "kv" or x.bits > 8 or x.per_channel for x in layout.segments)
        or layout.has_zero_points
    ):
        return "entries other than codes without zero points, keys and values separate"
    if [x[0].heads for x in keys] != [(h,) for h in first.heads] or len(values) != 1:
        return "latents other than keys per KV head and values of all KV heads"
    if len({tuple((x.bits, x.width) for x in segments) for segments in keys}) > 1:
        return "keys with other segments from head to head"
    if any(x.row_bytes % 4 for segments in keys for x in segments) or any(
        x.row_bytes % 16 for x in values[0]
    ):
        return "segments of keys that are no multiple of 4 bytes, or of values, of 16"
    if layout.tracked:
        return "entries with metrics, which need the weights that only two passes store"
    pages = PAGES if head_dim is None else PAGES[1:]
    if layout.page not in pages or len(items(values[0])) > WARPS:
        return f"pages of {layout.page} entries, or more values than warps hold"
    if stages(first, queries, head_dim) < STAGES:
        return "pages larger than half of a multiprocessor's memory"
    return None


def _shape(group: Group) -> tuple[Any, ...]:
    """What groups must have in common to be read by one kernel."""
    layout = group.layout
    segments = ((Place.of(group, x), x.side, x.bits, x.width) for x in layout.segments)
    return len(group.heads), layout.page, layout.scale, layout.tracked, *segments


@lru_cache(maxsize=4096)
def serves(
    groups: tuple[Group, ...], queries: int, device: torch.device, head_dim: int | None = None
) -> bool:
    """Tell whether the kernel supports a layer on this device: Hopper, with a PyTorch that compiles
    CUDA C++."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return (
        hasattr(torch.cuda, "_compile_kernel")
        and unsupported_reason(groups, queries, head_dim) is None
    )


def weighers_scale(group: Group, reconstructed: bool) -> bool:
    """Tell whether the warps that sum values multiply weights by the scales of their segment.

    Otherwise the scoring warps do it. The former is faster with several segments or reconstructed
    keys (4.6x smaller: 156 us per layer instead of 162), slower with one segment (150 instead of
    143).
    """
    return reconstructed or len(latents_of(group, "v")[0]) > 1


def items(values: Sequence[Segment]) -> list[tuple[int, int, int, int]]:
    """List the value items, 64 numbers each: segment, first word / 16, which bytes of words, first
    column of the segment."""
    item_list, column = [], 0
    for segment, x in enumerate(values):
        words = x.row_bytes // 2
        for block in range(0, -(-words // 16), 2 if x.bits == 8 else 1):
            item_list += [(segment, block, half, column) for half in range(2 if x.bits == 2 else 1)]
        column += x.width
    return item_list


def items_read(group: Group) -> list[tuple[int, ...]]:
    """Return `items` as the kernel reads them: `Item` of tools.cu."""
    (values,) = latents_of(group, "v")
    records = []
    for segment, *position in items(values):
        place = Place.of(group, values[segment])
        records.append(
            (*position, values[segment].bits, place.words, 2 * place.start, place.scale, 0)
        )
    return records


def read_bytes(group: Group) -> int:
    """Return the bytes of a page up to its last scale, rounded up to a multiple of 16."""
    layout = group.layout
    end = layout.blocks.scales.offset + layout.page * layout.scales_per_row * layout.scale
    return -(-end // 16) * 16


def products(keys: Sequence[Segment]) -> int:
    """Return the number of matrix products, 16 numbers each, that cover a key's latent.

    Four threads load 4 bytes of a segment at a time.
    """
    return sum(-(-x.row_bytes // 16) * (8 // x.bits) for x in keys)


def fast_pairs(head_dim: int) -> int:
    """Return the number of a key's pairs that are reconstructed; the others rotate slowly."""
    return padded_width(head_dim // 2) // 2


def columns_of(group: Group, queries: int, reconstructed: bool) -> int:
    """Return the query heads of a group, including padding."""
    size = padded(len(group.heads), queries, reconstructed)
    assert size is not None, "a layout that the one-pass kernel does not support"
    return len(group.heads) * size


def map_bytes(group: Group, queries: int, head_dim: int) -> int:
    """Return the shared memory for the maps, their rotations within 16 entries, and the scoring
    warps' queries, rotations and sums."""
    fast, num_products = fast_pairs(head_dim), products(latents_of(group, "k")[0])
    warps = columns_of(group, queries, True) // 4
    warp_bytes = 16 * fast + 64 + 512 * num_products + group.layout.page // 4 * fast
    return (
        len(group.heads) * (num_products * 64 * fast + 8 * fast) + 128 * fast + warps * warp_bytes
    )


def fixed_bytes(group: Group, queries: int, head_dim: int | None) -> int:
    """Return the shared memory besides pages: buffers of weights, maps that reconstruct keys, and
    small arrays."""
    columns = columns_of(group, queries, head_dim is not None)
    scorers = columns // (8 if head_dim is None else 4)
    number = len(items(latents_of(group, "v")[0]))
    buffer_bytes = columns * (2 * group.layout.page + 16) + 4 * columns + 4 * scorers
    small_bytes = 4 * columns + 16 * (MOST_STAGES + BUFFERS) + 48 + 32 * number  # sums, barriers ..
    maps = 0 if head_dim is None else map_bytes(group, queries, head_dim)
    return BUFFERS * buffer_bytes + small_bytes + maps


def stages(group: Group, queries: int, head_dim: int | None) -> int:
    """Return how many pages fit into shared memory at a time."""
    return min(MOST_STAGES, (ROOM - fixed_bytes(group, queries, head_dim)) // read_bytes(group))


def shared_bytes(group: Group, queries: int, head_dim: int | None) -> int:
    """Return the bytes of shared memory per program."""
    pages = stages(group, queries, head_dim) * read_bytes(group)
    return pages + fixed_bytes(group, queries, head_dim)
