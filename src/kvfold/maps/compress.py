"""Make maps for any transformers model from one calibration pass."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvfold import recipes
from kvfold.calibration.statistics import NoGradients, Statistics
from kvfold.compression.bases import builder_of, recipes_where
from kvfold.compression.compressor import Compressor, Prepared
from kvfold.compression.planning.default import choose_for_maps
from kvfold.compression.planning.target import Target
from kvfold.config import Recipe
from kvfold.layout import CacheSpec, LayerSpec
from kvfold.maps.attach import attach_maps
from kvfold.maps.family import attention_family
from kvfold.maps.layer_maps import Maps, rounded
from kvfold.maps.layers import AttentionLayer, attention_layers, check_layers
from kvfold.maps.rope_maps import RopeMaps
from kvfold.maps.rotation import Rotation, find_rotations
from kvfold.maps.selection import LONG_CONTEXT, SHORT_CONTEXT, LayerSelection, select_layers
from kvfold.maps.sidecar import Sidecar, probes_of, sizes_of
from kvfold.models.fold import LatentMaps
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Progress

RECIPE = "swift"

logger = logging.getLogger(__name__)


def recipe_of(recipe: str | Recipe | None) -> Recipe:
    """The recipe of that name (None: RECIPE). Raises SettingError for a recipe that cannot make
    maps."""
    chosen = recipe if isinstance(recipe, Recipe) else recipes.get(recipe or RECIPE)
    if not builder_of(chosen).makes_maps:
        raise SettingError(
            f"`recipe={chosen.name!r}` makes no maps beside the weights: add `fold=True`, which"
            " folds it into them, or use " + recipes_where(lambda basis: basis.makes_maps)
        )
    return chosen


def make_maps(
    model: Any,
    tokenizer: Any,
    recipe: str | Recipe | None,
    target: Target,
    *,
    source: str,
    search: Callable[..., tuple[float, dict[str, Any]]] | None = None,
    windows: bool = False,
    align: int | None = None,
    statistics: Path | str | Statistics | None = None,
    progress: Progress | None = None,
    begun: Callable[[Compressor], object] | None = None,
    **calibration: Any,
) -> tuple[Compressor, Sidecar]:
    """Make maps that compress the cache of a loaded model. The model stays as it is. Settings are
    those of `kvfold.compress`.

    source: name of the model, for the provenance.
    search: finds the share to keep within a budget, and what it reaches, for the provenance.
    begun: called with the compressor before calibration starts.
    calibration: calib, max_tokens, seed and saved.

    Returns the compressor and the sidecar. `provenance["left"]` of the sidecar lists the layers
    without maps and their share of the cache (see `maps.selection`). Raises ValueError for settings
    that cannot work.
    """
    chosen = recipe_of(recipe)
    basis = builder_of(chosen)
    layers = attention_layers(model)
    check_layers(model, layers)
    selection = select_layers(model.config, layers, windows)
    if selection.summary():
        logger.info(selection.summary())
    names = {layer.name for layer in selection.layers}
    rotations = {} if basis.after_rope else find_rotations(model, layers, names)
    family = attention_family(selection.layers, rotations, selection.uncompressed)
    first_layer = selection.layers[0]
    if chosen.keys == "kv" and first_layer.head_dim != first_layer.value_dim:
        raise SettingError(
            f"`recipe` {chosen.name!r} stores keys and values together, and those of"
            f" {first_layer.name} differ in width, {first_layer.head_dim} and"
            f" {first_layer.value_dim}: use {RECIPE!r} or 'lean'"
        )
    chosen, target, reason = choose_for_maps(recipe, family, model.config, target)
    compressor = Compressor(model, chosen, tokenizer, family=family, **calibration)
    factor = compressor.factor_of(target, align)
    if begun is not None:
        begun(compressor)
    prepared, gradients = _prepare(compressor, statistics, progress)
    if gradients is not None:
        warnings.warn(f"{source}: gradients of the loss: {gradients}", stacklevel=2)

    def mapped(plan: CacheSpec) -> tuple[CacheSpec, dict[str, Maps]]:
        """What layers store by a plan, and the maps of the layers that have any, by name."""
        spec = unrotated_spec(plan, selection.layers, rotations)
        planned_layers = zip(selection.layers, spec.layers, prepared.maps(spec), strict=True)
        return spec, {
            layer.name: layer_maps(planned, latents, rotations.get(layer.name))
            for layer, planned, latents in planned_layers
            if latents
        }

    reached, final_target = dict[str, Any](), target
    if target.limit is not None:
        assert search is not None, "a budget needs a search"
        keep, reached = search(
            prepared,
            target.limit,
            align=align,
            progress=progress,
            applied=lambda plan: _attached(model, layers, mapped(plan)[1]),
        )
        final_target = replace(target, keep=keep, budget=None)
    plan = _plan(prepared, final_target, factor, align)
    spec, maps = mapped(plan)
    provenance = {
        "model": source,
        "model_type": model.config.model_type,
        "sizes": sizes_of(model.config),
        "recipe": asdict(prepared.compressor.recipe),
        **asdict(target),
        "keep": final_target.keep,
        **reached,
        "align": align,
        "predicted": _predicted(prepared, plan),
        "statistics": prepared.statistics.key,
        "chosen": reason,
        "gradients": gradients,
        "left": _left(selection) if selection.summary() else None,
    }
    sidecar = Sidecar(
        maps=maps,
        spec=_mapped(spec),
        base=probes_of(layers),
        provenance={name: x for name, x in provenance.items() if x is not None},
    )
    return compressor, sidecar


@contextmanager
def _attached(
    model: Any, layers: Sequence[AttentionLayer], maps: Mapping[str, Maps]
) -> Iterator[Any]:
    """Context manager: the model with maps attached."""
    remove = attach_maps(model, layers, maps)
    try:
        yield model
    finally:
        remove()


def _prepare(
    compressor: Compressor, statistics: Path | str | Statistics | None, progress: Progress | None
) -> tuple[Prepared, str | None]:
    """Compute the bases. If a quantised model gives no gradients, repeat without them. Also returns
    how gradients were computed, None if by the model's own kernels alone."""
    try:
        prepared = compressor.prepare(statistics, progress)
        return prepared, _gradients(prepared.statistics)
    except NoGradients as error:
        first = compressor
        second = Compressor(
            first.model,
            without_gradients(first.recipe),
            first.tokenizer,
            calib=first.calib,
            max_tokens=first.max_tokens,
            seed=first.seed,
            family=first.family,
            saved=first.saved,
        )
        return _in_shares(second.prepare(statistics, progress)), f"none: {error.reason}"


