"""Plans of maps beside the weights: sizes in bits, and which layers of a model get maps.

Shapes: B sequences, T tokens, n latents, r numbers of the widest.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvfold
import model_types
from kvfold import recipes
from kvfold.calibration.statistics.record import Recorder
from kvfold.cli.main import main
from kvfold.engine.requests.params import SamplingParams
from kvfold.evaluation.measure import full_numbers, storage
from kvfold.hub.checkpoint import provenance_of, spec_of
from kvfold.hub.loading import load, load_tokenizer
from kvfold.layout import CacheSpec, Latent
from kvfold.layout.formats.integers import Integers, dequantize, quantize, scale_of
from kvfold.layout.pages import BLOCK, UNIT, cache_layout, tiers
from kvfold.maps.layers import AttentionLayer, attention_layers, eager_attention, using_attention
from kvfold.maps.selection import LONG_CONTEXT, MAX_WINDOWED_SHARE, SHORT_CONTEXT, select_layers
from kvfold.maps.sidecar import Sidecar
from kvfold.models.rotate import tier_rotation
from kvfold.utils.errors import SettingError
from maps_cases import ROUNDED
from maps_engine_cases import PROMPT, STEPS, apart, engine_logits
from model_types import TYPES, tiny
from sidecar_cases import bytes_tokenizer

TOKENS = 1024


def maps_of(model, folder, **size) -> Sidecar:
    return kvfold.compress(model, tokenizer=bytes_tokenizer(folder), max_tokens=TOKENS, **size)


def installed(*names: str) -> list[str]:
    return [name for name in names if name in TYPES]


@pytest.fixture
def ids() -> list[int]:
    return torch.randint(3, 127, (PROMPT + STEPS,)).tolist()


# -- sizes ------------------------------------------------------------------------------------


def test_without_a_size_maps_are_planned_as_a_folded_checkpoint_is() -> None:
    model, tokenizer = load("reference:gqa"), load_tokenizer("reference:gqa")
    maps = kvfold.compress(model, max_tokens=4096, tokenizer=tokenizer)
    folded = kvfold.compress(model, max_tokens=4096, tokenizer=tokenizer, fold=True)
    asked = provenance_of(folded)
    for name in ("factor", "levels", "prefer", "chosen"):
        assert list_free(maps.provenance[name]) == list_free(asked[name])
    assert maps.provenance["recipe"]["name"] == asked["recipe"]["name"] == "swift"
    assert latents_of(maps.spec) == latents_of(spec_of(folded))


def list_free(value):
    return tuple(value) if isinstance(value, list) else value


def latents_of(spec: CacheSpec) -> list[tuple[Latent, ...]]:
    return [layer.latents for layer in spec.layers]


@pytest.mark.parametrize("size", [{"factor": 3.0}, {"factor": 8.0}, {"bytes_per_token": 100.0}])
def test_a_pool_takes_what_was_asked_for(size, tmp_path) -> None:
    """Numbers and scales of a token, and bytes of whole pages, but for what these align to."""
    model = tiny("llama")
    llm = kvfold.LLM(model, maps=maps_of(model, tmp_path, **size), max_sequences=2, max_tokens=96)
    layout, pool = llm.runner.pool.layout, llm.runner.pool
    full = 2 * layout.spec.geometry.full_numbers
    wanted = size.get("bytes_per_token") or full / size["factor"]
    assert 0.9 * wanted < layout.bits_per_token / 8 <= wanted
    slot = pool.allocate_slot()
    pool.extend([slot], [64])
    blocks = [len(group.layout.segments) + 1 for group in layout.groups]
    aligned = sum(UNIT + BLOCK * count for count in blocks) * 64 // layout.page
    held = pool.stats().sequence_bytes[slot]
    assert 64 * layout.bits_per_token / 8 <= held <= 64 * wanted + aligned


def test_what_a_plan_is_for_and_its_bits_are_taken(tmp_path) -> None:
    model = tiny("llama")
    most = maps_of(model, tmp_path, factor=6.0, levels=(8, 6))
    bits = {x for layer in most.spec.layers for y in layer.latents for _, x in y.tiers or ()}
    assert bits <= {8, 6}
    assert maps_of(model, tmp_path, factor=4.0, prefer="speed").provenance["prefer"] == "speed"
    with pytest.raises(SettingError, match="exclude each other"):
        maps_of(model, tmp_path, factor=4.0, keep=0.5)
    with pytest.raises(SettingError, match="align is of ranks"):
        maps_of(model, tmp_path, factor=4.0, align=8)
    with pytest.raises(SettingError, match="leaves"):
        maps_of(model, tmp_path, factor=900.0)


def rounded(x: torch.Tensor, latents: Sequence[Latent]) -> torch.Tensor:
    """What latents store [B, n, T, r], as it comes back from the bits that are planned."""
    out = x.clone()
    for i, latent in enumerate(latents):
        start = 0
        for width, bits in latent.tiers or ():
            part = x[:, i, :, start : start + width]
            codes, scale, _ = quantize(part, bits, False, torch.float8_e4m3fn)
            out[:, i, :, start : start + width] = dequantize(
                codes, scale_of(scale, bits), None, bits
            )
            start += width
    return out


def projected_logits(model, made: Sidecar, ids: list[int], bits: bool = True) -> torch.Tensor:
    """Logits [T, V] of a model whose attention projects what it is given, and with `bits` rounds
    what would be stored."""
    layers = attention_layers(model)
    specs = dict(zip(made.maps, made.spec.layers, strict=True))
    bound = {}
    for layer in layers:
        if layer.source in specs:
            spec, maps = specs[layer.source], made.maps[layer.source].to(torch.float64)
            sides = (spec.key_latents, spec.value_latents)
            if bits:
                turns = ([tier_rotation(tiers(x, None, Integers)) for x in side] for side in sides)
                maps = maps.rotated(*turns)
            bound[layer.module] = maps.to(torch.float32), sides

    def attention(base, module, q, k, v, mask=None, **more):
        inner = eager_attention(module) if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]
        if module in bound:
            maps, (keys, values) = bound[module]
            k, v = maps.keys(k), maps.values(v)
            if bits:
                k, v = rounded(k, keys), rounded(v, values)
            k = k @ maps.key_up.mT
            v = maps.per_head(v) @ maps.value_ups.mT + maps.value_mean[:, None]
        return inner(module, q, k, v, mask, **more)

    def registered(base: str) -> str:
        name = f"planned_{base}"
        ALL_ATTENTION_FUNCTIONS.register(name, partial(attention, base))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
        return name

    with torch.no_grad(), using_attention(model, registered):
        return model(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", installed("llama", "gemma3_text", "qwen3_moe", "gpt2"))
def test_steps_of_planned_bits_are_those_of_rounded_keys_and_values(name, ids, tmp_path) -> None:
    model = tiny(name)
    made = maps_of(model, tmp_path, factor=4.0)
    found = engine_logits(kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64), ids)
    wanted = projected_logits(model, made, ids)[PROMPT - 1 :]
    whole = projected_logits(model, made, ids, bits=False)[PROMPT - 1 :]
    assert apart(found, wanted) < 0.005  # a number halfway between two codes may take either
    assert apart(found, whole) > 0.02


def test_transformers_stores_the_numbers_of_a_plan_whole(ids, tmp_path) -> None:
    """Without its bits, in float32 here."""
    model = tiny("llama")
    made = maps_of(model, tmp_path, factor=4.0)
    wanted = projected_logits(model, made, ids, bits=False)
    kvfold.attach(model, made)
    with torch.no_grad():
        assert apart(model(torch.tensor([ids])).logits[0], wanted) < 1e-5


def test_statistics_are_measured_once(tmp_path) -> None:
    model = tiny("gemma3_text")
    path = tmp_path / "statistics"
    first = maps_of(model, tmp_path, factor=4.0, statistics=path)
    written = path.stat().st_mtime_ns
    again = maps_of(model, tmp_path, factor=4.0, statistics=path)
    assert path.stat().st_mtime_ns == written
    assert latents_of(first.spec) == latents_of(again.spec)
    with pytest.raises(ValueError, match="layers differ"):
        maps_of(model, tmp_path, factor=4.0, statistics=path, windows=True)


# -- which layers -----------------------------------------------------------------------------

UNLIKE = installed(
    "gemma3n_text", "gemma4_text", "gemma4_unified_text", "mimo_v2_flash", "laguna", "zamba2"
)


@pytest.mark.parametrize("name", UNLIKE)
def test_layers_of_other_kinds_are_left(name: str, ids, tmp_path) -> None:
    """At full rank a model answers as before; at half rank as where attention projects."""
    model = tiny(name)
    with torch.no_grad():
        whole = model(torch.tensor([ids])).logits[0]
    for keep in (1.0, 0.5):
        made = maps_of(model, tmp_path, keep=keep, align=1)
        made.save(tmp_path / f"maps-{keep}")
        wanted = projected_logits(model, made, ids, bits=False)
        detach = kvfold.attach(model, tmp_path / f"maps-{keep}")
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0]
        detach()
        assert apart(found, wanted) < 4e-5
        assert (apart(found, whole) < ROUNDED) == (keep == 1.0)


def layer_of(window: int | None, index: int, heads: int = 4) -> AttentionLayer:
    """Of a model that is described alone."""
    return AttentionLayer(
        name=f"layers.{index}",
        source=f"layers.{index}",
        module=torch.nn.Identity(),
        num_query_heads=8,
        scaling=None,
        softcap=None,
        window=window,
        sinks=None,
        keys=torch.zeros(heads, 1, 128),
        values=torch.zeros(heads, 1, 128),
        positions=None,
    )


class Config:
    """Of a model with so many positions."""

    def __init__(self, positions: int) -> None:
        self.max_position_embeddings = positions

    def get_text_config(self, decoder: bool = False) -> "Config":
        return self


@pytest.mark.parametrize(
    ("windows", "positions", "mapped", "held"),
    [
        ([1024] * 5 + [None], 131072, 1, 0.135),  # as Gemma 3
        ([128, None], 131072, 1, 0.004),  # as gpt-oss
        ([4096] * 3 + [None], 131072, 4, 0.27),  # as Cohere 2: too much to be left
        ([4096, None], 8192, 2, 0.33),  # as Gemma 2, of few positions
        ([4096] * 4, 32768, 4, 1.0),  # all have one
        ([None] * 4, 32768, 4, 0.0),
    ],
)
def test_layers_with_a_window_are_left_where_they_hold_little(
    windows, positions, mapped, held
) -> None:
    layers = [layer_of(window, i) for i, window in enumerate(windows)]
    choice = select_layers(Config(positions), layers)
    assert len(choice.layers) == mapped
    tokens = min(LONG_CONTEXT, positions)
    alone = [x for x in layers if x.window is not None]
    total = sum(min(x.window or tokens, tokens) for x in layers)
    share = sum(min(x.window or tokens, tokens) for x in alone) / total
    assert share == pytest.approx(held, abs=0.005)
    assert (len(choice.uncompressed) > 0) == (0 < share <= MAX_WINDOWED_SHARE)
    assert len(select_layers(Config(positions), layers, windows=True).layers) == len(layers)


def test_the_kind_that_holds_most_is_planned() -> None:
    layers = [layer_of(None, i, heads=8 if i % 3 == 0 else 2) for i in range(6)]
    choice = select_layers(Config(LONG_CONTEXT), layers)
    assert [x.name for x in choice.layers] == ["layers.0", "layers.3"]
    assert choice.uncompressed_share(LONG_CONTEXT) == pytest.approx(1 / 3)
    assert choice.summary() == (
        "4 of 6 layers are left as they are, 4 with other heads than layers.0: they hold 33% at"
        " 8192, 33% at 32768 tokens of the original cache"
    )


@pytest.mark.parametrize("windows", [False, True])
def test_what_is_left_is_told_and_served_whole(windows: bool, ids, tmp_path) -> None:
    model = tiny("gemma3_text")
    made = maps_of(model, tmp_path, keep=0.5, align=1, windows=windows)
    assert len(made.maps) == len(made.spec.layers) == (4 if windows else 2)
    left = made.provenance.get("left")
    assert (left is None) == windows
    if left is not None:
        assert left["windowed"] == [f"model.layers.{i}.self_attn" for i in (0, 2)]
        assert set(left["share"]) == {str(SHORT_CONTEXT), str(LONG_CONTEXT)}
    llm = kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64)
    found, spec = engine_logits(llm, ids), llm.runner.pool.layout.spec
    widths = [x.row_width for x in spec.layers]
    assert sum(widths) == (128 if windows else 64 + 128)
    assert (widths[0] == widths[2] == 64) == (not windows)
    wanted = projected_logits(model, made, ids, bits=False)[PROMPT - 1 :]
    assert apart(found, wanted) < 4e-5


def test_layers_without_maps_take_the_bits_of_the_cache(ids, tmp_path) -> None:
    model = tiny("gemma3_text")
    made = maps_of(model, tmp_path, keep=1.0, align=1)
    with torch.no_grad():
        whole = model(torch.tensor([ids])).logits[0, PROMPT - 1 :]
    lost = []
    for bits in (16, 8, 4):
        llm = kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64, bits=bits)
        formats = {x.bits for group in llm.runner.pool.layout.groups for x in group.layout.segments}
        assert formats == {bits}
        lost.append(apart(engine_logits(llm, ids), whole))
    assert lost[0] < ROUNDED < lost[1] < 0.1
    assert lost[1] < lost[2]


def test_layers_that_a_recipe_skips_are_served_whole(ids, tmp_path) -> None:
    model = tiny("llama")
    recipe = replace(recipes.get("swift"), skip_layers=(1,))
    made = maps_of(model, tmp_path, recipe=recipe, keep=0.6, align=1)
    assert list(made.maps) == [f"model.layers.{i}.self_attn" for i in (0, 2, 3)]
    made.save(tmp_path / "maps")
    llm = kvfold.LLM(model, maps=tmp_path / "maps", max_sequences=2, max_tokens=64)
    assert [x.row_width for x in llm.runner.pool.layout.spec.layers][1] == 64
    wanted = projected_logits(model, made, ids, bits=False)[PROMPT - 1 :]
    assert apart(engine_logits(llm, ids), wanted) < 4e-5


def test_requests_through_whole_and_mapped_layers_run_together(tmp_path) -> None:
    model = tiny("gemma3_text")
    made = maps_of(model, tmp_path, factor=4.0)
    llm = kvfold.LLM(model, maps=made, max_sequences=3, max_tokens=96)
    prompts = [torch.randint(3, 127, (n,)).tolist() for n in (40, 17, 3)]
    wanted = SamplingParams(max_new_tokens=12, ignore_eos=True)
    together = llm.generate(prompts, wanted)
    alone = [llm.generate([x], wanted)[0] for x in prompts]
    assert [x.token_ids for x in together] == [x.token_ids for x in alone]


def test_scores_are_scaled_as_each_layer_does(ids, tmp_path) -> None:
    config = model_types.config("gpt2")
    config.scale_attn_by_inverse_layer_idx = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    made = maps_of(model, tmp_path, keep=0.5, align=1)
    if len({x.scaling for x in attention_layers(model)}) < 4:
        pytest.skip("this transformers scales queries of gpt2 before attention")
    llm = kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64)
    wanted = projected_logits(model, made, ids, bits=False)[PROMPT - 1 :]
    assert apart(engine_logits(llm, ids), wanted) < 4e-5


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma4_unified_text", "model.layers.1.self_attn has attention of another shape"),
        ("gemma3n_text", "model.layers.2.self_attn reads the keys and values of"),
        ("laguna", "has attention of another shape"),
        ("qwen3_next", "has recurrent layers"),
        ("lfm2", "has recurrent layers"),
    ],
)
def test_layers_that_the_engine_cannot_serve_are_named(name: str, why: str, tmp_path) -> None:
    if name not in TYPES:
        pytest.skip(f"this transformers has no {name}")
    model = tiny(name)
    made = maps_of(model, tmp_path, keep=0.5, align=1)
    with pytest.raises(SettingError, match=why):
        kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64)


@pytest.mark.skipif("gemma3n_text" not in TYPES, reason="this transformers has no gemma3n")
def test_gradients_of_layers_that_read_shared_keys_count(tmp_path, monkeypatch) -> None:
    """A layer's keys and values matter to all who read them."""
    model, place = tiny("gemma3n_text"), (0, "grad_key_post")

    def measured(name: str):
        statistics = tmp_path / name
        maps_of(model, tmp_path, keep=0.5, align=1, statistics=statistics)
        from safetensors.torch import load_file

        return load_file(statistics)["{}.{}.second".format(*place)]

    every = measured("every")
    attention = Recorder.attention

    def without(self, module, query, key, value, *args, **more):
        if module not in self.index:
            key, value = key.detach(), value.detach()
        return attention(self, module, query, key, value, *args, **more)

    monkeypatch.setattr(Recorder, "attention", without)
    assert apart(measured("own"), every) > 0.1


