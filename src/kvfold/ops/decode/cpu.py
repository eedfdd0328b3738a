"""Decode attention on CPUs over one list of all layers' pages, without padding. Plain PyTorch.

Chosen by `attention.cpu_paged` where the Numba kernel is not. Eviction may leave groups with very
different lengths, so pages of all items stand in one list instead of a padded rectangle. Attention
is linear in the codes, so codes are multiplied as they are and never converted to a matrix of
numbers.

Shapes: B sequences, g groups of one page class, i = g * B items ((sequence, group) pairs, a group's
items consecutive), n pages of all items, P entries per page; Hk KV heads, G query heads per KV
head, w numbers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from kvfold.layout.formats.integers import codes_by_position, lowest, scale_of
from kvfold.layout.pages import UNIT, Group
from kvfold.ops.common.pages import PageClass, Plan, words_of


@dataclass(frozen=True)
class PageList:
    """The pages of all items of one page class, item after item.

    kind: the page class.
    counts int64 [i]: pages of each item, at least 1.
    item int64 [n]: item of each page.
    units int64 [n]: offset of each page in the arena, in units.
    last int64 [i]: number of each item's last page.
    hidden bool [i, P]: entries of the last page beyond the item's length.
    """

    kind: PageClass
    counts: Tensor
    item: Tensor
    units: Tensor
    last: Tensor
    hidden: Tensor

    def read(self, arena: Tensor) -> Tensor:
        """Copy the pages: uint8 [n, page_bytes]. Entries beyond a length, which may hold NaN,
        become 0."""
        layout = self.kind.layout
        size = layout.page_units * UNIT
        windows = arena.as_strided(((len(arena) - size) // UNIT + 1, size), (UNIT, 1))
        pages = windows.index_select(0, self.units)
        ends = pages[self.last]
        for block in layout.blocks.of_rows:
            if block.size:
                self.kind.block(ends, block, torch.uint8).masked_fill_(self.hidden[..., None], 0)
        pages[self.last] = ends
        return pages

    def sum(self, x: Tensor) -> Tensor:
        """Sum x fp32 [n, ...] over each item's pages: [i, ...]."""
        return torch.segment_reduce(x, "sum", lengths=self.counts, unsafe=True)

    def max(self, x: Tensor) -> Tensor:
        """Maximum of x fp32 [n, ...] over each item's pages: [i, ...]."""
        return torch.segment_reduce(x, "max", lengths=self.counts, unsafe=True)


@dataclass(frozen=True)
class Floats:
    """Unquantised numbers [n, P, width] of pages."""

    numbers: Tensor
    width: int

    def dots(self, x: Tensor) -> Tensor:
        """Dot products of x fp32 [n, G, width] with every entry: [n, G, P]."""
        return torch.bmm(x, self.numbers.float().mT)

    def mix(self, weights: Tensor, pages: PageList) -> Tensor:
        """Sum each item's entries weighted by weights [n, G, P]: [i, G, width]."""
        return pages.sum(torch.bmm(weights, self.numbers.float()))


@dataclass(frozen=True)
class Codes:
    """Quantised numbers of pages.

    packed uint8 [n, P, bytes]: codes of an entry's `width` numbers; scale fp32 and zero [n, 1, P],
    zero None without zero points. A number is scale * code + low, where low is the zero point, or
    what centres the codes on 0.
    """

    packed: Tensor
    width: int
    bits: int
    scale: Tensor
    zero: Tensor | None

    def dots(self, x: Tensor) -> Tensor:
        """Dot products of x fp32 [n, G, width] with every entry: scale * (x . code) + low * sum(x),
        [n, G, P]."""
        partial_dots = (
            torch.bmm(x[..., columns] * factor, codes.float().mT)
            for columns, factor, codes in codes_by_position(self.packed, self.width, self.bits)
        )
        dots = reduce(Tensor.add_, partial_dots).mul_(self.scale)
        return dots.addcmul_(self._low(), x.sum(-1, keepdim=True))

    def mix(self, weights: Tensor, pages: PageList) -> Tensor:
        """Sum each item's entries weighted by weights [n, G, P]: [i, G, width]."""
        steps = weights * self.scale
        total = pages.sum((weights * self._low()).sum(-1, keepdim=True))
        out = total.repeat(1, 1, self.width)
        for columns, factor, codes in codes_by_position(self.packed, self.width, self.bits):
            out[..., columns] += pages.sum(torch.bmm(steps, codes.float())) * factor
        return out

    def _low(self) -> Tensor:
        """The number that code 0 stands for: fp32 [n, 1, P]."""
        return lowest(self.scale, self.zero, self.bits)[..., 0]


def supports(groups: Sequence[Group]) -> bool:
    """Tell whether `attend_pages` supports these pages: floats, and integer codes with a scale per
    entry."""
    return all("decode" in x.format.kernels for group in groups for x in group.layout.segments)


