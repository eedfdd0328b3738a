"""Text of tokens as they come: what a real tokenizer says of all of them, up to a stop string."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from kvfold.engine.api.detokenizer import Detokenizer, decoder_of
from kvfold.hub.loading import load_tokenizer

BOS, EOS = 0, 1
WORDS = ["▁hello", "▁world", "▁", "▁▁", "a", "é", "▁né", "\N{FIRE}", "▁�", "�", ".", "\n"]
BYTE_WORDS = [b"hello", b" world", b"\x83\xe3\x82", b"\xa2\xe3", b"\xe3\x82\xa2\xe3\x83"]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXT = "hello world. Ünïcödé \N{FIRE}\N{FIRE}\n\n\n\n\n  ア́ネー 中文 a\N{REPLACEMENT CHARACTER}b"

# Tokenizers -------------------------------------------------------------------------------------


def wrapped(vocab: list[str], decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    model = BPE({"<s>": 0, "</s>": 1} | {x: i for i, x in enumerate(vocab, 2)}, [], **options)
    inner = Tokenizer(model)
    inner.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama 2's: token 2 + b is byte b, then WORDS."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = decoders.Strip(content=" ", left=1, right=0)
    vocab = [f"<0x{b:02X}>" for b in range(256)] + WORDS
    return wrapped(vocab, decoders.Sequence([*steps, strip]), byte_fallback=True)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    return wrapped([f"<{b}>" for b in range(256)] + WORDS, decoders.Metaspace())


def letters_of_bytes() -> dict[int, str]:
    """GPT-2's: a printable character for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's: token 2 + b is byte b; then words, and tokens that end inside characters."""
    letters = letters_of_bytes()
    assert set(letters.values()) == set(ByteLevel.alphabet())
    pieces = [bytes([b]) for b in range(256)] + BYTE_WORDS
    vocab = ["".join(letters[b] for b in piece) for piece in pieces]
    return wrapped(vocab, decoders.ByteLevel())


@cache
def reference() -> Any:
    return load_tokenizer("reference:gqa")


MAKERS = [byte_fallback, metaspace, byte_level, reference]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.param()


def word(text: str) -> int:
    return 258 + WORDS.index(text)


def as_bytes(text: str | bytes) -> list[int]:
    return [2 + b for b in (text.encode() if isinstance(text, str) else text)]


def one_by_one(text: Detokenizer, ids: Sequence[int]) -> Iterator[str]:
    for token in ids:
        text.push([token])
        yield text.take()
    yield text.take(last=True)


def in_parts(text: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> str:
    borders = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    for start, end in pairwise(borders):
        text.push(ids[start:end])
    return text.take(last=True)


class Counting:
    """A decoder that notes how many tokens it was given, call by call."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.sizes: list[int] = []

    def __call__(self, ids: list[int]) -> str:
        self.sizes.append(len(ids))
        return self.decode(ids)


# What the tokenizer says ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [byte_fallback, metaspace])
@pytest.mark.parametrize("before", [0, 1, 3, 30])
def test_the_first_space_after_the_prompt(make: Callable[[], Any], before: int) -> None:
    prompt = [BOS, *[word("▁hello")] * before]
    text = Detokenizer(decoder_of(make()), prompt)
    shown = list(one_by_one(text, [word("▁world"), word("▁hello")]))
    assert "".join(shown) == (" world hello" if before else "world hello")


def test_special_tokens_that_end_the_prompt_do_not_hide_its_text() -> None:
    for specials in ([EOS], [EOS] * 5):
        prompt = [BOS, word("▁hello"), *specials]
        text = Detokenizer(decoder_of(byte_fallback()), prompt)
        assert "".join(one_by_one(text, [word("▁world")])) == " world"


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer = byte_fallback()
    ids = [word("▁world"), EOS, word("▁hello"), EOS]
    for skip, wanted in ((True, " world hello"), (False, " world</s> hello</s>")):
        text = Detokenizer(decoder_of(tokenizer, skip), [BOS, word("▁hello")])
        assert "".join(one_by_one(text, ids)) == wanted
    assert Detokenizer(decoder_of(tokenizer, False), [BOS, BOS]).take(last=True) == ""


def test_many_special_tokens_are_read_in_bounded_windows() -> None:
    decode = Counting(decoder_of(byte_fallback()))
    text = Detokenizer(decode, [word("▁hello")])
    shown = "".join(one_by_one(text, [*[EOS] * 100, word("▁world"), *[EOS] * 100]))
    assert shown == " world" and max(decode.sizes) <= 16


