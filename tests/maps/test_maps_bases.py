"""Maps on bases whose weights are quantised, offloaded or adapted: gradients while calibrating,
and the same answers at full rank.

Layers of this file stand for libraries' own, which `docs/quantised.md` was tried with.
Shapes: T tokens; D, O numbers that a layer takes and gives.
"""

import json
import shutil
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import kvfold
from kvfold.calibration.calibrate import calibrate
from kvfold.calibration.statistics import products
from kvfold.hub.loading import load, load_tokenizer, resolve
from kvfold.maps.family import attention_family
from kvfold.maps.layers import attention_layers
from kvfold.models.devices import is_offloaded
from kvfold.utils.errors import SettingError
from maps_cases import NEAR, ROUNDED, apart, random_maps
from maps_engine_cases import PROMPT, STEPS, engine_logits
from maps_users_cases import full_rank, logits
from model_types import tiny
from sidecar_cases import bytes_tokenizer, nats

GRADIENTS = {"key_post_weighted", "grad_key_post", "value_weighted", "grad_value"}

LIBRARY = torch.library.Library("kvfold_tests", "DEF")
LIBRARY.define("product(Tensor x, Tensor w) -> Tensor")
LIBRARY.impl("product", lambda x, w: x.detach() @ w.mT, "CPU")  # torch knows no gradient of it


class Packed(nn.Module):
    """A linear layer whose weight is stored in 8 bits, a scale an output."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (plain.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = plain.bias

    def dense(self) -> torch.Tensor:
        return self.codes * self.scale

    def forward(self, x):
        return nn.functional.linear(x, self.dense(), self.bias)


class WithoutBackward(Packed):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class WithZeros(Packed):
    def forward(self, x):
        out = torch.ops.kvfold_tests.product(x, self.dense())
        return out if self.bias is None else out + self.bias


class WithRoundedInputs(Packed):
    def forward(self, x):
        scale = x.detach().abs().amax(-1, keepdim=True) / 127
        return super().forward((x / scale).round() * scale)


def replaced(name: str, kind) -> nn.Module:
    """A tiny model whose layers' products are of a kind."""
    model = tiny(name)
    layers = [(x, y) for x, y in model.named_modules() if isinstance(y, nn.Linear)]
    for path, module in layers:
        if path.startswith("model.layers"):
            model.set_submodule(path, kind(module))
    return model


def statistics(model, monkeypatch):
    """Of the same text and labels."""

    def drawn(p, count, generator):
        return torch.arange(len(p))[:, None] * 7 % p.shape[1]

    monkeypatch.setattr(torch, "multinomial", drawn)
    windows = torch.arange(3, 123).repeat(2).view(4, 60)
    return calibrate(model, attention_family(attention_layers(model)), windows, GRADIENTS)


@pytest.mark.parametrize("name", ["llama", "phi", "qwen2"])  # phi and qwen2 have biases
@pytest.mark.parametrize(
    ("kind", "passes", "near"),
    [
        (Packed, True, 0),
        (WithoutBackward, False, 0),
        (WithZeros, False, 0),
        (WithRoundedInputs, False, 0.2),
    ],
)
def test_gradients_are_those_of_dequantised_weights(
    name: str, kind, passes: bool, near: float, monkeypatch
) -> None:
    model = replaced(name, kind)
    before = {x: y.__dict__.get("forward") for x, y in model.named_modules()}
    found = statistics(model, monkeypatch)
    wanted = statistics(replaced(name, Packed), monkeypatch)
    count = sum(isinstance(x, Packed) for x in model.modules())
    assert len(found.through_weights) == (0 if passes else count)
    for index, stored in wanted.layers.items():
        for quantity, moment in stored.items():
            assert apart(found[index, quantity].second, moment.second) < max(near, NEAR)
    assert {x: y.__dict__.get("forward") for x, y in model.named_modules()} == before


