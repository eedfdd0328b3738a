"""Maps beside the weights: made, saved, read, attached, and refused where they do not fit."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvfold
from kvfold.hub.loading import load, load_tokenizer
from kvfold.maps.layer_maps import NAMES, rounded
from kvfold.maps.layers import attention_layers
from kvfold.maps.sidecar import (
    NEAR,
    PLAN,
    TENSORS,
    Sidecar,
    probes,
)
from kvfold.models.fold import LatentMaps
from kvfold.utils.errors import SettingError
from maps_cases import ROUNDED
from matrix import slow
from model_types import tiny
from sidecar_cases import TEXT, bytes_tokenizer, nats


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("reference:gqa")


@pytest.fixture(scope="module")
def made():
    return kvfold.compress("reference:gqa", keep=0.5, max_tokens=4096)


@pytest.fixture(scope="module")
def before_rope():
    return kvfold.compress("reference:gqa", "small", keep=0.5, max_tokens=4096)


def test_maps_are_those_that_a_folded_model_has(made, tokenizer, tmp_path) -> None:
    """The same recipe, from what attention is asked and from the weights of a known family."""
    ids = torch.tensor([tokenizer(TEXT)["input_ids"][:512]])
    made.save(tmp_path / "maps")
    model = load("reference:gqa")
    before = nats(model, ids)
    detach = kvfold.attach(model, tmp_path / "maps")
    attached = nats(model, ids) - before
    detach()
    assert nats(model, ids) == before
    folded = kvfold.compress(
        model, "swift", keep=0.5, max_tokens=4096, tokenizer=tokenizer, fold=True
    )
    assert attached == pytest.approx(nats(folded, ids) - before, rel=0.03)


def test_a_chat_goes_on_through_the_smaller_cache(made, tokenizer) -> None:
    model = load("reference:gqa")
    kvfold.attach(model, made)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"][:64]])
    found = model.generate(
        ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, pad_token_id=0
    )
    cache = getattr(found, "past_key_values", None) or found.cache
    layer = made.spec.layers[0]
    assert cache.layers[0].values.shape[-1] == layer.value_latents[0].rank


@pytest.mark.parametrize(
    ("name",),
    [("gemma2",), *map(slow, ("qwen3_moe", "gpt_oss", "phi3", "cohere2")), ("opt",)],
)
def test_any_type_is_calibrated(name: str, tmp_path) -> None:
    """With little of the cache left out, and with much."""
    model, tokenizer = tiny(name), bytes_tokenizer(tmp_path)
    ids = torch.randint(3, 127, (1, 96))
    with torch.no_grad():
        wanted = model(ids).logits
    lost = []
    for keep in (1.0, 0.75, 0.25):
        made = kvfold.compress(model, keep=keep, align=1, tokenizer=tokenizer, max_tokens=1024)
        detach = kvfold.attach(model, made)
        with torch.no_grad():
            lost.append(float((model(ids).logits - wanted).norm() / wanted.norm()))
        detach()
    assert lost[0] < ROUNDED
    assert lost[0] < lost[1] < lost[2]


def test_another_model_is_refused(made) -> None:
    other = load("reference:gqa")
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.std())
    with pytest.raises(SettingError, match="which this model is not"):
        kvfold.attach(other, made)
    with pytest.raises(SettingError, match=r"KV heads|of that name"):
        kvfold.attach(load("reference:mha"), made)
    with pytest.raises(SettingError, match=r"of that name|KV heads"):
        kvfold.attach(tiny("gpt2"), made)


def test_the_same_base_in_fewer_bits_is_taken(made) -> None:
    for dtype, bits in ((torch.bfloat16, 16), (torch.float32, 4)):
        model = load("reference:gqa", dtype=dtype)
        if bits < 16:
            for name, parameter in model.named_parameters():
                if name.endswith("proj.weight"):
                    top = parameter.data.abs().amax(1, keepdim=True) / 7
                    parameter.data = (parameter.data / top).round() * top
        kvfold.attach(model, made)


def test_rounding_may_add_up_with_depth(made) -> None:
    """A last layer of a 4-bit model differs by more than half; as much everywhere is another."""
    for first, noise, taken in ((6, 0.7, True), (6, 3.0, False), (0, 0.9, False)):
        model = load("reference:gqa")
        with torch.no_grad():
            for layer in model.model.layers[first:]:
                for x in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight):
                    x += noise * x.std() * torch.randn_like(x)
        if taken:
            kvfold.attach(model, made)
        else:
            with pytest.raises(SettingError, match=r"keys and values of model\.layers"):
                kvfold.attach(model, made)


def test_a_revision_is_taken_as_long_as_it_is_near(made) -> None:
    """Weights that were trained on, and weights that have little to do with those before."""
    for noise, fits in ((0.02, True), (0.1, True), (1.0, False)):
        model = load("reference:gqa")
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("proj.weight"):
                    parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
        if fits:
            kvfold.attach(model, made)
            continue
        with pytest.raises(SettingError, match="or not in this revision: for the same tokens"):
            kvfold.attach(model, made)


def test_an_engine_says_so_before_it_takes_memory(made, monkeypatch) -> None:
    other = load("reference:gqa")
    with torch.no_grad():
        other.model.layers[2].self_attn.v_proj.weight.neg_()
    monkeypatch.setattr("kvfold.engine.runner.build._pool", None)
    with pytest.raises(
        SettingError, match=r"keys and values of model\.layers\.2\.self_attn differ by 0% and 200%"
    ):
        kvfold.LLM(other, maps=made, max_sequences=1, max_tokens=64)


def test_layers_without_maps_and_maps_without_a_layer(made) -> None:
    model, names = load("reference:gqa"), list(made.maps)
    fewer = {name: made.maps[name] for name in names[1:]}
    kvfold.attach(model, replace(made, maps=fewer))()
    with pytest.raises(SettingError, match=r"are of \d layers and their plan"):
        kvfold.LLM(model, maps=replace(made, maps=fewer), max_sequences=1, max_tokens=64)
    base = {name: made.base[name] for name in names[1:]}
    with pytest.raises(SettingError, match=f"were made without {names[0]}, an attention layer"):
        kvfold.attach(model, replace(made, maps=fewer, base=base))
    more = made.maps | {"model.layers.7.self_attn": made.maps[names[0]]}
    with pytest.raises(SettingError, match=r"a layer model\.layers\.7\.self_attn that calls"):
        kvfold.attach(model, replace(made, maps=more))


def test_detach(made, tokenizer) -> None:
    """Also from a copy, and not the maps of a later attach."""
    ids = torch.tensor([tokenizer(TEXT)["input_ids"][:64]])
    model = load("reference:gqa")
    before = nats(model, ids)
    take_away = kvfold.attach(model, made)
    attached, copied = nats(model, ids), copy.deepcopy(model)
    kvfold.detach(model)
    assert nats(model, ids) == before != attached
    assert not any(x._forward_pre_hooks for x in model.modules())
    kvfold.attach(model, made)
    take_away()
    assert nats(model, ids) == attached == nats(copied, ids)
    kvfold.detach(copied)
    assert nats(copied, ids) == before
    with pytest.raises(SettingError, match="has no maps to take away"):
        kvfold.detach(copied)


def test_maps_are_the_same_once_they_were_saved(made, tmp_path) -> None:
    """A cache that was filled with them goes on."""
    made.save(tmp_path / "maps")
    for name, own in Sidecar.load(tmp_path / "maps").maps.items():
        assert own.digest() == made.maps[name].digest()
        assert own.digest() != replace(own, value_mean=own.value_mean + 1).digest()


def test_big_tensors_take_16_bits(made, tmp_path) -> None:
    """With nothing lost of maps as they were made; others are saved as they are."""
    made.save(tmp_path / "maps")
    dtypes = {
        x.rpartition(".")[2]: y.dtype for x, y in load_file(tmp_path / "maps" / TENSORS).items()
    }
    for name in NAMES:
        big = name.endswith(("down", "up"))
        assert dtypes[name] == (torch.float16 if big else torch.float32)
    finer = {name: replace(x, key_up=x.key_up * 1.0001) for name, x in made.maps.items()}
    replace(made, maps=finer).save(tmp_path / "finer")
    tensors = load_file(tmp_path / "finer" / TENSORS)
    for name, maps in Sidecar.load(tmp_path / "finer").maps.items():
        assert maps.digest() == finer[name].digest()
        assert tensors[f"{name}.key_up"].dtype == torch.float32


def test_rounded_maps_keep_what_they_store() -> None:
    """up is adapted to the rounded down: what is stored comes back up to the rounding of one."""
    basis = torch.randn(3, 64, 64, dtype=torch.float64) / 8
    for rank in (64, 24):
        for x, y in zip(basis, torch.linalg.inv(basis).mT, strict=True):
            latent = LatentMaps(x[:, :rank], y[:, :rank], torch.zeros(64))
            down, up, _ = rounded(latent)
            assert torch.equal(down.half().float(), down) and torch.equal(up.half().float(), up)
            apart, alone = (
                (one.double().mT @ other.double() - torch.eye(rank)).norm()
                for one, other in ((down, up), (latent.down.half(), latent.up.half()))
            )
            assert apart < 0.85 * alone


@pytest.mark.parametrize("size", [1e6, 1e-6])
def test_maps_out_of_the_range_of_fp16_are_not_rounded(size: float) -> None:
    basis = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))[0]
    down, up, _ = rounded(LatentMaps(basis * size, basis / size, torch.zeros(16)))
    near = (down.mT.double() @ up.double() - torch.eye(16)).abs().max()
    assert torch.equal(down, (basis * size).float()) and near < 1e-5


def test_files_of_two_sidecars_are_refused(made, tmp_path) -> None:
    made.save(tmp_path / "one")
    maps = {name: replace(x, value_mean=x.value_mean + 1) for name, x in made.maps.items()}
    replace(made, maps=maps).save(tmp_path / "two")
    (tmp_path / "one" / TENSORS).replace(tmp_path / "two" / TENSORS)
    with pytest.raises(SettingError, match="is not the one that"):
        Sidecar.load(tmp_path / "two")


def test_the_card_names_a_base_on_the_hub(made) -> None:
    """And says of a folder only its name."""
    for model, base in (("Qwen/Qwen3-8B", "base_model: Qwen/Qwen3-8B\n"), ("/home/me/q", "")):
        text = replace(made, provenance={**made.provenance, "model": model}).readme()
        assert text.startswith(f"---\n{base}library_name: kvfold\n") and "/home/me" not in text


@pytest.mark.parametrize(
    ("model", "base", "loads"),
    [
        (
            "reference:gqa",
            "`reference:gqa`, a small model that comes with kvfold. It is not on the Hugging Face"
            ' hub; `kvfold.load("reference:gqa")` loads it.',
            'model = kvfold.load("reference:gqa")',
        ),
        (
            "reference:smollm2",
            "`HuggingFaceTB/SmolLM2-135M-Instruct` on the Hugging Face hub. kvfold calls it"
            " `reference:smollm2`; where a GGUF file of it is installed, that is read, which has"
            " fewer bits.",
            'from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")',
        ),
        ("gpt2", "`gpt2`.", 'from_pretrained("gpt2")'),
        ("/home/me/q", "`q`, from a folder or file of this name.", 'from_pretrained("q")'),
    ],
)
def test_the_card_says_what_the_base_model_is(made, model: str, base: str, loads: str) -> None:
    text = replace(made, provenance={**made.provenance, "model": model}).readme()
    assert f"\nBase model: {base}\n" in text and loads in text
    packaged = model == "reference:gqa"
    assert ("vllm serve" in text, "from_pretrained" in text) == (not packaged, not packaged)
    metadata = "base_model: HuggingFaceTB/SmolLM2-135M-Instruct\n"
    assert (metadata in text) == (model == "reference:smollm2")


def torn(made, folder, change) -> None:
    """Maps with tensors or a plan that `change(tensors, plan)` changed, and a digest that fits."""
    made.save(folder)
    tensors, plan = load_file(folder / TENSORS), json.loads((folder / PLAN).read_text())
    change(tensors, plan)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / TENSORS)
    plan |= {"sha256": None, "digest": None}
    (folder / PLAN).write_text(json.dumps(plan))


@pytest.mark.parametrize("part", [*NAMES, "order"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:0],
        lambda x: x[..., :-1],
        lambda x: torch.cat((x, x), -1),
        lambda x: x.flatten()[0].clone(),
        lambda x: torch.full_like(x.float(), torch.nan),
    ],
    ids=["empty", "narrower", "wider", "number", "nan"],
)
def test_tensors_that_do_not_fit_each_other_are_refused(
    made, before_rope, part: str, change, tmp_path
) -> None:
    def changed(tensors: dict, _: dict) -> None:
        name = next(x for x in tensors if x.endswith(f".{part}"))
        tensors[name] = change(tensors[name])

    torn(before_rope if part == "order" else made, tmp_path / "maps", changed)
    with pytest.raises(SettingError, match="is damaged"):
        Sidecar.load(tmp_path / "maps")


@pytest.mark.parametrize("angles", [[torch.nan], [0.1] * 99, 0.1])
def test_angles_that_no_key_has_are_refused(before_rope, angles, tmp_path) -> None:
    def changed(tensors: dict, _: dict) -> None:
        tensors[next(x for x in tensors if x.endswith(".inv_freq"))] = torch.tensor(angles)

    torn(before_rope, tmp_path / "maps", changed)
    with pytest.raises(SettingError, match="is damaged"):
        Sidecar.load(tmp_path / "maps")


@pytest.mark.parametrize("measured", [{}, {"lost": 0.1}, [], "much"])
def test_a_measure_without_its_figures_is_refused(made, measured, tmp_path) -> None:
    def changed(_: dict, plan: dict) -> None:
        plan["provenance"]["measured"] = measured or {"lost": None}

    torn(made, tmp_path / "maps", changed)
    with pytest.raises(SettingError, match="is damaged"):
        Sidecar.load(tmp_path / "maps")


def test_maps_twice_are_refused(made) -> None:
    model = load("reference:gqa")
    kvfold.attach(model, made)
    with pytest.raises(SettingError, match="has maps already"):
        kvfold.attach(model, made)


@pytest.mark.parametrize("file", [PLAN, TENSORS])
def test_half_a_sidecar_is_refused(made, file: str, tmp_path) -> None:
    made.save(tmp_path / "maps")
    path = tmp_path / "maps" / file
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"damaged|JSON"):
        Sidecar.load(tmp_path / "maps")
    path.unlink()
    with pytest.raises(SettingError, match=f"has no {file}"):
        Sidecar.load(tmp_path / "maps")


def test_a_plan_of_other_layers_than_maps_is_refused(made, tmp_path) -> None:
    made.save(tmp_path / "maps")
    path = tmp_path / "maps" / PLAN
    plan = json.loads(path.read_text())
    path.write_text(json.dumps(plan | {"layers": plan["layers"][1:]}))
    with pytest.raises(SettingError, match="is damaged"):
        Sidecar.load(tmp_path / "maps")


@pytest.mark.parametrize("name", ["base", "provenance", "layers"])
def test_a_plan_that_was_changed_is_refused(made, name: str, tmp_path) -> None:
    made.save(tmp_path / "maps")
    path = tmp_path / "maps" / PLAN
    plan = json.loads(path.read_text())
    plan[name] = plan[name][::-1] if name == "layers" else plan[name] | {"more": [1.0]}
    path.write_text(json.dumps(plan))
    with pytest.raises(SettingError, match=f"is damaged .{PLAN} is not as it was written"):
        Sidecar.load(tmp_path / "maps")


def test_another_format_is_refused(made, tmp_path) -> None:
    made.save(tmp_path / "maps")
    path = tmp_path / "maps" / PLAN
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(SettingError, match="has format 99"):
        Sidecar.load(tmp_path / "maps")


def test_recipes_that_need_the_family_are_refused() -> None:
    with pytest.raises(SettingError, match="makes no maps beside the weights"):
        kvfold.compress("reference:gqa", "palu-g", keep=0.5, max_tokens=4096)


def test_probes_tell_models_apart() -> None:
    one, other = (attention_layers(load(x)) for x in ("reference:gqa", "reference:mha"))
    a, b = (probes(x[1].keys, x[1].values) for x in (one, other))
    assert (a - b).norm() > 2 * NEAR * a.norm()