def test_special_tokens_after_what_may_be_unfinished() -> None:
    text = Detokenizer(decoder_of(metaspace()), [word("▁hello")])
    ids = [word("�"), *[EOS] * 10, word("▁world")]
    assert "".join(one_by_one(text, ids)) == REPLACEMENT + " world"


def test_what_reads_otherwise_after_the_next_tokens_is_not_shown_again() -> None:
    """A decoder that takes back what it said reads the tokens that are not text yet alone."""
    known = {(1,): "a", (1, 2): "a" + REPLACEMENT, (1, 2, 3): "other", (2, 3): "é", (): ""}
    text = Detokenizer(lambda ids: known[tuple(ids)])
    assert list(one_by_one(text, [1, 2, 3])) == ["a", "", "é", ""]


# A U+FFFD that was written, three byte tokens of it, cannot be told from bytes that do not read.
# No tokenizer encodes half a surrogate pair: LLM refuses a prompt of one.
READABLE = st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT), max_size=20)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(MAKERS), st.lists(READABLE, max_size=3), st.integers(0, 20))
@example(byte_fallback, [TEXT], 3)
@example(byte_level, [TEXT], 3)
@example(reference, [TEXT], 3)
@example(byte_fallback, [TEXT] * 3, 60)
def test_text_is_what_all_tokens_read_as(
    make: Callable[[], Any], parts: list[str], prompt: int
) -> None:
    """After any part of them as a prompt, one by one, in parts and at once; with special tokens in
    between, which are no text."""
    tokenizer, ids = make(), encoded(make, "a")
    for count, part in enumerate(parts):
        ids += [*encoded(make, part), *[0] * (5 * count)]
    while prompt < len(ids) and REPLACEMENT in tokenizer.decode(ids[:prompt]):
        prompt += 1
    decode = decoder_of(tokenizer)
    wanted = decode(ids)[len(decode(ids[:prompt])) :]
    before, after = ids[:prompt], ids[prompt:]
    assert "".join(one_by_one(Detokenizer(decode, before), after)) == wanted
    assert in_parts(Detokenizer(decode, before), after, [1, 3, 4, 9]) == wanted
    assert in_parts(Detokenizer(decode, before), after, []) == wanted


def encoded(make: Callable[[], Any], text: str) -> list[int]:
    if make is reference:
        return reference()(text)["input_ids"]
    if make is metaspace:
        return [word(WORDS[ord(x) % len(WORDS)]) for x in text]
    return as_bytes(text)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(MAKERS), st.data())
def test_any_tokens_read_the_same_however_they_are_pushed(
    make: Callable[[], Any], data: Any
) -> None:
    tokenizer = make()
    some = st.sampled_from(as_bytes(b"\xff\xf0\x9f\x94\xa5\xc3\xa9\n"))
    token = st.one_of(some, st.integers(2, len(tokenizer) - 1))  # special ones split characters
    ids = data.draw(st.lists(token, max_size=40))
    prompt = data.draw(st.lists(token, max_size=10))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=3))
    decode = decoder_of(tokenizer)
    wanted = "".join(one_by_one(Detokenizer(decode, prompt), ids))
    assert in_parts(Detokenizer(decode, prompt), ids, cuts) == wanted
    assert in_parts(Detokenizer(decode, prompt), ids, []) == wanted
    if make is byte_level:  # a fallback's bytes are read a stretch at a time
        whole, known = decode([*prompt, *ids]), decode(prompt)
        while not whole.startswith(known):  # but for a character that the prompt began
            known = known.removesuffix(REPLACEMENT)
        assert wanted == whole[len(known) :]


def test_tokens_that_end_inside_characters_are_streamed() -> None:
    """Every token ends one character and begins the next."""
    decode = Counting(decoder_of(byte_level()))
    split = 258 + BYTE_WORDS.index(b"\x83\xe3\x82")
    ids = [*as_bytes(b"\xe3\x82"), *[split] * 60, *as_bytes(b"\xa2")]
    shown = list(one_by_one(Detokenizer(decode), ids))
    assert "".join(shown) == (b"\xe3\x82\x83" * 60 + b"\xe3\x82\xa2").decode()
    assert all(shown[2:-1]) and max(decode.sizes) <= 16
    split = 258 + BYTE_WORDS.index(b"\xa2\xe3")
    ids = [*as_bytes(b"\xe3\x82"), split, *as_bytes(b"\x82\xa2")]
    assert list(one_by_one(Detokenizer(decode), ids)) == ["", "", "ア", "", "ア", ""]


