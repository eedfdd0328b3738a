"""What `kvfold advise` prints."""

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import expm1
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvfold.cli import common, serve_vllm
from kvfold.cli.bench_common import RANDOM, empty_table
from kvfold.cli.settings import FLAGS
from kvfold.config import CacheConfig
from kvfold.utils.errors import SettingError

if TYPE_CHECKING:
    from kvfold.evaluation.advice import MeasuredModel, Option
    from kvfold.evaluation.gpu_memory import GPUMemory
    from kvfold.layout import CacheSpec

WIDTH = 80  # columns of the printed text
MAPS = "maps"  # the folder that the printed commands write and read
TIMED = ("h100", "h200")  # GPUs with the kernels whose steps were timed, on an H200


def cache_words(cache: CacheConfig) -> list[str]:
    """A configuration as words of a command line of `kvfold serve`."""
    words = []
    for name, value in serve_vllm.changed(cache).items():
        setting = "no-rotation" if name == "rotate" else name.replace("_", "-")
        if setting in FLAGS["serve"].split():
            words += [f"--{setting}", str(value)]
        else:
            words += ["--set", setting if isinstance(value, bool) else f"{setting}={value}"]
    return words


def percent(value: float) -> str:
    """An increase in perplexity, in per cent: 0.01, 0.2, 12.0."""
    return f"{value:.{1 if abs(value) >= 0.095 else 2}f}"


def paragraph(text: str) -> None:
    """Print a text in lines of WIDTH, in which "2 %" is one word. Further lines of an item are
    indented."""
    lines = textwrap.fill(
        text.replace(" %", "\N{NO-BREAK SPACE}%"),
        WIDTH,
        subsequent_indent=" " * 2 * text.startswith(("- ", "* ")),
        break_long_words=False,
        break_on_hyphens=False,
    )
    print(lines.replace("\N{NO-BREAK SPACE}%", " %"))


