"""Incremental detokenisation of a request, up to a stop string. Pure Python, for any thread.

How a token decodes depends on the tokens before it: SentencePiece drops the first space of a text,
and a character may take several tokens. So a *window* of the last tokens is decoded. Its *seen*
part is text already, and its *unfinished* end, a run of U+FFFD, may still become another character.
"""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any

Decode = Callable[[list[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # how decoders show bytes that are no character
UNFINISHED = 3  # most bytes, and thus tokens, of an incomplete character
CONTEXT = 4  # last tokens that determine how the next one decodes; more if these split a character
WINDOW = 8  # most tokens decoded at once: the context is then renewed once in five calls of `push`


def decoder_of(tokenizer: Any, skip_special_tokens: bool = True) -> Decode:
    """`tokenizer.decode` with the options that it supports.

    skip_special_tokens: leave special tokens out of the text. Spaces are never cleaned up, since
        that would change text that was shown already.
    """
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    supported = signature(tokenizer.decode).parameters
    if not any(x.kind is Parameter.VAR_KEYWORD for x in supported.values()):
        options = {name: value for name, value in options.items() if name in supported}
    return partial(tokenizer.decode, **options)


class Detokenizer:
    """The text of a request, and the part of it that may be shown.

    decode: token ids to text. prompt_ids: tokens before the outputs; they are not shown. stop:
        strings that end the text, which is cut before the first complete one (the longest of
        several).

    Not shown yet: an incomplete character, and an end that may be the beginning of a stop string.
        Byte tokens that are not UTF-8 become U+FFFD, about one per byte.
    """

    def __init__(
        self,
        decode: Decode,
        prompt_ids: Sequence[int] = (),
        stop: "Sequence[str] | StopStrings" = (),
    ) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._seen = ""
        self._unfinished = 0  # number of U+FFFD at the window's end
        self._unsettled = 0  # tokens since the last one without any
        self._stops: _StopMatcher | None = None
        self._ended = False
        self._text: list[str] = []  # text that was not taken yet
        self._length = 0  # its number of characters
        self.push(self._context(list(prompt_ids[-WINDOW:]))[0])
        self.take(last=True)
        if stop:
            self._stops = _StopMatcher(stop if isinstance(stop, StopStrings) else StopStrings(stop))

    def push(self, ids: Sequence[int]) -> int | None:
        """Decode tokens. Returns how many it took until a stop string was complete; None: the text
        goes on.

        If decode raises, the tokens before the one at fault have been decoded.
        """
        if self._ended:
            return 0
        if self._stops is None and len(ids) > 1 and self._read_at_once(ids):
            return None
        for count, token in enumerate(ids, 1):
            self._add(self._read(token))
            if self._ended:
                return count
        return None

    def take(self, *, last: bool = False) -> str:
        """The new text that may be shown. With `last`, all remaining text."""
        if last:
            unfinished, self._unfinished = REPLACEMENT * self._unfinished, 0
            self._seen += unfinished
            self._add(unfinished)
            if self._stops is not None:
                self._stops.restart()
        held = 0 if self._ended or self._stops is None else self._stops.held
        if self._length == held:
            return ""
        text = "".join(self._text)
        size, self._length = self._length - held, held
        self._text = [text[size:]]
        return text[:size]

    def _add(self, text: str) -> None:
        """Append to the text, and end it at a stop string."""
        if self._ended:
            return
        self._text.append(text)
        self._length += len(text)
        if self._stops is not None and (match := self._stops.find(text)):
            end, size = match
            self._ended, self._length = True, self._length - len(text) + end - size
            self._text = ["".join(self._text)[: self._length]]

    def _read(self, token: int) -> str:
        """The text that a token adds. If the decoder raises, nothing changes."""
        window, seen, unsettled = [*self._window, token], self._seen, self._unsettled + 1
        now = self._decode(window)
        while not now.startswith(seen) and seen.endswith(REPLACEMENT):
            seen = seen.removesuffix(REPLACEMENT)  # the prompt ended within a character
        if not now.startswith(seen):  # byte fallback tokens changed how earlier ones decode
            window, seen = window[-unsettled:], ""
            now = self._decode(window)
        held = min(_num_replacements(now[len(seen) :]), UNFINISHED)
        text = now[len(seen) : len(now) - held]
        if held and unsettled > UNFINISHED:  # the first of these tokens starts no character
            last = window[-UNFINISHED:]
            reads = self._decode(last)
            left = min(_num_replacements(reads), held)
            text += REPLACEMENT * (held - left)
            held, unsettled = left, UNFINISHED
            if reads:
                window, now = last, reads
        if not held:
            window, now = self._settled(window, now, text)
        self._window, self._seen = window, now[: len(now) - held]
        self._unfinished, self._unsettled = held, unsettled if held else 0
        return text

    def _read_at_once(self, ids: Sequence[int]) -> bool:
        """Decode all tokens in one call. False, with nothing changed, if decoding one by one might
        differ."""
        window = [*self._window, *ids]
        try:
            now = self._decode(window)
        except Exception:  # raised again when that token is decoded alone
            return False
        text = now[len(self._seen) :]
        if not now.startswith(self._seen) or REPLACEMENT in text:
            return False
        self._window, self._seen = self._settled(window, now, text)
        self._unfinished = self._unsettled = 0
        self._add(text)
        return True

    def _settled(self, window: list[int], now: str, text: str) -> tuple[list[int], str]:
        """The window and its text, shortened if the window is too long. now: its text; text: the
        new part of it."""
        if len(window) <= WINDOW:
            return window, now
        # Tokens without text, such as special tokens, are no context for the next one.
        return self._context(window) if text else (window[:WINDOW], now)

    def _context(self, ids: list[int]) -> tuple[list[int], str]:
        """The last of `ids`, from the start of a character if possible, and their text."""
        shortest = None
        for size in range(max(min(CONTEXT, len(ids)), 1), min(WINDOW, len(ids)) + 1):
            last = ids[-size:]
            text = self._decode(last)
            if text and REPLACEMENT not in text:
                return last, text
            shortest = shortest or (last, text)
        return shortest or ([], "")


class StopStrings:
    """Stop strings as an Aho-Corasick automaton. It is immutable, so any number of texts may share
    it. A node is a prefix of a stop string; node 0 is the empty one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.ends = [0]  # length of the longest stop string that a node ends with
        for stop in stops:
            self._insert(stop)
        self._shorter = [0] * len(self.depth)  # the longest other node that is a node's suffix
        self._link()

    def next(self, node: int, character: str) -> int:
        """The longest node that is a suffix of a text, after one more character."""
        while node and character not in self._children[node]:
            node = self._shorter[node]
        return self._children[node].get(character, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            new = len(self.depth)
            child = self._children[node].setdefault(character, new)
            if child == new:
                self._children.append({})
                self.depth.append(self.depth[node] + 1)
                self.ends.append(0)
            node = child
        self.ends[node] = len(stop)

    def _link(self) -> None:
        nodes = [0]
        for node in nodes:  # shortest first
            for character, child in self._children[node].items():
                shorter = self.next(self._shorter[node], character) if node else 0
                self._shorter[child] = shorter
                self.ends[child] = self.ends[child] or self.ends[shorter]
                nodes.append(child)


class _StopMatcher:
    """Matches the stop strings against a text that comes in pieces."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops, self._node = stops, 0

    @property
    def held(self) -> int:
        """Length of the longest prefix of a stop string that the text ends with."""
        return self._stops.depth[self._node]

    def restart(self) -> None:
        """Forget the text."""
        self._node = 0

    def find(self, text: str) -> tuple[int, int] | None:
        """Continue with `text`, up to the end of the first complete stop string. Returns the end's
        position in `text` and the string's length."""
        for end, character in enumerate(text, 1):
            self._node = self._stops.next(self._node, character)
            if size := self._stops.ends[self._node]:
                return end, size
        return None


def _num_replacements(text: str) -> int:
    """Number of U+FFFD at the end."""
    return len(text) - len(text.rstrip(REPLACEMENT))