@pytest.mark.skipif("mimo_v2_flash" not in TYPES, reason="this transformers has no mimo")
@pytest.mark.parametrize("size", [{"keep": 1.0}, {"keep": 0.5}, {"factor": 4.0}])
def test_values_narrower_than_keys(size, ids, tmp_path) -> None:
    """Keys of 16 numbers a head, values of 12."""
    config = model_types.config("mimo_v2_flash")
    config.layer_types = ["full_attention"] * 4
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for weight in model.parameters():
        weight.data.mul_(3 if weight.dim() > 1 else 1)
    align = {"align": 1} if "keep" in size else {}
    maps_of(model, tmp_path, **size, **align).save(tmp_path / "maps")
    made = Sidecar.load(tmp_path / "maps")
    geometry = made.spec.geometry
    assert (geometry.head_dim, geometry.value_dim) == (16, 12)
    assert geometry.full_numbers == 4 * geometry.num_kv_heads * 28
    llm = kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64)
    found = engine_logits(llm, ids)
    wanted = projected_logits(model, made, ids, bits="factor" in size)[PROMPT - 1 :]
    assert apart(found, wanted) < (0.005 if "factor" in size else 4e-5)
    with pytest.raises(SettingError, match="differ in width, 16 and 12"):
        maps_of(model, tmp_path, recipe="small", **size)


