"""Keys before RoPE with maps: how models of many types rotate keys is measured, and
attention reconstructs and rotates them, with no code for a family.

Shapes: B prompts, T tokens.
"""

import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvfold
from kvfold.hub.loading import load, load_tokenizer
from kvfold.layout import Latent, LayerSpec
from kvfold.maps.attach import attach_maps
from kvfold.maps.layers import attention_layers, eager_attention, using_attention
from kvfold.maps.rope_maps import RopeMaps
from kvfold.maps.rotation import Rotation, find_rotations
from kvfold.models.fold import LatentMaps
from kvfold.models.positions import QUANTIZED
from kvfold.utils.errors import SettingError
from kvfold.utils.versions import cache_argument
from maps_cases import CHUNKS, EXPANDED, NEAR, ROUNDED, apart, in_chunks
from maps_engine_cases import engine_logits
from maps_rope_cases import REFUSED, maps_of, sidecar
from maps_users_cases import GENERATE, generated, logits
from matrix import matrix
from model_types import TYPES, config, tiny
from sidecar_cases import TEXT, bytes_tokenizer, nats

KINDS = [x for x in TYPES if x not in EXPANDED and x not in REFUSED and x != "minimax"]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 127, (2, sum(CHUNKS)))


def left_padded(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits in chunks of prompts, one of which is shorter: [B, T, V] and what is no padding."""
    seen = torch.ones_like(ids)
    seen[0, :6] = 0
    places = (seen.cumsum(-1) - 1).clamp(min=0)
    found, cache, start = [], DynamicCache(config=model.config), 0
    for size in CHUNKS:
        part, end = slice(start, start + size), start + size
        more = {"attention_mask": seen[:, :end], "position_ids": places[:, part]}
        found.append(model(ids[:, part], **more, **cache_argument(cache), use_cache=True).logits)
        start = end
    found = torch.cat(found, 1)
    return torch.cat((found[0, 6:], found[1]))


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_at_full_rank_a_model_answers_as_before(name: str, ids: torch.Tensor) -> None:
    model = tiny(name)
    whole, chunked = model(ids, use_cache=False).logits, in_chunks(model, ids)
    layers = attention_layers(model)
    maps = maps_of(model, layers)
    detach = attach_maps(model, layers, maps)
    assert apart(model(ids, use_cache=False).logits, whole) < NEAR
    assert apart(in_chunks(model, ids), chunked) < NEAR
    detach()
    wrong = {x: replace(own, key_up=own.key_up.flip(-1)) for x, own in maps.items()}
    attach_maps(model, layers, wrong)
    assert apart(model(ids, use_cache=False).logits, whole) > 0.01


@pytest.mark.parametrize("name", [x for x in REFUSED if x in TYPES])
def test_other_rotations_are_refused_by_layer(name: str) -> None:
    model = tiny(name)
    with pytest.raises(SettingError, match=rf"\d.* {REFUSED[name]}.*'swift'"):
        find_rotations(model, attention_layers(model))


def test_angles_that_depend_on_length_are_refused() -> None:
    config_ = config("llama")
    config_.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = AutoModelForCausalLM.from_config(config_)
    with pytest.raises(SettingError, match="rope_type 'dynamic'"):
        find_rotations(model, attention_layers(model))


# How keys of tiny models are rotated, as their papers say: rotated numbers, whether neighbours are
# pairs, its direction, and theta of all layers (0: none).
ROTATED = {
    "llama": (16, False, 1, [10000.0] * 4),
    "phi": (8, False, 1, [10000.0] * 4),
    "glm": (8, True, 1, [10000.0] * 4),
    "cohere2": (16, True, 1, [10000.0, 0.0] * 2),
    "nanochat": (16, False, -1, [10000.0] * 4),
    "gemma3_text": (16, False, 1, [10000.0, 1e6] * 2),
    "gpt2": (16, False, 1, [0.0] * 4),
}


def rotated_by_hand(k: torch.Tensor, places, about, theta: float, sign: int) -> torch.Tensor:
    """Keys [B, H, T, d] rotated at positions [B, T], pair by pair, as complex numbers."""
    w, neighbours, direction, _ = about
    if not theta:
        return k
    first = torch.arange(0, w, 2) if neighbours else torch.arange(w // 2)
    second = first + 1 if neighbours else first + w // 2
    angles = places[:, None, :, None] * theta ** (-torch.arange(0, w, 2).double() / w)
    turned = torch.complex(k[..., first].double(), k[..., second].double())
    turned = turned * torch.polar(torch.ones_like(angles), sign * direction * angles)
    k = k.clone()
    k[..., first], k[..., second] = turned.real.to(k), turned.imag.to(k)
    return k


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", [x for x in ROTATED if x in TYPES])
@torch.no_grad()
def test_at_half_rank_keys_before_rope_are_projected(name: str, joint: bool, ids) -> None:
    """As where keys are rotated back by hand, projected, and rotated again: the angles of the
    papers, the order of the model."""
    model = tiny(name)
    layers = attention_layers(model)
    maps = maps_of(model, layers, 0.5, joint)
    about = ROTATED[name]
    by_module = {x.module: (maps[x.name], about[3][i]) for i, x in enumerate(layers)}

    def projected(base, module, q, k, v, attention_mask=None, **more):
        own, theta = by_module[module]
        places, order = more["position_ids"].expand(len(k), -1), own.rotation.order
        back = rotated_by_hand(k, places, about, theta, -1)[..., order]
        z = [down(x, own, side) for x, side in ((back, "key"), (v, "value"))]
        z = [z[0] + z[1]] * 2 if joint else z
        up = [(x @ getattr(own, f"{side}_up").to(x).mT) for x, side in zip(z, SIDES, strict=True)]
        heads = own.num_heads
        keys, values = (split(x, heads // x.shape[1]) for x in up)
        keys = torch.empty_like(keys).index_copy_(3, order, keys + own.key_mean.to(keys)[:, None])
        values = values + own.value_mean.to(values)[:, None]
        inner = eager_attention(module) if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]
        keys = rotated_by_hand(keys, places, about, theta, 1)
        return inner(module, q, keys, values, attention_mask, **more)

    def registered(base: str) -> str:
        ALL_ATTENTION_FUNCTIONS.register(f"by_hand_{base}", partial(projected, base))
        mask = ALL_MASK_ATTENTION_FUNCTIONS[base]
        ALL_MASK_ATTENTION_FUNCTIONS.register(f"by_hand_{base}", mask)
        return f"by_hand_{base}"

    whole = model(ids, use_cache=False).logits
    with using_attention(model, registered):
        wanted = model(ids, use_cache=False).logits
    assert apart(wanted, whole) > 0.01
    detach = attach_maps(model, layers, maps)
    assert apart(in_chunks(model, ids), wanted) < NEAR
    assert apart(model(ids, use_cache=False).logits, wanted) < NEAR
    detach()
    wrong = {x: replace(y, rotation=other_angles(y.rotation)) for x, y in maps.items()}
    attach_maps(model, layers, wrong)
    if any(about[3]):
        assert apart(in_chunks(model, ids), wanted) > 100 * NEAR


SIDES = ("key", "value")


def down(x: torch.Tensor, own: RopeMaps, side: str) -> torch.Tensor:
    """[B, H, T, d] as what latents [B, m, T, r] store."""
    maps = getattr(own, f"{side}_down").to(x)
    whole = x.unflatten(1, (len(maps), -1)).transpose(2, 3).flatten(3)
    return whole @ maps - getattr(own, f"{side}_shift").to(x)[:, None]


def split(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, m, T, heads d] -> [B, m heads, T, d]."""
    return x.unflatten(3, (heads, -1)).transpose(2, 3).flatten(1, 2)


def other_angles(rotation: Rotation) -> Rotation:
    """As if tables were shifted: the angles of the next pair."""
    return Rotation(rotation.inv_freq.roll(1), rotation.order)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "cohere2", "qwen3_vl"])
