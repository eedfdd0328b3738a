"""kvfold bench agents: how many agent conversations a server bears, with JSON and a plot."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Parameter
from rich.table import Table

from kvfold.bench.serve_load import Conversations, Goals, Prompts
from kvfold.cli import common
from kvfold.cli.bench_common import Output, Results, empty_table, say
from kvfold.cli.bench_engine import (
    ENGINE,
    EngineFlags,
    server_settings,
    server_versions,
    target,
)
from kvfold.cli.bench_serve import KEY, Url, check_outputs, need_aiohttp, versions
from kvfold.cli.options import flags_of, parse_list
from kvfold.config import check, setting
from kvfold.utils.errors import SettingError
from kvfold.utils.files import new_file, writing
from kvfold.utils.text import packaged, read_text

if TYPE_CHECKING:
    from kvfold.bench.serve_client import Outcome


@Parameter(name="*", group="Conversations")
@dataclass(frozen=True, kw_only=True)
@flags_of(Conversations)
class ConversationFlags:
    """Flags of `Conversations`."""

    @property
    def conversations(self) -> Conversations:
        return Conversations(**asdict(self))

    def __post_init__(self) -> None:
        self.conversations  # noqa: B018


@Parameter(name="*", group="Measurement")
@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What is sent, for how long, and what answers must keep to."""

    model: str | None = setting(None, "The model's name; by default the server's only model.")
    api_key: str | None = setting(
        None, f"The API key to send; in ${KEY}, other users of this machine do not see it."
    )
    seconds: float = setting(40.0, "Seconds whose turns count.", above=0)
    settle: float = setting(8.0, "Seconds before them, after the last agent has joined.", least=0)
    wait: float = setting(20.0, "Seconds after them for turns without an answer yet.", least=0)
    ttft_ms: float = setting(2000.0, "Longest time to a first token, in ms.", above=0)
    tpot_ms: float = setting(40.0, "Longest mean time of each later token, in ms.", above=0)

    def __post_init__(self) -> None:
        check(self)

    @property
    def goals(self) -> Goals:
        return Goals(ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms)


CONVERSATIONS, MEASUREMENT = ConversationFlags(), Measurement()


def agents(
    url: Url,
    /,
    *,
    agents: str = "4,8,16",
    text: Path | None = None,
    label: str | None = None,
    talk: ConversationFlags = CONVERSATIONS,
    how: Measurement = MEASUREMENT,
    server: EngineFlags = ENGINE,
    json: Output = None,
    plot: Path | None = None,
    result_dir: Path | None = None,
) -> None:
    """Measure how many agents a server bears: conversations with long contexts that grow turn by
    turn.

    A number of agents is borne if 95 % of turns have their first token within 2 s, and 95 % take at
    most 40 ms for each later token. Numbers are tried upwards, up to the first that is not borne.
    Works with any OpenAI-compatible server that runs, such as kvfold's and vLLM's. With --engine,
    it starts one, and stops it at the end.

    Parameters
    ----------
    agents
        Numbers of agents to try, upwards, as in 8,16,32.
    text
        File with the text that contexts are cut from, instead of a packaged one.
    label
        Name of this server in the figure; by default its model.
    plot
        File for a figure: .svg, .png or .pdf.
    result_dir
        Existing folder for one more file for every number of agents, as `vllm bench serve` writes
        it.
    """
    check_outputs(json, plot, result_dir)
    need_aiohttp("bench agents")
    numbers = parse_list(agents, "--agents", int, "numbers such as 8,16,32")
    if not all(a < b for a, b in zip([0, *numbers], numbers, strict=False)):
        raise SettingError(f"`agents` must be numbers above 0 that rise; got {agents!r}")
    conversations = talk.conversations
    source = packaged("filler.txt") if text is None else read_text(text)
    key = how.api_key or os.environ.get(KEY)
    settings = {"url": url, "label": label, **asdict(conversations), **asdict(how)}
    settings |= {"api_key": None, "text": text and str(text)}
    settings["server"] = server_settings(server)
    results = Results(json, "agents", settings, versions() | server_versions(server), ("rows",))
    try:
        with target(url, server, key) as served:
            results.metadata["ready_s"] = served.ready_s
            work = measure(
                served.url, key, numbers, conversations, how, source, results, result_dir
            )
            asyncio.run(served.during(work))
    finally:
        rows = results.by_kind["rows"]
        if rows:
            show(rows)
    if plot is not None:
        from kvfold.bench.serve_plots import write_figure

        with writing(plot), new_file(plot) as scratch:
            write_figure(scratch, [results.metadata | results.by_kind], "agents")


