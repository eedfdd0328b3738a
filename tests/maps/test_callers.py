"""What callers of transformers hand to a model, folded or with maps: caches, positions, masks.

Maps keep all numbers in another basis, so a model must answer as the original does, which is asked
first. docs/callers.md has a row for every test here.
"""

import copy

import pytest
import torch
import transformers as hf
from torch import Tensor

from fold_cases import close, prepared
from kvfold import LLM, SamplingParams, compress
from kvfold.hub.loading import load
from kvfold.maps.attach import attach, detach
from kvfold.models.positions import QUANTIZED, fit_static
from kvfold.utils.errors import SettingError
from kvfold.utils.versions import cache_argument
from maps_rope_cases import sidecar
from matrix import matrix
from models import tiny
from models import tokens as ids_of

LONG = 40
RECIPES = ["lean", "small"]  # a latent of keys for each head, and one of keys and values
MODELS = ["llama-gqa", "mistral-sliding", "phi3", "gemma2-sliding", "gpt-neox"]
NAMES = ["folded", "maps"]


def pair(name: str, recipe: str, how: str):
    """The original, and the same model with keys that are reconstructed, at full rank."""
    bases = prepared(name, recipe)
    model = bases.compressor.model
    original = copy.deepcopy(model)
    if how == "folded":
        bases.fold(bases.plan(1.0, 1), {})
    else:
        attach(model, sidecar(model, joint=recipe == "small"))
    return original, model


@pytest.fixture(scope="module", params=NAMES)
def both(request):
    return pair("llama-gqa", "lean", request.param)


def logits(model, ids: Tensor, **more) -> Tensor:
    with torch.no_grad():
        return model(ids, **more).logits


def generate(model, ids: Tensor, **settings) -> Tensor:
    tokens = {"min_new_tokens": 12, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **tokens, **settings)


