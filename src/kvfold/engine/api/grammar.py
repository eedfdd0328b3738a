"""Constrain a text to a JSON schema, a regular expression or a structural tag: which tokens may
come next. Uses xgrammar, an optional dependency, in other processes (see `grammar_process`), which
a deadline can end.

Shapes: V vocabulary.
"""

import os
import re
import resource
import socket
import subprocess
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from itertools import count
from multiprocessing.connection import Connection
from threading import Event, Lock
from time import monotonic
from typing import Any

import numpy as np

from kvfold.engine.requests.request import SamplingParams
from kvfold.utils.errors import SettingError
from kvfold.utils.tokens import check_text

COMPILE_SECONDS = 10.0  # most time to compile a grammar
MASK_SECONDS = 0.5  # most CPU time to compute the mask of a token
WAIT_SECONDS = 0.8  # most time to wait for a mask, on a busy machine
START_SECONDS = 120.0  # most time to load xgrammar
NUM_IDLE = 8  # most grammar processes that stay alive without a sequence
NUM_REFUSED, REFUSED_SECONDS = 256, 60.0  # grammars to refuse at once, since they took too long
SETTINGS = "`json_schema`, `regex` and `structural_tag`"
_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")  # position in xgrammar's source in its errors
_GONE = "ended"  # the process was ended by its deadline or its memory limit


class GrammarProcess:
    """A process with one compiled grammar, for any number of sequences and threads.

    refusal: why it answers no more. leave: set if nobody waits for the grammar any more.

    Raises SettingError for an invalid grammar, or one that takes too long; RuntimeError if `leave`
    is set.
    """

    def __init__(
        self, talk: Connection, kind: str, text: str, refuse: "Refusals", leave: Event | None
    ) -> None:
        self.kind, self.refusal = kind, ""
        self._talk, self._key, self._refuse = talk, (kind, text), refuse
        self._lock, self._numbers = Lock(), count()
        self._dropped: deque[int] = deque()  # atomic methods, since finalizers append to it
        self._pending: list[tuple[int, tuple[int, ...]]] = []  # calls of `prepare` to be sent
        self._answers: dict[int, np.ndarray | str] = {}
        talk.send((kind, text, COMPILE_SECONDS, MASK_SECONDS))
        deadline = monotonic() + COMPILE_SECONDS + 1
        while leave is not None and not talk.poll(0.1) and monotonic() < deadline:
            if leave.is_set():
                talk.close()  # this ends the process
                raise RuntimeError("nobody waits for the grammar")
        why = self._receive(deadline)
        if why == _GONE:
            self._end(f"takes over {COMPILE_SECONDS:g} s, or too much memory, to compile")
            raise self.error
        if why is not None:
            raise SettingError(
                f"`{kind}` cannot be followed: {_PLACE.sub('', str(why)).strip():.300}"
            )

    @property
    def error(self) -> SettingError:
        return too_slow(self.kind, self.refusal)

    def open(self) -> int:
        """Number of a new sequence."""
        return next(self._numbers)

    def drop(self, number: int) -> None:
        """Forget a sequence, with the next message."""
        self._dropped.append(number)

    def prepare(self, number: int, tokens: Sequence[int]) -> None:
        """Let a sequence accept tokens and compute its next mask, after the next `flush`."""
        with self._lock:
            self._pending.append((number, tuple(tokens)))

    def flush(self) -> None:
        """Send the pending calls of all sequences in one message, since each message wakes the
        process."""
        with self._lock:
            self._send()

    def _send(self) -> None:
        if self.refusal or not self._pending:
            return
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        for gone in dropped:
            self._answers.pop(gone, None)
        pending, self._pending = self._pending, []
        try:
            self._talk.send((pending, dropped))
        except OSError:
            self._end_slow()

    def answer(self, number: int, deadline: float) -> np.ndarray | str:
        """The bit mask of tokens that may come next, or what is wrong with the accepted tokens.
        Raises SettingError if it takes too long."""
        with self._lock:
            self._send()
            while number not in self._answers:
                if self.refusal:
                    raise self.error
                if (reply := self._receive(deadline)) == _GONE:
                    self._end_slow()
                    continue
                numbers, bits, errors = reply
                rows = np.frombuffer(bits, dtype=np.int32).reshape(len(numbers), -1)
                self._answers |= dict(zip(numbers, rows, strict=True)) | errors
            return self._answers.pop(number)

    def _receive(self, deadline: float) -> Any:
        try:
            if self._talk.poll(max(0.0, deadline - monotonic())):
                return self._talk.recv()
        except (EOFError, OSError):
            pass
        return _GONE

    def _end_slow(self) -> None:
        self._end(f"takes over {MASK_SECONDS:g} s, or too much memory, for a token")

    def _end(self, why: str) -> None:
        """Refuse this grammar, and end the process, at the latest when it waits for a message."""
        self.refusal = why
        self._refuse.add(self._key, why)
        self._talk.close()


