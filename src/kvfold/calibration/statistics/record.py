"""Records statistics while a model runs: its attention function is replaced by this module's.

Shapes: T tokens of the window, Hq / Hk query / KV heads, G = Hq / Hk, d head dim, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from kvfold.calibration.statistics.moments import Moment
from kvfold.calibration.statistics.products import differentiable
from kvfold.calibration.statistics.quantities import (
    QUANTITIES,
    Attended,
    KeyValueGradients,
    OutputGradients,
    Window,
)
from kvfold.calibration.subspace import Subspace, subspace
from kvfold.layout import Geometry
from kvfold.models.adapter import Family, decoder_of
from kvfold.models.devices import input_device, is_offloaded, replaced_forward
from kvfold.ops.common.attention import attention

_ATTENTION = "kvfold_calibration"
RECOMPUTE_ABOVE = 10**9  # parameters; the activations of smaller models fit, which saves a third


def _attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return module.recorder.attention(module, *args, **kwargs)


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, eager_mask)


class Recorder:
    """The attention function of a calibration pass, and the sums that it records."""

    window: Window  # the current window, without RoPE
    windows: list[Window]  # the current window of every layer, with its RoPE

    def __init__(
        self, model: Any, family: type[Family], geometry: Geometry, needs: set[str]
    ) -> None:
        self.model, self.family, self.geometry = model, family, geometry
        self.quantities = {name: x for name, x in QUANTITIES.items() if name in needs}
        self.needs_backward = self._reads(KeyValueGradients) or self._reads(OutputGradients)
        self.subspaces: list[Callable[[], Subspace | None]] = [
            cache(partial(subspace, family, attention, geometry))
            for attention in family.attentions(model)
        ]
        self.index = {module: i for i, module in enumerate(family.attentions(model))}
        self.totals: list[dict[str, Any]] = [{} for _ in self.subspaces]
        self.hidden: dict[int, Tensor] = {}
        self.recomputing = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it, the model's attention calls this recorder. The model is restored at the
        end."""
        model, before = self.model, self.model.config._attn_implementation
        was_training, frozen = model.training, [p.requires_grad for p in model.parameters()]
        attentions = [*self.family.attentions(model), *self.family.unmeasured_attentions(model)]
        self.through_weights: list[str] = []
        try:
            model.eval().requires_grad_(False)
            for attention in attentions:
                attention.__dict__["recorder"] = self
            model.set_attn_implementation(_ATTENTION)
            with ExitStack() as stack:
                if self.needs_backward:
                    self._prepare_layers(stack)
                yield
        finally:
            model.set_attn_implementation(before)
            for attention in attentions:
                attention.__dict__.pop("recorder", None)
            model.train(was_training)
            for parameter, flag in zip(model.parameters(), frozen, strict=True):
                parameter.requires_grad_(flag)
            self.hidden.clear()

    def _prepare_layers(self, stack: ExitStack) -> None:
        """Make all layers differentiable, recompute the layers of a large or offloaded model in the
        backward pass (so that no weight is kept), and record each attention's input."""
        model = self.model
        like = torch.empty(0, dtype=model.dtype, device=input_device(model))
        self.through_weights = stack.enter_context(differentiable(model, like))
        large = sum(p.numel() for p in model.parameters()) > RECOMPUTE_ABOVE
        if recomputes := large or is_offloaded(model):
            # Else a layer's last module stops early, and accelerate does not free its weights.
            stack.enter_context(torch.utils.checkpoint.set_checkpoint_early_stop(False))
        for index, layer in enumerate(self.family.layers(model)):
            if recomputes:
                checkpoint = torch.utils.checkpoint.checkpoint
                recomputed = partial(checkpoint, layer.forward, use_reentrant=False)
                stack.enter_context(replaced_forward(layer, recomputed))
            if any(x.reads_hidden for x in self.quantities.values()):
                attention = getattr(layer, self.family.attention_name)
                keep = partial(self._keep_hidden, index)
                hook = attention.register_forward_pre_hook(keep, with_kwargs=True)
                stack.callback(hook.remove)

    def _keep_hidden(self, index: int, _: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        self.hidden[index] = (args[0] if args else kwargs["hidden_states"]).detach()

    def run(
        self,
        ids: Tensor,
        generator: torch.Generator,
        unpruned: bool,
        positions: Tensor | None = None,
    ) -> None:
        """Run one window of token ids [1, T], forward and, if gradients are read, backward.

        unpruned: whether ZDC's topic pruning keeps it. positions int64 [1, T]: of the tokens (None:
        from 0 on).
        """
        self.recomputing = False
        self.window = Window(
            scaling=self.geometry.scaling,
            softcap=self.geometry.softcap,
            tables=None,
            rope_scale=1.0,
            generator=generator,
            unpruned=unpruned,
        )
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rotations = self.family.layer_rope_tables(self.model, positions, len(self.totals))
        self.windows = [
            replace(self.window, tables=tables, rope_scale=scale, order=order)
            for tables, scale, order in rotations
        ]
        if self.needs_backward:
            self._backward_from_sampled_labels(ids)
        else:
            with torch.no_grad():
                decoder_of(self.model)(input_ids=ids, use_cache=False)

    def _backward_from_sampled_labels(self, ids: Tensor, chunk: int = 512) -> None:
        """Back-propagate the summed loss of labels drawn from the model's predictions.

        Logits exist for `chunk` positions at a time, since those of a 128K vocabulary are large.
        """
        model = self.model
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        hidden = decoder_of(model)(inputs_embeds=embedded, use_cache=False).last_hidden_state
        head = partial(self.family.logits, model)
        gradient = torch.empty_like(hidden)
        for part, out in zip(
            hidden.detach().split(chunk, 1), gradient.split(chunk, 1), strict=True
        ):
            leaf = part.requires_grad_()
            logits = head(leaf).float().flatten(0, 1)
            likely = logits.detach().softmax(-1)
            draw = self.window.generator  # on the device of the first layer
            drawn = torch.multinomial(likely.to(draw.device), 1, generator=draw)[:, 0]
            loss = nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")
            out.copy_(torch.autograd.grad(loss, leaf)[0])
        self.recomputing = True
        hidden.backward(gradient)

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute and record attention: q [1, Hq, T, d], k, v [1, Hk, T, d] after RoPE -> output
        [1, T, Hq, d].

        s_aux [Hq]: sinks, if the model has them. Layers that are not calibrated record nothing.
        """
        g, index = self.geometry, self.index.get(module)
        if index is None:
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            out = attention(
                query, key, value, attention_mask, scaling, softcap=softcap, sinks=s_aux
            )[0]
            return out.transpose(1, 2).contiguous(), None
        scaling = g.scaling if scaling is None else scaling
        query = query * (scaling / g.scaling)  # OPT scales queries itself: undo that
        window = self.windows[index]
        shared: dict[str, Any] = {"window": window, "subspace": self.subspaces[index]}
        if key.requires_grad and value.requires_grad and self._reads(KeyValueGradients):
            self._watch_gradients(index, shared, key, value)
        query, key = window.ordered(query), window.ordered(key)
        q = query.unflatten(1, (g.num_kv_heads, g.queries_per_kv))
        out = attention(
            query, key, value, attention_mask, g.scaling, softcap=g.softcap, sinks=s_aux
        )[0]
        out = out.unflatten(1, q.shape[1:3])
        if not self.recomputing:
            with torch.no_grad():
                tensors = {"q": q[0], "k": key[0], "v": value[0], "out": out[0]}
                self._record(index, Attended(**shared, **tensors, mask=attention_mask))
        if out.requires_grad and self._reads(OutputGradients) and not self.recomputing:
            out.register_hook(partial(self._saw_output_gradient, index, out.detach()[0]))
        return out.flatten(1, 2).transpose(1, 2).contiguous(), None

    def _watch_gradients(
        self, index: int, shared: dict[str, Any], key: Tensor, value: Tensor
    ) -> None:
        """Record the gradients of keys and values once they are summed over all attentions that
        read them: the layer's, and those of layers that share its keys and values."""
        ordered = shared["window"].ordered
        seen = {**shared, "k": ordered(key.detach()[0]), "v": value.detach()[0]}

        def saw(gradients: Sequence[Tensor | None]) -> None:
            grad_key, grad_value = gradients
            assert grad_key is not None and grad_value is not None
            self._saw_gradients(index, seen, ordered(grad_key), grad_value)

        if not self.recomputing:
            torch.autograd.graph.register_multi_grad_hook((key, value), saw)

    def _saw_gradients(
        self, index: int, seen: dict[str, Any], grad_key: Tensor, grad_value: Tensor
    ) -> None:
        """Record gradients [1, Hk, T, d] with respect to keys after RoPE and values."""
        seen = {**seen, "grad_key": grad_key[0], "grad_value": grad_value[0]}
        self._record(index, KeyValueGradients(**seen, hidden=self.hidden.get(index)))

    def _saw_output_gradient(self, index: int, out: Tensor, gradient: Tensor) -> None:
        self._record(index, OutputGradients(out=out, gradient=gradient[0]))

    def _reads(self, view: type) -> bool:
        return any(x.view is view for x in self.quantities.values())

    def _record(self, index: int, view: Attended | KeyValueGradients | OutputGradients) -> None:
        """Add what the statistics read from a view of layer `index` to their totals."""
        totals = self.totals[index]
        for name, quantity in self.quantities.items():
            if not isinstance(view, quantity.view) or (
                quantity.pruned and not self.window.unpruned
            ):
                continue
            term = quantity.read(view)
            if name in totals:
                totals[name] += term
            else:
                totals[name] = term

    def moments(self, centroids: int | None, seed: int) -> dict[int, dict[str, Moment]]:
        """Every layer's moments by name. centroids, seed: of ZDC's k-means."""
        return {
            index: {
                name: self.quantities[name].finish(total, centroids, seed)
                for name, total in totals.items()
            }
            for index, totals in enumerate(self.totals)
        }