STATIC = {"cache_implementation": "static", "disable_compile": True}
CACHES = {
    "dynamic": {},
    "static": STATIC,
    "static, prompt in chunks": STATIC | {"prefill_chunk_size": 16},
    "beams": {"num_beams": 3},
    "static beams": STATIC | {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "none": {"use_cache": False},
}


@pytest.mark.parametrize(
    ("name", "recipe", "how"), matrix(list(MODELS), list(RECIPES), list(NAMES))
)
def test_caches_of_generate(name: str, recipe: str, how: str) -> None:
    original, model = pair(name, recipe, how)
    ids, mask = ids_of(2, LONG), torch.ones(2, LONG, dtype=torch.long)
    mask[1, :7] = 0
    wrong = []
    for cache, settings in CACHES.items():
        one = "prompt_lookup_num_tokens" in settings
        asked = (ids[:1], mask[:1]) if one else (ids, mask)
        wanted, got = (
            generate(x, asked[0], attention_mask=asked[1], **settings) for x in (original, model)
        )
        if not torch.equal(got, wanted):
            wrong.append(cache)
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="offloads from a GPU")
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("how", NAMES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_offloaded_caches(recipe: str, how: str, kind: str) -> None:
    """On a GPU that other programs use too, transformers' own streams now and then read a layer
    before it is back, of the original model as well: three tries. With sliding windows its cache
    raises ValueError for the original model."""
    original, model = (x.to("cuda") for x in pair("llama-gqa", recipe, how))
    ids = ids_of(2, LONG).to("cuda")
    wanted = generate(original, ids)
    settings = {"cache_implementation": kind, "disable_compile": True}
    assert any(torch.equal(generate(model, ids, **settings), wanted) for _ in range(3))


POSITIONS = {
    "restart": torch.cat((torch.arange(15), torch.arange(25))),
    "restart twice": torch.cat((torch.arange(15), torch.arange(9), torch.arange(16))),
    "jump": torch.cat((torch.arange(15), torch.arange(25) + 60)),
    "repeat": torch.arange(LONG) // 2,
    "late": torch.arange(LONG) + 31,
    "backwards": torch.arange(LONG).flip(0),
    "beyond the cache": torch.arange(LONG) * 5,
    "rows that differ": torch.stack((torch.arange(LONG), torch.arange(LONG) + 9)),
    "from a negative one": torch.arange(LONG) - 3,
}


def split(model, ids: Tensor, places: Tensor, cache, sizes=(LONG - 5, 4, 1)) -> Tensor:
    """Logits of chunks through one cache."""
    stored = cache_argument(cache(model))
    parts = zip(ids.split(sizes, 1), places.split(sizes, 1), strict=True)
    return torch.cat([logits(model, x, position_ids=y, **stored) for x, y in parts], 1)


def dynamic(model) -> hf.Cache:
    return hf.DynamicCache(config=model.config)


def static(model) -> hf.Cache:
    return hf.StaticCache(config=model.config, max_cache_len=LONG + 9)


@pytest.mark.parametrize("places", POSITIONS.values(), ids=POSITIONS)
def test_positions(both, places: Tensor) -> None:
    ids, places = ids_of(2, LONG), places.expand(2, LONG)
    original, model = both
    plain = {"position_ids": places, "use_cache": False}
    close(logits(model, ids, **plain), logits(original, ids, **plain))
    for cache in (dynamic, static):
        close(split(model, ids, places, cache), split(original, ids, places, cache))


def test_packed_sequences_are_as_alone(both) -> None:
    """As `DataCollatorWithFlattening` gives them: no mask, positions that restart."""
    ids = ids_of(1, LONG)
    packed = logits(both[1], ids, position_ids=POSITIONS["restart"][None], use_cache=False)
    alone = [logits(both[0], x) for x in ids.split((15, 25), 1)]
    close(packed, torch.cat(alone, 1))


def test_right_padding(both) -> None:
    ids, mask = ids_of(2, LONG), torch.ones(2, LONG, dtype=torch.long)
    mask[1, -9:] = 0
    more = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1) * mask}
    close(*(logits(x, ids, **more) for x in reversed(both)), mask)


def test_masks_by_hand(both) -> None:
    """Tokens see others as a tree of candidates does: two branches at the same positions."""
    ids, see = ids_of(1, LONG), torch.ones(LONG, LONG, dtype=torch.bool).tril()
    see[30:, 20:30] = False
    places = torch.cat((torch.arange(30), torch.arange(20, 30)))[None]
    more = {"attention_mask": see[None, None], "position_ids": places}
    close(*(logits(x, ids, **more) for x in reversed(both)))


def test_a_cache_that_is_cropped_reordered_and_copied(both) -> None:
    ids, places = ids_of(2, LONG), torch.stack((torch.arange(LONG), torch.arange(LONG) * 2))
    answers = []
    for model in both:
        cache = dynamic(model)
        logits(model, ids, position_ids=places, past_key_values=cache)
        cache.crop(-10)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache = copy.deepcopy(cache)
        tail = {"position_ids": places.flip(0)[:, -10:], "past_key_values": cache}
        answers.append(logits(model, ids.flip(0)[:, -10:], **tail))
    close(answers[1], answers[0])


