"""How a layer's heads are divided between ranks, and which numbers of a token each rank needs. No
tensors.

Shapes: N tokens, P ranks, Hq / Hk query / KV heads, d head dim.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, pairwise, product
from math import ceil, gcd, inf

from kvfold.layout import (
    CacheSpec,
    Geometry,
    Latent,
    LayerSpec,
    MixedRanks,
    Side,
)
from kvfold.ops.common.plan import longest_first
from kvfold.utils.errors import SettingError

SLACK = 1 / 32  # accepted extra work of the busiest rank if fewer numbers are sent then
RANKING_BYTES = 4  # of a token's importance, a float32
ColumnRange = tuple[int, int]  # of a KV head's keys or values: first column, numbers


@dataclass(frozen=True, kw_only=True)
class HeadShare:
    """The query heads of a layer that one rank computes, KV head by KV head.

    A token's message to that rank is [queries | stored latents | keys | values]: the latents that
    its KV heads need. If full keys or values (d numbers per KV head) are fewer numbers than a
    latent of many heads, they are sent instead (`sends_full_keys`, `sends_full_values`).
    """

    spec: LayerSpec
    geometry: Geometry
    heads: tuple[int, ...]
    sends_full_keys: bool
    sends_full_values: bool

    @cached_property
    def kv(self) -> tuple[int, ...]:
        """The KV heads of its query heads. Other shares may contain the first and the last of them
        too."""
        return tuple(dict.fromkeys(head // self.geometry.queries_per_kv for head in self.heads))

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Indices into `kv`, repeated so that each entry serves equally many query heads; without
        repetition if no KV head is divided between shares."""
        group = self.geometry.queries_per_kv
        counts = [sum(head // group == kv for head in self.heads) for kv in self.kv]
        return tuple(i for i, n in enumerate(counts) for _ in range(n // gcd(*counts)))

    @cached_property
    def latents(self) -> tuple[Latent, ...]:
        """The latents that are sent, in the order of the cache entry."""
        sides = {
            side
            for side, full in (("k", self.sends_full_keys), ("v", self.sends_full_values))
            if not full
        }
        latents = (x for x in self.spec.latents if {*x.heads} & {*self.kv})
        return tuple(x for x in latents if {*x.side} & sides)

    @cached_property
    def query_ranks(self) -> tuple[int, ...]:
        return tuple(key_rank(self.spec, self.geometry, head) for head in self.heads)

    @cached_property
    def output_ranks(self) -> tuple[int, ...]:
        return tuple(value_rank(self.spec, self.geometry, head) for head in self.heads)

    @cached_property
    def row_width(self) -> int:
        """Numbers of a message for keys and values."""
        full = (
            self.geometry.head_dim * len(self.kv) * (self.sends_full_keys + self.sends_full_values)
        )
        return sum(x.rank for x in self.latents) + full

    @property
    def width(self) -> int:
        """Numbers of a message."""
        return sum(self.query_ranks) + self.row_width

    @property
    def output_width(self) -> int:
        """Numbers of a token's output, the input of the output projection."""
        return sum(self.output_ranks)

    @cached_property
    def keys(self) -> list[ColumnRange]:
        """Columns of a message with the keys of `kv`, or what they are reconstructed from."""
        if self.sends_full_keys:
            return self._full_columns(1 + self.sends_full_values)
        return column_ranges(self.latents, "k", self.kv, sum(self.query_ranks))

    @cached_property
    def values(self) -> list[ColumnRange]:
        """Columns of a message with the values of `kv`, or what they are reconstructed from."""
        if self.sends_full_values:
            return self._full_columns(1)
        return column_ranges(self.latents, "v", self.kv, sum(self.query_ranks))

    def _full_columns(self, from_the_end: int) -> list[ColumnRange]:
        d, count = self.geometry.head_dim, len(self.kv)
        first = self.width - from_the_end * d * count
        return [(first + i * d, d) for i in range(count)]


def column_ranges(
    latents: Sequence[Latent], side: Side, kv: Iterable[int], first: int = 0
) -> list[ColumnRange]:
    """(first column, numbers) of the keys or values of KV heads, in latents that start at column
    `first`."""
    starts = accumulate((x.rank for x in latents), initial=first)
    candidates = [(x, start) for x, start in zip(latents, starts, strict=False) if side in x.side]
    return [next((at, x.rank) for x, at in candidates if head in x.heads) for head in kv]


def key_rank(spec: LayerSpec, geometry: Geometry, head: int) -> int:
    """Numbers of a query head from which its scores are computed."""
    reconstructed = spec.keys == "pre_rope"
    return geometry.head_dim if reconstructed else _rank(spec.key_latents, geometry, head)


def value_rank(spec: LayerSpec, geometry: Geometry, head: int) -> int:
    """Numbers of a query head's output for the output projection."""
    return geometry.head_dim if spec.has_value_up else _rank(spec.value_latents, geometry, head)


def _rank(latents: Sequence[Latent], geometry: Geometry, head: int) -> int:
    return next(x.rank for x in latents if head // geometry.queries_per_kv in x.heads)


@lru_cache
def shares_of(spec: LayerSpec, geometry: Geometry, num_ranks: int) -> tuple[HeadShare, ...]:
    """Divide a layer's query heads between ranks, one share per rank.

    The busiest rank has as little attention work as possible with consecutive heads, or up to SLACK
    more if that sends fewer numbers. With more ranks than heads some ranks get none.

    Heads are tried in their order, and in the order that assigns KV heads, longest first, to the
    rank with the least work (ZACK §5.3).
    """
    group, kv = geometry.queries_per_kv, range(geometry.num_kv_heads)
    heads = range(geometry.num_query_heads)
    work = [key_rank(spec, geometry, h) + value_rank(spec, geometry, h) for h in heads]

    def cut(order: Sequence[int]) -> tuple[HeadShare, ...]:
        heads_in_order = [head for i in order for head in range(i * group, (i + 1) * group)]
        share = cache(
            lambda first, last: smallest(spec, geometry, tuple(heads_in_order[first:last]))
        )
        loads = [work[head] for head in heads_in_order]
        ends = run_ends(loads, num_ranks, lambda first, last: share(first, last).row_width)
        return tuple(share(*x) for x in pairwise([0, *ends]))

    def busiest(shares: tuple[HeadShare, ...]) -> int:
        return max(sum(work[head] for head in share.heads) for share in shares)

    longest = longest_first([work[i * group] for i in kv], [1] * len(kv), num_ranks).order
    assert longest is not None, "longest_first returns an order"
    candidates = [cut(kv), cut(longest.tolist())]
    limit = min(map(busiest, candidates)) * (1 + SLACK)
    fitting = (shares for shares in candidates if busiest(shares) <= limit)
    return min(fitting, key=lambda shares: sum(x.row_width for x in shares))


def smallest(spec: LayerSpec, geometry: Geometry, heads: tuple[int, ...]) -> HeadShare:
    """The share with the smallest message for these heads."""
    keys = (False, True) if spec.keys == "pre_rope" else (False,)
    values = (False, True) if spec.has_value_up else (False,)
    make = partial(HeadShare, spec=spec, geometry=geometry, heads=heads)
    options = (make(sends_full_keys=k, sends_full_values=v) for k, v in product(keys, values))
    return min(options, key=lambda x: x.row_width)


def run_ends(work: Sequence[int], parts: int, price: Callable[[int, int], int]) -> list[int]:
    """Divide items into `parts` consecutive ranges, and return their ends. With few items, ranges
    may be empty.

    The range with the most work has the least possible work, or up to SLACK more if that lowers the
    sum of price(first, last) over ranges.
    """
    sums, size = [0, *accumulate(work)], len(work)
    busiest = [0, *[inf] * size]  # least maximum for the first i items, in the ranges so far
    for _ in range(parts):
        busiest = [
            min(max(busiest[i], sums[j] - sums[i]) for i in range(j + 1)) for j in range(size + 1)
        ]
    most = busiest[size] * (1 + SLACK)
    best: list[tuple[float, list[int]]] = [(0, []), *[(inf, [])] * size]
    for _ in range(parts):
        best = [
            min(
                (best[i][0] + (price(i, j) if i < j else 0), [*best[i][1], j])
                for i in range(j + 1)
                if sums[j] - sums[i] <= most
            )
            for j in range(size + 1)
        ]
    return best[size][1]


def token_counts(num_tokens: int, num_ranks: int) -> list[int]:
    """Tokens per rank, in consecutive ranges: the first ranks may have one more than the last."""
    count, more = divmod(num_tokens, num_ranks)
    return [count + (rank < more) for rank in range(num_ranks)]


def low_rank_columns(share: HeadShare, low_rank: LayerSpec) -> list[int]:
    """The columns of a share's message that are sent for unimportant tokens: the first numbers of
    each head's queries and of each latent. low_rank: the layer's spec of unimportant tokens."""
    ranks = dict(zip(share.spec.latents, low_rank.latents, strict=True))
    sent_ranks = [key_rank(low_rank, share.geometry, head) for head in share.heads]
    sent_ranks += [ranks[latent].rank for latent in share.latents]
    starts = accumulate((*share.query_ranks, *(x.rank for x in share.latents)), initial=0)
    return [first + i for first, rank in zip(starts, sent_ranks, strict=False) for i in range(rank)]


def num_important(share: float, num_tokens: int) -> int:
    """The number of important tokens: `share` of num_tokens, rounded up."""
    return ceil(share * num_tokens - 1e-9)


def wire_bytes(
    spec: CacheSpec,
    num_tokens: int,
    num_ranks: int,
    itemsize: int = 2,
    low_rank_exchange: bool = False,
) -> int:
    """Bytes that all ranks together send to each other to prefill `num_tokens`, over all layers:
    queries, keys, values and attention outputs. itemsize: bytes of a number.

    What a rank sends to itself is not counted. For an uncompressed model, use the spec of
    `kvfold.layout.pages.plain_spec`. low_rank_exchange: as in `SequenceParallel`, what ranks tell
    each other about important tokens included; how many of them are on which rank is unknown, so
    this is exact if ranks have equally wide shares, and else for a prompt whose important tokens
    are spread evenly. Raises SettingError for a spec without such tokens.
    """
    if low_rank_exchange:
        check_low_rank(spec)
    counts, numbers = token_counts(num_tokens, num_ranks), 0
    for layer in spec.layers:
        pairs = zip(shares_of(layer, spec.geometry, num_ranks), counts, strict=True)
        numbers += sum((num_tokens - count) * (x.width + x.output_width) for x, count in pairs)
    total = numbers * itemsize
    return total - _saved_bytes(spec, counts, itemsize) if low_rank_exchange else total


def _saved_bytes(spec: CacheSpec, counts: Sequence[int], itemsize: int) -> int:
    """Bytes that `low_rank_exchange` saves. The first layer sends all tokens at full rank."""
    hybrid, low_rank, num_tokens = spec.hybrid, spec.low_rank, sum(counts)
    assert hybrid is not None and low_rank is not None, "all tokens store the same"
    numbers = 0.0
    for index in range(1, len(spec.layers)):
        unimportant = 1 - num_important(hybrid.important[index], num_tokens) / num_tokens
        shares = shares_of(spec.layers[index], spec.geometry, len(counts))
        for share, count in zip(shares, counts, strict=True):
            less = share.width - len(low_rank_columns(share, low_rank.layers[index]))
            numbers += unimportant * (num_tokens - count) * less
    rankings = len(ranking_layers(hybrid)) * 2 * (len(counts) - 1) * num_tokens
    return round(numbers) * itemsize - rankings * RANKING_BYTES


def check_low_rank(spec: CacheSpec) -> None:
    """Raises SettingError if tokens of these entries cannot be sent at two ranks."""
    if spec.hybrid is None:
        raise SettingError(
            "`low_rank_exchange=True`: all tokens of this model have one rank: compress it with"
            " `hybrid`, or leave `low_rank_exchange` out"
        )
    if spec.hybrid.by != "denominators":
        raise SettingError(
            "`low_rank_exchange=True`: this model ranks tokens by the attention that they receive"
            f" (by={spec.hybrid.by!r}), which ranks do not tell each other: compress it with"
            " by='denominators', or leave `low_rank_exchange` out"
        )


def ranking_layers(hybrid: MixedRanks) -> frozenset[int]:
    """The layers whose ranking of tokens a later layer's exchange uses."""
    return frozenset(hybrid.leaders[:-1])