class GrammarGuide:
    """Matches one sequence against a grammar; implements `request.Guide`."""

    def __init__(self, process: GrammarProcess) -> None:
        self._process, self._number, self._num_read = process, process.open(), 0
        self._deadline: float | None = None  # of a pending answer
        self._bits: np.ndarray | None = None
        self._error: str | None = None

    def copy(self) -> "GrammarGuide":
        """A guide for another sequence, before its first token. It shares the mask of the first
        token, if that is known."""
        assert not self._num_read, f"{self._num_read} tokens were read"
        other = GrammarGuide(self._process)
        other._bits, other._error = self._bits, self._error
        return other

    def prepare(self, outputs: Sequence[int]) -> None:
        """Start computing the mask that follows `outputs`, after the next `flush`."""
        new = outputs[self._num_read :]
        if self._deadline is None and (self._bits is None or new):
            self._process.prepare(self._number, new)
            self._num_read, self._deadline = len(outputs), monotonic() + WAIT_SECONDS

    def flush(self) -> None:
        """Send the prepared calls, so that `allowed_tokens` waits for less time."""
        self._process.flush()

    def allowed_tokens(self, outputs: Sequence[int]) -> np.ndarray:
        """Accepts the outputs since the last call. A step that is run again, or a prompt that is
        prefilled again, has no further effect."""
        self.prepare(outputs)
        if self._deadline is not None and self._error is None:
            answer = self._process.answer(self._number, self._deadline)
            self._deadline = None
            if isinstance(answer, str):
                self._error = answer
            else:
                self._bits = answer
        if self._error is not None:
            raise RuntimeError(self._error)
        assert self._bits is not None
        return self._bits.copy()

    def __del__(self) -> None:
        self._process.drop(self._number)


class Refusals:
    """Grammars that took too long, for a while: the same grammar is then refused at once."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()
        self._lock = Lock()

    def add(self, key: tuple[str, str], why: str) -> None:
        with self._lock:
            self._known[key] = monotonic(), why
            while len(self._known) > NUM_REFUSED:
                self._known.popitem(last=False)

    def check(self, key: tuple[str, str]) -> None:
        """Raises SettingError for a grammar that took too long."""
        with self._lock:
            since, why = self._known.get(key, (0.0, ""))
        if why and monotonic() - since < REFUSED_SECONDS:
            raise too_slow(key[0], why)


def too_slow(kind: str, why: str) -> SettingError:
    """The error for a grammar that takes too long."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = f", or give the server more memory: ulimit -v allows it {most} bytes"
    return SettingError(
        f"`{kind}` cannot be followed: it {why}; make it shorter or less nested"
        f"{'' if most == resource.RLIM_INFINITY else limit}"
    )


class Grammars:
    """The grammars of a tokenizer. Each is compiled once and kept for a while.

    vocab: V of the logits. eos_ids: tokens that end a complete text. Raises SettingError if
        xgrammar, a tokenizer or an end token is missing.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Collection[int]) -> None:
        if find_spec("xgrammar") is None:
            raise SettingError(f'{SETTINGS} need xgrammar: pip install "kvfold[structured]"')
        if tokenizer is None:
            raise SettingError(f"{SETTINGS} need a tokenizer: pass tokenizer= to LLM")
        if not eos_ids:
            raise SettingError(f"{SETTINGS} need a model that has an end token")
        import xgrammar

        known = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab, stop_token_ids=sorted(eos_ids)
        )
        self._known: str = known.serialize_json()
        self._starter: socket.socket | None = None  # to the process that forks one per grammar
        self._refusals, self._lock = Refusals(), Lock()
        self._in_use: weakref.WeakValueDictionary[tuple[str, str], GrammarProcess] = (
            weakref.WeakValueDictionary()
        )
        self._recent: OrderedDict[tuple[str, str], GrammarProcess] = OrderedDict()

    def guide(self, sampling: SamplingParams, leave: Event | None = None) -> GrammarGuide:
        """A guide for a new sequence. leave: ends the wait, with a RuntimeError. Raises
        SettingError for an invalid grammar, or one that takes too long."""
        (name,) = sampling.grammars
        check_text(name, text := getattr(sampling, name))
        return GrammarGuide(self._process((name, text), leave))

    def _process(self, key: tuple[str, str], leave: Event | None) -> GrammarProcess:
        self._refusals.check(key)
        with self._lock:
            process = self._in_use.get(key)
        if process is None or process.refusal:
            process = GrammarProcess(self._fork(), *key, self._refusals, leave)
        with self._lock:
            self._in_use[key] = self._recent[key] = process
            self._recent.move_to_end(key)
            while len(self._recent) > NUM_IDLE:
                self._recent.popitem(last=False)
        return process

    def _fork(self) -> Connection:
        """A connection to a new process, which waits for a grammar."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                self._send(theirs)
            except OSError:  # the starter was killed
                self._starter = None
                self._send(theirs)
        return Connection(ours.detach())

    def _send(self, theirs: socket.socket) -> None:
        self._starter = self._starter or self._start()
        socket.send_fds(self._starter, [b"1"], [theirs.fileno()])

    def _start(self) -> socket.socket:
        """Start the process that loads xgrammar and forks the others. It ends with this object."""
        ours, theirs = socket.socketpair()
        call = [sys.executable, "-m", "kvfold.engine.api.grammar_process", str(theirs.fileno())]
        with theirs:
            # In its own session, so that Ctrl-C does not reach it.
            process = subprocess.Popen(
                call,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # xgrammar prints the grammars of clients
                start_new_session=True,
            )
        weakref.finalize(self, _end, process, ours)
        talk = Connection(os.dup(ours.fileno()))
        try:
            talk.send(self._known)
            if not talk.poll(START_SECONDS):
                raise EOFError
            talk.recv()
        except (EOFError, OSError):
            raise RuntimeError(
                "the process that loads xgrammar did not start: it needs memory, which ulimit -v "
                "may limit"
            ) from None
        return ours


def _end(process: subprocess.Popen, talk: socket.socket) -> None:
    talk.close()
    process.kill()
    process.wait()