# -- the command line -------------------------------------------------------------------------


def test_the_command_says_what_was_planned_and_where_bits_take_effect(capsys, tmp_path) -> None:
    folder = tmp_path / "maps"
    main(["compress", "reference:gqa", "--max-tokens", "4096", "--output", str(folder)])
    said = capsys.readouterr().out
    made = Sidecar.load(folder)
    assert "recipe swift: a decode step reconstructs no keys" in said
    size = cache_layout(made.spec).bits_per_token / 8
    assert f"{size:.0f} bytes per token with the planned bits" in said
    assert (
        "with kvfold's engine and vLLM, which store the planned bits; transformers' cache" in said
    )
    assert made.provenance["measured"]["through"] == "kvfold's engine"


def test_the_command_says_what_was_left(capsys, tmp_path) -> None:
    model = tiny("gemma3_text")
    model.save_pretrained(tmp_path / "model")
    bytes_tokenizer(None).save_pretrained(tmp_path / "model")
    command = ["compress", str(tmp_path / "model"), "--max-tokens", str(TOKENS)]
    main([*command, "--factor", "4", "--output", str(tmp_path / "maps")])
    said = capsys.readouterr().out
    assert "2 of 4 layers are left as they are, 2 with a sliding window of 8 tokens" in said
    assert "the cache of all layers together is 4.0" in said
    main([*command, "--keep", ".5", "--windows", "--output", str(tmp_path / "all")])
    said = capsys.readouterr().out
    assert "maps of 4 layers" in said
    assert "left as they are" not in said


def test_what_a_cache_stores_counts_layers_without_maps(tmp_path) -> None:
    model = tiny("gemma3_text")
    made = maps_of(model, tmp_path, keep=0.5, align=1)
    assert len(made.maps) < model.config.num_hidden_layers
    every, mapped = full_numbers(model), made.spec.geometry.full_numbers
    stored = storage(model, None, made)
    assert stored["baseline_bytes_per_token"] == 2 * every > 2 * mapped
    assert stored["bytes_per_token"] == made.spec.bytes_per_token() + 2 * (every - mapped)
    assert stored["kept_fraction"] == pytest.approx(stored["bytes_per_token"] / (2 * every))