def test_wide_layers_are_read_in_parts(monkeypatch) -> None:
    whole = statistics(replaced("llama", WithoutBackward), monkeypatch)
    monkeypatch.setattr(products, "ROWS", 24)
    parts = statistics(replaced("llama", WithoutBackward), monkeypatch)
    for quantity in GRADIENTS:
        assert apart(parts[1, quantity].second, whole[1, quantity].second) < NEAR


class Experts(nn.Module):
    """A kernel that is no product, as of a mixture of experts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.register_buffer("packed", torch.zeros(2, dtype=torch.uint8))
        self.run = inner.forward

    @torch.no_grad()
    def forward(self, x):
        return self.run(x)


@pytest.mark.parametrize("zeros", [False, True])
def test_without_gradients_second_moments_serve_and_it_is_said(zeros: bool, tmp_path) -> None:
    model = tiny("llama")
    if zeros:

        class Activation(nn.Module):  # which computes a gradient of zeros
            def forward(self, x):
                return torch.ops.kvfold_tests.product(x, torch.eye(x.shape[-1]))

        model.model.layers[1].mlp.act_fn = Activation()
    else:
        model.model.layers[1].mlp = Experts(model.model.layers[1].mlp)
    ids = torch.randint(3, 127, (1, 96))
    wanted, lost = logits(model, ids), []
    for keep in (1.0, 0.25):
        with pytest.warns(UserWarning, match="gradients of the loss: none: "):
            made = kvfold.compress(
                model, keep=keep, align=1, tokenizer=bytes_tokenizer(tmp_path), max_tokens=1024
            )
        assert made.provenance["gradients"].startswith("none: ")
        assert made.provenance["recipe"]["gradients"] is False
        detach = kvfold.attach(model, made)
        lost.append(apart(logits(model, ids), wanted))
        detach()
    assert lost[0] < ROUNDED < lost[1]


def test_gradients_through_weights_are_said(tmp_path) -> None:
    more = {"keep": 0.5, "tokenizer": bytes_tokenizer(tmp_path), "max_tokens": 1024}
    with pytest.warns(UserWarning, match="through dequantised weights of"):
        made = kvfold.compress(replaced("llama", WithZeros), **more)
    assert "dequantised" in made.provenance["gradients"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = kvfold.compress(tiny("llama"), **more)
    assert "gradients" not in made.provenance


def test_statistics_that_are_not_finite_are_refused(tmp_path) -> None:
    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    model = tiny("llama")
    model.model.norm.register_forward_hook(lambda *args: Overflow.apply(args[-1]))
    with pytest.raises(ValueError, match="not finite in layer 0 in float32"):
        kvfold.compress(model, keep=0.5, tokenizer=bytes_tokenizer(tmp_path), max_tokens=1024)


def test_recipes_that_read_weights_are_refused() -> None:
    with pytest.raises(SettingError, match="makes no maps beside the weights"):
        kvfold.compress("reference:gqa", "zack", keep=0.5)


# -- offloaded weights -----------------------------------------------------------------------


def offloaded(folder: Path, cpu: tuple[str, ...]):
    """A tiny model whose layers, and what `cpu` does not name, are read from disk."""
    tiny("llama").save_pretrained(folder / "plain")
    count = tiny("llama").config.num_hidden_layers
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    place = {x: "cpu" if x in cpu else "disk" for x in parts}
    place |= {f"model.layers.{i}": "disk" for i in range(count)}
    return AutoModelForCausalLM.from_pretrained(
        folder / "plain", device_map=place, offload_folder=folder / "off", dtype=torch.float32
    )


@pytest.mark.parametrize("cpu", [(), ("model.embed_tokens", "model.norm", "lm_head")])
def test_offloaded_weights_stay_so(cpu: tuple[str, ...], tmp_path, monkeypatch) -> None:
    import accelerate.hooks

    alive, most = weakref.WeakSet(), [0]
    inner = accelerate.hooks.set_module_tensor_to_device

    def loading(module, name, device, *args, **kwargs):
        inner(module, name, device, *args, **kwargs)
        if not (x := getattr(module, name)).is_meta:
            alive.add(x)
            most[0] = max(most[0], sum(y.nbytes for y in alive))

    plain, model = tiny("llama"), offloaded(tmp_path, cpu)
    places = {x: y.device for x, y in model.named_parameters()}
    hooked = {x for x, y in model.named_modules() if "forward" in y.__dict__}
    more = {"keep": 0.5, "tokenizer": bytes_tokenizer(tmp_path), "max_tokens": 1024}
    with monkeypatch.context() as patch:
        patch.setattr(accelerate.hooks, "set_module_tensor_to_device", loading)
        made = kvfold.compress(model, **more)
    assert {x: y.device for x, y in model.named_parameters()} == places
    assert {x for x, y in model.named_modules() if "forward" in y.__dict__} == hooked
    layer, head = (
        sum(y.nbytes for y in x.parameters()) for x in (plain.model.layers[0], plain.lm_head)
    )
    assert 0 < most[0] <= layer + 2 * head
    wanted = kvfold.compress(plain, **more)
    for name, own in made.maps.items():
        assert torch.equal(own.key_down, wanted.maps[name].key_down)
    assert made.provenance["statistics"] == wanted.provenance["statistics"]
    ids = torch.randint(3, 127, (1, 20))
    for x in (model, plain):
        kvfold.attach(x, wanted)
    assert apart(logits(model, ids), logits(plain, ids)) < NEAR


def test_an_engine_refuses_offloaded_weights(tmp_path) -> None:
    model = offloaded(tmp_path, ())
    assert is_offloaded(model)
    with pytest.raises(SettingError, match="weights that accelerate reads"):
        kvfold.LLM(model, maps=full_rank(tiny("llama")), max_sequences=2, max_tokens=64)


# -- adapters --------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", [None, WithZeros])
def test_adapters_act_at_attach_while_calibrating_and_in_the_engine(
    dora: bool, kind, tmp_path
) -> None:
    peft = pytest.importorskip("peft")
    ids = torch.randint(3, 127, (1, PROMPT + STEPS))
    base = tiny("llama")
    made = full_rank(base)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=4, target_modules=names, use_dora=dora, init_lora_weights=False)
    model = peft.get_peft_model(base, config).eval()
    if kind is not None:  # what the adapters stand beside: PEFT knows torch's own layers alone
        for path, layer in list(base.named_modules()):
            if path.endswith("base_layer") and not dora:
                base.set_submodule(path, kind(layer))
    own = logits(model, ids)
    with model.disable_adapter():
        assert apart(logits(model, ids), own) > 0.01
    layers = attention_layers(base)
    for layer in layers:
        made.maps[layer.name] = random_maps(layer)
    made.base.update(full_rank(base).base)
    detach = kvfold.attach(model, made)
    assert apart(logits(model, ids), own) < NEAR
    detach()
    more = {"align": 1, "tokenizer": bytes_tokenizer(tmp_path), "max_tokens": 1024}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calibrated = kvfold.compress(model, keep=1.0, **more)
    llm = kvfold.LLM(model, maps=calibrated, max_sequences=2, max_tokens=64)
    assert apart(engine_logits(llm, ids[0].tolist()), own[0, PROMPT - 1 :]) < ROUNDED
    merged = model.merge_and_unload() if kind is None else None
    if merged is not None:
        kvfold.attach(merged, calibrated)
        assert apart(logits(merged, ids), own) < ROUNDED


# -- quantised checkpoints ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def maps():
    return kvfold.compress("reference:gqa", keep=0.5, max_tokens=4096)


def fp8(folder: Path, block: int = 128) -> None:
    """reference:gqa in fp8, a scale a block, as DeepSeek's and Qwen's checkpoints have it."""
    source = Path(resolve("reference:gqa"))
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name in [x for x in tensors if x.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        tiles = tensors[name].float().view(rows // block, block, columns // block, block)
        scale = tiles.abs().amax((1, 3)) / 448
        codes = (tiles / scale[:, None, :, None]).view(rows, columns)
        tensors[name] = codes.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }
    (folder / "config.json").write_text(json.dumps(config))


def compressed_tensors(folder: Path, scheme: str) -> None:
    """reference:gqa as vLLM's llm-compressor writes it."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors import quantization as ct
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    model = load("reference:gqa")
    chosen = ct.preset_name_to_scheme(scheme, ["Linear"])
    if chosen.weights.group_size:
        chosen.weights.group_size = 64
    groups = {"group_0": chosen}
    config = ct.QuantizationConfig(
        config_groups=groups, ignore=["lm_head"], quantization_status="frozen"
    )
    ct.apply_quantization_config(model, config)
    for module in model.modules():
        if not hasattr(module, "quantization_scheme"):
            continue
        weight = module.weight.data
        size = chosen.weights.group_size or weight.shape[1]
        parts = weight.unflatten(1, (-1, size))
        scale, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), chosen.weights)
        module.weight_scale.data = scale.view_as(module.weight_scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    load_tokenizer("reference:gqa").save_pretrained(folder)


KINDS = {"FP8": fp8}
KINDS |= {
    x: lambda folder, scheme=x: compressed_tensors(folder, scheme)
    for x in ("W8A8", "W4A16", "FP8_DYNAMIC")
}


@pytest.mark.parametrize("kind", KINDS)
def test_maps_of_a_base_fit_it_quantised(kind: str, maps, tmp_path) -> None:
    """From a folder, before anything ran: attached, at full rank, and in the engine."""
    KINDS[kind](tmp_path / "base")
    model, tokenizer = load(tmp_path / "base"), load_tokenizer("reference:gqa")
    detach = kvfold.attach(model, maps)
    ids = torch.tensor([tokenizer("The tide came in over the flats. " * 30)["input_ids"][:200]])
    attached = nats(model, ids)
    detach()
    own, plain = nats(model, ids), load("reference:gqa")
    before = nats(plain, ids)
    assert abs(own - before) < 0.2
    kvfold.attach(plain, maps)
    assert attached - own == pytest.approx(nats(plain, ids) - before, abs=0.1)
    whole = logits(model, ids)
    detach = kvfold.attach(model, full_rank(model))
    rounds = kind in ("W8A8", "FP8_DYNAMIC")  # what layers take: small changes become steps
    assert apart(logits(model, ids), whole) < (0.1 if rounds else NEAR)
    detach()
    llm = kvfold.LLM(str(tmp_path / "base"), maps=maps, max_sequences=2, max_tokens=64)
    found = engine_logits(llm, ids[0, : PROMPT + STEPS].tolist())
    kvfold.attach(model, maps)
    wanted = logits(model, ids[:, : PROMPT + STEPS])[0, PROMPT - 1 :]
    assert apart(found, wanted) < (0.1 if rounds else NEAR)


@pytest.mark.parametrize("kind", ["W8A8"])
def test_a_quantised_base_is_calibrated(kind: str, maps, tmp_path) -> None:
    """Though compressed-tensors computes no gradients where it rounds what layers take."""
    KINDS[kind](tmp_path / "base")
    with pytest.warns(UserWarning, match="through dequantised weights of 49 layers"):
        made = kvfold.compress(tmp_path / "base", keep=0.5, max_tokens=4096)
    tokenizer, model = load_tokenizer("reference:gqa"), load(tmp_path / "base")
    ids = torch.tensor([tokenizer("The tide came in over the flats. " * 30)["input_ids"][:200]])
    lost = []
    for one in (maps, made):
        detach = kvfold.attach(model, one)
        lost.append(nats(model, ids))
        detach()
    assert lost[1] == pytest.approx(lost[0], abs=0.1)
