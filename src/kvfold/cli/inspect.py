"""kvfold inspect: shows what a model's cache stores, or would store with a recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvfold.cli import common
from kvfold.cli.options import CALIBRATION, PLACE, Calibration, MapsName, ModelOrMaps, Place
from kvfold.utils.errors import SettingError

if TYPE_CHECKING:
    from kvfold.compression.compressor import Prepared
    from kvfold.compression.planning.target import Target
    from kvfold.evaluation.report import RankMap
    from kvfold.layout import CacheSpec, Geometry, LayerSpec

PARTS = {"k": "keys", "v": "values", "kv": "keys and values"}
SAID = {"sizes", "ratio", "accuracy", "measured", "recovery", "lora"}  # by other lines
Spectra = dict[str, list[list[float]]]


def inspect(
    model: ModelOrMaps | None = None,
    /,
    *,
    maps: MapsName = None,
    recipe: str | None = None,
    keep: float | None = None,
    align: int | None = None,
    html: Path | None = None,
    calibration: Calibration = CALIBRATION,
    place: Place = PLACE,
) -> None:
    """Show the ranks and bytes of MODEL's cache, layer by layer.

    With --recipe, shows what an uncompressed MODEL would store. With --maps, shows what the maps
    store, and checks whether they fit MODEL.

    Parameters
    ----------
    recipe
        Plan this recipe for an uncompressed MODEL, which stays as it is.
    keep
        Share of the cache to keep in that plan; by default 0.5.
    align
        Make ranks multiples of this number.
    html
        File for a heat map of the ranks, and the singular values of a plan.
    """
    with common.fast_imports():
        from kvfold.maps.named import holds_maps

    common.check_outputs(html=html)
    target = check_plan(recipe, keep, align, calibration)
    if model is not None and maps is None and holds_maps(model):
        model, maps = None, model
    if maps is not None:
        inspect_maps(maps, model, recipe, html)
        return
    if model is None:
        raise SettingError("there is nothing to inspect: give MODEL or `maps`")
    from kvfold.compression.planning.step_time import reconstruction_cost
    from kvfold.hub.checkpoint import saved_config
    from kvfold.layout.pages import plain_spec
    from kvfold.models.families import family_of
    from kvfold.models.kernels import kernels_of, one_pass_summary

    config = common.load_config(model)
    geometry = family_of(config).geometry(config)
    saved = saved_config(config)
    if saved is not None and recipe is not None:
        raise ValueError(
            f"{model} is compressed already, and --recipe plans for an original model: leave it"
            " out, or name the original"
        )
    spectra: Spectra = {}
    provenance: dict[str, Any] = {}
    spec: CacheSpec | None = None
    if saved is not None:
        spec, provenance = saved.spec, saved.provenance
    elif recipe is not None:
        bases = prepared(model, config, recipe, calibration, place, target, align)
        assert target.keep is not None
        spec, spectra = bases.plan(target.keep, align), spectra_of(bases)
    title = f"{model} ({config.model_type})"
    print_geometry(title, geometry)
    if spec is not None:
        name = provenance["recipe"]["name"] if provenance else recipe
        if note := reconstruction_cost(str(name), config, spec):
            print(note)
        print_spec(spec, provenance)
        print(f"kernels on a GPU: {kernels_of(config, spec)}")
        if provenance.get("prefer") == "speed":
            print(f"in one pass on a Hopper GPU: {one_pass_summary(config, spec)}")
    print_provenance(provenance)
    if html is not None:
        write_html(html, title, spec or plain_spec(geometry), spectra)


def inspect_maps(name: str, model: str | None, recipe: str | None, html: Path | None) -> None:
    """Print what maps store, and how large they are on disk."""
    from kvfold.cli.compress import folder_bytes, in_bytes
    from kvfold.maps.sidecar import folder_of

    if recipe is not None:
        raise SettingError(
            "`maps` and `recipe` exclude each other: one shows what is stored, the other plans"
            " something new: leave one out"
        )
    sidecar = common.load_maps(name)
    assert sidecar is not None
    if model is not None:
        common.load_config(model, sidecar)
    spec, provenance = sidecar.spec, dict(sidecar.provenance)
    title = f"{name}: maps of {len(sidecar.maps)} layers for {sidecar.source}"
    print_geometry(f"{title} ({provenance.get('model_type', 'any type')})", spec.geometry)
    print(f"on disk: {in_bytes(folder_bytes(folder_of(name)))}")
    print_spec(spec, provenance)
    print_provenance(provenance)
    if html is not None:
        write_html(html, title, spec, {})


def check_plan(
    recipe: str | None, keep: float | None, align: int | None, calibration: Calibration
) -> "Target":
    """The size to plan for. Raises ValueError for an illegal plan, and for settings of a plan
    without a recipe."""
    from kvfold.api import check_files
    from kvfold.compression.planning.target import Target, check_align
    from kvfold.config import DEFAULT_KEEP

    check_align(align)
    check_files(calibration.calib, calibration.stats, None)
    if recipe is None and (keep, align, calibration) != (None, None, CALIBRATION):
        raise SettingError(
            "`keep`, `align` and settings of calibration need a plan: give its `recipe` too"
        )
    return Target(keep=DEFAULT_KEEP if keep is None else keep)


def prepared(
    model: str,
    config: Any,
    recipe: str,
    calibration: Calibration,
    place: Place,
    target: "Target",
    align: int | None,
) -> "Prepared":
    """Load a model and compute the bases of a recipe."""
    compressor = common.compressor(model, config, recipe, calibration, place, target, align)
    with common.progress() as progress:
        return compressor.prepare(calibration.stats, progress)


def spectra_of(prepared: "Prepared") -> Spectra:
    """Singular values of every layer's bases in descending order, for keys and for values."""
    spectra: Spectra = {}
    for candidates in prepared.layers:
        merged: dict[str, list[float]] = {}
        for basis in candidates:
            merged.setdefault(PARTS[basis.side], []).extend(basis.singular.tolist())
        for part, values in merged.items():
            spectra.setdefault(part, []).append(sorted(values, reverse=True))
    return spectra


