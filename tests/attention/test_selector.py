"""The backend of every layer, by what it stores; no device is touched, so any can be asked for."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from kvfold import LLM, recipes
from kvfold.attention.backend import Task
from kvfold.attention.base import Columns, LayerAttention
from kvfold.attention.selector import DECODE, PREFILL, BackendChoice, select, warn_of_fallback
from kvfold.bench.variants import SHAPES, variant_layout
from kvfold.calibration.statistics import Statistics
from kvfold.compression.bases import builder_of
from kvfold.compression.compressor import Prepared
from kvfold.compression.planning.default import even_spec
from kvfold.compression.planning.step_time import DecodeLoad, predict
from kvfold.compression.ranks import LatentCandidate
from kvfold.config import Prefer
from kvfold.hub.loading import load_config
from kvfold.layout import (
    CacheSpec,
    KeyKind,
    Latent,
    LayerSpec,
    ValueKind,
)
from kvfold.layout.pages import Group, cache_layout
from kvfold.models.families import family_of
from kvfold.models.folded import layer_shapes
from kvfold.models.kernels import fastest_layout, kernels_of, one_pass_summary
from kvfold.ops.backend import GPU
from lab.variants import VARIANTS
from matrix import matrix
from models import CONFIGS, llama_8b, tiny
from steps import backends

pytest.importorskip("triton", reason="Triton is not installed")

from kvfold.ops import one_pass
from selector_cases import GEOMETRY

Layer = tuple[LayerAttention, tuple[Group, ...]]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


def layer_of(
    keys: KeyKind = "post_rope",
    values: ValueKind = "fused",
    *,
    shared: bool = False,
    tiers=None,
    codebooks=None,
    window: int | None = None,
    softcap: float | None = None,
    fixed: bool = True,
    sinks: bool = False,
    **layout,
) -> Layer:
    """A layer of 16 numbers a head and side, or of 16 for all of them."""
    heads = [(0, 1)] if shared else [(0,), (1,)]
    latents = tuple(
        Latent(side=side, heads=own, rank=16, tiers=tiers, codebooks=codebooks)
        for side in "kv"
        for own in heads
    )
    spec = LayerSpec(keys=keys, values=values, latents=latents)
    geometry = replace(GEOMETRY, softcap=softcap)
    found = cache_layout(CacheSpec(geometry=geometry, layers=(spec,)), **layout)
    up = torch.zeros(len(heads), 16 * len(heads[0]), 16)
    rope = SimpleNamespace(inv_freq=torch.ones(8), scaling=1.0)
    maps = LayerAttention(
        index=0,
        spec=spec,
        geometry=geometry,
        window=window,
        fixed_rope=fixed,
        has_sinks=sinks,
        sinks=torch.zeros(4) if sinks else None,
        key_columns=Columns(spec, spec.key_latents),
        value_columns=Columns(spec, spec.value_latents),
        key_up=up if keys == "pre_rope" else None,
        key_mean=torch.zeros(2, 16) if keys == "pre_rope" else None,
        value_up=up if values == "rebuilt" else None,
        output=torch.zeros(1, 1),
        rope=rope if keys == "pre_rope" else None,
    )
    return maps, found.groups


def task_of(device: str = "cuda", *, decode: bool = True, observed: bool = False) -> Task:
    return Task(
        decode=decode,
        observed=observed,
        device_type=device,
        dtype=torch.bfloat16,
    )


def warned(layer: Layer, choice: BackendChoice, task: Task) -> str:
    """The one warning of a layer that decodes in plain PyTorch."""
    maps, groups = layer
    with pytest.warns(UserWarning, match="decode in plain PyTorch") as caught:
        warn_of_fallback([maps] * 3, [groups] * 3, [choice] * 3, task)
    assert len(caught) == 1
    return str(caught[0].message)


@pytest.mark.parametrize(
    ("layer", "observed", "wanted"),
    [
        (layer_of("plain", "plain"), False, "TritonDecode"),
        (layer_of(bits=4), False, "TritonDecode"),
        (layer_of(bits=8, tracked=True), True, "TritonDecode"),
        (layer_of("pre_rope"), False, "LatentDecode"),
        (layer_of("pre_rope", shared=True, bits=4), False, "LatentDecode"),
        (layer_of(tiers=((8, 4), (8, 2))), False, "TritonDecode"),
        (layer_of(shared=True, bits=2), False, "TritonDecode"),
        (layer_of("pre_rope", tiers=((8, 8), (8, 4))), False, "LatentDecode"),
        (layer_of(shared=True, tracked=True), True, "TritonDecode"),
        (layer_of(tiers=((8, 4), (8, 2)), tracked=True), True, "TritonDecode"),
        (layer_of("pre_rope", tracked=True), True, "LatentDecode"),
        (layer_of(window=64, tracked=True), False, "TritonDecode"),
        (layer_of(softcap=30.0, window=64, shared=True), False, "TritonDecode"),
        (layer_of(sinks=True), False, "TritonDecode"),
        (layer_of("pre_rope", sinks=True), False, "LatentDecode"),
    ],
)
def test_kernels_decode_on_a_gpu(layer: Layer, observed: bool, wanted: str) -> None:
    task = task_of(observed=observed)
    choice = select(*layer, task)
    assert choice.backend.__name__ == wanted and choice.backend.supports_graphs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_fallback([layer[0]], [layer[1]], [choice], task)


@pytest.mark.parametrize(
    ("layer", "observed", "reason", "setting"),
    [
        (layer_of(bits=3), False, "3 bits", "8, 4 and 2 bits have kernels"),
        (layer_of("pre_rope", tiers=((8, 6), (8, 4))), False, "6 bits", "8, 4 and 2 bits have"),
        (layer_of(tiers=((12, 4), (4, 2))), False, "whole 16-bit words", "a recipe that keeps"),
        (layer_of(bits=4, residual=32), False, "residual", "leave residual out"),
        (
            layer_of(bits=2, format="kivi", residual=32, page=32),
            False,
            "residual",
            "leave residual and format='kivi' out; 8, 4 and 2 bits have kernels",
        ),
        (
            layer_of(bits=4, format="kvquant", codebooks=(tuple(range(16)),)),
            False,
            "in format kvquant, which the kernels do not read",
            "leave format='kvquant' out; 8, 4 and 2 bits have kernels",
        ),
        (layer_of(bits=4, sub_group=8), False, "", "leave sub_group out"),
        (layer_of(itemsize=4), False, "", "load the model as bfloat16"),
        (layer_of("pre_rope", window=64), False, "window of 64 tokens", "no setting avoids it"),
        (layer_of("pre_rope", softcap=30.0), False, "scores are capped", "no setting avoids it"),
        (layer_of(softcap=30.0, tracked=True), True, "observes capped", "no setting avoids it"),
        (layer_of(softcap=30.0, itemsize=4), False, "", "load the model as bfloat16"),
        (layer_of(bits=3, tracked=True), True, "3 bits", "8, 4 and 2 bits have kernels"),
    ],
)
def test_a_fallback_on_a_gpu_says_why_and_what_to_set(
    layer: Layer, observed: bool, reason: str, setting: str
) -> None:
    task = task_of(observed=observed)
    choice = select(*layer, task)
    assert choice.backend is DECODE[-1] and not choice.backend.supports_graphs
    message = warned(layer, choice, task)
    assert message.startswith("3 of 3 layers") and reason in message
    assert message.endswith(setting) or setting in message


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        (layer_of(bits=8, tracked=True), True),
        (layer_of(shared=True, tracked=True), False),
        (layer_of(tiers=((8, 4), (8, 2)), tracked=True), False),
        (layer_of("pre_rope", tracked=True), False),
        (layer_of(bits=3, tracked=True), False),
    ],
)
def test_queries_are_kept_where_decoding_leaves_no_weights(layer: Layer, wanted: bool) -> None:
    task = task_of(GPU, observed=True)
    assert select(*layer, task).backend.needs_observer(layer[1], GPU) is wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("numba", ("NumbaDecode",) * 4),
        ("reference", ("CpuPaged", "Fallback", "Fallback", "Fallback")),
    ],
)
def test_cpus_read_pages_and_warn_of_nothing(
    name: str, wanted: tuple[str, ...], backend: Callable[[str], None]
) -> None:
    pytest.importorskip("numba", reason="Numba is not installed")
    backend(name)
    window = {"window": 64, "tracked": True}
    task, several = task_of("cpu"), ({}, {"shared": True}, window, {"sinks": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options, wanted_one in zip(several, wanted, strict=True):
            layer = layer_of(**options)
            choice = select(*layer, task)
            assert choice.backend.__name__ == wanted_one
            warn_of_fallback([layer[0]], [layer[1]], [choice], task)


def test_without_triton_a_gpu_is_told_so(backend: Callable[[str], None]) -> None:
    backend("reference")
    layer, task = layer_of(), task_of()
    message = warned(layer, select(*layer, task), task)
    assert "KVFOLD_BACKEND is reference" in message and "install triton" in message


@pytest.mark.parametrize(
    ("layer", "observed", "wanted"),
    [
        (layer_of(window=64), False, "TritonPrefill"),
        (layer_of("pre_rope", "rebuilt", shared=True), False, "TritonPrefill"),
        (layer_of(tracked=True), True, "TritonPrefill"),
        (layer_of("pre_rope", tracked=True), True, "Fallback"),
        (layer_of(softcap=30.0), False, "TritonPrefill"),
        (layer_of(softcap=30.0, tracked=True), True, "Fallback"),
        (layer_of(sinks=True, window=64), False, "TritonPrefill"),
    ],
)
def test_prefill_has_its_own(layer: Layer, observed: bool, wanted: str) -> None:
    choice = select(*layer, task_of(decode=False, observed=observed))
    assert choice.backend.__name__ == wanted and choice.backend in PREFILL


# -- what a GPU would do, told on any machine ---------------------------------------------------


def stored(config: hf.PretrainedConfig, recipe: str, keep: float) -> CacheSpec:
    """What a recipe stores that keeps as much of every latent."""
    return even_spec(recipes.get(recipe), family_of(config).geometry(config), keep)


def planned(
    config: hf.PretrainedConfig, recipe: str, factor: float, prefer: Prefer = "balanced"
) -> CacheSpec:
    """What a recipe plans for a model whose latents decay at random."""
    geometry, basis = family_of(config).geometry(config), builder_of(recipes.get(recipe))
    chance = torch.Generator().manual_seed(int(factor))
    latents = []
    for layer in range(geometry.num_layers):
        for side, heads in basis.head_sets(geometry):
            width = len(side) * len(heads) * geometry.head_dim
            slope = 4 * torch.rand(1, generator=chance)
            singular = torch.exp(-slope * torch.arange(width) / width).double()
            own = SimpleNamespace(singular=singular, mean=range(width), width=width)
            latents.append(LatentCandidate(layer=layer, side=side, heads=heads, basis=own))
    compressor: Any = SimpleNamespace(
        model=SimpleNamespace(config=config), recipe=recipes.get(recipe), basis=basis,
        geometry=geometry, factor_of=lambda target: None, family=family_of(config),
    )  # fmt: skip
    prepared = Prepared(compressor=compressor, statistics=Statistics({}), candidates=latents)
    return prepared.plan_factor(factor, prefer=prefer)


SPEED = [("swift", "speed"), ("lean", "speed")]
MANY_HEADS = llama_8b(num_key_value_heads=32, num_hidden_layers=2)
NARROW = llama_8b(
    hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64, num_hidden_layers=4
)


@pytest.mark.parametrize(
    ("config", "plan"),
    matrix(
        [llama_8b(num_hidden_layers=2), MANY_HEADS, NARROW],
        [(x, "balanced") for x in ("swift", "fast", "lean", "small")] + SPEED,
    ),
)
def test_no_planned_checkpoint_decodes_in_pytorch(config, plan: tuple, backend) -> None:
    recipe, prefer = plan
    backend("reference")  # which says nothing of other machines
    for factor in (2, 3, 4, 6, 8, 14, 20):
        found = kernels_of(config, planned(config, recipe, factor, prefer))
        assert found.complete, (factor, str(found))


FEW_HEADS = llama_8b(num_key_value_heads=4, num_hidden_layers=2)


@pytest.mark.parametrize("config", [llama_8b(num_hidden_layers=2), FEW_HEADS])
@pytest.mark.parametrize("factor", [3, 4, 5, 6, 8, 14])
def test_plans_for_speed_are_decoded_in_one_pass(config, factor: int) -> None:
    spec = planned(config, "swift", factor, "speed")
    layout = fastest_layout(config, spec)
    assert layout is not None and layout.page == 64 and layout.kept_fraction <= 1 / factor
    assert one_pass_summary(config, spec) == "yes, pages of 64 rows"
    assert kernels_of(config, spec).complete
    assert one_pass_summary(config, planned(config, "swift", factor)).startswith("no: ")


LESS_QUERIES = llama_8b(num_key_value_heads=4, num_attention_heads=32, num_hidden_layers=2)


@pytest.mark.parametrize("config", [llama_8b(num_hidden_layers=2), LESS_QUERIES])
@pytest.mark.parametrize("factor", [3, 4, 5, 6, 8, 14])
def test_so_are_those_whose_keys_are_rebuilt(config, factor: int) -> None:
    spec = planned(config, "lean", factor, "speed")
    layout = fastest_layout(config, spec)
    assert layout is not None and layout.page in (32, 64) and layout.kept_fraction <= 1 / factor
    assert all(layer.keys == "pre_rope" for layer in spec.layers)
    assert all(len({x.tiers for x in layer.key_latents}) == 1 for layer in spec.layers)
    assert kernels_of(config, spec).complete
    assert one_pass_summary(config, planned(config, "lean", factor)).startswith("no: ")


def test_rebuilt_keys_have_as_many_numbers_as_memory_is_left_for() -> None:
    """Maps of a load take twice as much where heads are twice as wide."""
    widest = []
    for head_dim in (256, 128):
        config = llama_8b(num_hidden_layers=2, head_dim=head_dim)
        spec = planned(config, "lean", 8, "speed")
        assert fastest_layout(config, spec) is not None
        widest.append(max(x.rank for layer in spec.layers for x in layer.key_latents))
    assert widest[0] < widest[1] <= 96


def test_plans_for_speed_are_predicted_to_be_fast() -> None:
    config = llama_8b(num_hidden_layers=2)
    plans: list[Prefer] = ["speed", "balanced"]
    once, twice = (predict(config, planned(config, "swift", 4, x), DecodeLoad()) for x in plans)
    assert once is not None and twice is not None and once.ms < 0.8 * twice.ms
    few = predict(config, planned(config, "swift", 4, "speed"), DecodeLoad(batch=1))
    assert few is not None and few.ms < once.ms  # in two passes


def test_rows_of_a_plan_for_speed_suit_the_pass_whatever_the_queries() -> None:
    """The embedded model has two query heads a KV head, and the pass wants four or eight."""
    config = load_config("reference:gqa")
    spec = planned(config, "swift", 5, "speed")
    layout = cache_layout(spec, page=64)
    assert all(
        one_pass.unsupported_reason(layout.groups_of_layer(i), 8) is None
        for i in range(len(spec.layers))
    )
    assert one_pass_summary(config, spec) == "no: 2 KV heads of 2 query heads each"


def test_large_pages_are_smaller_where_two_do_not_fit() -> None:
    config = llama_8b(num_hidden_layers=2, head_dim=256)
    layout = fastest_layout(config, planned(config, "swift", 2, "speed"))
    assert layout is not None and layout.page == 32


def test_rebuilt_keys_are_decoded_in_one_pass_where_their_maps_fit() -> None:
    config = llama_8b(num_hidden_layers=4)
    spec = planned(config, "swift", 4, "speed")
    layers = tuple(replace(layer, keys="pre_rope") for layer in spec.layers)
    found = one_pass_summary(config, replace(spec, layers=layers))
    assert found == "no: pages larger than half of a multiprocessor's memory"
    shape, variant = SHAPES["llama-3.1-8b"], VARIANTS["lean-6x"]
    assert (
        one_pass_summary(config, variant_layout(shape, variant, 4).spec) == "yes, pages of 64 rows"
    )


@pytest.mark.parametrize(
    ("recipe", "keep", "decode", "said"),
    [
        ("small", 0.5, 32, ""),
        ("small", 0.25, 32, ""),
        ("lean", 0.5, 32, ""),
        ("swift", 0.5, 32, ""),
        ("fast", 0.5, 32, ""),
    ],
)
def test_any_machine_tells_how_many_layers_have_kernels(
    recipe: str, keep: float, decode: int, said: str, backend: Callable[[str], None]
) -> None:
    backend("reference")  # which says nothing of other machines
    config = llama_8b()
    found = kernels_of(config, stored(config, recipe, keep))
    assert (found.layers, found.decode, found.prefill) == (32, decode, 32)
    assert found.complete is (not said) and said in str(found)
    assert str(found).startswith(f"{decode} of 32 layers in decoding, 32 in prefill")


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("recipe", ["palu-m", "palu-g", "palu-j", "lorc"])
def test_latents_of_many_heads_have_kernels(heads: int, recipe: str, backend) -> None:
    """Of a model without RoPE, whose keys are absorbed, and of Llama-2's shape, whose are rebuilt;
    wide absorbed keys are prefilled in PyTorch."""
    backend("reference")
    sizes = {"hidden_size": 128 * heads, "num_attention_heads": heads, "num_hidden_layers": 2}
    without = hf.OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=128 * heads)
    for config in (without, llama_8b(**sizes, num_key_value_heads=heads)):
        spec = stored(config, recipe, 0.5)
        found = kernels_of(config, spec, torch.bfloat16)
        shared = max(len(x.heads) for layer in spec.layers for x in layer.latents)
        assert shared == {"palu-m": 1, "palu-g": 4}.get(recipe, heads)
        wide = config is without and shared > 4
        assert (found.decode, found.prefill) == (2, 0 if wide else 2), str(found)


def test_it_names_every_setting_in_the_way() -> None:
    config = llama_8b(dtype=torch.float32)
    text = str(kernels_of(config, stored(config, "small", 0.5)))
    assert "load the model as bfloat16" in text
    assert "0 of 32 layers in decoding, 0 in prefill" in text


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("recipe", ["small", "lean", "fast"])
def test_shapes_without_weights_are_those_of_the_model(name: str, recipe: str) -> None:
    model = tiny(name)
    family, spec = family_of(model.config), stored(model.config, recipe, 0.5)
    for index in range(len(spec.layers)):
        family.swap(model, spec, index)
    family.connect(model)
    shapes = layer_shapes(model.config, spec)
    for shape, module in zip(shapes, family.attentions(model), strict=True):
        maps, dim = module.description, spec.geometry.head_dim
        for field in ("index", "spec", "geometry", "window", "fixed_rope"):
            assert getattr(shape, field) == getattr(maps, field), field
        assert shape.reconstructs_keys is (maps.key_up is not None)
        assert shape.key_width == (dim if maps.key_up is not None else maps.key_columns.widest)
        mapped = maps.value_up is not None
        assert shape.value_width == (dim if mapped else maps.value_columns.widest)
        if maps.rope is not None:
            assert shape.fixed_rope is maps.rope.fixed


def test_angles_that_depend_on_lengths_have_no_kernel() -> None:
    choice = select(*layer_of("pre_rope", fixed=False), task_of())
    assert choice.backend is DECODE[-1] and "length" in choice.rejected["LatentDecode"]


def test_every_choice_is_logged(
    caplog: pytest.LogCaptureFixture, backend: Callable[[str], None]
) -> None:
    backend("reference")
    with caplog.at_level(logging.INFO, "kvfold.attention"):
        LLM(tiny("llama-gqa"), kv_bytes=2**20, max_sequences=2, max_tokens=64)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == 4  # two layers that decode and prefill
    assert found[0].startswith("layer 0, decode: CpuPaged; not TritonDecode: ")
    assert found[3].startswith("layer 1, prefill: Fallback; not TritonPrefill: ")
