"""Maps of any transformers model, from one pass over calibration text: nothing of its family."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvfold import recipes
from kvfold.compression.bases import builder_of
from kvfold.compression.calibration_text import CALIBRATION_TOKENS
from kvfold.compression.compressor import Compressor
from kvfold.compression.documents import is_self
from kvfold.compression.progress import Progress
from kvfold.compression.target import Target
from kvfold.config import DEFAULT_KEEP, Recipe, check_types
from kvfold.errors import SettingError
from kvfold.files import check_makeable
from kvfold.loading import check_loaded, load, load_tokenizer
from kvfold.models.fold import LatentMaps
from kvfold.seam.family import seam_family
from kvfold.seam.layers import check_layers, seam_layers, unwrapped
from kvfold.seam.maps import Maps
from kvfold.seam.sidecar import Sidecar, probes_of, sizes_of
from kvfold.spec import LayerSpec
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
    (None: swift). output: a new folder, written whole or not at all. check: gives
    the maps to save, from the compressor and those that were made, or raises. The rest as of
    `kvfold.compress`. Raises ValueError for what cannot work, before weights are read where that
    can be known.
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
    if not basis.after_rope or basis.factors_weights:
        raise SettingError(
            f"`recipe` {found.name!r} needs more of a model than what its attention is asked; use"
            f" {RECIPE!r}"
        )
    name = str(model) if isinstance(model, str | Path) else None
    if name is None:
        model = unwrapped(model)
        check_loaded(model, device, dtype)
    else:
        tokenizer = tokenizer or load_tokenizer(name)
        model = load(name, dtype=dtype, device=device, any_type=True)
    layers = seam_layers(model)
    check_layers(model, layers)
    compressor = Compressor(
        model,
        found,
        tokenizer,
        calib=calib,
        max_tokens=max_tokens,
        seed=seed,
        family=seam_family(layers),
    )
    compressor.factor_of(target, align)
    prepared = compressor.prepare(progress=progress)
    spec = prepared.plan(keep, align)
    each = zip(layers, spec.layers, prepared.maps(spec), strict=True)
    source = name or str(model.config.name_or_path)
    sidecar = Sidecar(
        maps={x.name: layer_maps(layer, own) for x, layer, own in each if own},
        spec=spec,
        base=probes_of(layers),
        provenance={
            "model": source,
            "model_type": model.config.model_type,
            "sizes": sizes_of(model.config),
            "recipe": asdict(found),
            "keep": keep,
            "statistics": prepared.statistics.key,
        },
    )
    if check is not None:
        sidecar = check(compressor, sidecar)
    if output is not None:
        sidecar.save(output)
    return sidecar


def layer_maps(layer: LayerSpec, latents: Sequence[LatentMaps]) -> Maps:
    """The maps of a layer whose latents, keys' first, have these."""
    keys = len(layer.key_latents)
    return Maps.of(latents[:keys], latents[keys:])
