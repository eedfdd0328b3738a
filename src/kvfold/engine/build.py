"""From a model, folded or plain, and a cache configuration to a runner over a pool."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvfold.artifact import spec_of
from kvfold.cache.eviction import policies
from kvfold.cache.eviction.base import Policy
from kvfold.cache.pool import Pool
from kvfold.config import CacheConfig
from kvfold.engine.request import CacheParams
from kvfold.engine.runner import ModelRunner
from kvfold.formats import format_of
from kvfold.models.adapter import LONG_ROPE, rope_type
from kvfold.models.families import attention_windows, family_of
from kvfold.models.fold import LatentMaps, fold_model
from kvfold.models.folded import FoldedAttention
from kvfold.models.rotate import rotate_rows
from kvfold.ops.common.rotation import rotation
from kvfold.spec import CacheSpec, KeyKind, LayerSpec
from kvfold.spec.layout import CacheLayout, cache_layout, plain_spec, tiers

PAGE = 32  # rows, where neither the configuration nor the policy says
SHARE = 0.5  # of free memory, where kv_bytes is not given


def build_runner(
    model: Any, config: CacheConfig, *, num_slots: int, max_tokens: int, seed: int = 0
) -> ModelRunner:
    """Fold and rotate `model` in place as `config` asks, and give it a pool.

    num_slots: most sequences at once; max_tokens: longest sequence. Raises ValueError for settings
    that contradict each other or the model, and for a pool that cannot hold a page of each group.
    """
    policy = policies.get(config.evict) if config.evict else None
    _check(model, policy, config)
    layout = prepare(model, config, policy)
    pool = Pool(
        layout,
        config.kv_bytes or default_bytes(layout, num_slots, max_tokens, model.device),
        num_slots=num_slots,
        max_tokens=max_tokens,
        device=model.device,
    )
    limits = CacheParams(keep_tokens=config.keep_tokens, max_cache_tokens=config.max_cache_tokens)
    return ModelRunner(model, pool, policy=policy, cache=limits, seed=seed)


def _check(model: Any, policy: Policy | None, config: CacheConfig) -> None:
    kind = rope_type(model.config)
    if kind in LONG_ROPE:
        raise ValueError(
            f"rope_type {kind!r} gives a sequence other tables once it, or one beside it, is long; "
            "the engine does not serve it: use transformers' generate"
        )
    windowed = any(attention_windows(model.config))
    if windowed and config.packs_pages:
        raise ValueError(
            f"format={config.format!r}, residual={config.residual}: this model's sliding window "
            "drops old tokens row by row, and here they are packed together: leave both out and "
            "keep bits"
        )
    if policy is not None and windowed:
        raise ValueError(
            f"evict={policy.name!r}: this model's sliding window already drops old tokens, and "
            "eviction would drop others: leave evict out"
        )


def prepare(model: Any, config: CacheConfig, policy: Policy | None = None) -> CacheLayout:
    """Fold a plain model to rows, turn rows for their bits, and lay pages out."""
    spec, quantized = spec_of(model), (config.bits or 16) < 16
    family, chosen = family_of(model.config), format_of(config.format)
    turn = config.rotate and chosen.rotates and (quantized or bool(spec and spec.planned))
    if spec is None:
        spec = plain_spec(family.geometry(model.config))
        spec = _turned_spec(spec) if turn else spec
        maps = [_turned_maps(x, turn, model.device) for x in spec.layers]
        fold_model(model, family, spec, maps)
    elif turn:
        for attention, layer in zip(family.attentions(model), spec.layers, strict=True):
            if isinstance(attention, FoldedAttention) and layer.keys != "plain":
                rotate_rows(
                    attention, {x: _turn(tiers(x, config.bits, chosen)) for x in layer.latents}
                )
    return cache_layout(
        spec,
        page=_page(config, policy),
        itemsize=model.dtype.itemsize,
        bits=config.bits,
        sub_group=config.sub_group,
        zeros=config.zeros,
        tracked=[
            config.evict is not None or window is not None
            for window in attention_windows(model.config)
        ],
        format=config.format,
        residual=config.residual,
    )


def _page(config: CacheConfig, policy: Policy | None) -> int:
    """Rows a page: as configured, else as the policy was published with."""
    published = policy.page if policy else None
    return next(x for x in (config.page, published, PAGE) if x is not None)


def _turned_spec(spec: CacheSpec) -> CacheSpec:
    """Full keys and values as latents of full rank, whose maps can hold a rotation."""
    keys: KeyKind = "post" if spec.geometry.rope else "absorbed"
    layers = tuple(replace(x, keys=keys, values="fused") for x in spec.layers)
    return replace(spec, layers=layers)


def _turned_maps(layer: LayerSpec, turn: bool, device: torch.device) -> list[LatentMaps | None]:
    if not turn:
        return [None] * len(layer.latents)
    return [_rotation_maps(latent.rank, device) for latent in layer.latents]


def _rotation_maps(n: int, device: torch.device) -> LatentMaps:
    q = rotation(n).to(device)
    return LatentMaps(q, q, q.new_zeros(n))


def _turn(widths: Sequence[tuple[int, int]]) -> torch.Tensor:
    """A rotation of a latent that keeps its tiers apart; 16-bit tiers stay as they are."""
    blocks = [
        rotation(width) if bits < 16 else torch.eye(width, dtype=torch.float64)
        for width, bits in widths
    ]
    return torch.block_diag(*blocks) if blocks else torch.zeros(0, 0, dtype=torch.float64)


def default_bytes(
    layout: CacheLayout, num_slots: int, max_tokens: int, device: torch.device
) -> int:
    """Bytes for all slots at full length, or SHARE of the free memory if that is less."""
    pages = -(-max_tokens // layout.page)
    wanted = int((layout.page_bytes * pages + layout.tail_bytes) * num_slots * 1.05)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(min(wanted + 2**20, int(free * SHARE)), 1)