def print_geometry(title: str, geometry: "Geometry") -> None:
    print(title)
    print(
        f"{geometry.num_layers} layers, {geometry.num_query_heads} query and"
        f" {geometry.num_kv_heads} KV heads of {geometry.head_dim}, width {geometry.hidden_size}"
    )
    print(f"full cache: {2 * geometry.full_numbers} bytes per token at 16 bits")


def print_spec(spec: "CacheSpec", provenance: dict[str, Any]) -> None:
    """Print totals and measured losses, then a table with one line per layer."""
    from kvfold.hub.card import facts
    from kvfold.layout.pages import cache_layout

    layout = cache_layout(spec) if spec.planned else None
    if layout is not None:
        full, stored = 2 * spec.geometry.full_numbers, layout.bits_per_token / 8
        print(
            f"a token takes {stored:.0f} bytes in place of {full} in kvfold's engine and vLLM:"
            f" {full / stored:.2f}x smaller"
        )
    for line in facts(spec, provenance):
        print(line)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("layer", "keys", "values"):
        table.add_column(name)
    table.add_column("ranks")
    table.add_column("bytes" if layout is None else "16-bit bytes", justify="right")
    if layout is not None:
        table.add_column("stored bytes", justify="right")
    for index, layer in enumerate(spec.layers):
        sizes = [str(2 * layer.row_width)]
        if layout is not None:
            sizes.append(f"{layout.layer_bits[index] / 8:.0f}")
        table.add_row(str(index), layer.keys, layer.values, describe(layer), *sizes)
    common.print_table(table)


def print_provenance(provenance: dict[str, Any]) -> None:
    """Print how a plan was made, without what other lines say."""
    for key, value in provenance.items():
        if key not in SAID:
            print(f"{key}: {in_words(value)}")


def in_words(value: Any) -> str:
    """A value of JSON without brackets, and without settings that are off: None, False, 0."""
    if isinstance(value, dict):
        settings = {name: x for name, x in value.items() if x not in (None, False, [], {})}
        words = (name if x is True else f"{name} {in_words(x)}" for name, x in settings.items())
        return ", ".join(words)
    if isinstance(value, list | tuple):
        return ", ".join(map(in_words, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe(layer: "LayerSpec") -> str:
    """The ranks of a layer's latents, such as "keys 24 16, values 40"."""
    ranks: dict[str, list[str]] = {}
    for latent in layer.latents:
        ranks.setdefault(PARTS[latent.side], []).append(str(latent.rank))
    return ", ".join(f"{part} {' '.join(numbers)}" for part, numbers in ranks.items())


def rank_map(spec: "CacheSpec") -> "RankMap":
    """The ranks as a heat map with a row for every set of heads that share a latent in any
    layer."""
    from kvfold.evaluation.report import RankMap

    rows: dict[tuple[str, tuple[int, ...]], list[int | None]] = {}
    for index, layer in enumerate(spec.layers):
        for latent in layer.latents:
            row = rows.setdefault((latent.side, latent.heads), [None] * len(spec.layers))
            row[index] = latent.rank
    places = sorted(rows, key=lambda place: ("kv".find(place[0][0]), place))
    dim = spec.geometry.head_dim
    return RankMap(
        labels_y=[heads_label(heads) for _, heads in places],
        ranks=[rows[place] for place in places],
        widths=[len(side) * len(heads) * dim for side, heads in places],
        parts=[PARTS[side] for side, _ in places],
    )


def heads_label(heads: tuple[int, ...]) -> str:
    return f"head {heads[0]}" if len(heads) == 1 else f"heads {heads[0]}-{heads[-1]}"


def write_html(path: Path, title: str, spec: "CacheSpec", spectra: Spectra) -> None:
    from kvfold.evaluation.report import write_report

    summary = [
        ("bytes a token at 16 bits", str(spec.bytes_per_token())),
        ("full cache", str(2 * spec.geometry.full_numbers)),
        ("kept", f"{spec.kept_fraction:.4f}"),
        ("layers", str(spec.geometry.num_layers)),
    ]
    write_report(path, title=title, summary=summary, rows=[], ranks=rank_map(spec), spectra=spectra)
    print(f"wrote {path}")