def in_lines(words: Sequence[str]) -> str:
    """A command for the shell, in lines of WIDTH where its words allow that."""
    parts: list[str] = []  # a flag and its value stay in one line
    for before, word in zip(["", *words], words, strict=False):
        if before.startswith("--") and not word.startswith("--"):
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    lines, line = [], " "
    for part in parts:
        if len(line) + len(part) + 3 > WIDTH and line.strip():
            lines.append(line)
            line = "     "
        line += f" {part}"
    return " \\\n".join([*lines, line])


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the command says.

    model: as the user named it; base: the model itself. maps: a folder or hub id. limit: of the
    loss, in per cent; None where the user named one setting, which is `chosen`. spec, provenance:
    of a model that is compressed already.
    """

    model: str
    base: str
    maps: str | None
    gpu: str
    context: int
    sequences: int | None
    limit: float | None
    options: "Sequence[Option]"
    chosen: "Option | None"
    measured: "Sequence[MeasuredModel]"
    spec: "CacheSpec | None"
    provenance: dict[str, Any]

    def show(self) -> None:
        """Print what fits, and what to run."""
        from kvfold.evaluation.gpu_memory import GIB, WORK
        from kvfold.hub.card import facts

        memory = self.options[0].memory
        paragraph(
            f"{self.model}, requests of {self.context} tokens. GPU: {self.gpu},"
            f" {memory.gpu_bytes / GIB:.1f} GiB, of which {100 * memory.share:.0f} % are used:"
            f" {memory.weights / GIB:.2f} GiB for weights in 16 bits, {WORK / GIB:.0f} GiB for work"
            f" space, and {memory.pool / GIB:.2f} GiB for the cache."
        )
        if self.spec is not None:
            print(f"\n{self.model} stores:")
            for line in facts(self.spec, self.provenance):
                paragraph(f"- {line}")
        print()
        common.print_table(self._table())
        print()
        for note in self._notes():
            paragraph(note)
        print()
        for line in self._advice():
            paragraph(line)
        if self.chosen is not None and (commands := self.commands(self.chosen)):
            print()
            print("\n".join(map(in_lines, commands)))
            if commands[-1][0] != "vllm":
                print("  (vLLM does not serve this setting)")
        if (more := self._more()) is not None:
            print()
            paragraph(
                f"Within the same loss {more.name} holds more, {more.room.requests}, with slower"
                " steps:"
            )
            print()
            print(in_lines(self._compress(more)))

    def _table(self) -> Table:
        models, lost = self._columns(), self._card_loss()
        columns = ["this model"] * (lost is not None) + [x.short for x in models]
        steps = ["step ms", "tokens/s"] if self._is_timed else []
        heads = (f"loss, %\n{x}" for x in columns)
        table = empty_table("setting", "smaller", "requests", *steps, *heads)
        for option in self.options:
            losses = [self._loss_cell(option, x) for x in models]
            if lost is not None:
                losses = [lost if option is self.chosen else "", *losses]
            table.add_row(
                option.name + " *" * (option is self.chosen and self.limit is not None),
                f"{option.smaller:.1f}x",
                str(option.room.requests),
                *(self._step_cells(option) if steps else ()),
                *losses,
            )
        return table

    @property
    def _is_timed(self) -> bool:
        """Whether times of steps can be predicted for the GPU."""
        return self.gpu.lower() in TIMED

    def _step_cells(self, option: "Option") -> list[str]:
        room = option.room
        if room.step_ms is None or room.tokens_per_s is None:
            return ["slower" if option.slow and room.requests else "-", "-"]
        mark = "~" * room.step_estimated
        return [f"{mark}{room.step_ms:.1f}", f"{mark}{room.tokens_per_s:.0f}"]

    def _columns(self) -> "Sequence[MeasuredModel]":
        """The models whose losses are shown; two columns fit."""
        shown = [x for x in self.measured if any(x.rises(y.name) for y in self.options)]
        return shown if self._card_loss() is None else shown[:1]

    def _loss_cell(self, option: "Option", model: "MeasuredModel") -> str:
        if (rises := model.rises(option.name)) is None:
            return "" if option.name == "original" else "-"
        low, high = map(percent, rises)
        return low if low == high else f"{low} to {high}"

    def _card_loss(self) -> str | None:
        """What was measured when the maps were made, as an increase in perplexity."""
        measured = self.provenance.get("measured") or {}
        if (lost := measured.get("lost")) is None or self.chosen is None:
            return None
        if self.chosen.name != "maps":
            return None
        error = measured["lost_se"]
        return percent(100 * expm1(lost)) + ("" if error is None else f" ± {percent(100 * error)}")

    def _notes(self) -> Iterator[str]:
        """What the columns mean, and where their numbers come from."""
        from kvfold.compression.planning.step_time import DEFAULT

        if models := self._columns():
            names = " and on ".join(x.hub for x in models)
            text = "loss: increase in perplexity on Wikipedia and on Python source, "
            if self._is_measured:
                yield f"{text}measured on this model ({names})."
            else:
                yield (
                    f"{text}measured on {names}. These are OTHER models' figures, nearest in size"
                    " first; `kvfold compress` and `kvfold eval` measure yours."
                )
        last = self.options[-1].name
        if self._card_loss() is not None:
            yield f"Loss of {last}: measured on this model when they were made, ± standard error."
        elif last != "original" and not any(x.rises(last) for x in self.measured):
            yield f"The loss of {last} was not measured; `kvfold eval` measures it."
        if any(x.flags is not None for x in self.options):
            yield (
                "swift, lean, small: recipes of `kvfold compress`, with the sizes and times of a"
                " typical plan. lean and small reconstruct keys, which makes steps slower."
            )
        which = "all requests that fit" if self.sequences is None else f"{self.sequences} requests"
        if self._is_timed:
            other = "" if self.gpu.lower() == "h200" else f"; an {self.gpu.upper()} takes longer"
            yield (
                f"step ms, tokens/s: a decode step of {which}, predicted for an {DEFAULT}{other}."
                " ~ is a rough prediction."
            )
        else:
            yield (
                f"Times of steps are not predicted for this GPU, only for {' and '.join(TIMED)}."
            )
        if most := max(x.memory.beside_pages(self.context) for x in self.options):
            yield (
                f"repair: {most / 2**20:.1f} MiB of hidden states a request, in addition to its"
                " pages."
            )

    @property
    def _is_measured(self) -> bool:
        """Whether the losses were measured on this very model."""
        return self.measured[0].is_model(self.base)

    def _advice(self) -> Iterator[str]:
        """What to take, and why."""
        chosen, wanted = self.chosen, self.sequences or 1
        requests = f"{wanted} request{'s' * (wanted > 1)} of {self.context} tokens"
        within = "" if self.limit is None else f" within a loss of {self.limit:g} %"
        best = max(self.options, key=lambda x: x.room.requests)
        if not best.room.requests:
            if best.memory.pool:
                yield "No setting holds even one request: take a larger --gpu, or lower --context."
            else:
                yield "The weights and the work space leave no room: take a larger --gpu."
            return
        if chosen is None or chosen.room.requests < wanted:
            yield (
                f"Nothing{within} holds {requests}: {best.name} holds most, {best.room.requests}."
                " Lower --context or --sequences, take a larger --gpu"
                + (", or allow a higher --loss." if within else ".")
            )
            return
        fits = f"{chosen.room.requests} requests of {self.context} tokens fit, {self._times_more()}"
        if self.limit is None:
            yield f"{chosen.name}: {fits}."
        elif chosen.name == "original":
            yield f"* Take the original: {fits}. No compression is needed."
        elif chosen.slow:
            yield (
                f"* Take {chosen.name}: {fits}. Settings that reconstruct no keys do not hold"
                f" {requests}{within} ({self.measured[0].short}); of the others it has the fastest"
                " steps."
            )
        else:
            superlative = "loses least" if self.sequences else "holds most"
            holding = f" hold {requests}," if self.sequences else ""
            yield (
                f"* Take {chosen.name}: {fits}. It {superlative} of those that{holding} reconstruct"
                f" no keys and lose at most {self.limit:g} % ({self.measured[0].short})."
            )

    def _times_more(self) -> str:
        """The requests of the chosen setting beside those of the original."""
        original, chosen = (x.room.requests if x else 0 for x in (self.options[0], self.chosen))
        if self.chosen is self.options[0]:
            return "uncompressed"
        if not original:
            return "where uncompressed none does"
        return f"{chosen / original:.1f}x as many as uncompressed"

    def _more(self) -> "Option | None":
        """A setting that holds more than the chosen one within the same loss, with slower steps."""
        from kvfold.evaluation import advice

        if self.limit is None or self.chosen is None or self.sequences is not None:
            return None
        within = [x for x in self.options if advice.loss(x, self.measured[0]) <= self.limit]
        most = max(within, key=lambda x: x.room.requests)
        return most if most.slow and most.room.requests > self.chosen.room.requests else None

    def _compress(self, option: "Option") -> list[str]:
        """The command that makes maps for a setting."""
        assert option.flags is not None
        flags = " ".join(option.flags).split()
        return ["kvfold", "compress", self._served, *flags, "--output", MAPS]

    @property
    def _served(self) -> str:
        """The model in commands."""
        return "MODEL" if self.model.startswith(RANDOM) else self.model

    def commands(self, option: "Option") -> list[list[str]]:
        """The words of the commands that serve a setting: with kvfold's engine, and with vLLM where
        it can."""
        memory, count = option.memory, self.sequences or option.room.requests
        if not 0 < count <= option.room.requests:
            return []
        pages = memory.pool - count * memory.beside_pages(self.context)
        pool = [] if memory.cache.kv_bytes else ["--set", f"kv-bytes={pages}"]
        sizes = ["--max-sequences", str(count), "--max-tokens", str(self.context), *pool]
        commands, maps, served = [], self.maps, [self._served]
        if option.flags is not None:
            commands.append(self._compress(option))
            maps, served = MAPS, [MAPS]
        elif maps is not None and maps != self.model:
            served += ["--maps", maps]
        serve = ["kvfold", "serve", *served, *cache_words(memory.cache), *sizes]
        commands.append(serve)
        if (vllm := self._vllm(memory, maps, count)) is not None:
            commands.append(vllm)
        return commands

    def _vllm(self, memory: "GPUMemory", maps: str | None, count: int) -> list[str] | None:
        """The words of the command that starts vLLM's server; None for what it does not serve."""
        from kvfold.hub.loading import resolve

        try:
            flags = serve_vllm.cache_flags(replace(memory.cache, kv_bytes=None), maps)
        except SettingError:
            return None
        model = self._served if self._served == "MODEL" else str(resolve(self.base))
        limits = ["--max-num-seqs", str(count), "--max-model-len", str(self.context)]
        if memory.share != 0.9:
            limits += ["--gpu-memory-utilization", f"{memory.share:g}"]
        return ["vllm", "serve", model, *limits, *flags]

    def record(self) -> dict[str, Any]:
        """The results as plain values."""
        memory = self.options[0].memory
        return {
            "model": self.base,
            "maps": self.maps,
            "gpu": self.gpu,
            "gpu_bytes": memory.gpu_bytes,
            "share": memory.share,
            "context": self.context,
            "sequences": self.sequences,
            "loss_percent": self.limit,
            "measured": self.provenance.get("measured"),
            "rows": [self._row(x) for x in self.options],
            "advice": None if self.chosen is None else self.chosen.name,
            "commands": [] if self.chosen is None else self.commands(self.chosen),
        }

    def _row(self, option: "Option") -> dict[str, Any]:
        losses = {x.hub: x.nats.get(option.name) for x in self.measured}
        return {
            "setting": option.name,
            "cache": asdict(option.memory.cache),
            "smaller": option.smaller,
            "weight_bytes": option.memory.weights,
            "pool_bytes": option.memory.pool,
            **option.room.record(),
            "reconstructs_keys": option.slow > 0,
            "nats_of_measured_models": losses,
        }
