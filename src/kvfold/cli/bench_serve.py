"""kvfold bench serve: what a server that speaks OpenAI's HTTP holds, as JSON and plots."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from kvfold.bench.serve_load import Bounds, Job, Prompts, Traffic
from kvfold.cli import common
from kvfold.cli.bench_common import Output, Results, empty_table, say
from kvfold.cli.options import MOST, Files, Flag, flags_of, parse_list
from kvfold.config import check, setting
from kvfold.utils.errors import SettingError
from kvfold.utils.files import check_writable, new_file, writing
from kvfold.utils.kinds import fits
from kvfold.utils.text import json_object, packaged, read_text

if TYPE_CHECKING:
    from kvfold.bench.serve_client import Client, Outcome

KEY = "KVFOLD_API_KEY"
WIDTH = 120  # of tables in a log
Url = Annotated[str, Parameter(help="Of the server, such as http://127.0.0.1:8000.")]


@Parameter(name="*", group="Traffic")
@dataclass(frozen=True, kw_only=True)
@flags_of(Traffic)
class Requests:
    """`Traffic`."""

    @property
    def traffic(self) -> Traffic:
        return Traffic(**asdict(self))

    def __post_init__(self) -> None:
        self.traffic  # noqa: B018


@Parameter(name="*", group="Goals")
@dataclass(frozen=True, kw_only=True)
@flags_of(Bounds)
class Limits:
    """`Bounds`."""

    @property
    def bounds(self) -> Bounds:
        return Bounds(**asdict(self))

    def __post_init__(self) -> None:
        self.bounds  # noqa: B018


@Parameter(name="*", group="Server")
@dataclass(frozen=True, kw_only=True)
class Asking:
    """How a server is asked."""

    model: str | None = setting(None, "The model to ask; by default the only one.")
    api_key: str | None = setting(None, f"What to send; ${KEY} is not shown by ps.")
    endpoint: Literal["completions", "chat"] = setting("completions", "What to ask for.")
    plain: Flag = setting(False, "Send OpenAI's own fields alone; answers may end early.")
    concurrency: int | None = setting(None, "Most requests that are open at once.", least=1)
    seconds: float = setting(600.0, "Most time for a rate; what is open then is left.", above=0)
    warmup: int = setting(1, "Requests before the first rate that are not measured.", least=0)

    def __post_init__(self) -> None:
        check(self)


REQUESTS, LIMITS, ASKING = Requests(), Limits(), Asking()


def serve(
    url: Url,
    /,
    *,
    rate: str | None = None,
    text: Path | None = None,
    label: str | None = None,
    beside: Files = (),
    requests: Requests = REQUESTS,
    asking: Asking = ASKING,
    limits: Limits = LIMITS,
    json: Output = None,
    plot: Path | None = None,
) -> None:
    """Send requests to a server at stated rates and measure what their clients see.

    Any server that speaks OpenAI's HTTP is measured alike.

    Parameters
    ----------
    rate
        Requests a second, separated by commas, as in 1,2,4; inf sends all at once. By default a
        trace's own times.
    text
        Where prompts are cut from, instead of ours.
    label
        What the figure calls this server; by default its model.
    beside
        JSON of earlier runs of the same requests: drawn too, and their answers compared.
    plot
        File for a figure: .svg, .png or .pdf.
    """
    check_outputs(json, plot)
    if find_spec("aiohttp") is None:
        raise ValueError('bench serve needs aiohttp: pip install "kvfold[load]"')
    rates, traffic = parse_rates(rate, requests.traffic), requests.traffic
    others = [read_report(path) for path in beside]
    source = packaged("filler.txt") if text is None else read_text(text)
    key = asking.api_key or os.environ.get(KEY)
    settings = {"url": url, "label": label, **asdict(traffic), **asdict(asking)}
    settings |= {"api_key": None, "bounds": asdict(limits.bounds), "text": text and str(text)}
    settings["trace"] = traffic.trace and str(traffic.trace)
    run = Run(url, key, asking, traffic, limits.bounds, rates, source)
    results = Results(json, "serve", settings, versions(), ("rows", "answers"))
    try:
        asyncio.run(run.measure(results))
    finally:
        if rows := results.by_kind["rows"]:
            show(rows, limits.bounds)
            for other in others:
                print(compared(results, other))
    if plot is not None:
        with writing(plot), new_file(plot) as scratch:
            from kvfold.bench.serve_plots import write_figure

            write_figure(scratch, [results.metadata | results.by_kind, *others])


def check_outputs(json: Path | None, plot: Path | None) -> None:
    """Before anything is sent. Raises ValueError."""
    common.check_outputs(json=json)
    if plot is None:
        return
    from kvfold.bench.serve_plots import check_installed

    check_installed()
    check_writable(plot)
    if plot.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--plot: {plot} must end with .svg, .png or .pdf")


def versions() -> dict[str, str | None]:
    """Of the client; the server's are in its answers, if anywhere."""
    from kvfold import __version__
    from kvfold.cli.bench_common import installed

    return {"kvfold": __version__, "commit": common.commit(), "aiohttp": installed("aiohttp")}