@torch.no_grad()
def test_left_padding_changes_nothing(name: str, joint: bool, ids: torch.Tensor) -> None:
    model = tiny(name)
    wanted = left_padded(model, ids)
    layers = attention_layers(model)
    attach_maps(model, layers, maps_of(model, layers, joint=joint))
    assert apart(left_padded(model, ids), wanted) < NEAR


@torch.no_grad()
def test_padding_moves_what_is_projected(ids: torch.Tensor) -> None:
    """A shorter prompt answers as by itself: positions of its row are its own, at half rank too."""
    model = tiny("llama")
    layers = attention_layers(model)
    attach_maps(model, layers, maps_of(model, layers, 0.5))
    alone = model(ids[:1, 6:], use_cache=False).logits[0]
    assert apart(left_padded(model, ids)[: len(alone)], alone) < NEAR


# -- what users do ------------------------------------------------------------------------------


@pytest.fixture
def few() -> torch.Tensor:
    return torch.randint(3, 127, (2, 20))


@pytest.mark.parametrize(
    ("name", "joint"),
    [("llama", False), ("gemma3_text", True), ("cohere2", False), ("gpt_oss", True)],
)
@pytest.mark.parametrize("settings", GENERATE.values(), ids=GENERATE)
def test_generate_gives_the_same_tokens(name: str, joint: bool, settings, few) -> None:
    model = tiny(name)
    seen = torch.ones_like(few)
    seen[0, :5] = 0
    settings = {**settings, "attention_mask": seen}
    wanted = generated(model, few, **settings)
    kvfold.attach(model, sidecar(model, joint=joint))
    assert torch.equal(generated(model, few, **settings), wanted)


