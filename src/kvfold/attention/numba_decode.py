"""Decode attention on CPUs by the Numba kernels of `ops.decode.numba`, for keys in the space of
scores.

The *part* of a step is the set of tokens of one attention call, here one of each decoding sequence.
`Parts` (`ops.common.parts`) is another word: the keys or values of a latent in its group.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.attention.backend import RESIDUAL, AttentionBackend, Task, Weighed
from kvfold.attention.base import LayerAttention, LayerShape
from kvfold.attention.metadata import AttentionMetadata, CacheView
from kvfold.attention.observer import Observer
from kvfold.attention.triton_decode import score_limits
from kvfold.cache.eviction.scorers.attention import observed
from kvfold.layout.pages import Group
from kvfold.ops.backend import no_numba
from kvfold.ops.common.parts import Parts, plan_parts, unsupported_reason


class NumbaDecode(AttentionBackend):
    """Serves keys in the space of scores, for latents of one KV head or of several, observed or
    not.

    plans: by layer. A step has one decoding part.
    """

    observes: ClassVar[bool] = True

    def __init__(self, view: CacheView, plans: Mapping[int, Parts]) -> None:
        super().__init__(view)
        self.plans = plans

    @classmethod
    def unsupported_reason(
        cls, layer: LayerShape, groups: Sequence[Group], task: Task
    ) -> str | None:
        if layer.reconstructs_keys:
            return "keys are stored before RoPE"
        if groups[0].layout.residual:
            return RESIDUAL
        return no_numba(task.device_type) or unsupported_reason(layer.spec, groups)

    @classmethod
    def prepare(
        cls, view: CacheView, layers: Sequence[LayerAttention], observer: Observer | None
    ) -> Callable[[CacheView], AttentionBackend]:
        plans = {
            x.index: plan_parts(
                x.spec, view.layout.groups_of_layer(x.index), x.geometry.queries_per_kv, view.dtype
            )
            for x in layers
        }
        return partial(cls, plans=plans)

    def attend(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, into: Tensor | None = None
    ) -> Tensor:
        """q [B, Hq, 1, .] -> [B, 1, W]."""
        from kvfold.ops.decode import numba

        observation, watch = self.view.observing, None
        if part.prompt_lengths is not None:
            assert observation is not None
            is_observed = observed(part.positions, part.prompt_lengths, observation)[:, 0]
            scorer = observation.scorer
            last = torch.where(is_observed, part.positions[:, 0] - scorer.exclude, -1)
            watch = numba.Watch(scorer.power, last)
        pages, plan = self.view.pages[layer.index], self.plans[layer.index]
        inputs, limits = (pages, part.slots, layer.scale, plan, watch), score_limits(layer, part)
        out, _ = numba.decode(q[:, :, 0].detach(), *inputs, layer.sinks, limits)
        return layer.merge_heads(out[:, :, None].to(q.dtype), into=into)

    def weigh(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Weighed:
        from kvfold.ops.decode import numba

        inputs = self.view.pages[layer.index], part.slots, layer.scale, self.plans[layer.index]
        limits = score_limits(layer, part)
        out, lse = numba.decode(q[:, :, 0].detach(), *inputs, None, limits=limits)
        return out[:, :, None], lse[..., None]