def list_pages(
    layers: Sequence[tuple[slice, Plan]], tables: Tensor, slots: Tensor, lengths: Tensor
) -> list[list[PageList]]:
    """List the pages of every layer: per layer, a `PageList` per page class.

    layers: the slice of group numbers and the plan of each layer; tables int32
        [S, groups of all layers, pages]; slots int64 [B]; lengths int32 [B, groups of all layers]:
        of these sequences, at least 1.
    """
    kinds = [(groups.start, kind) for groups, plan in layers for kind in plan.kinds]
    group = torch.cat([start + kind.numbers for start, kind in kinds])
    page, batch = layers[0][1].page, len(slots)
    rows = lengths[:, group].T.flatten().long()
    counts = (rows + (page - 1)) // page
    item = torch.repeat_interleave(counts)
    ends = counts.cumsum(0)
    number = torch.arange(len(item)) - (ends - counts)[item]
    units = tables[slots[item % batch], group[item // batch], number].long()
    hidden = torch.arange(page) > ((rows - 1) % page)[:, None]
    sizes = [len(kind.numbers) * batch for _, kind in kinds]
    num_pages = [int(class_counts.sum()) for class_counts in counts.split(sizes)]
    per_class = (
        *(x.split(sizes) for x in (counts, ends, hidden)),
        *(x.split(num_pages) for x in (item, units)),
    )
    page_lists = (
        PageList(
            kind,
            count,
            item_of_page - item_of_page[0],
            groups,
            end - (end[0] - count[0]) - 1,
            beyond,
        )
        for (_, kind), count, end, beyond, item_of_page, groups in zip(
            kinds, *per_class, strict=True
        )
    )
    return [[next(page_lists) for _ in plan.kinds] for _, plan in layers]


def attend_pages(q: Tensor, data: Tensor, pages: PageList, scale: float) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v of one query per sequence over the groups of one page class.

    q [B, Hk, G, w], of the dtype of unquantised numbers, where KV head h belongs to the layer's
    group h; zero beyond a head's rank. data: of `PageList.read`. Returns fp32 [B, g, G, w] and the
    attention weights fp32 [n, G, P].
    """
    kind, batch, dtype = pages.kind, len(q), q.dtype
    items = (q[:, kind.numbers].float() * scale).transpose(0, 1).flatten(0, 1)
    keys = _segments(kind, data, "k", dtype)
    weights = _softmax(_scores(kind, keys, items.index_select(0, pages.item)), pages)
    parts = [numbers.mix(weights, pages) for numbers in _segments(kind, data, "v", dtype)]
    out = torch.cat([items[..., :0], *parts], -1)
    return out.unflatten(0, (-1, batch)).transpose(0, 1), weights


def add_metrics(arena: Tensor, data: Tensor, pages: PageList, values: Tensor) -> None:
    """Add values fp32 [n, P] to the eviction metrics of pages that `PageList.read` returned as
    `data`.

    Metrics of entries beyond a length are undefined afterwards.
    """
    metrics = pages.kind.layout.blocks.metrics
    start = pages.units * (UNIT // 4) + metrics.offset // 4
    address = start[:, None] + torch.arange(values.shape[1])
    new = pages.kind.block(data, metrics, torch.float32)[..., 0] + values
    words_of(arena, torch.float32).scatter_(0, address.flatten(), new.flatten())


def positions_of(data: Tensor, pages: PageList) -> Tensor:
    """Return the token positions of the pages' entries: int32 [n, P], 0 beyond a length."""
    return pages.kind.block(data, pages.kind.layout.blocks.positions, torch.int32)[..., 0]


def _softmax(scores: Tensor, pages: PageList) -> Tensor:
    """Softmax over all entries of an item. scores [n, G, P] become the weights, in place."""
    scores[pages.last] = scores[pages.last].masked_fill_(pages.hidden[:, None], -torch.inf)
    most = pages.max(scores.amax(-1)).index_select(0, pages.item)
    weights = scores.sub_(most[..., None]).exp_()
    total = pages.sum(weights.sum(-1)).index_select(0, pages.item)
    return weights.div_(total[..., None])


def _scores(kind: PageClass, keys: Iterable[Codes | Floats], q: Tensor) -> Tensor:
    """Scores of q [n, G, w] with the keys of every page: [n, G, P]."""
    scores, begin = [q.new_zeros(*q.shape[:2], kind.layout.page)], 0
    for numbers in keys:
        scores.append(numbers.dots(q[..., begin : begin + numbers.width]))
        begin += numbers.width
    return reduce(Tensor.add_, scores)


def _segments(
    kind: PageClass, data: Tensor, side: str, dtype: torch.dtype
) -> Iterator[Codes | Floats]:
    """Yield the segments of one side in pages uint8 [n, page_bytes], in the order of the side's
    columns."""
    for i, segment in enumerate(kind.layout.segments):
        if side not in segment.side:
            continue
        if segment.quantized:
            scale, *zero = (x[:, None] for x in kind.metadata(data, i))
            steps = scale_of(scale, segment.bits)
            low = zero[0] if zero else None
            yield Codes(kind.codes(data, i), segment.width, segment.bits, steps, low)
        else:
            yield Floats(kind.block(data, kind.layout.blocks.codes[i], dtype), segment.width)
