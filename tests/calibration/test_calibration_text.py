"""Which text calibration reads: packaged documents of several kinds, or what a model writes."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import kvfold
from commands import refused
from kvfold import recipes
from kvfold.calibration import text as calibration_text
from kvfold.calibration.documents import (
    PACKAGED,
    PARTS,
    Document,
    calibration_documents,
    conversation,
    shares,
    split,
)
from kvfold.calibration.self_text import write
from kvfold.calibration.text import calibration_windows, self_windows
from kvfold.compression import compressor
from kvfold.compression.compressor import Compressor
from kvfold.hub import loading
from kvfold.utils.chat import ROLES, encode_chat
from kvfold.utils.text import packaged

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
]


@pytest.fixture
def tokenizer():
    return loading.load_tokenizer("reference:gqa")


@pytest.fixture(scope="module")
def model():
    return loading.load("reference:gqa", device="cpu")


@pytest.fixture
def short(monkeypatch):
    """Windows of 64 tokens."""
    monkeypatch.setattr(calibration_text, "CALIBRATION_WINDOW", 64)


# -- packaged documents -------------------------------------------------------------------------


@pytest.mark.parametrize("most", [16384, 32768])
def test_two_fifths_of_the_tokens_are_code_and_two_prose(tokenizer, most):
    found = calibration_documents(None, tokenizer)
    sizes = [len(tokenizer(document.text).input_ids) for document in found]
    tokens = Counter()
    for document, share in zip(found, shares(found, sizes, most), strict=True):
        tokens[document.kind] += share
    assert tokens.keys() == {"prose", "code", "other"}
    assert all(abs(n - most * PARTS[kind] / sum(PARTS.values())) <= 3 for kind, n in tokens.items())


def test_kinds_are_mixed_throughout(tokenizer):
    kinds = [document.kind for document in calibration_documents(None, tokenizer)]
    whole = Counter(kinds)
    for end in range(20, len(kinds), 10):
        for kind, count in Counter(kinds[:end]).items():
            assert abs(count - end * whole[kind] / len(kinds)) <= 2


def test_packaged_files_are_small_and_conversations_whole():
    files = [file for names in PACKAGED.values() for file in names]
    assert sum(len(packaged(file).encode()) for file in files) < 700_000
    for line in packaged("calibration/chat.jsonl").splitlines():
        turns = [x for x in json.loads(line) if x["role"] != "system"]
        assert all(x["role"] in ROLES and x["content"] for x in json.loads(line))
        assert [x["role"] for x in turns] == ["user", "assistant"] * (len(turns) // 2)


def test_shares_of_kinds_are_equal_and_small_kinds_leave_the_rest():
    found = [Document("a", ""), Document("b", ""), Document("a", ""), Document("b", "")]
    assert shares(found, [1000] * 4, 2000) == [500] * 4
    assert shares(found, [10, 1000, 10, 400], 1220) == [10, 800, 10, 400]
    assert split([5, 100, 100], 65) == [5, 30, 30]


def test_few_tokens_are_of_few_documents_that_run_on():
    found = [Document("a", "")] * 100
    given = shares(found, [1000] * 100, 1024)
    assert [i for i, size in enumerate(given) if size] == [0, 25, 50, 75]
    assert max(given) == min(size for size in given if size) == 256
    short = shares(found, [10] * 100, 600)
    assert sum(short) == 600 and sum(size > 0 for size in short) == 60


def test_files_that_are_given_are_one_kind(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("one\n<|endoftext|>\ntwo")
    assert calibration_documents([file]) == [Document("given", "one"), Document("given", "two")]


# -- conversations ------------------------------------------------------------------------------


def test_conversations_are_written_by_the_chat_template(tokenizer):
    tokenizer.chat_template = CHAT
    assert (
        conversation(ASKED, tokenizer) == "<system>Be brief.</><user>Why?</><assistant>Because.</>"
    )
    texts = [document.text for document in calibration_documents(None, tokenizer)]
    assert sum(text.startswith(("<user>", "<system>")) for text in texts) == len(
        packaged("calibration/chat.jsonl").splitlines()
    )


def test_a_system_prompt_that_a_template_refuses_is_left_out(tokenizer):
    tokenizer.chat_template = NO_SYSTEM + CHAT
    assert conversation(ASKED, tokenizer) == "<user>Why?</><assistant>Because.</>"


def test_conversations_without_a_template_are_paragraphs(tokenizer):
    text = "System: Be brief.\n\nUser: Why?\n\nAssistant: Because."
    assert conversation(ASKED, tokenizer) == conversation(ASKED, None) == text


def test_a_template_that_writes_bos_does_not_double_it(tokenizer):
    tokenizer.chat_template = "{{ bos_token }}" + CHAT
    config = SimpleNamespace(max_position_embeddings=64, get_text_config=lambda **_: config)
    config.vocab_size = len(tokenizer)
    rows = calibration_windows(tokenizer, config, None, 32768)
    twice = (rows[:, 1:-1] == tokenizer.bos_token_id) & (rows[:, 2:] == tokenizer.bos_token_id)
    assert not twice.any()


# -- text that the model writes -----------------------------------------------------------------


@pytest.mark.parametrize("template", [None, CHAT])
def test_a_model_writes_the_same_text_for_a_seed(short, model, tokenizer, template):
    tokenizer.chat_template = template
    state, seen = torch.get_rng_state(), []
    rows = self_windows(model, tokenizer, 512, 3, lambda done, total: seen.append((done, total)))
    assert rows.shape == (8, 64) and (rows[:, 0] == tokenizer.bos_token_id).all()
    assert torch.equal(rows, self_windows(model, tokenizer, 512, 3))
    assert not torch.equal(rows, self_windows(model, tokenizer, 512, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert seen == sorted(seen) and seen[-1] == (512, 512)


def test_texts_are_prompts_and_replies_up_to_their_end(model, tokenizer, monkeypatch):
    tokenizer.chat_template = CHAT
    ends = list(range(1000, len(tokenizer), 8))
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    texts = write(model, tokenizer, 2000, 160)
    assert sum(map(len, texts)) >= 2000 and max(map(len, texts)) <= 160
    prompts = packaged("calibration/prompts.txt").splitlines()
    ended = 0
    for text, prompt in zip(texts, prompts, strict=False):
        asked = encode_chat(tokenizer, prompt)
        assert text[: len(asked)] == asked
        reply = text[len(asked) :]
        assert not set(reply[:-1]) & set(ends)
        ended += reply[-1] in ends
    assert ended >= 8


def test_statistics_of_own_text_are_reused_without_writing_it_again(
    short, model, tokenizer, tmp_path, monkeypatch
):
    def made(seed=0, max_tokens=256):
        own = {"calib": ["self"], "max_tokens": max_tokens, "seed": seed}
        job = Compressor(model, recipes.get("zack"), tokenizer, **own)
        return job.prepare(tmp_path / "stats.safetensors").statistics

    first = made()
    assert first.key["text"].startswith("self: 256 tokens, seed 0")

    def again(*_, **__):
        raise AssertionError("text was written again")

    monkeypatch.setattr(compressor, "self_windows", again)
    assert made().key == first.key
    for other in ({"seed": 1}, {"max_tokens": 320}):
        with pytest.raises(ValueError, match="text"):
            made(**other)


def test_self_stands_alone(tmp_path, capsys):
    files = ["--calib", "self", "some.txt", "--output", tmp_path / "new"]
    assert "stands alone" in refused(capsys, "compress", "reference:gqa", *files)


def test_a_model_is_compressed_on_its_own_text(short, tmp_path):
    kvfold.compress(
        "reference:gqa",
        recipe="zack",
        calib=["self"],
        max_tokens=256,
        output=tmp_path / "own",
        fold=True,
    )
    provenance = json.loads((tmp_path / "own" / "config.json").read_text())["quantization_config"]
    assert "self: 256 tokens" in json.dumps(provenance)