def parse_rates(text: str | None, traffic: Traffic) -> list[float | None]:
    """Raises SettingError for rates that are none, or that are needed and not given; ValueError for
    a trace that cannot be read."""
    example = "numbers such as 1,2,4 or inf"
    found: list[float | None] = [None]
    if text is not None:
        found = [*parse_list(text, "--rate", float, example)]
    if not all(rate is None or rate > 0 for rate in found):
        raise SettingError(f"`rate` must be above 0; got {text!r}")
    traffic.jobs(found[0])
    return found


# Of an earlier run, what the figure and the comparison read.
ROW = {
    "offered_per_s": float | None,
    "requests_per_s": float,
    **dict.fromkeys(("ttft_ms", "tbt_ms", "normalised_ms"), dict | None),
}
RATES = ("offered_per_s", "requests_per_s")
ANSWER = {"rate": str, "number": int, "text": str, "error": str | None}


def read_report(path: Path) -> dict[str, Any]:
    """An earlier run. Raises ValueError for a file of another kind."""
    try:
        found = json_object(read_text(path))
        if found["benchmark"] == "serve" and _whole(found):
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"--beside: {path} is no result of kvfold bench serve; make it with --json")


def _whole(found: Mapping[str, Any]) -> bool:
    """Whether the results are there and of their types. Raises KeyError, TypeError."""
    rows, times = found["rows"], [name for name, kind in ROW.items() if kind == dict | None]
    spreads = [row[name] for row in rows for name in times if row[name] is not None]
    return (
        bool(rows)
        and all(fits(row[name], kind) for row in rows for name, kind in ROW.items())
        and all(_is_number(row[name] or 0) for row in rows for name in RATES)
        and all(_is_number(x[key]) for x in spreads for key in ("mean", "p50", "p99"))
        and all(fits(x[name], kind) for x in found["answers"] for name, kind in ANSWER.items())
        and fits(found["settings"]["label"], str)
    )


def _is_number(value: Any) -> bool:
    """Whether a float holds it: JSON's whole numbers have no bound."""
    return fits(value, float) and (abs(value) < MOST or isinstance(value, float))


@dataclass
class Run:
    """A load test: rates one after the other."""

    url: str
    key: str | None
    asking: Asking
    traffic: Traffic
    bounds: Bounds
    rates: Sequence[float | None]
    text: str

    async def measure(self, results: Results) -> None:
        from kvfold.bench.serve_client import Server, connected
        from kvfold.bench.serve_results import summary

        asked = self.asking
        server = Server(
            url=self.url,
            model=asked.model,
            api_key=self.key,
            endpoint=asked.endpoint,
            plain=asked.plain,
        )
        async with connected(server) as client:
            about = results.metadata["settings"]
            about["label"] = about["label"] or client.model.name
            about["model"] = client.model.name
            prompts = await self.prompts(client)
            about["prompts"] = "token ids" if isinstance(prompts.units[0], int) else "words"
            await self.warm_up(client, prompts)
            for rate in self.rates:
                outcomes = await self.at(client, rate, prompts)
                row = summary(rate, outcomes, self.bounds)
                results.add("answers", *(answer_of(row, *pair) for pair in enumerate(outcomes)))
                results.add("rows", row)

    async def prompts(self, client: "Client") -> Prompts:
        ids = None if self.asking.endpoint == "chat" else await client.token_ids(self.text)
        return Prompts(ids or self.text.split(), self.traffic.seed)

    async def warm_up(self, client: "Client", prompts: Prompts) -> None:
        """What a server compiles for its first requests is no part of any rate."""
        jobs = self.fit(client, self.traffic.jobs(inf))[: self.asking.warmup]
        if jobs:
            await self.send(client, jobs, prompts, "warm up")

    async def at(self, client: "Client", rate: float | None, prompts: Prompts) -> "list[Outcome]":
        """One rate. Raises ValueError where the model has room for none of the requests."""
        jobs = [x for x in self.traffic.jobs(rate) if x.at < self.asking.seconds]
        fit = self.fit(client, jobs)
        if len(fit) < self.traffic.requests:
            most = client.model.max_tokens
            say(
                f"{len(fit)} of {self.traffic.requests} requests are sent: the others exceed the "
                f"model's {most} tokens, or the {self.asking.seconds:g} s, or are not in the trace"
            )
        return await self.send(client, fit, prompts, f"rate {rate}")

    def fit(self, client: "Client", jobs: Sequence[Job]) -> list[Job]:
        most = client.model.max_tokens or inf
        found = [job for job in jobs if job.prompt + job.output <= most]
        if not found:
            raise SettingError(
                f"no request fits the model's {most} tokens: lower `max_input` or `input_tokens`"
            )
        return found

    async def send(
        self, client: "Client", jobs: Sequence[Job], prompts: Prompts, name: str
    ) -> "list[Outcome]":
        with common.progress() as progress:
            return await client.replay(
                jobs,
                prompts,
                name=name,
                concurrency=self.asking.concurrency,
                seconds=self.asking.seconds,
                done=partial(progress, name),
            )


