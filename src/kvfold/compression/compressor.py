"""`Compressor`: measures statistics, builds bases, plans sizes, and folds models."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from kvfold.calibration.calibrate import artifact_key, calibrate
from kvfold.calibration.documents import is_self
from kvfold.calibration.saved_pass import SavedPass
from kvfold.calibration.self_text import describe
from kvfold.calibration.statistics import Statistics
from kvfold.calibration.text import (
    calibration_windows,
    check_tokens,
    default_tokens,
    self_windows,
    window_length,
)
from kvfold.compression.bases import Source, builder_of, recipes_where
from kvfold.compression.codebooks import with_codebooks
from kvfold.compression.planning.plan import (
    LatentSize,
    by_layer,
    plan_bits,
    planned_spec,
    predicted_loss,
)
from kvfold.compression.planning.preference import key_limits
from kvfold.compression.planning.sizes import aligned, bits_of, factor_of, numbers
from kvfold.compression.planning.target import Target, check_keep
from kvfold.compression.ranks import LatentCandidate, allocate, method_of
from kvfold.compression.training.recover import BATCH, check_steps, warn_of_passes
from kvfold.compression.training.recover import recover as distil
from kvfold.config import SEEDS, Prefer, Ratios, Recipe, Setting, check_types
from kvfold.experimental.hybrid import rank_of, with_low_rank
from kvfold.hub.checkpoint import mark, saved_spec
from kvfold.layout import CacheSpec, Geometry
from kvfold.models.adapter import Family
from kvfold.models.copies import shared_copy
from kvfold.models.families import check_model, family_of
from kvfold.models.finite import check_outputs
from kvfold.models.fold import LatentMaps, fold_model
from kvfold.models.folded import attention_windows
from kvfold.models.kernels import fastest_layout
from kvfold.models.weights import check_finite
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Progress, stage


class Compressor:
    """A model and a recipe that fit each other, and the text to calibrate on.

    `prepare` measures and builds bases; the model stays as it is until a `Prepared` folds it.
    family: how to read the model (default: by its type). calib, max_tokens, seed: of the text, as
    in `kvfold.compress` (max_tokens=None: `default_tokens`). saved: file of the calibration pass,
    so that a stopped one continues. Raises ValueError where model and recipe do not fit.
    """

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        tokenizer: Any = None,
        *,
        calib: list[str | Path] | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        family: type[Family] | None = None,
        saved: SavedPass | None = None,
    ) -> None:
        arguments = {"recipe": recipe, "calib": calib, "max_tokens": max_tokens}
        check_types(type(self).__init__, arguments)
        Setting(**SEEDS).check("seed", seed, int)
        check_model(model)
        check_original(model.config)
        self.model, self.recipe, self.tokenizer = model, recipe, tokenizer
        self.family: type[Family] = family or family_of(model.config)
        self.geometry = self.family.geometry(model.config)
        self.calib, self.seed, self.saved = calib, seed, saved
        self.max_tokens = default_tokens(model) if max_tokens is None else max_tokens
        self._written: dict[int, Tensor] = {}
        self.basis, self.ranks = builder_of(recipe), method_of(recipe)
        check(recipe, self.geometry, model.config.model_type)
        check_finite(model)
        check_outputs(model)

    @property
    def needs(self) -> set[str]:
        """Names of the statistics (QUANTITIES) that the recipe reads."""
        return needs(self.recipe)

    def factor_of(self, target: Target, align: int | None = None) -> float | None:
        """How many times smaller a plan of bits is to make a token (see `sizes.factor_of`)."""
        return factor_of(self.recipe, self.geometry, target, align)

    def align(self, align: int | None) -> int:
        """The number that ranks are multiples of (None: the default)."""
        return aligned(self.geometry, align)

    def windows(self, max_tokens: int | None = None, progress: Progress | None = None) -> Tensor:
        """Windows [n, T] of the calibration text.

        Text that the model writes itself is cached here, since a folded model would write other
        text.
        """
        count = self.max_tokens if max_tokens is None else max_tokens
        if not is_self(self.calib):
            return calibration_windows(self.tokenizer, self.model.config, self.calib, count)
        if count not in self._written:
            report = stage(progress, "write text")
            windows = self_windows(self.model, self.tokenizer, count, self.seed, report)
            self._written[count] = windows
        return self._written[count]

    def prepare(
        self,
        statistics: Path | str | Statistics | None = None,
        progress: Progress | None = None,
    ) -> "Prepared":
        """Calibrate (or reuse statistics) and build every layer's bases, with all directions.

        statistics: an artifact file, reused if it exists and fits, written if not.
        """
        measured = self._statistics(statistics, self.needs, progress)
        report = stage(progress, "bases")
        candidates: list[LatentCandidate] = []
        for source in self._sources(measured):
            for side, heads in self.basis.head_sets(self.geometry):
                basis = self.basis.build(source, side, heads)
                candidates.append(
                    LatentCandidate(layer=source.layer, side=side, heads=heads, basis=basis)
                )
            if report is not None:
                report(source.layer + 1, self.geometry.num_layers)
        scores = self.ranks.scores(candidates, self._sources(measured))
        layers = self.geometry.num_layers
        scored = [
            replace(c, score=score, skip=self.ranks.stays_whole(c.layer, layers, score))
            for c, score in zip(candidates, scores, strict=True)
        ]
        return Prepared(compressor=self, statistics=measured, candidates=scored)

    def _sources(self, statistics: Statistics) -> Iterator[Source]:
        """What bases read of each layer. Weights in fp64 live as long as the layer's Source."""
        for index, attention in enumerate(self.family.attentions(self.model)):
            yield Source(
                layer=index,
                family=self.family,
                attention=attention,
                geometry=self.geometry,
                statistics=statistics,
            )

    def _statistics(
        self, source: Path | str | Statistics | None, needs: set[str], progress: Progress | None
    ) -> Statistics:
        if isinstance(source, Statistics):
            return source
        if source is None or not needs:
            return self.measure(needs, progress)
        path = Path(source)
        if path.exists():
            text = self._self_text() or self.windows()
            key = artifact_key(self.model, text, self.recipe.centroids, self.family.layer_names)
            stored = Statistics.load(path, key)
            if stored.has(needs):
                return stored.to(self.model.device)
        measured = self.measure(needs, progress)
        measured.save(path)
        return measured

    def _self_text(self) -> str | None:
        """What the model's own text is written from; None for text from files."""
        return describe(self.max_tokens, self.seed) if is_self(self.calib) else None

    def measure(self, needs: set[str], progress: Progress | None = None) -> Statistics:
        """Measure the statistics named in `needs` in one pass over the calibration text."""
        if not needs:
            return Statistics({})
        return calibrate(
            self.model,
            self.family,
            self.windows(progress=progress),
            needs,
            text=self._self_text(),
            centroids=self.recipe.centroids,
            seed=self.seed,
            progress=stage(progress, "calibrate"),
            saved=self.saved,
        )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A compressor with the bases of every layer. It plans any number of sizes, and folds them."""

    compressor: Compressor
    statistics: Statistics
    candidates: Sequence[LatentCandidate]

    @property
    def layers(self) -> list[list[LatentCandidate]]:
        """The candidates of each layer."""
        return by_layer(self.candidates)

    def plan_target(self, target: Target, align: int | None = None) -> CacheSpec:
        """The plan of a size that names a share, a factor, bytes or hybrid ratios."""
        factor = self.compressor.factor_of(target, align)
        if isinstance(target.hybrid, Ratios):
            return self.plan_hybrid(target.hybrid, align)
        if factor is not None:
            assert target.levels is not None
            return self.plan_factor(factor, target.levels, target.preference, target.layouts)
        assert target.keep is not None, "a budget is a search, which finds a share"
        return self.plan(target.keep, align)

    def plan(self, keep: float, align: int | None = None) -> CacheSpec:
        """The plan that keeps a share `keep` of the cache, in ranks alone."""
        check_keep(keep)
        c = self.compressor
        ranks = allocate(self.candidates, c.ranks, numbers(keep, c.geometry), c.align(align))
        return self._spec([(rank, None) for rank in ranks])

    def plan_hybrid(self, ratios: Ratios, align: int | None = None) -> CacheSpec:
        """The plan of two ranks, for important and unimportant tokens, the same in all layers (ZDC
        §5.2). Raises SettingError for a recipe or a model whose entries have no low-rank form."""
        c, step = self.compressor, self.compressor.align(align)
        if any(attention_windows(c.model.config)) or c.geometry.softcap is not None:
            raise SettingError(
                "`hybrid`: no attention with a sliding window or capped scores, which this model "
                "has, reads entries of two ranks: give `keep`"
            )
        removed = {"k": ratios.keys, "v": ratios.values, "kv": 0.0}
        ranks = [min(rank_of(removed[x.side], x.numbers, step), x.width) for x in self.candidates]
        spec = self._spec([(rank, None) for rank in ranks])
        return with_low_rank(spec, ratios, step)

    def plan_factor(
        self,
        factor: float,
        levels: Sequence[int] | None = None,
        prefer: Prefer = "balanced",
        layouts: int | None = None,
    ) -> CacheSpec:
        """The plan of ranks and bits that makes a token `factor` times smaller than at 16 bits.

        levels: bits that numbers may have (None: those of `prefer`). prefer: see `preference`.
        layouts: most bit-width layouts of the model (None: `default_layouts`). The basis must
        predict losses.
        """
        c = self.compressor
        target = Target(
            factor=factor,
            levels=None if levels is None else tuple(levels),
            prefer=prefer,
            layouts=layouts,
        )
        c.factor_of(target)  # raises for a recipe that cannot be planned so
        bits, levels = bits_of(factor, c.geometry), target.levels
        assert levels is not None
        limits = key_limits(prefer, c.basis.key_kind(c.geometry))
        plans = (
            self._spec(plan_bits(self.candidates, bits, levels, prefer, limit, layouts))
            for limit in limits
        )
        first = next(plans)
        config = c.model.config
        fits = partial(fastest_layout, config, windows=c.family.windows(config))
        if len(limits) == 1 or fits(first) is not None:
            return first
        return next((x for x in plans if fits(x) is not None), first)

    def predicted_loss(self, spec: CacheSpec) -> float | None:
        """Predicted increase in cross-entropy (nats/token) of a plan, of dimensions and bits. None
        where the basis predicts none, and for plans of two ranks."""
        if not self.compressor.basis.predicts_loss or spec.hybrid is not None:
            return None
        return sum(
            predicted_loss(c.basis, latent)
            for layer, candidates in zip(spec.layers, self.layers, strict=True)
            if layer.keys != "plain"
            for latent, c in zip(layer.latents, candidates, strict=True)
        )

    def _spec(self, sizes: Sequence[LatentSize]) -> CacheSpec:
        c = self.compressor
        spec = planned_spec(self.candidates, sizes, c.geometry, c.basis.key_kind(c.geometry))
        if c.recipe.codebooks:
            layers = with_codebooks(spec, self.maps(spec), self.statistics)
            return replace(spec, layers=tuple(layer for layer, _ in layers))
        return spec

    def fold(
        self,
        spec: CacheSpec,
        provenance: dict[str, Any],
        *,
        model: Any = None,
        recover: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Fold the model in place, and train its maps for `recover` steps.

        provenance: is stored in the model's config. model: a copy to fold instead.
        """
        c = self.compressor
        model = c.model if model is None else model
        check_steps(recover)
        provenance = {**provenance, "recipe": asdict(c.recipe), "statistics": self.statistics.key}
        windows, teacher = None, None
        if recover:  # what can fail, fails before the model changes
            windows = c.windows(recover * BATCH * window_length(model.config), progress)
            warn_of_passes(recover, len(windows))
            teacher = shared_copy(model)
        self._fold(model, spec)
        mark(model, spec, provenance)
        if windows is not None:
            before, after = distil(
                model,
                teacher,
                c.family,
                spec,
                windows,
                recover,
                seed=c.seed,
                progress=stage(progress, "recover"),
            )
            learnt = {"tokens": windows.numel(), "before": before, "after": after}
            mark(model, spec, {**provenance, "recovery": {"steps": recover, **learnt}})

    def folded_copy(self, spec: CacheSpec) -> Any:
        """A folded copy of the model. It shares all weights except the attentions'."""
        copy = shared_copy(self.compressor.model)
        self.fold(spec, {}, model=copy)
        return copy

    def _fold(self, model: Any, spec: CacheSpec) -> None:
        maps = self.maps(spec)
        if self.compressor.recipe.codebooks:
            maps = [scaled for _, scaled in with_codebooks(spec, maps, self.statistics)]
        all_maps: list[list[LatentMaps | None]] = [
            list(layer_maps) if layer_maps else [None] * len(layer.latents)
            for layer, layer_maps in zip(spec.layers, maps, strict=True)
        ]
        fold_model(model, self.compressor.family, spec, all_maps)

    def maps(self, spec: CacheSpec) -> list[list[LatentMaps]]:
        """The maps of every layer's latents; an empty list for uncompressed layers."""
        return [
            []
            if layer.keys == "plain"
            else [
                LatentMaps(*c.basis.truncated(latent.rank), c.basis.mean)
                for latent, c in zip(layer.latents, candidates, strict=True)
            ]
            for layer, candidates in zip(spec.layers, self.layers, strict=True)
        ]


