"""Text of a request's tokens as they come, up to a stop string. Pure Python, for any thread.

How a token reads depends on those before it: SentencePiece drops a text's first space, and a
character may take several tokens. So a *window* of the last tokens is decoded, of which the *seen*
part is text already and the *unfinished* end, of U+FFFDs, may become another character yet.
"""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any

Decode = Callable[[list[int]], str]

UNREAD = "\N{REPLACEMENT CHARACTER}"  # how decoders write bytes that are no character
UNFINISHED = 3  # most bytes, so tokens, of a character that lacks some
CONTEXT = 4  # last tokens that show how the next one reads; more, where these begin in a character
WINDOW = 8  # tokens that are decoded at once: a new context is then due in one push of five


def decoder_of(tokenizer: Any, skip_special_tokens: bool = True) -> Decode:
    """`tokenizer.decode`, with the options that it knows.

    skip_special_tokens: they do not become text. Spaces are never cleaned up, as that would change
    text that was shown.
    """
    wanted = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    known = signature(tokenizer.decode).parameters
    if not any(x.kind is Parameter.VAR_KEYWORD for x in known.values()):
        wanted = {name: value for name, value in wanted.items() if name in known}
    return partial(tokenizer.decode, **wanted)


class Detokenizer:
    """A request's text, and which part of it may be shown already.

    decode: token ids to text. prompt_ids: what the tokens go on from; none of it is shown. stop:
    strings that end the text, which is cut before the one that is complete first (the longest of
    several). Held back: an unfinished character, and an end that may be the beginning of a stop
    string. A stretch of byte tokens that is not UTF-8 reads as U+FFFDs, about one a byte.
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
        self._unfinished = 0  # characters at the window's end
        self._unsettled = 0  # tokens since there were none such
        self._stops: _Place | None = None
        self._ended = False
        self._text: list[str] = []  # not taken yet
        self._length = 0  # characters of that
        self.push(self._context(list(prompt_ids[-WINDOW:]))[0])
        self.take(last=True)
        if stop:
            self._stops = _Place(stop if isinstance(stop, StopStrings) else StopStrings(stop))

    def push(self, ids: Sequence[int]) -> int | None:
        """Take in tokens. How many it took until a stop string was complete; None: text goes on.

        What decode raises reaches the caller: tokens before the one that it refuses are taken in.
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
        """The text that may be shown and was not taken; with what is held back if `last`."""
        if last:
            unfinished, self._unfinished = UNREAD * self._unfinished, 0
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
        if self._stops is not None and (found := self._stops.find(text)):
            end, size = found
            self._ended, self._length = True, self._length - len(text) + end - size
            self._text = ["".join(self._text)[: self._length]]

    def _read(self, token: int) -> str:
        """Text that a token adds. An error of the decoder changes nothing."""
        window, seen, unsettled = [*self._window, token], self._seen, self._unsettled + 1
        now = self._decode(window)
        while not now.startswith(seen) and seen.endswith(UNREAD):
            seen = seen.removesuffix(UNREAD)  # the prompt ended inside a character
        if not now.startswith(seen):  # a byte fallback reads no byte of a stretch that is not UTF-8
            window, seen = window[-unsettled:], ""
            now = self._decode(window)
        held = min(_unread(now[len(seen) :]), UNFINISHED)
        text = now[len(seen) : len(now) - held]
        if held and unsettled > UNFINISHED:  # the first of them begins no character
            last = window[-UNFINISHED:]
            reads = self._decode(last)
            left = min(_unread(reads), held)
            text += UNREAD * (held - left)
            held, unsettled = left, UNFINISHED
            if reads:
                window, now = last, reads
        if not held:
            window, now = self._settled(window, now, text)
        self._window, self._seen = window, now[: len(now) - held]
        self._unfinished, self._unsettled = held, unsettled if held else 0
        return text

    def _read_at_once(self, ids: Sequence[int]) -> bool:
        """Read tokens in one go. False, with nothing changed, if one by one may read otherwise."""
        window = [*self._window, *ids]
        try:
            now = self._decode(window)
        except Exception:  # comes again where its token is read
            return False
        text = now[len(self._seen) :]
        if not now.startswith(self._seen) or UNREAD in text:
            return False
        self._window, self._seen = self._settled(window, now, text)
        self._unfinished = self._unsettled = 0
        self._add(text)
        return True

    def _settled(self, window: list[int], now: str, text: str) -> tuple[list[int], str]:
        """A window that is not too long in place of one that reads as `now`, the last `text` of
        which is new; and its reading."""
        if len(window) <= WINDOW:
            return window, now
        # Tokens that are no text, such as special ones, say nothing about the next.
        return self._context(window) if text else (window[:WINDOW], now)

    def _context(self, ids: list[int]) -> tuple[list[int], str]:
        """The last of `ids`, from the start of a character if there is one, and how they read."""
        shortest = None
        for size in range(max(min(CONTEXT, len(ids)), 1), min(WINDOW, len(ids)) + 1):
            last = ids[-size:]
            text = self._decode(last)
            if text and UNREAD not in text:
                return last, text
            shortest = shortest or (last, text)
        return shortest or ([], "")


class StopStrings:
    """Stop strings as an Aho-Corasick automaton, which any number of texts may share: nothing
    changes it. A node is the beginning of a stop; 0 is the empty one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.ends = [0]  # characters of the longest stop that a node ends with
        for stop in stops:
            self._insert(stop)
        self._shorter = [0] * len(self.depth)  # the longest other node that a node ends with
        self._link()

    def next(self, node: int, character: str) -> int:
        """The longest node that a text ends with, by that of the text without its last one."""
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


class _Place:
    """Where among stop strings a text is that comes in pieces: at the longest beginning of one that
    it ends with. held: characters of that."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops, self._node = stops, 0

    @property
    def held(self) -> int:
        return self._stops.depth[self._node]

    def restart(self) -> None:
        """Forget the text."""
        self._node = 0

    def find(self, text: str) -> tuple[int, int] | None:
        """Go on with `text`, to the end of the stop that is complete first: where in `text` that
        is, and how long the stop."""
        for end, character in enumerate(text, 1):
            self._node = self._stops.next(self._node, character)
            if size := self._stops.ends[self._node]:
                return end, size
        return None


def _unread(text: str) -> int:
    """U+FFFDs at the end."""
    return len(text) - len(text.rstrip(UNREAD))