@pytest.mark.parametrize("settings", [{}, GENERATE["static"], GENERATE["beams"]])
def test_caches_and_none_give_the_same_at_half_rank(settings, few) -> None:
    model = tiny("gemma3_text")
    kvfold.attach(model, sidecar(model, 0.5))
    without = {**settings, "use_cache": False, "cache_implementation": None}
    assert torch.equal(generated(model, few, **settings), generated(model, few, **without))


def test_a_static_cache_of_fewer_latents_of_keys_than_of_values(few) -> None:
    """As of recipes whose keys share a latent and whose values do not."""
    model = tiny("llama")
    layers = attention_layers(model)
    heads, d = layers[0].num_kv_heads, layers[0].head_dim
    whole, head = (LatentMaps(x, x, x[0] * 0) for x in (torch.eye(heads * d), torch.eye(d)))
    latents = [Latent(side="k", heads=tuple(range(heads)), rank=heads * d)]
    latents += [Latent(side="v", heads=(i,), rank=d) for i in range(heads)]
    spec = LayerSpec(keys="pre_rope", values="rebuilt", latents=tuple(latents))
    wanted = generated(model, few)
    maps = {
        name: RopeMaps.before_rope(spec, [whole] + [head] * heads, rotation)
        for name, rotation in find_rotations(model, layers).items()
    }
    attach_maps(model, layers, maps)
    assert torch.equal(generated(model, few, cache_implementation="static"), wanted)


def test_speculation_crops_what_is_stored(few) -> None:
    model = tiny("llama")
    one = few[:1].repeat(1, 2)
    wanted = generated(model, one)
    kvfold.attach(model, sidecar(model))
    assert torch.equal(generated(model, one, prompt_lookup_num_tokens=3), wanted)
    assert torch.equal(generated(model, one, assistant_model=tiny("llama")), wanted)


def test_copies_of_a_cache_and_reordered_prompts(few) -> None:
    model = tiny("llama")
    kvfold.attach(model, sidecar(model, 0.5))
    places = torch.stack((torch.arange(20), torch.arange(20) + 9))
    whole = logits(model, few, position_ids=places, use_cache=False)
    cache = DynamicCache(config=model.config)
    logits(model, few[:, :8], position_ids=places[:, :8], **cache_argument(cache))
    for each in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        found = logits(model, few[:, 8:], position_ids=places[:, 8:], **cache_argument(each))
        assert apart(found, whole[:, 8:]) < NEAR
    cache.reorder_cache(torch.tensor([1, 0]))
    more = {"position_ids": places.flip(0)[:, 8:], **cache_argument(cache)}
    assert apart(logits(model, few.flip(0)[:, 8:], **more), whole.flip(0)[:, 8:]) < NEAR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_are_exact_in_any_dtype(dtype: torch.dtype, few) -> None:
    model = tiny("llama", dtype)
    places = torch.arange(20)[None] + 70_000
    wanted = logits(model, few, position_ids=places)
    kvfold.attach(model, sidecar(model))
    found = torch.cat(list(stepwise(model, few, places)), 1)
    assert apart(found.float(), wanted.float()) < 0.2


def stepwise(model, ids, places):
    cache = DynamicCache(config=model.config)
    for i in range(0, ids.shape[1], 5):
        part = slice(i, i + 5)
        yield logits(model, ids[:, part], position_ids=places[:, part], **cache_argument(cache))


@pytest.mark.slow
def test_torch_compile(few) -> None:
    model = tiny("llama")
    wanted = logits(model, few)
    torch._dynamo.reset()
    kvfold.attach(model, sidecar(model))
    fast = torch.compile(model, backend="eager")
    assert apart(logits(fast, few), wanted) < NEAR
    cache = DynamicCache(config=model.config)
    found = [logits(fast, few[:, i : i + 1], **cache_argument(cache)) for i in range(5)]
    assert apart(torch.cat(found, 1), wanted[:, :5]) < NEAR


def test_training_gives_the_same_gradients(few) -> None:
    model = tiny("llama").train()
    found = []
    for _ in range(2):
        model.zero_grad()
        model(few, labels=few).loss.backward()
        found.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
        if len(found) == 1:
            kvfold.attach(model, sidecar(model))
    assert max(map(apart, *found)) < 1e-3


class Rounding(QUANTIZED):
    def __init__(self) -> None:
        self.is_initialized = False

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, tokens: int) -> tuple[int, int]:
        return tokens, 0

    def _quantize(self, *_):
        return None

    _dequantize = _quantize


