"""The statistics that a calibration pass can measure: one entry of QUANTITIES each.

Shapes: T tokens of a window, Hk KV heads, G query heads per KV head, d head dim, K = Hk * d, D
model width, n a moment's width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvfold.calibration.statistics.moments import Moment
from kvfold.calibration.statistics.reduce import reduced_rows
from kvfold.calibration.subspace import Subspace
from kvfold.ops.common.attention import Tables, capped, rotate

# First tokens of a window that statistics `_weighted` (weighted by gradients) and `grad_` omit: see
# `basis.weighted`. Moments at attention outputs (`out_head_weighted`, `grad_out`) have all tokens.
FIRST = 1
_OUT_STRIDE = 4  # every 4th query position is enough for `out`, whose values are Hk times wider


@dataclass(frozen=True, kw_only=True)
class Window:
    """What all layers' views of one window share.

    scaling, softcap: of the model's scores. tables: RoPE tables of the window's positions (None: no
    RoPE); rope_scale: the square of RoPE's own scaling. order: int64 [d], the order of a key's
    numbers in which the tables rotate pairs (i, i + w / 2), which all statistics use (None: the
    model's order). generator: for random draws. unpruned: ZDC's topic pruning keeps the window.
    """

    scaling: float
    softcap: float | None
    tables: Tables | None
    rope_scale: float
    generator: torch.Generator
    unpruned: bool
    order: Tensor | None = None

    def ordered(self, x: Tensor) -> Tensor:
        """Keys or queries [.., d] in `order`."""
        return x if self.order is None else x[..., self.order]

    def rotate_back(self, x: Tensor) -> Tensor:
        """The transpose of RoPE applied to x [.., T, d], as gradients pass it."""
        if self.tables is None:
            return x
        cos, sin = self.tables
        return rotate(x.float(), cos[0], sin[0], sign=-1)

    def unrotate(self, x: Tensor) -> Tensor:
        """The inverse of RoPE applied to x [.., T, d]. It differs from the transpose by RoPE's
        scaling."""
        return self.rotate_back(x) / self.rope_scale


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Keys after RoPE and values [Hk, T, d] of one layer, which may differ in d. subspace: returns
    the layer's subspace."""

    window: Window
    subspace: Callable[[], Subspace | None]
    k: Tensor
    v: Tensor

    @cached_property
    def keys(self) -> Tensor:
        """Keys before RoPE [T, K]."""
        return _flat(self.window.unrotate(self.k))

    @cached_property
    def keys_and_values(self) -> Tensor:
        """Keys before RoPE and values [T, 2K]."""
        return torch.cat((self.keys, _flat(self.v)), -1)

    def coordinates(self, rows: Tensor) -> Tensor:
        """Vectors [.., 2K] as coordinates in the layer's subspace, if it has one."""
        where = self.subspace()
        return where.coordinates(rows) if where else rows


@dataclass(frozen=True, kw_only=True)
class Attended(Stored):
    """One layer's attention in the forward pass: q, out [Hk, G, T, d], mask [1, 1, T, T] or
    None."""

    q: Tensor
    mask: Tensor | None
    out: Tensor

    @cached_property
    def weights(self) -> Tensor:
        """Attention probabilities [Hk, G, T, T], fp32."""
        scores = torch.einsum("hgtd,hsd->hgts", self.q, self.k).float() * self.window.scaling
        scores = capped(scores, self.window.softcap)
        return (scores if self.mask is None else scores + self.mask[0]).softmax(-1)


@dataclass(frozen=True, kw_only=True)
class KeyValueGradients(Stored):
    """Gradients of the summed loss at a layer's keys after RoPE and values [Hk, T, d]. hidden:
    input of the attention module [1, T, D] (None where no statistic reads it)."""

    hidden: Tensor | None
    grad_key: Tensor
    grad_value: Tensor

    @cached_property
    def grad_before(self) -> Tensor:
        """Gradients at keys before RoPE [Hk, T, d]."""
        return self.window.rotate_back(self.grad_key)

    @cached_property
    def grads(self) -> Tensor:
        """Gradients at `keys_and_values` [T, 2K]."""
        return torch.cat((_flat(self.grad_before), _flat(self.grad_value)), -1)

    def side(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys before RoPE (i = 0) or values (1), without the first token, and their gradients
        [T - 1, K]."""
        widths = [x.shape[0] * x.shape[2] for x in (self.k, self.v)]
        both = self.keys_and_values[FIRST:], self.grads[FIRST:]
        vectors, gradients = (x.split(widths, -1)[i] for x in both)
        return vectors, gradients


@dataclass(frozen=True, kw_only=True)
class OutputGradients:
    """Attention outputs of a layer and the summed loss's gradient there [Hk, G, T, d]."""

    out: Tensor
    gradient: Tensor


MIN_SAMPLES = 4096  # tokens that `samples` keeps at least; at most twice as many


class Sampled:
    """Every `stride`-th token of all windows: rows [N, n]. The stride doubles as tokens are added,
    so that N stays between MIN_SAMPLES and twice that."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.stride = rows.cpu(), 1

    def __iadd__(self, other: "Sampled") -> "Sampled":
        self.rows = torch.cat((self.rows, other.rows[:: self.stride]))
        while len(self.rows) > 2 * MIN_SAMPLES:
            self.rows, self.stride = self.rows[::2], 2 * self.stride
        return self


@dataclass(frozen=True)
class Quantity:
    """A statistic and how it is measured. meaning: a description, with the shape of its second
    moment.

    view: the class of the argument of `read`, which is called for every window and layer; all but
    Attended need a backward pass. The results of `read` are summed with +=, and
    `finish(total, centroids, seed)` turns the sum into a Moment. reads_hidden: it reads the input
    of the attention module. pruned: only windows that ZDC's pruning keeps are counted.
    """

    meaning: str
    read: Callable[[Any], Any]
    view: type = Attended
    finish: Callable[[Any, int | None, int], Moment] = lambda total, *_: total
    reads_hidden: bool = False
    pruned: bool = False


def _flat(x: Tensor) -> Tensor:
    """Concatenate heads: [Hk, T, d] -> [T, K]."""
    return x.transpose(0, 1).flatten(1)


def _rotated_back(x: Attended) -> Moment:
    """The moment of R_{-j} q, with a key position j drawn from each query's attention weights."""
    drawn = torch.multinomial(x.weights.flatten(0, 2), 1, generator=x.window.generator)[:, 0]
    q = x.q.flatten(1, 2)
    if x.window.tables is None:
        return Moment.of(q)
    cos, sin = (table[0][drawn].unflatten(0, q.shape[:2]) for table in x.window.tables)
    return Moment.of(rotate(q.float(), cos, sin, sign=-1))


def _outputs_over_all(x: Attended) -> Moment:
    over_all = x.weights[:, :, ::_OUT_STRIDE].to(x.v.dtype) @ _flat(x.v)
    return Moment.of(over_all.flatten(0, 2))


def _kept_rows(x: Attended) -> list[Any]:
    return [tuple(part.detach().float().cpu() for part in (x.q.flatten(1, 2), x.k, x.v))]


def _grad_weighted(rows: Tensor, grads: Tensor) -> Moment:
    """The moment of vectors [N, n], each weighted by the norm of its gradient."""
    return Moment.of(rows, grads.norm(dim=-1))


def _grad_kv(x: KeyValueGradients) -> Moment:
    grads, where = x.grads[FIRST:], x.subspace()
    return Moment.of(grads.double() @ where.axes if where else grads)


def _first(x: KeyValueGradients) -> Moment:
    row = torch.cat((x.keys_and_values, _flat(x.k)), -1)[0].double()
    return Moment.once(row.square(), row)


def _samples(x: KeyValueGradients) -> Sampled:
    parts = x.keys_and_values, _flat(x.k), x.grads, _flat(x.grad_key)
    return Sampled(torch.cat(parts, -1)[FIRST:].float())


def _as_moment(sampled: Sampled, *_: Any) -> Moment:
    return Moment.once(sampled.rows, sampled.rows.sum(0))


def _grad_out(x: OutputGradients) -> Moment:
    """The sum over G query heads of E[g g^T]."""
    g = x.gradient.double()
    tokens = torch.full(g.shape[:1], g.shape[2], dtype=g.dtype, device=g.device)
    return Moment(torch.einsum("hgtd,hgte->hde", g, g), g.sum((1, 2)), tokens)


def _fisher_squares(x: KeyValueGradients) -> Moment:
    """Squares of this window's gradients of W_K and W_V, element by element [2, Hk, d, D].

    fp32 is enough, since the mean is taken over a few hundred squares.
    """
    assert x.hidden is not None
    hidden, sides = x.hidden[0].float(), (x.grad_before, x.grad_value)
    weights = [torch.einsum("htd,tc->hdc", g.float(), hidden) for g in sides]
    return Moment.once(torch.stack(weights).square_(), hidden.new_zeros(()))


def _fisher_score(squares: Moment, *_: Any) -> Moment:
    """As Palu's release: the root of the mean square of every element, averaged over each head."""
    windows = int(squares.weight)
    score = (squares.second.double() / windows).sqrt().mean((2, 3)).mT.contiguous()
    return Moment.once(score, score.sum(-1))


# The names are those in statistics files, and those that bases and rank methods list in `needs`.
QUANTITIES: dict[str, Quantity] = {
    "key_pre": Quantity("keys before RoPE, all heads [K, K]", lambda x: Moment.of(x.keys)),
    "value": Quantity("values, all heads [K, K]", lambda x: Moment.of(_flat(x.v))),
    "kv": Quantity(
        "keys before RoPE and values, in the subspace of the layer [<= 2K]",
        lambda x: Moment.of(x.coordinates(x.keys_and_values)),
    ),
    "key_post": Quantity("keys after RoPE, per head [Hk, d, d]", lambda x: Moment.of(x.k)),
    "key_seen": Quantity(
        "keys after RoPE weighted by the attention they receive [Hk, d, d]",
        lambda x: Moment.of(x.k, x.weights.sum((1, 2))),
    ),
    "query": Quantity(
        "queries after RoPE, summed over a KV head's query heads [Hk, d, d]",
        lambda x: Moment.of(x.q.flatten(1, 2)),
    ),
    "query_back": Quantity(
        "queries rotated back by an attended key's position [Hk, d, d]", _rotated_back
    ),
    "out": Quantity(
        "attention outputs over all heads' values, all query heads pooled [K, K]",
        _outputs_over_all,
    ),
    "out_head": Quantity(
        "attention outputs, query heads of a KV head pooled [Hk, d, d]",
        lambda x: Moment.of(x.out.flatten(1, 2)),
    ),
    "key_pre_weighted": Quantity(
        "keys before RoPE, each token weighted by its gradient's norm [K, K]",
        lambda x: _grad_weighted(*x.side(0)),
        KeyValueGradients,
    ),
    "kv_weighted": Quantity(
        "the same of keys before RoPE and values, in the subspace of the layer",
        lambda x: _grad_weighted(x.coordinates(x.keys_and_values[FIRST:]), x.grads[FIRST:]),
        KeyValueGradients,
    ),
    "key_post_weighted": Quantity(
        "keys after RoPE, each token weighted by its gradient's norm [Hk, d, d]",
        lambda x: _grad_weighted(x.k[:, FIRST:], x.grad_key[:, FIRST:]),
        KeyValueGradients,
    ),
    "value_weighted": Quantity(
        "values, each token weighted by its gradient's norm [K, K]",
        lambda x: _grad_weighted(*x.side(1)),
        KeyValueGradients,
    ),
    "out_head_weighted": Quantity(
        "the same of `out_head` [Hk, d, d]",
        lambda x: Moment.of(x.out.flatten(1, 2), x.gradient.norm(dim=-1).flatten(1)),
        OutputGradients,
    ),
    "grad_key_pre": Quantity(
        "loss gradient at keys before RoPE [K, K]",
        lambda x: Moment.of(x.side(0)[1]),
        KeyValueGradients,
    ),
    "grad_key_post": Quantity(
        "loss gradient at keys after RoPE [Hk, d, d]",
        lambda x: Moment.of(x.grad_key[:, FIRST:]),
        KeyValueGradients,
    ),
    "grad_value": Quantity(
        "loss gradient at values [K, K]", lambda x: Moment.of(x.side(1)[1]), KeyValueGradients
    ),
    "grad_kv": Quantity(
        "loss gradient at (keys before RoPE, values), in the layer's subspace",
        _grad_kv,
        KeyValueGradients,
    ),
    "first": Quantity(
        "a window's first token: keys before RoPE, values, keys after RoPE [3K]; squares",
        _first,
        KeyValueGradients,
    ),
    "samples": Quantity(
        "some tokens' keys before RoPE, values and keys after RoPE, and loss gradients there, not"
        " a moment [N, 6K]",
        _samples,
        KeyValueGradients,
        finish=_as_moment,
    ),
    "grad_out": Quantity(
        "loss gradient at attention outputs, summed over query heads [Hk, d, d]",
        _grad_out,
        OutputGradients,
    ),
    "fisher": Quantity(
        "root mean square gradient of W_K's and W_V's elements, mean a KV head [Hk, 2]",
        _fisher_squares,
        KeyValueGradients,
        finish=_fisher_score,
        reads_hidden=True,
    ),
    "rows_reduced": Quantity(
        "ZDC's k-means centroids of Q, K and V per head: second moments [Hk, 2, d, d]",
        _kept_rows,
        finish=reduced_rows,
        pruned=True,
    ),
}
