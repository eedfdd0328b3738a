"""Models with maps attached, used as users of transformers use them.

The maps keep all numbers in another basis, so a model must answer as it did before.
"""

import copy
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache

import kvfold
from kvfold.hub.loading import load, load_tokenizer
from kvfold.maps.layers import attention_layers
from kvfold.maps.sidecar import probes_of
from kvfold.utils.errors import SettingError
from kvfold.utils.versions import cache_argument
from maps_cases import NEAR, apart
from maps_users_cases import GENERATE, full_rank, generated, logits
from model_types import tiny


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 127, (2, 20))


@pytest.fixture
def model():
    return tiny("llama")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("settings", GENERATE.values(), ids=GENERATE)
def test_generate_gives_the_same_tokens(name: str, settings, ids: torch.Tensor) -> None:
    if name == "gpt2" and "prefill_chunk_size" in settings:
        pytest.skip("transformers takes the tiny config's KV heads for gpt2's")
    model = tiny(name)
    wanted = generated(model, ids, **settings)
    kvfold.attach(model, full_rank(model))
    assert torch.equal(generated(model, ids, **settings), wanted)


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_a_static_cache_holds_what_a_growing_one_does(model, keep, ids: torch.Tensor) -> None:
    kvfold.attach(model, full_rank(model, keep))
    wanted = generated(model, ids)
    assert torch.equal(generated(model, ids, cache_implementation="static"), wanted)


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_implementation": "offloaded"},
        {"cache_implementation": "quantized", "cache_config": {"backend": "quanto"}},
        {"cache_implementation": "quantized", "cache_config": {"backend": "hqq"}},
    ],
)
def test_other_caches(model, settings, ids: torch.Tensor) -> None:
    try:
        wanted = generated(model, ids, **settings)
    except (ImportError, RuntimeError, AssertionError) as error:
        pytest.skip(f"not without maps either: {error}"[:90])
    kvfold.attach(model, full_rank(model))
    found = generated(model, ids, **settings)
    assert found.shape == wanted.shape
    if settings["cache_implementation"] == "offloaded":
        assert torch.equal(found, wanted)


def test_speculation_gives_the_same_tokens(model, ids: torch.Tensor) -> None:
    one = ids[:1].repeat(1, 2)
    wanted = generated(model, one)
    kvfold.attach(model, full_rank(model))
    assert torch.equal(generated(model, one, prompt_lookup_num_tokens=3), wanted)
    assistant = copy.deepcopy(model)
    assert torch.equal(generated(model, one, assistant_model=assistant), wanted)
    assert torch.equal(generated(model, one, assistant_model=tiny("llama")), wanted)


def test_a_cache_serves_several_turns_and_copies(model, ids: torch.Tensor) -> None:
    whole = logits(model, ids)
    kvfold.attach(model, full_rank(model))
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :8], **cache_argument(cache))
    prefix = copy.deepcopy(cache)
    again = pickle.loads(pickle.dumps(cache))
    for each in (cache, prefix, again):
        assert apart(logits(model, ids[:, 8:], **cache_argument(each)), whole[:, 8:]) < NEAR


def test_a_cache_outlives_maps_that_come_back(model, ids: torch.Tensor) -> None:
    whole, maps = logits(model, ids), full_rank(model)
    detach = kvfold.attach(model, maps)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :8], **cache_argument(cache))
    detach()
    kvfold.attach(model, maps)
    assert apart(logits(model, ids[:, 8:], **cache_argument(cache)), whole[:, 8:]) < NEAR


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_a_cache_of_other_maps_is_refused(model, keep: float, ids: torch.Tensor) -> None:
    plain = DynamicCache(config=model.config)
    logits(model, ids, **cache_argument(plain))
    detach = kvfold.attach(model, full_rank(model, keep))
    with pytest.raises(SettingError, match="cache was filled"):
        logits(model, ids, **cache_argument(plain))
    mapped = DynamicCache(config=model.config)
    logits(model, ids, **cache_argument(mapped))
    detach()
    for cache in (mapped, copy.deepcopy(mapped)):
        with pytest.raises(SettingError, match="cache was filled"):
            logits(model, ids, **cache_argument(cache))
    logits(model, ids, **cache_argument(plain))
    kvfold.attach(model, full_rank(model, keep))  # other random ones
    with pytest.raises(SettingError, match="cache was filled"):
        logits(model, ids, **cache_argument(mapped))