class Rounding(QUANTIZED):
    """A cache of few bits that needs no other library, and keeps what it gets."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor

    def _dequantize(self, tensor: Tensor) -> Tensor:
        return tensor


def test_a_cache_that_rounds_positions_is_refused(both) -> None:
    cache = dynamic(both[1])
    cache.layers[0] = Rounding()
    with pytest.raises(SettingError, match="a quantized cache would round the positions"):
        logits(both[1], ids_of(1, 4), past_key_values=cache)


ADAPTERS = {
    "LoRA": {},
    "LoRA of one projection": {"target_modules": ["o_proj"]},
    "DoRA": {"use_dora": True},
    "merged, still wrapped": {},
}


def adapted(**settings):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", **{"target_modules": "all-linear", "r": 4, **settings}
    )
    wrapped = peft.get_peft_model(tiny("llama-gqa"), config)
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    return wrapped.eval()


def refused(model, match: str) -> None:
    """By the engine and by folding, and the model stays as it was."""
    ids = ids_of(1, LONG)
    wanted = logits(model, ids)
    for call in (lambda: LLM(model), lambda: compress(model, fold=True, calib=None)):
        with pytest.raises(SettingError, match=match):
            call()
    assert torch.equal(logits(model, ids), wanted)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_that_would_be_dropped_are_refused(name: str) -> None:
    wrapped = adapted(**ADAPTERS[name])
    if "merged" in name:
        wrapped.merge_adapter()
    refused(wrapped.get_base_model(), "an adapter of PEFT, which would be dropped: merge it first")


def test_a_merged_adapter_is_served() -> None:
    model = adapted().merge_and_unload()
    prompt = ids_of(1, 12)
    wanted = generate(model, prompt)[0, 12:].tolist()
    answer = LLM(model).generate(
        [prompt[0].tolist()], SamplingParams(max_new_tokens=12, ignore_eos=True)
    )
    assert list(answer[0].token_ids) == wanted


def test_hooks_that_would_not_be_called_are_refused() -> None:
    for path in ("", ".v_proj"):
        model = tiny("llama-gqa")
        module = model.get_submodule(f"model.layers.1.self_attn{path}")
        module.register_forward_hook(lambda *_: None)
        refused(model, f"layer 1, self_attn{path}: a hook, which would not be called")


def test_dynamic_int8_of_torch_is_refused() -> None:
    model = torch.ao.quantization.quantize_dynamic(tiny("llama-gqa"), {torch.nn.Linear})
    refused(model, "layer 0, self_attn.q_proj: a Linear, whose weights are not those")


def test_other_linear_layers_are_refused() -> None:
    """As those of bitsandbytes, FP8Linear and quanto, which are classes of their own."""

    class Coded(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model = tiny("llama-gqa")
    attention = model.model.layers[1].self_attn
    coded = Coded(48, 48, bias=False)
    coded.weight = attention.q_proj.weight
    attention.q_proj = coded
    refused(model, "layer 1, self_attn.q_proj: a Coded, whose weights are not those")


class Coded8(Tensor):
    """A weight of another class in a plain linear layer, as torchao has them."""


def test_weights_of_another_class_are_refused() -> None:
    model = tiny("llama-gqa")
    layer = model.model.layers[1].self_attn.v_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Coded8))
    refused(model, "layer 1, self_attn.v_proj: weights of a Coded8: take the model before")


def test_weights_on_disk_are_refused(tmp_path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.disk_offload(tiny("llama-gqa"), tmp_path, execution_device="cpu")
    refused(model, "weights that accelerate reads from the host or from disk")


HEADLESS = "which has no head of logits: load it with AutoModelForCausalLM"


@pytest.mark.parametrize("kind", [hf.LlamaForSequenceClassification, hf.LlamaModel])
def test_models_without_logits_are_refused(kind) -> None:
    model = kind(tiny("llama-gqa").config)
    for call in (LLM, compress):
        with pytest.raises(SettingError, match=f"got {kind.__name__}, {HEADLESS}"):
            call(model)


@pytest.mark.parametrize("beside", [False, True])
def test_learned_prompts_are_refused(beside: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    maps = sidecar(tiny("llama-gqa")) if beside else None
    with pytest.raises(SettingError, match="an adapter of PEFT"):
        LLM(peft.get_peft_model(tiny("llama-gqa"), config), maps=maps)


def test_a_folder_of_an_adapter_is_refused(tmp_path) -> None:
    adapted().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is an adapter of PEFT, not a model: load its base"):
        LLM(str(tmp_path))


def test_a_folder_of_a_model_and_an_adapter_is_refused(tmp_path) -> None:
    adapted().save_pretrained(tmp_path)
    tiny("llama-gqa").save_pretrained(tmp_path)
    with pytest.raises(SettingError, match="an adapter of PEFT, which would be dropped"):
        LLM(load(str(tmp_path)))


def test_flex_attention(both) -> None:
    model, ids = copy.deepcopy(both[1]), ids_of(1, 20)
    model.set_attn_implementation("flex_attention")
    if hasattr(model.config, "quantization_config"):
        with pytest.raises(SettingError, match="takes masks as tensors, and BlockMask is none"):
            logits(model, ids)
    else:
        close(logits(model, ids), logits(both[0], ids))


def test_export_leaves_the_model_as_it_was(both) -> None:
    class Logits(torch.nn.Module):
        def __init__(self, model) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, use_cache=False).logits

    model, ids = copy.deepcopy(both[1]), ids_of(1, 20)
    exported = torch.export.export(Logits(model), (ids,), strict=False).module()
    for x in (exported(ids), logits(model, ids)):
        close(x, logits(both[0], ids))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["maps", "folded"])
def test_compile_of_one_graph(how: str) -> None:
    """Without a break: a whole prompt, then chunks and tokens through caches, and `generate`."""
    original, model = pair("llama-gqa", "lean", how)
    ids, places = ids_of(1, LONG), torch.arange(LONG)[None]
    plain = model.forward
    for cache in (None, dynamic, static):
        torch._dynamo.reset()
        model.forward = torch.compile(plain, fullgraph=True, backend="eager")
        if cache is None:
            for more in ({}, {"use_cache": False}):
                close(logits(model, ids, **more), logits(original, ids, **more))
        else:
            close(split(model, ids, places, cache), split(original, ids, places, cache))
    name = {"cache_implementation": "static"}
    assert torch.equal(generate(model, ids, **name), generate(original, ids, **name))


ENCODER = hf.BartConfig(
    d_model=48,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    decoder_ffn_dim=64,
    vocab_size=97,
    pad_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=2,
)


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return hf.LlamaForCausalLM(tiny("llama-gqa").config)


def needs_images() -> torch.nn.Module:
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    vision = {**small, "image_size": 28, "patch_size": 14}
    queries = {**small, "encoder_hidden_size": 32, "vocab_size": 99}
    text = {"hidden_size": 48, "word_embed_proj_dim": 48, "num_hidden_layers": 2, "ffn_dim": 64}
    text |= {"model_type": "opt", "num_attention_heads": 4, "vocab_size": 97}
    config = hf.Blip2Config(vision_config=vision, qformer_config=queries, text_config=text)
    return hf.Blip2ForConditionalGeneration(config)


NO_MODELS = {
    "None": (lambda: None, "got None"),
    "a name": (lambda: "nowhere", "got 'nowhere'"),
    "a config": (lambda: tiny("llama-gqa").config, "got an object LlamaConfig"),
    "weights": (lambda: tiny("llama-gqa").state_dict(), "got an object OrderedDict"),
    "a module": (lambda: torch.nn.Linear(2, 2), "got Linear, which is no model of transformers'"),
    "a wrapper": (
        lambda: torch.nn.DataParallel(tiny("llama-gqa")),
        "got DataParallel, which is no model of transformers': give the model that it holds",
    ),
    "an encoder with a decoder": (
        lambda: hf.BartForConditionalGeneration(ENCODER),
        "an encoder with a decoder: kvfold serves decoders alone",
    ),
    "no weights": (on_meta, "whose weights are on the meta device, without numbers"),
    "no tokens": (
        lambda: hf.ViTModel(hf.ViTConfig(hidden_size=48, num_hidden_layers=1)),
        "got ViTModel, which has no embedding of tokens",
    ),
    "images": (needs_images, "whose forward needs pixel_values: give the language model inside"),
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_what_is_no_decoder_is_refused_by_all(name: str) -> None:
    make, match = NO_MODELS[name]
    value, maps = make(), sidecar(tiny("llama-gqa"))
    calls = [lambda: attach(value, maps), lambda: detach(value)]
    if name != "a name":
        calls += [lambda: LLM(value), lambda: LLM(value, maps=maps), lambda: compress(value)]
    for call in calls:
        with pytest.raises(SettingError, match=match):
            call()


def test_a_compiled_model_is_refused_where_its_weights_are_read() -> None:
    model = torch.compile(tiny("llama-gqa"), backend="eager")
    for call in (lambda: LLM(model), lambda: compress(model, fold=True)):
        with pytest.raises(SettingError, match=r"torch\.compile made: give the model"):
            call()


HEADS = [hf.LlamaForSequenceClassification, hf.LlamaForTokenClassification, hf.LlamaModel]


@pytest.mark.parametrize("kind", HEADS)
def test_maps_act_whatever_head_a_model_has(kind) -> None:
    plain = tiny("llama-gqa")
    plain.config.pad_token_id = 0
    model, maps, ids = kind(plain.config).eval(), sidecar(plain), ids_of(2, LONG)
    model.base_model.load_state_dict(plain.model.state_dict())
    with torch.no_grad():
        wanted = model(ids)[0]
        if kind is hf.LlamaModel:
            with pytest.raises(SettingError, match="attach them to the model with its head"):
                attach(model, maps)
            plain.model, maps = model, sidecar(plain)
            attach(plain, maps)
        else:
            attach(model, maps)
        close(model(ids)[0], wanted)


def test_maps_of_a_model_of_images() -> None:
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vision = hf.CLIPVisionConfig(hidden_size=32, image_size=28, patch_size=14, **small)
    text = tiny("llama-gqa").config
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=96)
    model = hf.LlavaForConditionalGeneration(config).eval()
    ids = torch.cat((ids_of(1, 4), torch.full((1, 4), 96), ids_of(1, 9).clamp(max=95)), 1)
    image = {"pixel_values": torch.randn(1, 3, 28, 28)}
    wanted = logits(model, ids, **image)
    attach(model, sidecar(model))
    close(logits(model, ids, **image), wanted)


def test_the_engine_refuses_decoders_that_count_positions_themselves() -> None:
    with pytest.raises(SettingError, match="'bart' takes no position_ids, by which the engine"):
        LLM(hf.BartForCausalLM(ENCODER).eval(), max_sequences=2, max_tokens=64)


def test_types_without_a_number_of_positions_are_refused_for_their_attention() -> None:
    config = hf.BloomConfig(hidden_size=48, n_layer=2, n_head=4, vocab_size=97)
    model = hf.BloomForCausalLM(config).eval()
    for call in (lambda: compress(model, "swift"), lambda: LLM(model, max_tokens=64)):
        with pytest.raises(SettingError, match="no layer of model type 'bloom' calls transformers"):
            call()


def test_a_refused_attention_leaves_the_model_as_it_was() -> None:
    model, ids = tiny("llama-gqa"), ids_of(1, 20)
    wanted, maps = logits(model, ids), sidecar(model)
    model.set_attn_implementation("paged|eager")
    with pytest.raises(SettingError, match="stores keys and values itself, so maps cannot act"):
        attach(model, maps)
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model, ids), wanted)
    attach(model, maps)
    close(logits(model, ids), wanted)


def test_a_static_cache_fits_keys_as_wide_as_the_model_has() -> None:
    """What is stored for values is allocated anew, too, where keys need it not."""
    config = tiny("llama-gqa").config
    cache = hf.StaticCache(config, max_cache_len=8)
    cache.early_initialization(1, 1, 8, torch.float32, torch.device("cpu"))
    key, value = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 3)
    fit_static(cache, 0, key, value)
    keys, values = cache.update(key, value, 0)
    assert keys.shape[3] == 8 and values.shape[3] == 3
