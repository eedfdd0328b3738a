"""Apply the maps around attention to few tokens: one Triton launch before it and one after it.

Shapes as in `ops.maps`. A launch computes a list of products, each of a slice of a token's numbers
with a weight [K, columns]. Products are cut into tiles of COLUMNS columns: a program takes one tile
of weights and TOKENS inputs. If several query heads share a weight, each head of a token is an
input.
"""
# mypy: allow-untyped-defs

from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from kvfold.ops.common.launch import launch_options
from kvfold.ops.common.plan import cdiv, power_of_two
from kvfold.ops.common.recording import launch
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.decode.kernels import after_launch
from kvfold.ops.maps import EntryMaps, OutputMaps, reference

FEW = 256  # most tokens; above, plain PyTorch reuses tiles of weights
COLUMNS = 16  # of a tile: the fewest for tensor cores, so that many programs share the reading
DEPTH = 128  # most inputs that a program multiplies at once
STAGES = {16: 6, 32: 5, 64: 4}  # by tokens of a program
WARPS = {16: 2, 32: 4, 64: 4}
ALIGN = 8  # numbers of the widest load
QUERY, KEY, VALUE = 0, 1, 2  # sources of a product's inputs
FIELDS = 8  # of a tile, see `maps_kernel`


class Product(NamedTuple):
    """A product with weight [K, columns], plus bias [columns].

    source, head: inputs begin at this head of QUERY, KEY or VALUE. begin: first column of the
        outputs. heads: number of adjacent heads that share this weight; their outputs are `step`
        columns apart.
    """

    source: int
    head: int
    weight: Tensor
    bias: Tensor | None
    begin: int
    heads: int = 1
    step: int = 0


class Packed(NamedTuple):
    """The weights of a launch, in the layout that the kernel reads.

    weights: all tiles, one after another, each [K / depth, COLUMNS, depth], so that an iteration of
        a program's loop reads adjacent bytes. biases: fp32 [tiles, COLUMNS]. table: int32
        [tiles, FIELDS]. depth: inputs that a program multiplies at once. num_query_tiles: number of
        tiles that read queries; they come first. align: divides every K, up to ALIGN.
    """

    weights: Tensor
    biases: Tensor
    table: Tensor
    depth: int
    num_query_tiles: int
    align: int

    @classmethod
    def of(cls, products: Sequence[Product], like: Tensor) -> "Packed":
        products = [x for x in products if x.weight.shape[1]]
        sizes = [len(x.weight) for x in products]
        depth = depth_of(sizes)
        weights, biases, begin = [like.new_empty(0)], [], 0
        table: list[tuple[int, ...]] = []
        for product in products:
            tiles = _tiles(product.weight, depth)
            bias = like.new_zeros(product.weight.shape[1]) if product.bias is None else product.bias
            biases.append(pad(bias.float(), (0, -len(bias) % COLUMNS)).view(-1, COLUMNS))
            table += _rows(product, begin, tiles[0].numel())
            begin += tiles.numel()
            weights.append(tiles.flatten())
        return cls(
            weights=torch.cat(weights),
            biases=torch.cat(biases) if biases else torch.empty(0, COLUMNS, device=like.device),
            table=torch.tensor(table, dtype=torch.int32, device=like.device).view(-1, FIELDS),
            depth=depth,
            num_query_tiles=sum(row[0] == QUERY for row in table),
            align=gcd(ALIGN, *sizes),
        )


def depth_of(sizes: Sequence[int]) -> int:
    """Return how many inputs a program multiplies at once, for products with these numbers of
    inputs.

    The larger of two powers of two if it divides all sizes, else the smaller one.
    """
    most = min(DEPTH, max(16, power_of_two(max(sizes, default=0))))
    fitting = (most >> i for i in range(2) if all(x % (most >> i) == 0 for x in sizes))
    return next(fitting, max(16, most >> 1))


def _tiles(weight: Tensor, depth: int) -> Tensor:
    """Cut a weight [K, columns] into tiles [.., K / depth, COLUMNS, depth], padded with zeros."""
    rows, columns = weight.shape
    padded = pad(weight.detach(), (0, -columns % COLUMNS, 0, -rows % depth))
    cut = padded.view(cdiv(rows, depth), depth, cdiv(columns, COLUMNS), COLUMNS)
    return cut.permute(2, 0, 3, 1)


