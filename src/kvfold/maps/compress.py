"""Maps of any transformers model, from one pass over calibration text: nothing of its family."""

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


def recipe_of(given: str | Recipe | None) -> Recipe:
    """The recipe of that name (None: RECIPE). Raises SettingError for one that maps beside the
    weights cannot be made by."""
    recipe = given if isinstance(given, Recipe) else recipes.get(given or RECIPE)
    if not builder_of(recipe).makes_maps:
        raise SettingError(
            f"`recipe={recipe.name!r}` makes no maps beside the weights: add `fold=True`, which"
            " folds it into them, or use " + recipes_where(lambda basis: basis.makes_maps)
        )
    return recipe


def make_maps(
    model: Any,
    tokenizer: Any,
    recipe: str | Recipe | None,
    target: Target,
    *,
    source: str,
    search: Callable[..., tuple[float, float]] | None = None,
    windows: bool = False,
    align: int | None = None,
    statistics: Path | str | Statistics | None = None,
    progress: Progress | None = None,
    begun: Callable[[Compressor], object] | None = None,
    **calibration: Any,
) -> tuple[Compressor, Sidecar]:
    """Maps by which the cache of a loaded model becomes smaller, and what measured it; the model
    stays as it is. The settings are those of `kvfold.compress`.

    source: the model's name, for provenance; search: finds the share to keep within a budget, as
    `evaluation.budget.search_keep`; begun: is told what measures before it does; calibration:
    calib, max_tokens, seed and saved. Layers that
    are left as they are, and the share of the cache that they hold, are told by
    `provenance["left"]` of the result (see `seam.choice`). Raises ValueError for what cannot work.
    """
    found = recipe_of(recipe)
    basis = builder_of(found)
    layers = attention_layers(model)
    check_layers(model, layers)
    choice = select_layers(model.config, layers, windows)
    if choice.summary():
        logger.info(choice.summary())
    names = {layer.name for layer in choice.layers}
    rotations = {} if basis.after_rope else find_rotations(model, layers, names)
    family = attention_family(choice.layers, rotations, choice.uncompressed)
    first = choice.layers[0]
    if found.keys == "kv" and first.head_dim != first.value_dim:
        raise SettingError(
            f"`recipe` {found.name!r} stores keys and values together, and those of {first.name}"
            f" differ in width, {first.head_dim} and {first.value_dim}: use {RECIPE!r} or 'lean'"
        )
    found, target, why = choose_for_maps(recipe, family, model.config, target)
    compressor = Compressor(model, found, tokenizer, family=family, **calibration)
    size = compressor.factor_of(target, align)
    if begun is not None:
        begun(compressor)
    prepared, gradients = _prepare(compressor, statistics, progress)
    if gradients is not None:
        warnings.warn(f"{source}: gradients of the loss: {gradients}", stacklevel=2)

    def mapped(plan: CacheSpec) -> tuple[CacheSpec, dict[str, Maps]]:
        """What layers store of a plan, and the maps of those that have some, by name."""
        spec = unrotated_spec(plan, choice.layers, rotations)
        each = zip(choice.layers, spec.layers, prepared.maps(spec), strict=True)
        return spec, {
            layer.name: layer_maps(planned, latents, rotations.get(layer.name))
            for layer, planned, latents in each
            if latents
        }

    ratio, sized = None, target
    if target.limit is not None:
        assert search is not None, "a budget needs a search"
        keep, ratio = search(
            prepared,
            target.limit,
            align=align,
            progress=progress,
            applied=lambda plan: _attached(model, layers, mapped(plan)[1]),
        )
        sized = replace(target, keep=keep, budget=None)
    plan = _plan(prepared, sized, size, align)
    spec, maps = mapped(plan)
    provenance = {
        "model": source,
        "model_type": model.config.model_type,
        "sizes": sizes_of(model.config),
        "recipe": asdict(prepared.compressor.recipe),
        **asdict(target),
        "keep": sized.keep,
        "ratio": ratio,
        "align": align,
        "predicted": _predicted(prepared, plan),
        "statistics": prepared.statistics.key,
        "chosen": why,
        "gradients": gradients,
        "left": _left(choice) if choice.summary() else None,
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
    """The model with maps, until the block ends."""
    take_away = attach_maps(model, layers, maps)
    try:
        yield model
    finally:
        take_away()


def _prepare(
    compressor: Compressor, statistics: Path | str | Statistics | None, progress: Progress | None
) -> tuple[Prepared, str | None]:
    """Bases, without gradients where a quantised model gives none; and how gradients were computed,
    where not by the model's own kernels alone."""
    try:
        prepared = compressor.prepare(statistics, progress)
        return prepared, _gradients(prepared.statistics)
    except NoGradients as error:
        c = compressor
        other = Compressor(
            c.model,
            without_gradients(c.recipe),
            c.tokenizer,
            calib=c.calib,
            max_tokens=c.max_tokens,
            seed=c.seed,
            family=c.family,
            saved=c.saved,
        )
        return _in_shares(other.prepare(statistics, progress)), f"none: {error.reason}"


def _in_shares(prepared: Prepared) -> Prepared:
    """With directions weighed by their share of each latent's spectrum, so that bits are planned by
    what has no common unit."""
    candidates = []
    for one in prepared.candidates:
        singular = one.basis.singular
        total = singular.norm().clamp(min=1e-300)
        candidates.append(replace(one, basis=replace(one.basis, singular=singular / total)))
    return replace(prepared, candidates=candidates)


def _plan(prepared: Prepared, target: Target, factor: float | None, align: int | None) -> CacheSpec:
    """Bits and dimensions together for a factor, else dimensions alone."""
    if factor is not None:
        assert target.levels is not None
        return prepared.plan_factor(factor, target.levels, target.preference)
    assert target.keep is not None
    return prepared.plan(target.keep, align)


def _predicted(prepared: Prepared, plan: CacheSpec) -> float | None:
    """Nats a token that a plan is predicted to lose; None without gradients."""
    return prepared.predicted_loss(plan) if prepared.compressor.recipe.gradients else None


def _mapped(spec: CacheSpec) -> CacheSpec:
    """Of the layers that have maps: a recipe may leave others whole."""
    layers = tuple(layer for layer in spec.layers if layer.keys != "plain")
    return replace(spec, layers=layers, geometry=replace(spec.geometry, num_layers=len(layers)))


def _left(choice: LayerSelection) -> dict[str, Any]:
    """What is left of a model without maps, as provenance."""
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
    """A recipe that reads second moments of queries, keys and outputs alone. These have no common
    unit, so the budget is spent by shares of each."""
    return replace(recipe, name=f"{recipe.name} without gradients", gradients=False, ranks="energy")


def _gradients(statistics: Statistics) -> str | None:
    """How gradients were computed, where not by the model's own kernels alone."""
    if not (through := statistics.through_weights):
        return None
    return f"through dequantised weights of {len(through)} layers ({through[0]} and others)"


def unrotated_spec(
    spec: CacheSpec, layers: Sequence[AttentionLayer], rotations: Mapping[str, Rotation]
) -> CacheSpec:
    """A plan in which keys of layers that do not rotate them are scored as they are stored, where
    they have latents of their own and nothing sees a shift of all scores."""
    planned = []
    for layer, own in zip(layers, spec.layers, strict=True):
        plain = own.keys == "pre_rope" and not rotations[layer.name].rotates
        heads = {len(x.heads) if x.side == "k" else 0 for x in own.key_latents}
        if plain and heads == {1} and layer.softcap is None and layer.sinks is None:
            own = replace(own, keys="post_rope")
        planned.append(own)
    return replace(spec, layers=tuple(planned))


def layer_maps(
    layer: LayerSpec, latents: Sequence[LatentMaps], rotation: Rotation | None = None
) -> Maps:
    """The maps of a layer whose latents, keys' first, have these, rounded as a sidecar saves them.
    rotation: of its keys, where they are stored before RoPE."""
    latents = [rounded(x) for x in latents]
    if layer.keys == "pre_rope":
        assert rotation is not None, "keys before RoPE are of a known rotation"
        return RopeMaps.before_rope(layer, latents, rotation)
    keys = len(layer.key_latents)
    return Maps.of(latents[:keys], latents[keys:])