def test_two_models_and_threads(ids: torch.Tensor) -> None:
    one, other = tiny("llama"), tiny("qwen3")
    wanted = [logits(x, ids, use_cache=use) for x in (one, other) for use in (True, False)]
    for x in (one, other):
        kvfold.attach(x, full_rank(x))
    meet = threading.Barrier(8)

    def run(index: int) -> float:
        model, use = (one, other)[index // 2 % 2], index % 2 == 0
        meet.wait()
        return max(apart(logits(model, ids, use_cache=use), wanted[index % 4]) for _ in range(10))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert max(pool.map(run, range(8))) < NEAR
    finally:
        sys.setswitchinterval(interval)


def test_a_saved_model_loads_plainly(model, ids: torch.Tensor, tmp_path) -> None:
    wanted = logits(model, ids)
    kvfold.attach(model, full_rank(model))
    model.save_pretrained(tmp_path)
    assert "kvfold" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert apart(logits(loaded, ids), wanted) < NEAR
    built = AutoModelForCausalLM.from_config(model.config)
    built.load_state_dict(model.state_dict())
    assert apart(logits(built.eval(), ids), wanted) < NEAR


def test_a_copy_has_the_maps(model, ids: torch.Tensor) -> None:
    wanted = logits(model, ids)
    detach = kvfold.attach(model, full_rank(model))
    twin = copy.deepcopy(model)
    detach()
    assert torch.equal(logits(model, ids), wanted)
    assert 0 < apart(logits(twin, ids), wanted) < NEAR


def test_a_pickle_is_read_by_another_process(model, ids: torch.Tensor, tmp_path) -> None:
    kvfold.attach(model, full_rank(model))
    torch.save({"model": model, "ids": ids, "wanted": logits(model, ids)}, tmp_path / "all.pt")
    code = (
        "import sys, torch; x = torch.load(sys.argv[1], weights_only=False);"
        "y = x['model'](x['ids']).logits; assert (y - x['wanted']).norm() < 1e-3 * y.norm()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "all.pt")], check=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_changes_its_dtype(model, dtype: torch.dtype, ids: torch.Tensor) -> None:
    wanted = logits(model, ids)
    kvfold.attach(model, full_rank(model))
    logits(model, ids)
    found = logits(model.to(dtype), ids)
    assert found.dtype == dtype
    assert apart(found.float(), wanted) < 0.2


def test_autocast(model, ids: torch.Tensor) -> None:
    wanted = logits(model, ids)
    kvfold.attach(model, full_rank(model))
    with torch.autocast("cpu", torch.bfloat16):
        assert apart(logits(model, ids).float(), wanted) < 0.2
        assert apart(logits(model, ids, use_cache=False).float(), wanted) < 0.2


def gradients(model, ids: torch.Tensor, **more) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **more).loss.backward()
    return [x.grad.clone() for x in model.parameters() if x.grad is not None]


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_training_gives_the_same_gradients(model, reentrant, ids: torch.Tensor) -> None:
    model.train()
    wanted = gradients(model, ids)
    kvfold.attach(model, full_rank(model))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    found = gradients(model, ids)
    assert len(found) == len(wanted)
    assert max(map(apart, found, wanted)) < 1e-3


def test_training_goes_on_after_inference_mode(model, ids: torch.Tensor) -> None:
    wanted = gradients(model, ids)
    kvfold.attach(model, full_rank(model))
    with torch.inference_mode():
        model(ids)
    assert max(map(apart, gradients(model, ids), wanted)) < 1e-3


@pytest.mark.parametrize("first", ["attach", pytest.param("compile", marks=pytest.mark.slow)])
def test_torch_compile(model, first: str, ids: torch.Tensor) -> None:
    wanted = logits(model, ids)
    torch._dynamo.reset()
    if first == "compile":
        fast = torch.compile(model, backend="eager")
        logits(fast, ids)
        detach = kvfold.attach(model, full_rank(model))
    else:
        detach = kvfold.attach(model, full_rank(model))
        fast = torch.compile(model, backend="eager")
    assert apart(logits(fast, ids), wanted) < NEAR
    assert apart(logits(fast, ids, use_cache=False), wanted) < NEAR
    cache = DynamicCache(config=model.config)
    found = [logits(fast, ids[:, i : i + 1], **cache_argument(cache)) for i in range(5)]
    assert apart(torch.cat(found, 1), wanted[:, :5]) < NEAR
    detach()
    assert apart(logits(fast, ids), wanted) < NEAR


def test_maps_of_a_compiled_model(model, ids: torch.Tensor) -> None:
    wanted, maps = logits(model, ids), full_rank(model)
    fast = torch.compile(model, backend="eager")
    kvfold.attach(fast, maps)
    assert apart(logits(fast, ids), wanted) < NEAR


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_another_attention_is_set_while_attached(model, keep, ids: torch.Tensor) -> None:
    plain = logits(model, ids)
    detach = kvfold.attach(model, full_rank(model, keep))
    wanted = logits(model, ids)
    model.set_attn_implementation("eager")
    assert apart(logits(model, ids), wanted) < NEAR
    assert apart(logits(model, ids, use_cache=False), wanted) < NEAR
    detach()
    assert model.config._attn_implementation == "eager"
    assert apart(logits(model, ids), plain) < NEAR


def lora(model):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4))
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    return wrapped.eval()