async def measure(
    url: str,
    key: str | None,
    numbers: Sequence[int],
    conversations: Conversations,
    how: Measurement,
    text: str,
    results: Results,
    result_dir: Path | None,
) -> None:
    """Measure one number of agents after another, up to the first that is not borne."""
    from kvfold.bench.agents import Agents, result
    from kvfold.bench.serve_client import Server, connected

    server = Server(url=url, model=how.model, api_key=key, return_token_ids=True)
    async with connected(server) as client:
        settings, most = results.metadata["settings"], client.model.max_tokens
        settings["model"] = client.model.name
        settings["label"] = settings["label"] or client.model.name
        if most is not None and conversations.longest > most:
            raise SettingError(
                f"`longest` must be at most the model's {most} tokens; got {conversations.longest}:"
                f" lower it and `shortest`"
            )
        prompts = Prompts(await client.token_ids(text) or text.split(), conversations.seed)
        settings["prompts"] = "token ids" if prompts.are_tokens else "words"
        load = Agents(client, prompts, conversations)
        try:
            for number in numbers:
                say(f"{_agents(number)}: reading contexts")
                await load.join(number)
                say(f"{_agents(number)}: measuring for {how.settle + how.seconds:g} s")
                await asyncio.sleep(how.settle)
                outcomes = await load.measure(how.seconds, how.wait)
                row = result(number, outcomes, how.goals, how.seconds)
                results.add("rows", row)
                if result_dir is not None:
                    write_as_vllm(result_dir, settings, number, outcomes, how)
                if not row["borne"]:
                    break
        finally:
            await load.leave()


def write_as_vllm(
    folder: Path,
    settings: Mapping[str, Any],
    number: int,
    outcomes: "Sequence[Outcome]",
    how: Measurement,
) -> None:
    """Write the turns of a number of agents as `vllm bench serve` writes its requests."""
    from kvfold.bench.vllm_results import vllm_result, write_vllm_result

    result = vllm_result(
        outcomes,
        seconds=how.seconds,
        goals=how.goals,
        endpoint="completions",
        label=settings["label"],
        model=settings["model"],
        request_rate="inf",
        concurrency=number,
    )
    write_vllm_result(folder, f"{settings['label']}-{number}-agents", result)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table with one line per number of agents, then errors and the most that are borne."""
    common.print_table(table(rows))
    for row in rows:
        for error, count in row["errors"].items():
            print(f"{_agents(row['agents'])}: {count} of {row['requests']} turns failed: {error}")
    borne = [row["agents"] for row in rows if row["borne"]]
    if not borne:
        print("no number of agents was borne")
    else:
        most = ", the most that were tried" if borne[-1] == rows[-1]["agents"] else ""
        print(f"borne: {_agents(borne[-1])}{most}")


def _agents(number: int) -> str:
    return "1 agent" if number == 1 else f"{number} agents"


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Times in milliseconds: medians and 99th percentiles."""
    table = empty_table(
        *("agents", "turns", "within\nTTFT", "within\nTPOT", "TTFT\np50", "p99"),
        *("TPOT\np50", "p99", "out\ntokens/s", "context\ntokens"),
    )
    for row in rows:
        times = [(name, key) for name in ("ttft_ms", "tpot_ms") for key in ("p50", "p99")]
        numbers = [f"{100 * row[name]:.0f} %" for name in ("first_within", "token_within")]
        numbers += [f"{row[name][key]:.1f}" if row.get(name) else "-" for name, key in times]
        numbers += [f"{row['output_tokens_per_s']:.0f}", f"{row['context_tokens']:.0f}"]
        table.add_row(f"{row['agents']}", f"{row['completed']}/{row['requests']}", *numbers)
    return table