def _in_shares(prepared: Prepared) -> Prepared:
    """Scale the singular values of each latent to a norm of 1, so that bits can be planned for
    latents whose losses have no common unit."""
    candidates = []
    for candidate in prepared.candidates:
        singular = candidate.basis.singular
        total = singular.norm().clamp(min=1e-300)
        candidates.append(
            replace(candidate, basis=replace(candidate.basis, singular=singular / total))
        )
    return replace(prepared, candidates=candidates)


def _plan(prepared: Prepared, target: Target, factor: float | None, align: int | None) -> CacheSpec:
    """Plan bits and ranks together for a compression factor, or ranks alone for a share to keep."""
    if factor is not None:
        assert target.levels is not None
        return prepared.plan_factor(factor, target.levels, target.preference, target.layouts)
    assert target.keep is not None
    return prepared.plan(target.keep, align)


def _predicted(prepared: Prepared, plan: CacheSpec) -> float | None:
    """Predicted increase in cross-entropy (nats per token) of a plan; None without gradients."""
    return prepared.predicted_loss(plan) if prepared.compressor.recipe.gradients else None


def _mapped(spec: CacheSpec) -> CacheSpec:
    """The spec of the layers that have maps: a recipe may leave some layers uncompressed."""
    layers = tuple(layer for layer in spec.layers if layer.keys != "plain")
    return replace(spec, layers=layers, geometry=replace(spec.geometry, num_layers=len(layers)))


def _left(choice: LayerSelection) -> dict[str, Any]:
    """The layers without maps, as saved in the provenance."""
    return {
        "windowed": [x.name for x in choice.sliding_window],
        "unlike": [x.name for x in choice.other_shape],
        "share": {
            str(tokens): round(choice.uncompressed_share(tokens), 4)
            for tokens in (SHORT_CONTEXT, LONG_CONTEXT)
        },
        "words": choice.summary(),
    }


def without_gradients(recipe: Recipe) -> Recipe:
    """A variant of a recipe that needs no gradients: it reads only second moments of queries, keys
    and outputs. These have no common unit, so the budget is spent by each direction's share of its
    spectrum."""
    return replace(recipe, name=f"{recipe.name} without gradients", gradients=False, ranks="energy")


def _gradients(statistics: Statistics) -> str | None:
    """How gradients were computed, for the provenance; None if by the model's own kernels alone."""
    if not (dequantized := statistics.through_weights):
        return None
    return f"through dequantised weights of {len(dequantized)} layers ({dequantized[0]} and others)"


def unrotated_spec(
    spec: CacheSpec, layers: Sequence[AttentionLayer], rotations: Mapping[str, Rotation]
) -> CacheSpec:
    """A plan in which layers without RoPE score keys as stored, which is cheaper than
    reconstructing them. Only layers with one key latent per head, without softcap and sinks,
    qualify."""
    planned = []
    for layer, layer_spec in zip(layers, spec.layers, strict=True):
        no_rope = layer_spec.keys == "pre_rope" and not rotations[layer.name].rotates
        heads = {len(x.heads) if x.side == "k" else 0 for x in layer_spec.key_latents}
        if no_rope and heads == {1} and layer.softcap is None and layer.sinks is None:
            layer_spec = replace(layer_spec, keys="post_rope")
        planned.append(layer_spec)
    return replace(spec, layers=tuple(planned))


def layer_maps(
    layer: LayerSpec, latents: Sequence[LatentMaps], rotation: Rotation | None = None
) -> Maps:
    """The maps of one layer, rounded as a sidecar saves them.

    layer: what the layer stores.
    latents: maps of its latents, keys first.
    rotation: RoPE of its keys, if they are stored before RoPE.
    """
    latents = [rounded(x) for x in latents]
    if layer.keys == "pre_rope":
        assert rotation is not None, "keys before RoPE are of a known rotation"
        return RopeMaps.before_rope(layer, latents, rotation)
    keys = len(layer.key_latents)
    return Maps.of(latents[:keys], latents[keys:])