@pytest.mark.parametrize("first", ["attach", "lora"])
def test_lora(model, first: str, ids: torch.Tensor, tmp_path) -> None:
    maps = full_rank(model)
    if first == "attach":
        detach = kvfold.attach(model, maps)
        tuned = lora(model)
    else:
        tuned = lora(model)
        detach = kvfold.attach(tuned, maps)
    found, tokens = logits(tuned, ids), generated(tuned, ids)
    tuned.save_pretrained(tmp_path)
    detach()
    assert 0 < apart(logits(tuned, ids), found) < NEAR
    assert torch.equal(generated(tuned, ids), tokens)


def test_a_prefix_of_peft_is_refused(model, ids: torch.Tensor) -> None:
    peft = pytest.importorskip("peft")
    maps = full_rank(model)
    asked = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    kvfold.attach(model, maps)
    tuned = peft.get_peft_model(model, asked).eval()
    with pytest.raises(SettingError, match="cache was filled"):
        logits(tuned, ids)


def test_an_old_detach_does_not_touch_new_maps(model, ids: torch.Tensor) -> None:
    wanted, maps = logits(model, ids), full_rank(model)
    old = kvfold.attach(model, maps)
    old()
    old()
    new = kvfold.attach(model, maps)
    old()
    assert 0 < apart(logits(model, ids), wanted) < NEAR
    new()
    assert torch.equal(logits(model, ids), wanted)


def test_a_failed_forward_leaves_no_trace(model, ids: torch.Tensor) -> None:
    wanted = logits(model, ids)
    kvfold.attach(model, full_rank(model))
    hook = model.model.layers[2].self_attn.o_proj.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        logits(model, ids)
    hook.remove()
    assert apart(logits(model, ids, use_cache=False), wanted) < NEAR


def fail(*_):
    raise RuntimeError("on purpose")


def traces(model) -> list:
    return [
        (name, x.training, len(x._forward_hooks), len(x._forward_pre_hooks), sorted(x.__dict__))
        for name, x in model.named_modules()
    ]


@pytest.mark.parametrize("failing", [False, True])
def test_a_look_leaves_no_trace(model, failing: bool) -> None:
    model.model.layers[1].train()
    update, config = Cache.update, model.config.to_dict()
    if failing:
        model.model.layers[2].register_forward_hook(fail)
    before = traces(model)
    if failing:
        with pytest.raises(RuntimeError, match="on purpose"):
            attention_layers(model)
    else:
        attention_layers(model)
    assert traces(model) == before
    assert Cache.update is update
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"


