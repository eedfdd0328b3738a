"""Compile and match grammars in separate processes, which end at a deadline: xgrammar may take
minutes and gigabytes for a short grammar, and cannot be stopped within a process.

`python -m kvfold.engine.api.grammar_process DESCRIPTOR` loads xgrammar and forks one process for
each socket that it is sent. It ends with the process that started it.
"""

import fcntl
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MEMORY = 2**31  # most bytes that a grammar may allocate


def main(descriptor: int) -> None:
    """Fork a process for every socket received, until the starting process ends."""
    import numpy  # noqa: F401  # before forking
    import xgrammar

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # child processes are not waited for
    starter = socket.socket(fileno=descriptor)
    talk = Connection(os.dup(descriptor))
    known = xgrammar.TokenizerInfo.deserialize_json(talk.recv())
    talk.send("ready")
    while True:
        _, (*sockets,), *_ = socket.recv_fds(starter, 1, 1)
        if not sockets:
            return
        if os.fork() == 0:
            starter.close()
            talk.close()
            _serve(Connection(sockets[0]), known)
        os.close(sockets[0])


def _serve(talk: Connection, known: Any) -> None:
    """Serve one grammar and all its sequences. Ends the process."""
    try:
        _limit_memory()
        _answer(talk, known)
    except (EOFError, OSError):  # the other side closed the connection
        pass
    finally:
        os._exit(0)


def _answer(talk: Connection, known: Any) -> None:
    """Compile the grammar, then answer messages with bit masks."""
    import numpy as np
    import xgrammar

    kind, text, compile_seconds, mask_seconds = talk.recv()
    width = -(-known.vocab_size // 32)
    try:
        with _alarm(compile_seconds, signal.ITIMER_REAL), _ends_with(talk):
            compiled = _compile(xgrammar.GrammarCompiler(known, max_threads=1), kind, text)
            first = np.empty((1, width), dtype=np.int32)
            xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(first)
    except (RuntimeError, MemoryError) as error:
        return talk.send(str(error) or "it takes too much memory")
    talk.send(None)
    matchers: dict[int, Any] = {}
    while True:
        calls, dropped = talk.recv()
        for gone in dropped:
            matchers.pop(gone, None)
        bits, errors = np.zeros((len(calls), width), dtype=np.int32), {}
        for row, (number, tokens) in enumerate(calls):
            matcher = matchers.get(number) or xgrammar.GrammarMatcher(compiled)
            matchers[number] = matcher
            with _alarm(mask_seconds, signal.ITIMER_PROF):
                rejected = next((x for x in tokens if not matcher.accept_token(x)), None)
                if rejected is None:
                    matcher.fill_next_token_bitmask(bits, row)
                else:
                    errors[number] = f"token {rejected} is none that the grammar allows"
        talk.send(([number for number, _ in calls], bits.tobytes(), errors))


def _compile(compiler: Any, kind: str, text: str) -> Any:
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "structural_tag":
        return compiler.compile_structural_tag(text)
    # On one line: a small model may never leave the white space that JSON allows.
    return compiler.compile_json_schema(text, any_whitespace=False)


@contextmanager
def _alarm(seconds: float, clock: int) -> Iterator[None]:
    """Let the kernel end this process if the block takes longer than `seconds`: of real time, or of
    this process's CPU time (ITIMER_PROF), however busy the machine is."""
    signal.setitimer(clock, seconds)
    yield
    signal.setitimer(clock, 0)


@contextmanager
def _ends_with(talk: Connection) -> Iterator[None]:
    """Let the kernel end this process if the other side closes the connection meanwhile (Linux)."""
    descriptor = talk.fileno()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    if talk.poll():  # closed before the signal was set up
        raise EOFError
    yield
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _limit_memory() -> None:
    sizes = Path("/proc/self/statm")
    if sizes.exists():  # on Linux
        most = int(sizes.read_text().split()[0]) * resource.getpagesize() + MEMORY
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]))
