"""kvfold bench serve: a load test of an OpenAI-compatible server, with JSON and plots."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table

from kvfold.bench.serve_load import Goals, Prompts, TimedRequest, Traffic
from kvfold.cli import common
from kvfold.cli.bench_common import Output, Results, empty_table, say
from kvfold.cli.bench_engine import (
    ENGINE,
    EngineFlags,
    Target,
    server_settings,
    server_versions,
    target,
)
from kvfold.cli.options import MOST, Files, Flag, flags_of, parse_list
from kvfold.config import check, setting
from kvfold.utils.errors import SettingError
from kvfold.utils.files import check_writable, new_file, writing
from kvfold.utils.kinds import fits
from kvfold.utils.text import json_object, packaged, read_text

if TYPE_CHECKING:
    from kvfold.bench.serve_client import Client, Outcome

KEY = "KVFOLD_API_KEY"
Url = Annotated[
    str,
    Parameter(
        help="The server's URL, such as http://127.0.0.1:8000; with --engine, the model to serve."
    ),
]


@Parameter(name="*", group="Traffic")
@dataclass(frozen=True, kw_only=True)
@flags_of(Traffic)
class TrafficFlags:
    """Flags of `Traffic`."""

    @property
    def traffic(self) -> Traffic:
        return Traffic(**asdict(self))

    def __post_init__(self) -> None:
        self.traffic  # noqa: B018


@Parameter(name="*", group="Goals")
@dataclass(frozen=True, kw_only=True)
@flags_of(Goals)
class GoalFlags:
    """Flags of `Goals`."""

    @property
    def goals(self) -> Goals:
        return Goals(**asdict(self))

    def __post_init__(self) -> None:
        self.goals  # noqa: B018


@Parameter(name="*", group="Server")
@dataclass(frozen=True, kw_only=True)
class ClientFlags:
    """How requests are sent to the server."""

    model: str | None = setting(None, "The model's name; by default the server's only model.")
    api_key: str | None = setting(
        None, f"The API key to send; in ${KEY}, other users of this machine do not see it."
    )
    endpoint: Literal["completions", "chat"] = setting("completions", "The endpoint to call.")
    plain: Flag = setting(False, "Send only fields of OpenAI's API; answers may then end early.")
    concurrency: int | None = setting(None, "Most requests that are open at once.", least=1)
    seconds: float = setting(
        600.0, "Time limit of a rate; requests that are still open are abandoned.", above=0
    )
    warmup: int = setting(1, "Requests to send first that are not measured.", least=0)

    def __post_init__(self) -> None:
        check(self)


TRAFFIC, GOALS, CLIENT = TrafficFlags(), GoalFlags(), ClientFlags()


def serve(
    url: Url,
    /,
    *,
    rate: str | None = None,
    text: Path | None = None,
    label: str | None = None,
    beside: Files = (),
    requests: TrafficFlags = TRAFFIC,
    asking: ClientFlags = CLIENT,
    limits: GoalFlags = GOALS,
    server: EngineFlags = ENGINE,
    json: Output = None,
    plot: Path | None = None,
    result_dir: Path | None = None,
) -> None:
    """Load-test a server: send requests at one or more rates, and report latency and throughput
    as a client sees them.

    Works with any OpenAI-compatible server that runs, such as kvfold's and vLLM's. With --engine,
    it starts one, and stops it at the end.

    Parameters
    ----------
    rate
        Requests a second; several rates with commas, as in 1,2,4; inf sends all at once. By default
        the times of --set trace.
    text
        File with the text that prompts are cut from, instead of a packaged one.
    label
        Name of this server in the figure; by default its model.
    beside
        JSON files of earlier runs with the same requests, to draw in the same figure and to compare
        answers with.
    plot
        File for a figure: .svg, .png or .pdf.
    result_dir
        Existing folder for one more file for every rate, as `vllm bench serve` writes it.
    """
    check_outputs(json, plot, result_dir)
    need_aiohttp("bench serve")
    traffic, goals = requests.traffic, limits.goals
    rates = parse_rates(rate, traffic)
    others = [read_report(path) for path in beside]
    source = packaged("filler.txt") if text is None else read_text(text)
    key = asking.api_key or os.environ.get(KEY)
    settings = {"url": url, "label": label, **asdict(traffic), **asdict(asking)}
    settings |= {"api_key": None, "bounds": asdict(goals), "text": text and str(text)}
    settings["trace"] = traffic.trace and str(traffic.trace)
    settings["server"] = server_settings(server)
    used = versions() | server_versions(server)
    results = Results(json, "serve", settings, used, ("rows", "answers"))
    try:
        with target(url, server, key) as served:
            results.metadata["ready_s"] = served.ready_s
            run = LoadTest(served, key, asking, traffic, goals, rates, source, result_dir)
            asyncio.run(served.during(run.measure(results)))
    finally:
        if rows := results.by_kind["rows"]:
            show(rows, goals)
            for other in others:
                print(compared(results, other))
    if plot is not None:
        with writing(plot), new_file(plot) as scratch:
            from kvfold.bench.serve_plots import write_figure

            write_figure(scratch, [results.metadata | results.by_kind, *others])


def check_outputs(json: Path | None, plot: Path | None, result_dir: Path | None = None) -> None:
    """Raises ValueError for files that cannot be written, before anything is sent."""
    common.check_outputs(json=json)
    if result_dir is not None:
        if not result_dir.is_dir():
            raise SettingError(f"`result_dir`: {result_dir} is no folder; create it first")
        check_writable(result_dir / "x.json")
    if plot is None:
        return
    from kvfold.bench.serve_plots import check_installed

    check_installed()
    check_writable(plot)
    if plot.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--plot: {plot} must end with .svg, .png or .pdf")


def need_aiohttp(command: str) -> None:
    """Raises ValueError if aiohttp is not installed."""
    if find_spec("aiohttp") is None:
        raise ValueError(f'{command} needs aiohttp: pip install "kvfold[load]"')


def versions() -> dict[str, str | None]:
    """Versions of the client."""
    from kvfold import __version__
    from kvfold.utils.versions import version_of

    return {"kvfold": __version__, "commit": common.commit(), "aiohttp": version_of("aiohttp")}


def parse_rates(text: str | None, traffic: Traffic) -> list[float | None]:
    """The rates of --rate; None: the times of the trace. Raises SettingError for rates that are not
    legal, or missing; ValueError for a trace that cannot be read."""
    example = "numbers such as 1,2,4 or inf"
    rates: list[float | None] = [None]
    if text is not None:
        rates = [*parse_list(text, "--rate", float, example)]
    if not all(rate is None or rate > 0 for rate in rates):
        raise SettingError(f"`rate` must be above 0; got {text!r}")
    traffic.timed(rates[0])
    return rates


# The fields of an earlier run that the figure and the comparison read, with their types.
ROW = {
    "offered_per_s": float | None,
    "requests_per_s": float,
    **dict.fromkeys(("ttft_ms", "tbt_ms", "normalised_ms"), dict | None),
}
RATES = ("offered_per_s", "requests_per_s")
ANSWER = {"rate": str, "number": int, "text": str, "error": str | None}


def read_report(path: Path) -> dict[str, Any]:
    """The JSON of an earlier run. Raises ValueError for another kind of file."""
    try:
        report = json_object(read_text(path))
        if report["benchmark"] == "serve" and _is_complete(report):
            return report
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"--beside: {path} is not a result of kvfold bench serve; write one with --json"
    )


def _is_complete(report: Mapping[str, Any]) -> bool:
    """Whether a report has all fields that are read, of the right types. Raises KeyError,
    TypeError."""
    rows, times = report["rows"], [name for name, kind in ROW.items() if kind == dict | None]
    spreads = [row[name] for row in rows for name in times if row[name] is not None]
    return (
        bool(rows)
        and all(fits(row[name], kind) for row in rows for name, kind in ROW.items())
        and all(_is_number(row[name] or 0) for row in rows for name in RATES)
        and all(_is_number(x[key]) for x in spreads for key in ("mean", "p50", "p99"))
        and all(fits(x[name], kind) for x in report["answers"] for name, kind in ANSWER.items())
        and fits(report["settings"]["label"], str)
    )


def _is_number(value: Any) -> bool:
    """Whether a float can hold it: whole numbers in JSON may be of any size."""
    return fits(value, float) and (abs(value) < MOST or isinstance(value, float))


@dataclass
class LoadTest:
    """Sends the traffic to a server at one rate after the other."""

    target: Target
    key: str | None
    flags: ClientFlags
    traffic: Traffic
    goals: Goals
    rates: Sequence[float | None]
    text: str
    result_dir: Path | None = None

    async def measure(self, results: Results) -> None:
        from kvfold.bench.serve_client import Server, connected
        from kvfold.bench.serve_results import summary

        server = Server(
            url=self.target.url,
            model=self.flags.model,
            api_key=self.key,
            endpoint=self.flags.endpoint,
            plain=self.flags.plain,
        )
        async with connected(server) as client:
            settings = results.metadata["settings"]
            settings["label"] = settings["label"] or client.model.name
            settings["model"] = client.model.name
            prompts = await self.prompts(client)
            settings["prompts"] = "token ids" if isinstance(prompts.units[0], int) else "words"
            await self.warm_up(client, prompts)
            for rate in self.rates:
                outcomes = await self.at_rate(client, rate, prompts)
                row = summary(rate, outcomes, self.goals, self.traffic.questions)
                results.add("answers", *(answer_of(row, *pair) for pair in enumerate(outcomes)))
                results.add("rows", row)
                self.write_as_vllm(settings, row, outcomes)

    def write_as_vllm(
        self, settings: Mapping[str, Any], row: Mapping[str, Any], outcomes: "Sequence[Outcome]"
    ) -> None:
        """Write the results of one rate as `vllm bench serve` does."""
        if self.result_dir is None:
            return
        from kvfold.bench.vllm_results import vllm_result, write_vllm_result

        result = vllm_result(
            outcomes,
            seconds=row["seconds"],
            goals=self.goals,
            endpoint=self.flags.endpoint,
            label=settings["label"],
            model=settings["model"],
            request_rate="inf" if row["offered_per_s"] is None else row["offered_per_s"],
            concurrency=self.flags.concurrency,
        )
        write_vllm_result(self.result_dir, f"{settings['label']}-{row['rate']}qps", result)

    async def prompts(self, client: "Client") -> Prompts:
        ids = None if self.flags.endpoint == "chat" else await client.token_ids(self.text)
        return Prompts(ids or self.text.split(), self.traffic.seed)

    async def warm_up(self, client: "Client", prompts: Prompts) -> None:
        """Send requests that are not measured: servers compile for their first requests."""
        requests = self.fitting(client, self.traffic.timed(inf))[: self.flags.warmup]
        if requests:
            await self.send(client, requests, prompts, "warm up")

    async def at_rate(
        self, client: "Client", rate: float | None, prompts: Prompts
    ) -> "list[Outcome]":
        """Measure one rate. Raises ValueError if no request fits into the model's context."""
        requests = [x for x in self.traffic.timed(rate) if x.at < self.flags.seconds]
        fit = self.fitting(client, requests)
        if len(fit) < self.traffic.requests:
            most = client.model.max_tokens
            say(
                f"{len(fit)} of {self.traffic.requests} requests are sent: the others exceed the "
                f"model's {most} tokens, or the {self.flags.seconds:g} s, or are not in the trace"
            )
        return await self.send(client, fit, prompts, f"rate {rate}")

    def fitting(self, client: "Client", requests: Sequence[TimedRequest]) -> list[TimedRequest]:
        """The requests that fit into the model's context. Raises SettingError if none does."""
        most = client.model.max_tokens or inf
        fit = [x for x in requests if x.prompt + x.output <= most]
        if not fit:
            raise SettingError(
                f"no request fits into the model's {most} tokens: lower `max_input` or"
                " `input_tokens`"
            )
        return fit

    async def send(
        self, client: "Client", requests: Sequence[TimedRequest], prompts: Prompts, name: str
    ) -> "list[Outcome]":
        with common.progress() as progress:
            return await client.replay(
                requests,
                prompts,
                name=name,
                concurrency=self.flags.concurrency,
                seconds=self.flags.seconds,
                done=partial(progress, name),
            )