def _rows(product: Product, begin: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield the table's row for each tile of a product. size: weights of a tile; begin: offset of
    the first tile."""
    inputs, columns = product.weight.shape
    for tile, first in enumerate(range(0, columns, COLUMNS)):
        yield (
            product.source,
            product.head,
            product.heads,
            inputs,
            begin + tile * size,
            product.begin + first,
            min(COLUMNS, columns - first),
            product.step,
        )


def pack_entries(maps: EntryMaps) -> Packed:
    """Pack the weights of `score_space`; those for queries come first."""
    return Packed.of([*_of_queries(maps), *_of_entries(maps)], maps.key_up)


def pack_outputs(maps: OutputMaps) -> Packed:
    """Pack the weights of `outputs`."""
    heads, width = maps.queries, maps.mean.shape[1]
    heads_maps = zip(maps.value_up, maps.mean, maps.ranks, strict=True)
    products = [
        Product(QUERY, i * heads, up[:, :rank].mT, mean, i * heads * width, heads, width)
        for i, (up, mean, rank) in enumerate(heads_maps)
    ]
    return Packed.of(products, maps.value_up)


def _of_queries(maps: EntryMaps) -> Iterator[Product]:
    heads, width = maps.queries, maps.key_up.shape[2]
    for i, up in enumerate(maps.key_up):
        yield Product(QUERY, i * heads, up, None, i * heads * width, heads, width)


def _of_entries(maps: EntryMaps) -> Iterator[Product]:
    begin = 0
    for i, rank in enumerate(maps.key_ranks):
        yield Product(KEY, i, maps.key_down[i, :, :rank], -maps.key_shift[i, :rank], begin)
        begin += rank
    heads_per_latent = maps.value_down.shape[1] // maps.head_dim
    for i, rank in enumerate(maps.value_ranks):
        bias = -maps.value_shift[i, :rank]
        yield Product(VALUE, i * heads_per_latent, maps.value_down[i, :, :rank], bias, begin)
        begin += rank


@step_kernel
def maps_kernel(
    query, key, value, weights, biases, table, queries, entries, num_tokens,
    query_n, query_h, key_n, key_h, value_n, value_h, queries_n, entries_n,
    SPAN: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Program (tile, i): TOKENS inputs of a tile. x_n, x_h: strides from one token and from one
    head to the next; SPAN: numbers of a value head; ALIGN: divides all of these and K."""
    tile_row = table + tl.program_id(0) * FIELDS
    source, head, heads = tl.load(tile_row), tl.load(tile_row + 1), tl.load(tile_row + 2)
    K, begin = tl.load(tile_row + 3), tl.load(tile_row + 5)
    first = tl.multiple_of(tl.load(tile_row + 4), COLUMNS * 16)
    count, step = tl.load(tile_row + 6), tl.load(tile_row + 7)
    if tl.program_id(1) * TOKENS < num_tokens * heads:
        column, depth = tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
        bias = tl.load(biases + tl.program_id(0) * COLUMNS + column)
        item = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
        in_range, token, head_offset = item < num_tokens * heads, item // heads, item % heads
        x, x_n, x_h, span, out, out_n = query, query_n, query_h, SPAN, queries, queries_n
        if source != 0:
            out, out_n = entries, entries_n
            if source == 1:
                x, x_n, x_h = key, key_n, key_h
            else:
                x, x_n, x_h, span = value, value_n, value_h, value_h
        x, K = tl.multiple_of(x, 2 * ALIGN), tl.multiple_of(K, ALIGN)
        x_n, x_h = tl.multiple_of(x_n, ALIGN), tl.multiple_of(x_h, ALIGN)
        span = tl.multiple_of(span, ALIGN)
        x_row = x + token * x_n + (head + head_offset) * x_h
        tile = weights + first + column[:, None] * DEPTH + depth[None, :]
        after_launch(PDL)
        sums = tl.zeros([COLUMNS, TOKENS], tl.float32)
        for start in tl.range(0, K, DEPTH, num_stages=STAGES):
            k = start + depth
            at = x_row[None, :] + (k // SPAN * span + k % SPAN)[:, None]
            a = tl.load(at, in_range[None, :] & (k < K)[:, None], 0.0)
            sums = tl.dot(tl.load(tile + start * COLUMNS), a, sums)
        sums += bias[:, None]
        target = (
            out + token[None, :] * out_n + begin + (head_offset * step)[None, :] + column[:, None]
        )
        tl.store(
            target, sums.to(out.dtype.element_ty), in_range[None, :] & (column < count)[:, None]
        )


def score_space(
    maps: EntryMaps, query: Tensor, key: Tensor | None, value: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Like `ops.maps.score_space`. Queries are [N, Hq, r] in memory, the layout that decoding
    reads."""
    inputs = [query] if key is None or value is None else [query, key, value]
    if not _serves(inputs):
        return reference.score_space(maps, query, key, value)
    packed = maps.packed
    q = query.new_empty(*query.shape[:2], maps.key_up.shape[2])
    if key is None or value is None:
        sizes = maps.head_dim, maps.queries, packed.num_query_tiles, len(query) * maps.queries
        _launch(packed, [query] * 3, q, q, *sizes)
        return q.transpose(0, 1), None
    entries = query.new_empty(len(query), maps.entry_width)
    sizes = maps.head_dim, maps.queries, len(packed.table), len(query)
    _launch(packed, inputs, q, entries, *sizes)
    return q.transpose(0, 1), entries


def outputs(maps: OutputMaps, out: Tensor, into: Tensor | None = None) -> Tensor:
    """Like `ops.maps.outputs`."""
    sequences, _, tokens, _ = out.shape
    x = out[:, :, 0] if tokens == 1 else out[0].transpose(0, 1)
    if (sequences > 1 and tokens > 1) or not _serves([x]):
        return reference.outputs(maps, out, into)
    to = out.new_empty(sequences, tokens, maps.output_width) if into is None else into
    rows = to.view(-1, maps.output_width)
    packed = maps.packed
    sizes = packed.depth, maps.queries, len(packed.table), len(x) * maps.queries
    _launch(packed, [x] * 3, rows, rows, *sizes)
    return to


def _serves(inputs: Sequence[Tensor]) -> bool:
    """Whether the kernel supports these inputs, each [N, heads, numbers]."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return False
    return 0 < len(inputs[0]) <= FEW and all(x.stride(-1) == 1 for x in inputs)


def _launch(
    packed: Packed, inputs: Sequence[Tensor], queries: Tensor, entries: Tensor, span: int,
    heads: int, tiles: int, together: int,
) -> None:  # fmt: skip
    """Compute the first `tiles` tiles. span: SPAN of the kernel; heads: most heads that share a
    weight; together: inputs of a program, if that is a size it supports."""
    if not tiles:
        return
    number, weights = len(inputs[0]), packed.weights
    assert all(x.dtype is weights.dtype for x in inputs), "maps are in the model's dtype"
    strides = [n for x in inputs for n in _strides(x)]
    places = [x.data_ptr() // x.itemsize for x in inputs]
    tokens = min(max(STAGES), max(min(STAGES), power_of_two(together)))
    launch(
        maps_kernel, (tiles, cdiv(number * heads, tokens)),
        *inputs, weights, packed.biases, packed.table, queries, entries, number,
        *strides, queries.stride(0), entries.stride(0),
        SPAN=span, FIELDS=FIELDS, ALIGN=gcd(packed.align, span, *strides, *places),
        TOKENS=tokens, COLUMNS=COLUMNS, DEPTH=packed.depth, STAGES=STAGES[tokens],
        num_warps=WARPS[tokens], **launch_options(weights.device),
    )  # fmt: skip


def _strides(x: Tensor) -> tuple[int, int]:
    """Strides from one token and from one head to the next; 0 for a dimension of size 1, for which
    PyTorch's stride is arbitrary."""
    token, head = (n if size > 1 else 0 for n, size in zip(x.stride(), x.shape[:2], strict=False))
    return token, head