def shared_statistics(
    compressors: Sequence[Compressor],
    progress: Progress | None = None,
    path: Path | None = None,
) -> Statistics:
    """The statistics that all `compressors` read, from one pass. They have one model and text.

    path: an artifact file, reused if it exists and has them, written if not.
    """
    needed = set().union(*(compressor.needs for compressor in compressors))
    return compressors[0]._statistics(path, needed, progress)


def needs(recipe: Recipe) -> set[str]:
    """Names of the statistics (keys of QUANTITIES) that a recipe reads."""
    more = {"samples"} if recipe.codebooks else set()
    return builder_of(recipe).needs() | method_of(recipe).needs() | more


def check(recipe: Recipe, geometry: Geometry, model_type: str) -> None:
    """Raises ValueError where a recipe cannot apply to a model."""
    if geometry.key_norm and builder_of(recipe).factors_weights:
        raise ValueError(
            f"recipe {recipe.name!r} factors W_K, but {model_type} normalises keys after W_K; use "
            + recipes_where(lambda basis: not basis.factors_weights)
        )
    last = geometry.num_layers - 1
    if wrong := [layer for layer in recipe.skip_layers if not 0 <= layer <= last]:
        raise ValueError(
            f"skip_layers names {wrong}, but the model's layers are 0 to {last}: leave those out"
        )


def check_config(
    config: Any, recipe: Recipe, max_tokens: int | None, target: Target, align: int | None
) -> None:
    """Raises ValueError where a model of this transformers config cannot be folded by a recipe to
    this size, or calibrated on so many tokens. Needs no loaded model."""
    check_original(config)
    geometry = family_of(config).geometry(config)
    check(recipe, geometry, config.model_type)
    factor_of(recipe, geometry, target, align)
    if needs(recipe) and max_tokens is not None:
        check_tokens(config, max_tokens)


def check_original(config: Any) -> None:
    """Raises ValueError for the config of a compressed model."""
    if saved_spec(config) is not None:
        raise ValueError("this model is compressed already; start from the original checkpoint")
