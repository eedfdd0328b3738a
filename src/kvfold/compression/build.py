"""From a recipe and statistics to every layer's latents, each with its basis.

Shapes: Hk KV heads, d head dim, K = Hk * d, D width; n numbers a latent stands for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.compression.basis import Basis, orthonormal, weight_svd, weighted, whitened_svd
from kvfold.compression.statistics import Moment, Statistics
from kvfold.compression.support import Support
from kvfold.config import Recipe
from kvfold.models.adapter import Projections
from kvfold.spec import Geometry, KeyKind, Side


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A latent before its rank is known."""

    layer: int
    side: Side
    heads: tuple[int, ...]
    basis: Basis


@dataclass(frozen=True, kw_only=True)
class Source:
    """Everything a basis of one layer may use."""

    layer: int
    geometry: Geometry
    weights: Projections
    statistics: Statistics
    support: Support | None
    gradients: bool
    reduce: bool

    def felt(self, name: str) -> Moment:
        """A moment in which tokens that the loss feels more weigh more, where gradients are used.

        The loss of an error is E[(g . e)^2]; taking g and e as independent ignores that a few
        tokens carry most of the gradient. Weighing tokens by |g| is one step towards the nearest
        Kronecker product of E[g g^T x c c^T], and it measured 10-15 % less loss.
        """
        return self.statistics[self.layer, f"{name}_felt" if self.gradients else name]

    def first(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Keys before RoPE, values and keys after RoPE of a first token [K], with gradients."""
        if not self.gradients:
            return None
        k, v, rotated = self.statistics[self.layer, "first"].mean().chunk(3)
        return k, v, rotated


def needs(recipe: Recipe) -> set[str]:
    """Names of the statistics a recipe reads (statistics.QUANTITIES)."""
    wanted = {"fisher"} if recipe.ranks == "fisher" else set()
    if recipe.basis == "zack":
        wanted |= {"rows_reduced"} if recipe.reduce else {"query"}
        return wanted | {"key_post", "value"}
    if recipe.basis == "palu":
        return wanted | {"key_pre", "value"}
    if recipe.basis == "lorc":
        return wanted
    if recipe.keys == "kv":
        felt, plain = {"kv_felt", "grad_kv", "first"}, {"query_back"}
        return wanted | {"kv"} | (felt if recipe.gradients else plain)
    if recipe.basis == "post":
        felt, plain = {"key_post_felt", "grad_key_post"}, {"key_seen", "query"}
        wanted |= {"value", "key_post"}
    else:
        felt, plain = {"key_pre_felt", "grad_key_pre"}, {"query_back"}
        wanted |= {"value", "key_pre"}
    if recipe.values == "head":
        felt, plain = felt | {"out_head_felt", "grad_out"}, plain | {"out_head"}
    else:
        felt, plain = felt | {"value_felt", "grad_value"}, plain | {"out"}
    return wanted | (felt | {"first"} if recipe.gradients else plain)


def key_kind(recipe: Recipe, geometry: Geometry) -> KeyKind:
    if not geometry.rope:
        return "absorbed"
    return "post" if recipe.basis in ("zack", "post") else "pre"


def check(recipe: Recipe, geometry: Geometry, model_type: str) -> None:
    """Raises ValueError where a recipe cannot apply to a model."""
    if geometry.key_norm and recipe.basis in ("lorc", "palu"):
        raise ValueError(
            f"recipe {recipe.name!r} factors W_K, but {model_type} normalises keys after W_K; use "
            "zack, zdc, fast, swift, lean or small"
        )
    last = geometry.num_layers - 1
    if wrong := [layer for layer in recipe.skip_layers if not 0 <= layer <= last]:
        raise ValueError(
            f"skip_layers names {wrong}, but the model's layers are 0 to {last}: leave those out"
        )


def head_sets(recipe: Recipe, geometry: Geometry) -> list[tuple[Side, tuple[int, ...]]]:
    """Which heads share a latent: key latents first, then value latents."""
    heads = tuple(range(geometry.num_kv_heads))
    if recipe.keys == "kv":
        return [("kv", heads)]
    size = {"head": 1, "group": min(recipe.group_size, len(heads)), "joint": len(heads)}
    sides: list[tuple[Side, str]] = [("k", recipe.keys), ("v", recipe.values)]
    sets: list[tuple[Side, tuple[int, ...]]] = []
    for side, share in sides:
        step = size[share]
        sets += [(side, heads[i : i + step]) for i in range(0, len(heads), step)]
    return sets


def prospects(recipe: Recipe, source: Source) -> list[Prospect]:
    """One layer's latents with their bases, widest first direction first."""
    build = BUILDERS[recipe.basis]
    return [
        Prospect(layer=source.layer, side=side, heads=heads, basis=build(source, side, heads))
        for side, heads in head_sets(recipe, source.geometry)
    ]


def build_zack(source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
    """ZACK §4.3: rows [Q; K] after RoPE, or [V; W_O^h of the group's query heads]."""
    (head,), s, layer = heads, source.statistics, source.layer
    reduced = s[layer, "rows_reduced"] if source.reduce else None
    zero = torch.zeros(source.geometry.head_dim, dtype=torch.double, device=source.weights.k.device)
    if side == "k":
        keys = s[layer, "key_post"]
        rows = (
            reduced.second[head, 0].to(zero.device)
            if reduced
            else s[layer, "query"].second[head] + keys.second[head]
        )
        return orthonormal(rows, zero).measured(keys.raw()[head])
    values = s[layer, "value"]
    where = _span(source, heads)
    rows = reduced.second[head, 1].to(zero.device) if reduced else values.second[where, where]
    basis = orthonormal(rows + output_gram(source)[where, where], zero)
    return basis.measured(values.raw()[where, where])


def build_lorc(source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
    where = _span(source, heads)
    w = source.weights
    return (
        weight_svd(w.k[where], w.k_bias[where])
        if side == "k"
        else weight_svd(w.v[where], w.v_bias[where])
    )


def build_palu(source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
    where = _span(source, heads)
    moment = source.statistics[source.layer, "key_pre" if side == "k" else "value"]
    bias = (source.weights.k_bias if side == "k" else source.weights.v_bias)[where]
    width = min(where.stop - where.start, source.geometry.hidden_size)
    basis = whitened_svd(moment.raw()[where, where], moment.mean()[where], bias, width)
    return basis.measured(moment.covariance()[where, where])


def build_post(source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
    """Ours, after RoPE, per head. The constant mean of rotated keys drops out of the softmax."""
    if side == "v":
        return build_values(source, heads)
    (head,), s, layer = heads, source.statistics, source.layer
    keys = s[layer, "key_post_felt" if source.gradients else "key_seen"]
    weight = s[layer, "grad_key_post" if source.gradients else "query"]
    first = source.first()
    basis = weighted(
        keys.covariance()[head],
        weight.raw()[head],
        keys.mean()[head],
        first and first[2][_span(source, heads)],
    )
    return basis.measured(s[layer, "key_post"].covariance()[head])


def build_latent(source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
    """Ours, before RoPE: keys of some heads, values of some heads, or both of all heads."""
    if side == "kv":
        return build_shared(source)
    if side == "v":
        return build_values(source, heads)
    where = _span(source, heads)
    plain = source.statistics[source.layer, "key_pre"].covariance()[where, where]
    moment = source.felt("key_pre")
    covariance = moment.covariance()[where, where]
    first, gradient = source.first(), key_gradient(source)[where, where]
    basis = weighted(covariance, gradient, moment.mean()[where], first and first[0][where])
    return basis.measured(plain)


def build_values(source: Source, heads: tuple[int, ...]) -> Basis:
    """Ours for values. Of one head: errors are seen through attention, C = Cov(p V), G at its
    outputs; so are those of several without gradients. Else C and G at the values themselves."""
    s, layer, where = source.statistics, source.layer, _span(source, heads)
    name = "out_head_felt" if source.gradients else "out_head"
    if len(heads) == 1 and name in s.layers[layer]:
        out = s[layer, name]
        covariance, mean = out.covariance()[heads[0]], out.mean()[heads[0]]
        gradient = output_gradient(source)[where, where]
    else:
        seen = source.felt("value" if source.gradients else "out")
        covariance, mean = seen.covariance()[where, where], seen.mean()[where]
        gradient = s[layer, "grad_value"].raw() if source.gradients else output_gram(source)
        gradient = gradient[where, where]
    first = source.first()
    basis = weighted(covariance, gradient, mean, first and first[1][where])
    return basis.measured(s[layer, "value"].covariance()[where, where])


def build_shared(source: Source) -> Basis:
    """Ours: one latent for all keys and values of the layer, within what W_K and W_V can produce.

    Without gradients the two sides' weights have no common unit; each is scaled to the same total
    weighted energy.
    """
    s, layer, where = source.statistics, source.layer, source.support
    moment = source.felt("kv")
    covariance = moment.covariance()
    gradient = s[layer, "grad_kv"].raw() if source.gradients else _balanced(source, covariance)
    first = torch.cat(found[:2]) if (found := source.first()) else None
    if first is not None and where:
        first = where.coordinates(first[None])[0]
    basis = weighted(covariance, gradient, moment.mean(), first)
    basis = basis.measured(s[layer, "kv"].covariance())
    return basis.lifted(where.axes, where.origin) if where else basis


def _balanced(source: Source, covariance: Tensor) -> Tensor:
    """Key and value weights without gradients, each scaled to weighted energy one."""
    where, parts = source.support, source.geometry.kv_width
    lifted = where.axes @ covariance @ where.axes.mT if where else covariance
    blocks = []
    for i, block in enumerate((key_gradient(source), output_gram(source))):
        span = slice(i * parts, (i + 1) * parts)
        blocks.append(block / (block * lifted[span, span]).sum().clamp(min=1e-30))
    gradient = torch.block_diag(*blocks)
    return where.axes.mT @ gradient @ where.axes if where else gradient


BUILDERS: dict[str, Callable[[Source, Side, tuple[int, ...]], Basis]] = {
    "zack": build_zack,
    "lorc": build_lorc,
    "palu": build_palu,
    "post": build_post,
    "latent": build_latent,
}


def key_gradient(source: Source) -> Tensor:
    """How errors of keys before RoPE cost loss [K, K]; without gradients, through the scores of
    queries turned back to the key's position, one block per head."""
    s, layer = source.statistics, source.layer
    if source.gradients:
        return s[layer, "grad_key_pre"].raw()
    return torch.block_diag(*s[layer, "query_back"].raw())


def output_gradient(source: Source) -> Tensor:
    """How errors of attention outputs cost loss, one block per KV head [K, K]."""
    if source.gradients:
        return torch.block_diag(*source.statistics[source.layer, "grad_out"].raw())
    return output_gram(source)


def output_gram(source: Source) -> Tensor:
    """Sum over a KV head's query heads of W_O^h^T W_O^h, one block per KV head [K, K]."""
    g = source.geometry
    heads = source.weights.o.unflatten(1, (g.num_kv_heads, g.queries_per_kv, g.head_dim))
    return torch.block_diag(*torch.einsum("ohgd,ohge->hde", heads, heads))


def _span(source: Source, heads: tuple[int, ...]) -> slice:
    d = source.geometry.head_dim
    return slice(heads[0] * d, (heads[-1] + 1) * d)