def answer_of(row: dict[str, Any], number: int, outcome: "Outcome") -> dict[str, Any]:
    """The JSON record of a request: its times in seconds from the start, and its text."""
    names = ("at", "sent", "ended", "prompt_tokens", "output_tokens", "finish_reason", "error")
    fields = {name: getattr(outcome, name) for name in names}
    first = outcome.events[0] if outcome.events else None
    return {"rate": row["rate"], "number": number, **fields, "first": first, "text": outcome.text}


def show(rows: Sequence[dict[str, Any]], goals: Goals) -> None:
    """Print a table with one line per rate, then errors and the highest rate that meets the
    goals."""
    from kvfold.bench.serve_results import sustained

    common.print_table(table(rows, goals.any_set))
    for row in rows:
        for error, count in row["errors"].items():
            print(f"rate {row['rate']}: {count} of {row['requests']} failed: {error}")
    if goals.any_set:
        best = sustained(rows)
        print("no rate met the goals" if best is None else sustained_text(best))


def sustained_text(row: Mapping[str, Any]) -> str:
    return (
        f"sustained: {row['offered_per_s']:g} requests/s offered, {row['goodput_per_s']:.2f} "
        f"answered within the goals ({100 * row['attained']:.0f} %)"
    )


SAME = (*(field.name for field in fields(Traffic)), "text", "endpoint", "prompts")