def test_looks_of_several_threads_see_their_own_model() -> None:
    models = [tiny(name) for name in ("llama", "qwen3", "gemma2", "gpt2")]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                for found, model in zip(pool.map(attention_layers, models), models, strict=True):
                    assert [x.source for x in found] == [x.name for x in found]
                    assert found[0].module in set(model.modules())
                    assert len(found) == 4
    finally:
        sys.setswitchinterval(interval)


def test_maps_of_a_model_in_training_mode() -> None:
    """Dropout changes keys and layers may be skipped; what is attached to must not depend on it."""
    model = tiny("gpt2")
    wanted = probes_of(attention_layers(model))
    model.transformer.drop.p = 0.9
    model.train()
    assert probes_of(attention_layers(model)) == wanted
    assert model.training


class OwnCache(DynamicCache):
    """Of a user, that does more than store."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx >= len(self.layers):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        return keys, values


def test_a_cache_of_a_users_class(model, ids: torch.Tensor) -> None:
    wanted = logits(model, ids)
    kvfold.attach(model, full_rank(model))
    cache = OwnCache()
    found = [logits(model, x, **cache_argument(cache)) for x in ids.split(10, 1)]
    assert apart(torch.cat(found, 1), wanted) < NEAR


def test_layers_without_maps_stay_plain_after_a_failure(model, ids: torch.Tensor) -> None:
    wanted, maps = logits(model, ids), full_rank(model)
    some = {name: x for name, x in maps.maps.items() if "layers.0" not in name}
    kvfold.attach(model, replace(maps, maps=some))
    assert 0 < apart(logits(model, ids), wanted) < NEAR
    cache = DynamicCache(config=model.config)
    hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        logits(model, ids, **cache_argument(cache))
    hook.remove()
    cache.layers[0].crop(-ids.shape[1])  # which is all that was stored
    assert apart(logits(model, ids, **cache_argument(cache)), wanted) < NEAR


def test_maps_are_made_of_a_model_with_lora(ids: torch.Tensor) -> None:
    tuned = lora(load("reference:gqa"))
    tokenizer = load_tokenizer("reference:gqa")
    made = kvfold.compress(tuned, keep=1.0, max_tokens=4096, tokenizer=tokenizer)
    wanted = logits(tuned, ids)
    kvfold.attach(tuned, made)
    assert apart(logits(tuned, ids), wanted) < 1e-3


def test_probabilities_are_the_same(ids: torch.Tensor) -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(ids, output_attentions=True).attentions
    kvfold.attach(model, full_rank(model))
    with torch.no_grad():
        found = model(ids, output_attentions=True).attentions
    assert len(found) == len(wanted) == 4
    assert max(map(apart, found, wanted)) < NEAR
    model.set_attn_implementation("eager")  # as the setter asks for
    model.config.output_attentions = True
    with torch.no_grad():
        assert max(map(apart, model(ids).attentions, wanted)) < NEAR


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_given_by_hand_and_packed_sequences(model, attention, ids: torch.Tensor) -> None:
    model.set_attn_implementation(attention)
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    seen[8:, :8] = False
    asked = {"position_ids": torch.tensor([[*range(8), *range(12)]])}
    whole = {**asked, "attention_mask": torch.zeros(1, 1, 20, 20).masked_fill(~seen, -1e9)}
    wanted = logits(model, ids[:1], **whole)
    packed = logits(model, ids[:1], use_cache=False, **asked)
    kvfold.attach(model, full_rank(model))
    assert apart(logits(model, ids[:1], **whole), wanted) < NEAR
    assert apart(logits(model, ids[:1], use_cache=False, **asked), packed) < NEAR


def test_tokens_of_paged_batches_are_refused(model, ids: torch.Tensor) -> None:
    kvfold.attach(model, full_rank(model))
    model.set_attn_implementation("paged|eager")
    with pytest.raises(SettingError, match="paged"):
        logits(model, ids)