# Bytes that are no character --------------------------------------------------------------------


def test_half_a_character_is_not_shown() -> None:
    raw = "aé🔥b".encode()
    for text, bytes_to_ids in (
        (Detokenizer(lambda ids: bytes(ids).decode(errors="replace")), list),
        (Detokenizer(decoder_of(byte_fallback())), as_bytes),
    ):
        shown = []
        for token in bytes_to_ids(raw):
            text.push([token])
            shown.append(text.take())
        assert shown == ["a", "", "é", "", "", "", "🔥", "b"]
        text.push(bytes_to_ids(raw[1:2]))
        assert text.take() == ""
        assert text.take(last=True) == REPLACEMENT
        assert text.take(last=True) == ""


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
def test_a_character_that_the_prompt_began(make: Callable[[], Any]) -> None:
    """The output ends it, or does not: what was the prompt's is not shown."""
    prompt, rest = as_bytes("a\N{FIRE}")[:3], as_bytes("\N{FIRE}")[2:]
    decode = decoder_of(make())
    assert "".join(one_by_one(Detokenizer(decode, prompt), rest)) == "\N{FIRE}"
    assert "".join(one_by_one(Detokenizer(decode, prompt), [258, 259])) in (
        " hello world",
        "hello world",
    )


@pytest.mark.parametrize("make", [byte_fallback, byte_level, reference])
def test_what_never_is_a_character_is_streamed_in_time_that_does_not_grow(
    make: Callable[[], Any],
) -> None:
    tokenizer, rng = make(), random.Random(0)
    decode = Counting(decoder_of(tokenizer))
    text, ids = Detokenizer(decode), [rng.randrange(130, 258) for _ in range(2000)]
    if make is reference:
        vocab = tokenizer.get_vocab()
        broken = sorted(i for i in vocab.values() if tokenizer.decode([i]) == REPLACEMENT)
        ids = [rng.choice(broken) for _ in range(2000)]
    late = 0
    for at, token in enumerate(ids):
        text.push([token])
        late = 0 if text.take() else late + 1
        assert late <= 8, at
    assert max(decode.sizes) <= 16
    assert sum(decode.sizes) <= 16 * len(ids) and len(decode.sizes) <= 2.2 * len(ids)


@pytest.mark.parametrize("bad", [1, 2, 3, 4, 5, 50])
def test_text_after_what_is_no_character(bad: int) -> None:
    """A byte fallback would read a whole stretch as U+FFFDs: here only what is near the fault."""
    good = "Ünïcödé 中文 \N{FIRE}\N{FIRE} Кириллица\n"
    ids = [*as_bytes("é\n"), *as_bytes(b"\xff") * bad, *as_bytes("--" + good * 2)]
    text = "".join(one_by_one(Detokenizer(decoder_of(byte_fallback())), ids))
    assert text.startswith("é\n" + REPLACEMENT * bad) and text.endswith(good)
    level = "".join(one_by_one(Detokenizer(decoder_of(byte_level())), ids))
    assert level == "é\n" + REPLACEMENT * bad + "--" + good * 2


# Decoders ---------------------------------------------------------------------------------------


class Plain:
    """A tokenizer of the simplest kind."""

    def decode(self, ids: list[int]) -> str:
        return "".join("abc"[i] for i in ids)


def test_decoders_of_what_only_decodes() -> None:
    assert decoder_of(Plain())([0, 2]) == "ac"
    assert decoder_of(byte_level().backend_tokenizer, False)([1, 2 + 97]) == "</s>a"
    assert decoder_of(byte_level())([1, 2 + 97]) == "a"