def compared(results: Results, other: dict[str, Any]) -> str:
    """How far this run's answers equal those of an earlier one, as a sentence."""
    from kvfold.bench.serve_results import agreement

    ours, name = results.metadata["settings"], other["settings"]["label"]
    differ = [key for key in SAME if ours[key] != other["settings"].get(key)]
    texts = [{(x["rate"], x["number"]): x["text"] for x in answers if x["error"] is None}
             for answers in (results.by_kind["answers"], other["answers"])]  # fmt: skip
    both = sorted(texts[0].keys() & texts[1].keys())
    if differ or not both:
        why = f"{differ[0]} differs" if differ else "no request was answered in both"
        return f"{name}: answers are not compared, {why}"
    alike = agreement([texts[0][key] for key in both], [texts[1][key] for key in both])
    return (
        f"{name}: {100 * alike['equal']:.0f} % of {alike['answers']} answers are equal; "
        f"{100 * alike['prefix']:.0f} % of an answer comes before the first difference"
    )


def table(rows: Sequence[dict[str, Any]], has_goals: bool) -> Table:
    """Times in milliseconds: medians and 99th percentiles, and means of JCT (job completion time)
    and of normalised latency."""
    goodput = ("goodput\n/s",) if has_goals else ()
    table = empty_table(
        *("rate", "done", "requests\n/s", *goodput, "out\ntokens/s", "TTFT\np50", "p99"),
        *("TBT\np50", "p99", "JCT\nmean", "ms/\ntoken"),
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
        numbers += [f"{row['goodput_per_s']:.2f}"] if has_goals else []
        numbers += [f"{row['output_tokens_per_s']:.0f}"]
        numbers += [f"{row[name][key]:.1f}" if row[name] else "-" for name, key in times]
        table.add_row(row["rate"], f"{row['completed']}/{row['requests']}", *numbers)
    return table