def test_a_cache_that_rounds_is_refused(few) -> None:
    model = tiny("llama")
    kvfold.attach(model, sidecar(model))
    cache = DynamicCache(config=model.config)
    cache.layers = [Rounding() for _ in range(4)]
    with pytest.raises(SettingError, match="would round the positions"):
        model(few, position_ids=torch.arange(20)[None], **cache_argument(cache))


def test_images_are_refused(few) -> None:
    if "qwen3_vl" not in TYPES:
        pytest.skip("this transformers has no qwen3_vl")
    model = tiny("qwen3_vl")
    kvfold.attach(model, sidecar(model))
    places = torch.arange(20).expand(4, 2, 20).clone()
    logits(model, few, position_ids=places)
    places[2, :, 9:] += 3
    with pytest.raises(SettingError, match="rotated by three positions"):
        logits(model, few, position_ids=places)


# -- the sidecar ----------------------------------------------------------------------------------


def compressed(name: str, recipe: str, keep: float, folder):
    model = tiny(name)
    about = {"align": 1, "windows": True, "max_tokens": 1024}
    about["tokenizer"] = bytes_tokenizer(folder)
    return model, kvfold.compress(model, recipe, keep=keep, **about)


@pytest.mark.parametrize(
    ("name", "recipe"),
    matrix(["llama", "cohere2", "gemma3_text", "gpt_oss", "gpt2", "glm"], ["lean", "small"]),
)
def test_any_type_is_calibrated_before_rope(name: str, recipe: str, tmp_path) -> None:
    ids = torch.randint(3, 127, (1, 96))
    wanted, lost = logits(tiny(name), ids), []
    for keep in (1.0, 0.75, 0.25):
        model, made = compressed(name, recipe, keep, tmp_path)
        made.save(tmp_path / f"maps{keep}")
        kvfold.attach(model, tmp_path / f"maps{keep}")
        lost.append(apart(logits(model, ids), wanted))
    assert lost[0] < ROUNDED
    assert lost[0] - ROUNDED < lost[1] < lost[2]


def test_layers_that_do_not_rotate_reconstruct_nothing(tmp_path) -> None:
    _, made = compressed("cohere2", "lean", 0.5, tmp_path)
    assert [x.keys for x in made.spec.layers] == ["pre_rope", "post_rope"] * 2


@pytest.mark.parametrize("recipe", ["lean", pytest.param("small", marks=pytest.mark.slow)])
def test_maps_are_those_that_a_folded_model_has(recipe: str) -> None:
    """The same recipe, from what attention is asked and from the weights of a known family."""
    tokenizer = load_tokenizer("reference:gqa")
    ids = torch.tensor([tokenizer(TEXT)["input_ids"][:512]])
    model = load("reference:gqa")
    before = nats(model, ids)
    made = kvfold.compress(model, recipe, keep=0.4, max_tokens=4096, tokenizer=tokenizer)
    detach = kvfold.attach(model, made)
    attached = nats(model, ids) - before
    detach()
    folded = kvfold.compress(
        model, recipe, keep=0.4, max_tokens=4096, tokenizer=tokenizer, fold=True
    )
    assert attached == pytest.approx(nats(folded, ids) - before, rel=0.03)


def test_another_theta_is_refused(tmp_path) -> None:
    _, made = compressed("llama", "lean", 0.5, tmp_path)
    other = config("llama")
    other.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 1.02}
    model = tiny("llama")
    longer = type(model)(other).eval()
    longer.load_state_dict(model.state_dict())
    with pytest.raises(SettingError, match="by other angles than when its maps were made"):
        kvfold.attach(longer, made)
    kvfold.attach(model, made)


# -- the engine -----------------------------------------------------------------------------------

PROMPT, STEPS = 21, 4
SERVED = ("llama", "cohere2", "gemma3_text", "glm", "smollm3", "nanochat", "gpt2")


@pytest.mark.parametrize(
    ("name", "recipe"), matrix([x for x in SERVED if x in TYPES], ["lean", "small"])
)
def test_steps_of_the_engine_are_those_of_transformers(name: str, recipe: str, tmp_path) -> None:
    ids = torch.randint(3, 127, (PROMPT + STEPS,)).tolist()
    model, made = compressed(name, recipe, 0.5, tmp_path)
    llm = kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64)
    found = engine_logits(llm, ids)
    coarse = kvfold.LLM(model, maps=made, max_sequences=2, max_tokens=64, bits=8)
    rounded = engine_logits(coarse, ids)
    kvfold.attach(model, made)
    wanted = logits(model, torch.tensor([ids]), use_cache=False)[0, PROMPT - 1 :]
    assert apart(found, wanted) < 4e-5
    assert apart(found, wanted.flip(0)) > 0.05
    assert 1e-5 < apart(rounded, wanted) < 0.1