def test_spaces_stay_as_they_are() -> None:
    inner = Tokenizer(WordPiece({"[UNK]": 0, "do": 1, "not": 2, ".": 3}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=True)
    assert tokenizer.decode([1, 2, 3]) == "do not."
    text = Detokenizer(decoder_of(tokenizer))
    assert "".join(one_by_one(text, [1, 2, 3])) == decoder_of(tokenizer)([1, 2, 3]) == "do not ."


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_token_that_the_decoder_refuses_takes_no_text_with_it(stop: tuple[str, ...]) -> None:
    text = Detokenizer(decoder_of(Plain()), [0, 1], stop)
    with pytest.raises(IndexError, match="out of range"):
        text.push([0, 1, 99, 2])
    with pytest.raises(IndexError, match="out of range"):
        text.push([99])
    assert text.push([2]) is None
    assert text.take() + text.take(last=True) == "abc"


def test_long_outputs_are_read_at_once() -> None:
    decode = Counting(decoder_of(reference()))
    ids = reference()(TEXT.replace(REPLACEMENT, "") * 20)["input_ids"]
    text = Detokenizer(decode, ids[:9])
    text.push(ids)
    assert text.take(last=True) == TEXT.replace(REPLACEMENT, "") * 20
    assert len(decode.sizes) <= 4


def test_neither_torch_nor_the_engine_is_needed() -> None:
    code = (
        "import sys, kvfold.engine.api.detokenizer; "
        "assert not {'torch', 'transformers', 'kvfold.engine.requests.request'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Stop strings -----------------------------------------------------------------------------------

PIECES = ["a", "b", "ab", "ba", "abc", "c", "", "é"[:1], "\N{FIRE}"]


def pieces(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def by_character(text: str, stops: Sequence[str]) -> tuple[str, int | None]:
    """The text as it is when a stop string is complete for the first time, and where that ends."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], end
    return text, None


def may_begin(text: str, stops: Sequence[str]) -> int:
    """Characters of the longest end of a text that is the beginning of a stop."""
    sizes = range(len(text), 0, -1)
    return next((n for n in sizes if any(s.startswith(text[-n:]) for s in stops)), 0)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=6),
)
def test_stop_strings_across_tokens(ids: list[int], stops: list[str]) -> None:
    text, shown, used = Detokenizer(pieces, stop=stops), "", None
    for count, token in enumerate(ids, 1):
        used = text.push([token])
        shown += text.take()
        if used is not None:
            assert used == 1
            break
        so_far = pieces(ids[:count])
        assert shown == so_far[: len(so_far) - may_begin(so_far, stops)]
    wanted, end = by_character(pieces(ids), stops)
    assert wanted.startswith(shown)
    assert (shown + text.take(last=True), used is not None) == (wanted, end is not None)

    together = Detokenizer(pieces, stop=stops)
    used = together.push(ids)
    assert together.take(last=True) == wanted
    if end is None:
        assert used is None
    else:
        assert len(pieces(ids[: used - 1])) < end <= len(pieces(ids[:used]))
        assert together.push(ids) == 0 and together.take(last=True) == ""


def test_of_stops_that_end_together_the_longest_counts() -> None:
    for stops in (("c", "abc", "bc"), ("abc", "bc", "c")):
        text = Detokenizer(lambda ids: "".join(map(chr, ids)), stop=stops)
        assert text.push(list(b"xxabcyy")) == 5
        assert text.take() == "xx" and text.take(last=True) == ""


def test_nothing_after_a_stop_is_shown() -> None:
    text = Detokenizer(
        lambda ids: b"".join((b"a", b"b!c\xf0")[i] for i in ids).decode(errors="replace"),
        stop=["!"],
    )
    assert text.push([0, 1, 0]) == 2
    assert text.take(last=True) == "ab" and text.take(last=True) == ""


def test_text_is_streamed_as_soon_as_it_is_safe() -> None:
    words = ["Hel", "lo E", "N", "D", "o E", "ND."]
    text = Detokenizer(lambda ids: "".join(words[i] for i in ids), stop=("END.", "STOP"))
    shown = []
    for token in range(6):
        used = text.push([token])
        shown.append(text.take(last=used is not None))
    assert shown == ["Hel", "lo ", "", "", "ENDo ", ""]
    assert used == 1


def test_stops_do_not_cost_more_the_longer_and_the_more_they_are() -> None:
    """5 us a token of this thread's own time; trying every end of the text with every stop would
    take minutes."""
    long = "ab" * 10_000
    stops = [long + "!", *(f"stop {i}" for i in range(500))]
    words = ["a", "b", "!", "no end here"]
    start = time.thread_time()
    text = Detokenizer(lambda ids: "".join(words[i] for i in ids), stop=stops)
    for _ in range(2000):
        assert text.push([3]) is None and text.take() == words[3]
    for i in range(19_999):
        assert text.push([i % 2]) is None and text.take() == ""
    assert text.push([0]) is None
    assert text.take() == long[:19_999]  # "a" begins the stop once more
    for i in range(19_999):
        assert text.push([1 - i % 2]) is None and text.take() == ""
    assert text.push([2]) == 1 and text.take(last=True) == ""
    assert time.thread_time() - start < 20
