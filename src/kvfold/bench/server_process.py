"""A server in a process of its own, for one benchmark. Imports no torch."""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import ProxyHandler, build_opener

T = TypeVar("T")
READY = 1800.0  # most seconds to an answer: large checkpoints take minutes to load
STOPPING = 30.0  # seconds to stop in, before it is killed
POLL = 0.2  # seconds between two looks at the process
SHOWN = 20  # last lines of a failed server's log to print
REFUSAL = "kvfold: error: "  # how a line begins that says what is wrong with a command
SET_PDEATHSIG = 1  # of Linux's prctl


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    with ExitStack() as stack:
        local = "127.0.0.1", 0
        opened = [stack.enter_context(socket.create_server(local)) for _ in range(count)]
        return [x.getsockname()[1] for x in opened]


class ServerProcess:
    """A server that runs as a command. Its output goes to a log, which stays if it fails."""

    def __init__(self, words: Sequence[str], url: str, environment: Mapping[str, str]) -> None:
        """words: the command line. url: where the server will listen, with /health."""
        self.url = url
        with tempfile.NamedTemporaryFile(prefix="kvfold-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C comes to us alone; `stop` then stops it
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    def wait_until_ready(self, most: float | None = None) -> None:
        """Wait until the server answers. Raises ValueError if it ends before, or takes more than
        `most` seconds (None: READY)."""
        most = READY if most is None else most
        end = time.monotonic() + most
        while not _answers(f"{self.url}/health"):
            self.check("before it answered")
            if time.monotonic() > end:
                raise self._error(f"does not answer after {most:g} s")
            time.sleep(POLL)
        self.check("before it answered")  # if another process answers at this port

    def check(self, when: str) -> None:
        """Raises ValueError if the server has ended."""
        code = self.process.poll()
        if code is None:
            return
        last = (self._lines() or [""])[-1]
        if last.startswith(REFUSAL):
            self.log.unlink(missing_ok=True)
            raise ValueError(last.removeprefix(REFUSAL))
        how = f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"
        raise self._error(f"{how} {when}")

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises ValueError as soon as the server ends."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=POLL)
                self.check("during the benchmark")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task.result()

    def stop(self) -> None:
        """End the server and all its processes."""
        try:
            self.process.terminate()
            self.process.wait(STOPPING)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also if the wait is interrupted
            _kill_session(self.process)
            self.process.wait()

    def _lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()

    def _error(self, what: str) -> ValueError:
        """Prints the last lines of the log to stderr."""
        print(*self._lines()[-SHOWN:], sep="\n", file=sys.stderr, flush=True)
        return ValueError(
            f"the server {what}: its last lines are above, its whole log is in {self.log}"
        )


@contextmanager
def running(
    words: Sequence[str], url: str, environment: Mapping[str, str]
) -> Iterator[ServerProcess]:
    """Context manager: a server that answers, which is stopped at the end. Its log stays where it
    has failed."""
    server = ServerProcess(words, url, environment)
    failed = False
    try:
        server.wait_until_ready()
        yield server
    except ValueError:
        failed = True
        raise
    finally:
        server.stop()
        if not failed:
            server.log.unlink(missing_ok=True)


def _answers(url: str) -> bool:
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """In the child: end when the benchmark is killed, so that no server keeps a GPU."""
    assert _libc is not None
    _libc.prctl(SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of the processes that a server has started."""
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of ended processes
        os.killpg(process.pid, signal.SIGKILL)
