"""What a calibration pass writes down: the model runs with this module's attention function.

Shapes: T tokens of the window, Hq / Hk query / KV heads, G = Hq / Hk, d head dim, K = Hk * d.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from kvfold.compression.reduce import Rows, reduced_rows
from kvfold.compression.statistics import Moment, Statistics
from kvfold.compression.support import Support
from kvfold.models.adapter import Family
from kvfold.ops.common.attention import Tables, attention, capped, rotate
from kvfold.spec import Geometry

GRADIENTS = {"grad_key_pre", "grad_value", "grad_kv", "grad_out", "grad_key_post", "fisher"}
READ_WEIGHTS = {"key_seen", "query_back", "out"}  # needs attention probabilities themselves
_ATTENTION = "kvfold_calibration"
RECOMPUTE_ABOVE = 10**9  # parameters; below, a window's activations fit and a third of it is saved
# Tokens of a window whose keys and values `_felt` and `grad_` leave out: see `basis.weighted`.
# Moments at attention outputs (`out_head_felt`, `grad_out`) have all.
FIRST = 1
_OUT_STRIDE = 4  # every 4th query position is enough for `out`, whose values are Hk times wider


def _attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return module.recorder.attention(module, *args, **kwargs)


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, eager_mask)


def _flat(x: Tensor) -> Tensor:
    """[Hk, T, d] -> [T, K]."""
    return x.transpose(0, 1).flatten(1)


class _Tap(torch.autograd.Function):
    """Identity on tensors whose gradients `record` wants to see together."""

    @staticmethod
    def forward(ctx: Any, record: Callable[..., None], *tensors: Tensor) -> Any:
        ctx.record = record
        views = tuple(tensor.view_as(tensor) for tensor in tensors)
        return views if len(views) > 1 else views[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.record(*gradients)
        return None, *gradients


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return partial(torch.utils.checkpoint.checkpoint, forward, use_reentrant=False)


class Recorder:
    """The attention function of a calibration pass and what it writes down."""

    def __init__(
        self,
        model: Any,
        family: type[Family],
        geometry: Geometry,
        statistics: Statistics,
        needs: set[str],
        supports: list[Support | None],
    ) -> None:
        self.model, self.family, self.geometry = model, family, geometry
        self.statistics, self.needs, self.supports = statistics, needs, supports
        self.tables: Tables | None = None
        self.rope_scale = 1.0
        self.recomputing = False
        self.keeps_rows = False
        self.generator: torch.Generator | None = None
        self.inputs: dict[int, Tensor] = {}
        self.rows: dict[int, list[Rows]] = {}
        self.squares: dict[int, Tensor] = {}

    @contextmanager
    def installed(self, gradients: bool) -> Iterator[None]:
        """The model with this recorder as its attention; everything is put back at the end."""
        model, before = self.model, self.model.config._attn_implementation
        was_training, frozen = model.training, [p.requires_grad for p in model.parameters()]
        hooks: list[Callable[[], None]] = []
        attentions = list(self.family.attentions(model))
        try:
            model.eval().requires_grad_(False)
            for attention in attentions:
                attention.__dict__["recorder"] = self
            model.set_attn_implementation(_ATTENTION)
            if gradients:
                hooks = self._prepare_layers()
            yield
        finally:
            for undo in hooks:
                undo()
            model.set_attn_implementation(before)
            for attention in attentions:
                attention.__dict__.pop("recorder", None)
            model.train(was_training)
            for parameter, flag in zip(model.parameters(), frozen, strict=True):
                parameter.requires_grad_(flag)
            self.inputs.clear()

    def _prepare_layers(self) -> list[Callable[[], None]]:
        """Recompute a large model's layers in backward, and see each attention's input."""
        undo: list[Callable[[], None]] = []
        large = sum(p.numel() for p in self.model.parameters()) > RECOMPUTE_ABOVE
        for index, layer in enumerate(self.family.layers(self.model)):
            if large:
                layer.forward = _recomputed(layer.forward)
                undo.append(partial(layer.__dict__.pop, "forward", None))
            if "fisher" in self.needs:
                attention = getattr(layer, self.family.attention_name)
                hook = attention.register_forward_pre_hook(
                    lambda _, args, kwargs, index=index: self._keep_input(index, args, kwargs),
                    with_kwargs=True,
                )
                undo.append(hook.remove)
        return undo

    def _keep_input(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs[index] = (args[0] if args else kwargs["hidden_states"]).detach()

    def start(self, tokens: int, generator: torch.Generator, keeps_rows: bool = False) -> None:
        """Prepare for one window of `tokens` tokens; keeps_rows: for `reduce_rows`."""
        self.generator, self.recomputing, self.keeps_rows = generator, False, keeps_rows
        rotary = self.family.rotary(self.model)
        if rotary is not None:
            like = torch.empty(0, dtype=torch.float32, device=self.model.device)
            self.tables = rotary(like, torch.arange(tokens, device=like.device)[None])
            self.rope_scale = float(getattr(rotary, "attention_scaling", 1.0)) ** 2

    def backward_from_sampled_labels(self, ids: Tensor, chunk: int = 512) -> None:
        """Back-propagate the summed loss of labels drawn from the model's own predictions.

        The logits exist for `chunk` positions at a time: 128K of vocabulary would not fit else.
        """
        model = self.model
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        hidden = model.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        head = partial(self.family.logits, model)
        gradient = torch.empty_like(hidden)
        for part, out in zip(
            hidden.detach().split(chunk, 1), gradient.split(chunk, 1), strict=True
        ):
            leaf = part.requires_grad_()
            logits = head(leaf).float().flatten(0, 1)
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=self.generator)
            loss = nn.functional.cross_entropy(logits, drawn[:, 0], reduction="sum")
            out.copy_(torch.autograd.grad(loss, leaf)[0])
        self.recomputing = True
        hidden.backward(gradient)

    # -- the attention function ---------------------------------------------------------------

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """q [1, Hq, T, d], k, v [1, Hk, T, d] after RoPE -> output [1, T, Hq, d]."""
        g, index = self.geometry, module.layer_idx
        scaling = g.scaling if scaling is None else scaling
        query = query * (scaling / g.scaling)  # OPT scales queries itself: undo that
        seen = key.detach()[0], value.detach()[0]
        if key.requires_grad and self.needs & GRADIENTS:
            key, value = _Tap.apply(lambda *g: self._saw_gradients(index, *seen, *g), key, value)
        grouped = query.unflatten(1, (g.num_kv_heads, g.queries_per_kv))
        out = attention(query, key, value, attention_mask, g.scaling, softcap=g.softcap)[0]
        out = out.unflatten(1, grouped.shape[1:3])
        if not self.recomputing:
            with torch.no_grad():
                self._saw(index, grouped[0], key[0], value[0], attention_mask, out[0])
        if out.requires_grad and "grad_out" in self.needs:
            own = out.detach()[0]
            out = _Tap.apply(lambda g: self._saw_out_gradient(index, own, g[0]), out)
        return out.flatten(1, 2).transpose(1, 2).contiguous(), None

    def _saw(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor
    ) -> None:
        """q, out [Hk, G, T, d], k, v [Hk, T, d], mask [1, 1, T, T]."""
        needs, add = self.needs, self.statistics.add
        before = self._unrotate(k)
        weights = self._weights(q, k, mask) if needs & READ_WEIGHTS else k
        if needs & {"key_pre", "kv"}:
            if "key_pre" in needs:
                add(index, "key_pre", _flat(before))
            if "kv" in needs:
                both, where = torch.cat((_flat(before), _flat(v)), -1), self.supports[index]
                add(index, "kv", where.coordinates(both) if where else both)
        if "value" in needs:
            add(index, "value", _flat(v))
        if "key_post" in needs:
            add(index, "key_post", k)
        if "key_seen" in needs:
            add(index, "key_seen", k, weights.sum((1, 2)))
        if "query" in needs:
            add(index, "query", q.flatten(1, 2))
        if "query_back" in needs:
            add(index, "query_back", self._turned_back(q, weights))
        if "out_head" in needs:
            add(index, "out_head", out.flatten(1, 2))
        if self.keeps_rows:
            kept = [x.detach().float().cpu() for x in (q.flatten(1, 2), k, v)]
            self.rows.setdefault(index, []).append((kept[0], kept[1], kept[2]))
        if "out" in needs:
            over_all = weights[:, :, ::_OUT_STRIDE].to(v.dtype) @ _flat(v)
            add(index, "out", over_all.flatten(0, 2))

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention probabilities [Hk, G, T, T] of q [Hk, G, T, d] over k [Hk, T, d], fp32."""
        scores = torch.einsum("hgtd,hsd->hgts", q, k).float() * self.geometry.scaling
        scores = capped(scores, self.geometry.softcap)
        return (scores if mask is None else scores + mask[0]).softmax(-1)

    def _saw_gradients(
        self, index: int, k: Tensor, v: Tensor, grad_key: Tensor, grad_value: Tensor
    ) -> None:
        """k, v [Hk, T, d] after RoPE, and gradients [1, Hk, T, d] with respect to them."""
        needs, add, where = self.needs, self.statistics.add, self.supports[index]
        before = self._rotate_back(grad_key[0])
        if "fisher" in needs:
            self._saw_fisher(index, before, grad_value[0])
        seen = torch.cat((_flat(self._unrotate(k)), _flat(v)), -1)
        felt = torch.cat((_flat(before), _flat(grad_value[0])), -1)
        if "first" in needs:
            self._saw_first(index, torch.cat((seen, _flat(k)), -1)[0].double())
        both, grads = seen[FIRST:], felt[FIRST:]
        if "grad_kv" in needs:
            add(index, "grad_kv", grads.double() @ where.axes if where else grads)
            add(index, "kv_felt", where.coordinates(both) if where else both, grads.norm(dim=-1))
        if "grad_key_post" in needs:
            own, g = k[:, FIRST:], grad_key[0, :, FIRST:]
            add(index, "grad_key_post", g)
            add(index, "key_post_felt", own, g.norm(dim=-1))
        sides = ("key_pre", "value")
        for name, x, g in zip(sides, both.chunk(2, -1), grads.chunk(2, -1), strict=True):
            if f"grad_{name}" in needs:
                add(index, f"grad_{name}", g)
                add(index, f"{name}_felt", x, g.norm(dim=-1))

    def _saw_first(self, index: int, x: Tensor) -> None:
        """x [3K] of a window's first token."""
        one = torch.ones((), dtype=x.dtype, device=x.device)
        self.statistics.accumulate(index, "first", Moment(second=x.square(), first=x, weight=one))

    def _saw_fisher(self, index: int, *gradients: Tensor) -> None:
        """Squares of this window's gradients of W_K and W_V, element by element [2, Hk, d, D].

        gradients: at keys before RoPE and at values [Hk, T, d]. fp32: a term is a square, and the
        root of the mean is taken over a few hundred of them.
        """
        x = self.inputs[index][0].float()
        weights = [torch.einsum("htd,tc->hdc", g.float(), x) for g in gradients]
        squares = torch.stack(weights).square_()
        self.squares[index] = self.squares[index] + squares if index in self.squares else squares

    def _saw_out_gradient(self, index: int, out: Tensor, gradient: Tensor) -> None:
        """out, gradient [Hk, G, T, d]; the sum over G query heads of E[g g^T] is kept."""
        g, norms = gradient.double(), gradient.norm(dim=-1)
        tokens = torch.full(g.shape[:1], g.shape[2], dtype=g.dtype, device=g.device)
        moment = Moment(
            second=torch.einsum("hgtd,hgte->hde", g, g), first=g.sum((1, 2)), weight=tokens
        )
        self.statistics.accumulate(index, "grad_out", moment)
        if "out_head_felt" in self.needs:
            self.statistics.add(index, "out_head_felt", out.flatten(1, 2), norms.flatten(1))

    def _rotate_back(self, x: Tensor) -> Tensor:
        """The transposed RoPE of x [.., T, d]: what a gradient goes through."""
        if self.tables is None:
            return x
        cos, sin = self.tables
        return rotate(x.float(), cos[0], sin[0], sign=-1)

    def _unrotate(self, x: Tensor) -> Tensor:
        """The inverse RoPE of x [.., T, d]; differs from the transpose by RoPE's own scaling."""
        return self._rotate_back(x) / self.rope_scale

    def _turned_back(self, q: Tensor, weights: Tensor) -> Tensor:
        """R_{-j} q for one key position j drawn from every attention row: [Hk, G * T, d]."""
        flat = weights.flatten(0, 2)
        drawn = torch.multinomial(flat, 1, generator=self.generator)[:, 0]
        q = q.flatten(1, 2)
        if self.tables is None:
            return q
        cos, sin = (table[0][drawn].unflatten(0, q.shape[:2]) for table in self.tables)
        return rotate(q.float(), cos, sin, sign=-1)

    def reduce_rows(self, centroids: int | None, seed: int) -> None:
        """ZDC §5.1: k-means over the rows of the windows that were kept."""
        for index, rows in self.rows.items():
            self.statistics.accumulate(index, "rows_reduced", reduced_rows(rows, centroids, seed))
        self.rows.clear()

    def reduce_fisher(self, windows: int) -> None:
        """Palu's release: the root of the mean square of every element, then their mean a head."""
        for index, squares in self.squares.items():
            score = (squares.double() / windows).sqrt().mean((2, 3)).mT.contiguous()
            one = torch.ones((), dtype=score.dtype, device=score.device)
            moment = Moment(second=score, first=score.sum(-1), weight=one)
            self.statistics.accumulate(index, "fisher", moment)
        self.squares.clear()
