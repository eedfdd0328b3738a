"""Maps of any transformers model, from one pass over calibration text: nothing of its family."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvfold import recipes
from kvfold.compression.bases import builder_of
from kvfold.compression.bases.pre_rope import PreRope
from kvfold.compression.calibration_text import CALIBRATION_TOKENS
from kvfold.compression.compressor import Compressor
from kvfold.compression.documents import is_self
from kvfold.compression.progress import Progress
from kvfold.compression.statistics import NoGradients, Statistics
from kvfold.compression.target import Target
from kvfold.config import DEFAULT_KEEP, Recipe, check_types
from kvfold.errors import SettingError
from kvfold.files import check_makeable
from kvfold.loading import check_loaded, load, load_tokenizer
from kvfold.models.fold import LatentMaps
from kvfold.seam.family import seam_family
from kvfold.seam.layers import SeamLayer, check_layers, seam_layers, unwrapped
from kvfold.seam.maps import Maps
from kvfold.seam.rope_maps import RopeMaps
from kvfold.seam.rotation import Rotation, find_rotations
from kvfold.seam.sidecar import Sidecar, probes_of, sizes_of
from kvfold.spec import CacheSpec, LayerSpec
from kvfold.text import check_tokenizer, read_texts

RECIPE = "swift"


def make_maps(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    keep: float = DEFAULT_KEEP,
    align: int | None = None,
    calib: list[str | Path] | None = None,
    tokenizer: Any = None,
    device: str | None = None,
    dtype: str = "auto",
    max_tokens: int = CALIBRATION_TOKENS,
    seed: int = 0,
    output: Path | str | None = None,
    check: Callable[[Compressor, Sidecar], Sidecar] | None = None,
    progress: Progress | None = None,
) -> Sidecar:
    """Maps by which a model's cache keeps `keep` of its numbers; the model stays as it is.

    model: a name, or a loaded causal LM of any type whose layers call transformers' attention
    interface and are alike in their heads. recipe: one that takes keys as attention gets them
    (None: swift), or lean or small, which take them before RoPE where that rotates pairs. output: a
    new folder, written whole or not at all. check: gives the maps to save, from the compressor and
    those that were made, or raises. The rest as of `kvfold.compress`. Raises ValueError for what
    cannot work, before weights are read where that can be known.
    """
    check_types(make_maps, locals())
    target = Target(keep=keep)
    target.check_align(align)
    check_tokenizer(tokenizer)
    if calib and not is_self(calib):
        read_texts(calib)
    if output is not None:
        check_makeable(Path(output))
    found = recipe if isinstance(recipe, Recipe) else recipes.get(recipe or RECIPE)
    basis = builder_of(found)
    if basis.reads_weights or not (basis.after_rope or isinstance(basis, PreRope)):
        raise SettingError(
            f"`recipe` {found.name!r} needs more of a model than what its attention is asked; use"
            f" {RECIPE!r}, 'lean' or 'small'"
        )
    name = str(model) if isinstance(model, str | Path) else None
    if name is None:
        model = unwrapped(model)
        check_loaded(model, device, dtype)
    else:
        tokenizer = tokenizer or load_tokenizer(name)
        model = load(name, dtype=dtype, device=device, any_type=True)
    source = name or str(model.config.name_or_path) or type(model).__name__
    layers = seam_layers(model)
    check_layers(model, layers)
    rotations = {} if basis.after_rope else find_rotations(model, layers)
    more: dict[str, Any] = {
        "calib": calib,
        "max_tokens": max_tokens,
        "seed": seed,
        "family": seam_family(layers, rotations),
    }
    compressor = Compressor(model, found, tokenizer, **more)
    compressor.factor_of(target, align)
    try:
        prepared = compressor.prepare(progress=progress)
        gradients = _gradients(prepared.statistics)
    except NoGradients as error:
        gradients = f"none: {error.reason}"
        found = without_gradients(found)
        prepared = Compressor(model, found, tokenizer, **more).prepare(progress=progress)
    if gradients is not None:
        warnings.warn(f"{source}: gradients of the loss: {gradients}", stacklevel=2)
    spec = unrotated_spec(prepared.plan(keep, align), layers, rotations)
    each = zip(layers, spec.layers, prepared.maps(spec), strict=True)
    sidecar = Sidecar(
        maps={
            x.name: layer_maps(layer, own, rotations.get(x.name)) for x, layer, own in each if own
        },
        spec=spec,
        base=probes_of(layers),
        provenance={
            "model": source,
            "model_type": model.config.model_type,
            "sizes": sizes_of(model.config),
            "recipe": asdict(found),
            "keep": keep,
            "statistics": prepared.statistics.key,
            **({} if gradients is None else {"gradients": gradients}),
        },
    )
    if check is not None:
        sidecar = check(compressor, sidecar)
    if output is not None:
        sidecar.save(output)
    return sidecar


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
    spec: CacheSpec, layers: Sequence[SeamLayer], rotations: Mapping[str, Rotation]
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
    """The maps of a layer whose latents, keys' first, have these. rotation: of its keys, where they
    are stored before RoPE."""
    if layer.keys == "pre_rope":
        assert rotation is not None, "keys before RoPE are of a known rotation"
        return RopeMaps.before_rope(layer, latents, rotation)
    keys = len(layer.key_latents)
    return Maps.of(latents[:keys], latents[keys:])