def answer_of(row: dict[str, Any], number: int, outcome: "Outcome") -> dict[str, Any]:
    """A request as it is kept: its times in seconds from the start, and its text."""
    names = ("at", "sent", "ended", "prompt_tokens", "output_tokens", "finish_reason", "error")
    kept = {name: getattr(outcome, name) for name in names}
    first = outcome.events[0] if outcome.events else None
    return {"rate": row["rate"], "number": number, **kept, "first": first, "text": outcome.text}


def show(rows: Sequence[dict[str, Any]], bounds: Bounds) -> None:
    """Print a line a rate, then what the lines do not say."""
    from kvfold.bench.serve_results import sustained

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(rows, bounds.given))
    for row in rows:
        for error, count in row["errors"].items():
            print(f"rate {row['rate']}: {count} of {row['requests']} failed: {error}")
    if bounds.given:
        best = sustained(rows)
        print("no rate kept to the bounds" if best is None else held(best))


def held(row: Mapping[str, Any]) -> str:
    return (
        f"sustained: {row['offered_per_s']:g} requests/s offered, {row['goodput_per_s']:.2f} "
        f"answered within the bounds ({100 * row['attained']:.0f} %)"
    )


SAME = (*(field.name for field in fields(Traffic)), "text", "endpoint", "prompts")


def compared(results: Results, other: dict[str, Any]) -> str:
    """How far this run's answers are those of an earlier one."""
    from kvfold.bench.serve_results import agreement

    ours, name = results.metadata["settings"], other["settings"]["label"]
    differ = [key for key in SAME if ours[key] != other["settings"].get(key)]
    pairs = [{(x["rate"], x["number"]): x["text"] for x in found if x["error"] is None}
             for found in (results.by_kind["answers"], other["answers"])]  # fmt: skip
    both = sorted(pairs[0].keys() & pairs[1].keys())
    if differ or not both:
        why = f"{differ[0]} differs" if differ else "no request was answered in both"
        return f"{name}: answers are not compared, {why}"
    found = agreement([pairs[0][key] for key in both], [pairs[1][key] for key in both])
    return (
        f"{name}: {100 * found['equal']:.0f} % of {found['answers']} answers are equal; "
        f"{100 * found['prefix']:.0f} % of an answer comes before the first difference"
    )


def table(rows: Sequence[dict[str, Any]], bounded: bool) -> Table:
    """Milliseconds: medians and the 99th percentile, normalised latency's mean."""
    goodput = ("goodput/s",) if bounded else ()
    found = empty_table(
        *("rate", "done", "requests/s", *goodput, "out tokens/s", "TTFT p50", "p99", "TBT p50"),
        *("p99", "JCT mean", "ms/token"),
    )
    for row in rows:
        times = (
            ("ttft_ms", "p50"),
            ("ttft_ms", "p99"),
            ("tbt_ms", "p50"),
            ("tbt_ms", "p99"),
            ("jct_ms", "mean"),
            ("normalised_ms", "mean"),
        )
        numbers = [f"{row['requests_per_s']:.2f}"]
        numbers += [f"{row['goodput_per_s']:.2f}"] if bounded else []
        numbers += [f"{row['output_tokens_per_s']:.0f}"]
        numbers += [f"{row[name][key]:.1f}" if row[name] else "-" for name, key in times]
        found.add_row(row["rate"], f"{row['completed']}/{row['requests']}", *numbers)
    return found
