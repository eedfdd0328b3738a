"""Build a runner: from a model, folded or not, and a cache configuration."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvfold.cache.eviction import policies
from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.rescoring import as_rescoring
from kvfold.cache.sharing import SharingPool
from kvfold.config import AUTO, PAGE, CacheConfig
from kvfold.engine.requests.request import CacheParams
from kvfold.engine.runner.repair import check_repairs
from kvfold.engine.runner.runner import ModelRunner
from kvfold.hub.checkpoint import spec_of
from kvfold.layout import CacheSpec
from kvfold.layout.formats import format_of
from kvfold.layout.pages import (
    CacheLayout,
    cache_layout,
    plain_spec,
    with_coarse_bits,
    with_window,
)
from kvfold.maps.engine_model import check_servable, install, served_spec
from kvfold.maps.family import attention_family
from kvfold.maps.plain import measured_means, plain_sidecar, with_plain_maps
from kvfold.maps.sidecar import Sidecar
from kvfold.models.adapter import PAGED
from kvfold.models.copies import shared_copy
from kvfold.models.devices import is_offloaded
from kvfold.models.families import family_of, has_family
from kvfold.models.fold import fold_plain
from kvfold.models.foldable import check_weights
from kvfold.models.folded import attention_windows
from kvfold.models.merged import merge_products
from kvfold.models.rotary import LONG_ROPE, rope_type
from kvfold.models.rotate import rotate_model, with_full_rank_latents
from kvfold.ops.backend import use_triton
from kvfold.ops.decode import one_pass_page
from kvfold.utils.errors import SettingError, renamed

DEMOTED_BITS = 4  # of tokens that are demoted from 8 bits
SHARE = 0.5  # of free memory for the pool, if `kv_bytes` is not set


def build_runner(
    model: Any,
    config: CacheConfig,
    *,
    num_slots: int,
    max_tokens: int,
    seed: int = 0,
    owned: bool = False,
    policy: Policy | None = None,
    tokenizer: Any = None,
    maps: Sidecar | None = None,
) -> ModelRunner:
    """Build a runner with a pool as `config` says. It uses a copy of `model`, which shares its
    weights, is folded if it was not, and rotated for quantisation. `model` itself does not change,
    unless `owned`.

    num_slots: most sequences at once. max_tokens: longest sequence.
    owned: nobody else needs `model`, so the copy is not made.
    policy: eviction policy, instead of the one named in `config`.
    tokenizer: for policies with a re-scoring pass.
    maps: sidecar maps, for a model of any type.

    Raises ValueError for settings that contradict each other or the model, and for a pool that
    cannot hold one page of each group.
    """
    if maps is not None or not has_family(model.config):
        return _with_maps(model, maps, config, num_slots, max_tokens, owned)
    if policy is None and config.evict == AUTO:
        raise SettingError(
            "`evict='auto'` is measured before an engine is built: set `evict` to what "
            "kvfold.best_policy(model, tokenizer, keep_tokens=...) returns"
        )
    if policy is None and config.evict is not None:
        policy = policies.get(config.evict)
    compressed = spec_of(model)
    check_served(model.config, compressed, policy, config)
    if config.window:  # which only maps beside the weights have
        return _with_maps(model, None, config, num_slots, max_tokens, owned)
    check_scores(model, policy)
    check_weights(model, family_of(model.config))
    use_triton(model.device.type)
    limits = CacheParams(keep_tokens=config.keep_tokens, max_cache_tokens=config.max_cache_tokens)
    itemsize, device = model.dtype.itemsize, model.device.type
    layout = layout_of(model.config, compressed, config, policy, itemsize, device)
    spec, rotates = layout.spec, _rotates(compressed, config)
    windows = attention_windows(model.config)
    pool = _pool(layout, config, windows, num_slots, max_tokens, model.device)
    served = model if owned else shared_copy(model)
    if compressed is None:
        fold_plain(served, spec, measured_means(model) if rotates else None)
    elif rotates:
        rotate_model(served, spec, config.bits, format_of(config.format))
    twin = _twin(served, policy)
    merge_products(served, family_of(served.config))
    return ModelRunner(
        served,
        pool,
        policy=policy,
        cache=limits,
        seed=seed,
        tokenizer=tokenizer,
        twin=twin,
        repairs=config.repair,
    )


def _with_maps(
    model: Any,
    maps: Sidecar | None,
    config: CacheConfig,
    num_slots: int,
    max_tokens: int,
    owned: bool,
) -> ModelRunner:
    """A runner of a model of any type with sidecar maps (None: maps that drop nothing)."""
    check_sidecar_cache(config)
    if is_offloaded(model):
        raise SettingError(
            "`model` has weights that accelerate reads from the host or from disk at every step,"
            " which the engine does not: use kvfold.attach and transformers"
        )
    layers, maps = plain_sidecar(model) if maps is None else (maps.layers_of(model), maps)
    check_servable(model, layers)
    key_means = None
    if config.window:
        sliding, capped = (
            any(getattr(x, name) is not None for x in layers) for name in ("window", "softcap")
        )
        _check_window(config, sliding=sliding, capped=capped)
        key_means = [x.keys for x in measured_means(model)]
    use_triton(model.device.type)
    maps = with_plain_maps(maps, model, layers)
    spec = served_spec(maps.spec)
    windows = [layer.window for layer in layers]
    tracked = [window is not None for window in windows]
    layout = _paged(spec, config, tracked, model.dtype.itemsize, model.device.type, config.page)
    pool = _pool(layout, config, windows, num_slots, max_tokens, model.device)
    served = model if owned else shared_copy(model)
    rotated_format = format_of(config.format) if _rotates(maps.spec, config) else None
    rounded = config.bits, rotated_format
    maps_of_layers = install(served, layers, maps, spec, *rounded, key_means)
    served_layers = [replace(x, module=served.get_submodule(x.name)) for x in layers]
    return ModelRunner(served, pool, family=attention_family(served_layers), layers=maps_of_layers)


def check_sidecar_cache(config: CacheConfig) -> None:
    """Raises SettingError for cache settings that sidecar maps do not support."""
    if config.evict is not None or config.format != CacheConfig().format or config.repair:
        raise SettingError(
            f"`maps`: with maps beside the weights nothing is evicted, and the only format is"
            f" {CacheConfig().format!r}: leave `evict`, `repair` and `format` out, or fold the maps"
            " into the model (kvfold compress --fold)"
        )


def _pool(
    layout: CacheLayout,
    config: CacheConfig,
    windows: Sequence[int | None],
    num_slots: int,
    max_tokens: int,
    device: torch.device,
) -> SharingPool:
    """A pool of the size in `config`, or for all slots at full length. windows: sliding window of
    each layer."""
    size = config.kv_bytes or default_bytes(layout, num_slots, max_tokens, device)
    size = _without_windows(size, layout, config, num_slots)
    lengths = {"num_slots": num_slots, "max_tokens": max_tokens}
    with renamed(num_bytes="kv_bytes"), _blamed(config):
        return SharingPool(
            layout, size, **lengths, sliding_windows=windows, padding_slot=True, device=device
        )


def _without_windows(size: int, layout: CacheLayout, config: CacheConfig, num_slots: int) -> int:
    """Bytes that are left for pages. Raises SettingError if the windows of all slots, and of the
    padding slot, take all."""
    windows = layout.window_bytes * (num_slots + 1)
    if windows and windows >= size:
        several = num_slots > 1
        sequences = f"{num_slots} sequences" if several else "one sequence"
        fewer = "fewer sequences (`max_sequences`) or " * several
        raise SettingError(
            f"`window={config.window}` takes {windows} bytes for {sequences}, and the cache has"
            f" {size}: raise `kv_bytes`, or take {fewer}a shorter `window`"
        )
    return size - windows


def _check_window(cache: CacheConfig, *, sliding: bool, capped: bool) -> None:
    """Raises SettingError for a model whose attention cannot have an exact window. sliding, capped:
    whether some of its layers have a sliding window or capped scores."""
    if sliding or capped:
        what = "a sliding window" if sliding else "capped scores"
        raise SettingError(
            f"`window={cache.window}`: this model has layers with {what}, which exact windows do"
            " not support: leave `window` out"
        )


def _check_compressed(cache: CacheConfig, kept_fraction: float) -> None:
    """Raises SettingError for an exact window beside entries that are exact themselves."""
    if cache.window and kept_fraction >= 1:
        raise SettingError(
            f"`window={cache.window}` keeps the last tokens exactly beside compressed ones, and"
            " here all tokens keep all numbers in 16 bits: set `bits` to 8 or fewer, or leave"
            " `window` out"
        )


def _twin(served: Any, policy: Policy | None) -> Any:
    """A second copy of the model for policies that need gradients, which merged and compiled
    operations do not compute."""
    scorer = as_rescoring(policy)
    if scorer is None or not scorer.gradient_weighted:
        return None
    twin = shared_copy(served).eval()
    twin.config._attn_implementation = PAGED
    return twin


@contextmanager
def _blamed(config: CacheConfig) -> Iterator[None]:
    """Raise an error about the pool's size that names `page` or `residual`, if these are the
    cause."""
    try:
        yield
    except SettingError as error:
        settings = {"page": config.page, "residual": config.residual}
        names = " and ".join(f"`{name}={x}`" for name, x in settings.items() if x is not None)
        if config.kv_bytes is not None or not names:
            raise
        raise SettingError(
            f"{names}: pages of so many tokens take more than half of the free memory; use fewer,"
            " or set `kv_bytes`"
        ) from error


def check_served(
    config: Any, spec: CacheSpec | None, policy: Policy | None, cache: CacheConfig
) -> None:
    """Raises ValueError if the engine cannot serve a model with such a cache.

    config: the model's transformers config. spec: of the compressed model, else None.
    """
    if config._attn_implementation == PAGED:
        raise ValueError("this model belongs to an engine already (owned=True): load it again")
    kind = rope_type(config)
    if kind in LONG_ROPE:
        raise ValueError(
            f"rope_type {kind!r} changes the RoPE tables of a sequence when it, or another one in "
            "its batch, is long; the engine does not support it: use transformers' generate"
        )
    windowed = any(attention_windows(config))
    if windowed and cache.packs_pages:
        raise SettingError(
            f"{cache.packing}: this model's sliding window drops old tokens one by one, and here"
            " they are packed together: leave that out and keep `bits`"
        )
    if spec is not None and cache.window:
        raise SettingError(
            f"`window={cache.window}`: this model computes compressed keys and values, as its maps"
            " are folded into its weights: leave `window` out, or compress the model without"
            " `fold`"
        )
    if cache.window:
        geometry = family_of(config).geometry(config)
        _check_window(cache, sliding=windowed, capped=geometry.softcap is not None)
        _check_compressed(cache, (cache.bits or 16) / 16)
    if policy is not None and windowed:
        raise SettingError(
            f"`evict={policy.name!r}`: this model's sliding window already drops old tokens, and "
            "eviction would drop others: leave `evict` out"
        )
    if spec is not None and spec.hybrid is not None:
        _check_hybrid(config, spec, policy, cache)
    if spec is not None and cache.repair:
        check_repairs(spec)


def check_scores(model: Any, policy: Policy | None) -> None:
    """Raises SettingError for a policy that needs learned scores if the model has none."""
    if policy is not None and "learned" in policy.scorer.needs and not has_scores(model):
        raise SettingError(
            f"`evict={policy.name!r}`: this model has no learned scores; compress it with "
            "`learn_scores=True`, or take another policy, such as 'kvzip'"
        )


def has_scores(model: Any) -> bool:
    """Whether a model has learned eviction scores."""
    attentions = family_of(model.config).attentions(model)
    return all(getattr(x, "score_map", None) is not None for x in attentions)


def _check_hybrid(config: Any, spec: CacheSpec, policy: Policy | None, cache: CacheConfig) -> None:
    """Raises SettingError for settings that a model with mixed ranks (`hybrid`) does not
    support."""
    what = "this model's cache entries have two widths (`hybrid`)"
    if policy is not None:
        raise SettingError(
            f"`evict={policy.name!r}`: {what}, and eviction supports only one: leave `evict` out,"
            " or compress the model without `hybrid`"
        )
    if cache.packs_pages:
        raise SettingError(
            f"{cache.packing}: {what}, and tokens that are packed together cannot move: leave that"
            " out"
        )
    if _rotates(spec, cache):
        raise SettingError(
            f"`bits={cache.bits}`: {what}, the low-rank one of the leading numbers, which rotation"
            " would mix with the others: set `rotate=False`"
        )
    if any(attention_windows(config)) or spec.geometry.softcap is not None:
        raise SettingError(
            f"{what}, which attention with a sliding window or capped scores does not support: "
            "compress the model without `hybrid`"
        )


def layout_of(
    config: Any,
    compressed: CacheSpec | None,
    cache: CacheConfig,
    policy: Policy | None,
    itemsize: int,
    device: str = "cpu",
) -> CacheLayout:
    """The page layouts with which an engine stores a model.

    config: the model's transformers config. compressed: its spec if it is compressed. itemsize:
        bytes of an unquantised number. Pages have the configured size, else the policy's published
        size, else the size that is fastest on this type of device.
    """
    spec = compressed or plain_spec(family_of(config).geometry(config))
    if compressed is None and _rotates(compressed, cache):
        spec = with_full_rank_latents(spec)
    tracked = [bool(policy or spec.hybrid or window) for window in attention_windows(config)]
    page = cache.page or (policy.page if policy else None) or format_of(cache.format).rows
    return _paged(spec, cache, tracked, itemsize, device, page)


def _paged(
    spec: CacheSpec,
    cache: CacheConfig,
    tracked: Sequence[bool],
    itemsize: int,
    device: str,
    page: int | None,
) -> CacheLayout:
    """A layout with `page` entries per page (None: fastest on this type of device). tracked:
    whether each layer's entries carry positions and metrics."""

    def paged(page: int, bits: int | None = cache.bits) -> CacheLayout:
        return cache_layout(
            spec,
            page=page,
            itemsize=itemsize,
            bits=bits,
            sub_group=cache.sub_group,
            zeros=cache.zeros,
            tracked=tracked,
            format=cache.format,
            residual=cache.residual,
        )

    if page is None and device == "cuda" and cache.residual is None:
        page = one_pass_page(paged, spec.geometry.queries_per_kv)
    page = page or PAGE
    if cache.window:
        _check_compressed(cache, paged(page).kept_fraction)
        return with_window(paged(page), cache.window, itemsize)
    if cache.when_full != "demote":
        return paged(page)
    _check_demotion(spec, tracked)
    return with_coarse_bits(paged(page), paged(page * 8 // DEMOTED_BITS, DEMOTED_BITS))


def _check_demotion(spec: CacheSpec, tracked: Sequence[bool]) -> None:
    """Raises SettingError for a model whose tokens cannot be demoted to fewer bits. tracked:
    whether each layer's entries carry positions, because some of them are dropped or moved."""
    way_out = "leave `when_full` out"
    if spec.hybrid is not None:
        reason = "this model's cache entries have two widths (`hybrid`)"
    elif any(tracked):
        reason = "this model's sliding window drops old tokens one by one"
    elif spec.geometry.softcap is not None:
        reason = "this model caps its attention scores"
    elif any(layer.keys == "pre_rope" for layer in spec.layers):
        reason = (
            "this model's keys are stored before RoPE, and a demoted token would lose its place"
        )
        way_out = "compress it with a recipe such as 'fast' instead, or " + way_out
    else:
        return
    raise SettingError(f"`when_full='demote'`: {reason}: {way_out}")


def _rotates(compressed: CacheSpec | None, cache: CacheConfig) -> bool:
    """Whether entries are rotated before they are quantised."""
    quantized = (cache.bits or 16) < 16 or bool(compressed and compressed.planned)
    return cache.rotate and format_of(cache.format).wants_rotation and quantized


def default_bytes(
    layout: CacheLayout, num_slots: int, max_tokens: int, device: torch.device
) -> int:
    """Bytes for all slots at full length, but at most SHARE of the free memory."""
    wanted = layout.bytes_for(num_slots, max_tokens)
    return max(min(wanted, int(free_bytes(device) * SHARE)), 1)


def free_bytes(device: torch.device) -> int:
    """Bytes of free memory on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
