"""Prefill of long prompts by several ranks: time, bytes on the wire and loss, compressed or not.

    torchrun --nproc-per-node 2 benchmarks/sequence_parallel.py --json speed.json
    torchrun --nproc-per-node 2 benchmarks/sequence_parallel.py --tokens 2048 4000 \
        --models reference:gqa zdc-70 zdc-50 zdc-30 --json gloo.json
    python benchmarks/sequence_parallel.py --bytes --json bytes.json

The first takes GPUs (NCCL) where there are any, else CPUs (gloo), and random weights of --shape, in
bfloat16, that keep 1 - p of every head, in sixteenths; --models are checkpoints, whose loss on
held-out text stands beside their time; those with low-rank entries (`hybrid`) read with
low_rank_exchange, too. Every model reads by all ranks and by one. Prompts differ
from round to round, and models take turns in a round; times are of the slowest rank, medians over
rounds. One more round, with a stop of the device around each, says how much of it exchanges and
attention take. Of the uncompressed model a GPU times cuDNN's attention, too. --engines adds engines
of the uncompressed model with a cache of so many bits: then also how long it takes until rank 0 has
the prompt as a packed context, and until its first token after that. --bytes counts alone, without
a device: what the tests hold to the bytes that are really sent.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvfold
from kvfold.bench.synthetic_engine import random_model
from kvfold.bench.variants import SHAPES, Variant, variant_layout
from kvfold.cli.bench_common import versions
from kvfold.engine.requests.params import SamplingParams
from kvfold.evaluation.perplexity import token_nll
from kvfold.hub.checkpoint import mark
from kvfold.hub.loading import load, load_tokenizer
from kvfold.layout import CacheSpec
from kvfold.layout.pages import plain_spec
from kvfold.models.copies import shared_copy
from kvfold.models.families import family_of
from kvfold.parallel import Prefilled, SequenceParallel, context, wire_bytes
from kvfold.utils.files import write_json
from kvfold.utils.text import packaged, running
from kvfold.utils.tokens import windows
from lab.variants import VARIANTS

QUESTION = 32  # tokens of the question after a prompt that was handed over
HANDED_OVER = "handover_seconds", "first_token_seconds", "context_bytes"
CUDNN = "uncompressed, cuDNN"
PLAIN = "uncompressed"


def kept(p: float, head_dim: int, step: int) -> Variant:
    """Keys and values of so many numbers a head, the multiple of `step` next to what p leaves."""
    share = max(round((1 - p) * head_dim / step), 1) * step / head_dim
    return Variant(keys=(share,), values=(share,))


@dataclass
class Case:
    """A model by all ranks and by one; seconds of every round, and nats of every prompt's token."""

    name: str
    spec: CacheSpec
    ranks: int
    parallel: SequenceParallel | None  # None on ranks that are not asked
    low_rank_exchange: bool = False
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """The kernels that attend."""
        if self.name != CUDNN:
            yield
            return
        plain = patch.dict(os.environ, KVFOLD_BACKEND="reference")
        with plain, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield


class Watch:
    """Seconds and bytes of a prefill's parts on this rank, the device stopped around each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.exchange, self.attention, self.bytes = device, 0.0, 0.0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        whole, attend = dist.all_to_all_single, context.attend

        def exchange(output: Tensor, sent: Tensor, outputs: Any, inputs: Any, group: Any) -> None:
            self.bytes += (len(sent) - inputs[dist.get_rank(group)]) * sent.itemsize
            call = lambda: whole(output, sent, outputs, inputs, group=group)  # noqa: E731
            self.exchange += seconds_of(call, self.device)[0]

        def attention(*place: Any) -> Tensor:
            seconds, found = seconds_of(lambda: attend(*place), self.device)
            self.attention += seconds
            return found

        wire = patch.object(dist, "all_to_all_single", exchange)
        with wire, patch.object(context, "attend", attention):
            yield


def seconds_of(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    synchronize(device)
    begin = time.perf_counter()
    found = call()
    synchronize(device)
    return time.perf_counter() - begin, found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def over_ranks(value: float, device: torch.device, how: Any = dist.ReduceOp.MAX) -> float:
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, how)
    return float(found)


class Bench:
    """All cases on this rank's device."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        self.size = dist.get_world_size()
        self.alone = dist.new_group([0])
        self.cases: list[Case] = []
        for name, model in self._models():
            for ranks in (self.size, 1):
                self._add(name, model, ranks)
                if name == PLAIN and device.type == "cuda":
                    self._add(CUDNN, model, ranks)
                if self.cases[-1].spec.hybrid is not None:
                    self._add(f"{name}, low-rank exchange", model, ranks, low_rank_exchange=True)

    def _add(self, name: str, model: Any, ranks: int, low_rank_exchange: bool = False) -> None:
        asked = ranks == self.size or dist.get_rank() == 0
        group, how = None if ranks == self.size else self.alone, low_rank_exchange
        parallel = SequenceParallel(model, group, low_rank_exchange=how) if asked else None
        spec = [parallel.spec if parallel else None]
        dist.broadcast_object_list(spec, 0)
        assert spec[0] is not None
        self.cases.append(Case(name, spec[0], ranks, parallel, low_rank_exchange))

    def _models(self) -> Iterator[tuple[str, Any]]:
        a = self.arguments
        if a.models:
            for name in a.models:
                yield name, load(name, device=str(self.device))
            return
        plain = random_model(a.shape, None, self.device)
        yield PLAIN, plain
        for bits in a.engines:
            most = max(a.tokens) + 2 * QUESTION
            yield (
                f"engine, {bits} bits",
                kvfold.LLM(plain, max_sequences=1, max_tokens=most, bits=bits),
            )
        for p in a.p:
            head_dim = SHAPES[a.shape].head_dim
            variant = kept(p, head_dim, head_dim // 16)
            yield (
                f"p {1 - variant.keys[0]:.3g}",
                folded(plain, variant_layout(SHAPES[a.shape], variant).spec),
            )

    def prompts(self, tokens: int) -> Tensor:
        """One a round, int64 [rounds + 2, N]: one to warm up and one for the parts."""
        a, count = self.arguments, self.arguments.rounds + 2
        if not a.models:
            generator = torch.Generator().manual_seed(0)
            return torch.randint(3, 30000, (count, tokens), generator=generator) % 250
        text = running(packaged("filler.txt"))
        found = windows(load_tokenizer(a.models[0]), text, tokens, count * tokens)
        return found[torch.arange(count) % len(found)]

    def measure(self, tokens: int) -> list[dict[str, Any]]:
        prompts = self.prompts(tokens)
        for turn, ids in enumerate(prompts[:-1]):
            for case in self.cases:
                dist.barrier()
                seconds, loss = self._read(case, ids)
                if turn:  # the first warms up
                    case.seconds.append(over_ranks(seconds, self.device))
                    case.losses.append(loss)
        rows = [self._row(case, prompts[-1]) for case in self.cases]
        for case in self.cases:
            case.seconds, case.losses = [], []
        return rows

    def _read(self, case: Case, ids: Tensor) -> tuple[float, float]:
        """Seconds of this rank, and nats a token of the prompt, nan where weights are random."""
        if case.parallel is None:
            seconds, nats = 0.0, 0.0
        else:
            with case.attention():
                read = case.parallel.prefill
                seconds, found = seconds_of(lambda: read(ids), self.device)
            nats = self._nats(case.parallel, found, ids) if self.arguments.models else 0.0
        total = over_ranks(nats, self.device, dist.ReduceOp.SUM)
        return seconds, total / (len(ids) - 1)

    @torch.inference_mode()
    def _nats(self, parallel: SequenceParallel, found: Any, ids: Tensor) -> float:
        """Of the tokens that follow this rank's."""
        first = sum(found.counts[: parallel.rank])
        targets = ids[first + 1 : first + 1 + len(found.hidden)]
        logits = parallel.family.logits(parallel.model, found.hidden[: len(targets)])
        return float(token_nll(logits[None], targets[None]).sum())

    def _row(self, case: Case, ids: Tensor) -> dict[str, Any]:
        watch = Watch(self.device)
        dist.barrier()
        handed_over: tuple[float, ...] = (0.0, 0.0, 0)
        if case.parallel is not None:
            is_engine = case.parallel.llm is not None
            with watch.running(), case.attention():
                found = case.parallel.prefill(ids, keep_entries=is_engine)
            if is_engine:
                handed_over = self._handed_over(case.parallel, found)
        sent = int(over_ranks(watch.bytes, self.device, dist.ReduceOp.SUM))
        itemsize = case.parallel.model.dtype.itemsize if case.parallel else 0
        itemsize = int(over_ranks(itemsize, self.device))
        how = case.low_rank_exchange
        promised = wire_bytes(case.spec, len(ids), case.ranks, itemsize, low_rank_exchange=how)
        spread = 0.1 if how else 0  # of important tokens over ranks with unequal shares
        assert abs(sent - promised) <= spread * promised, "bytes as promised"
        seconds = case.seconds * (1 if len(case.seconds) > 1 else 2)  # quantiles take two
        deciles = statistics.quantiles(seconds, n=10, method="inclusive")
        return {
            "name": case.name,
            "kept_fraction": case.spec.kept_fraction,
            "ranks": case.ranks,
            "tokens": len(ids),
            "seconds": statistics.median(case.seconds),
            "seconds_p10": deciles[0],
            "seconds_p90": deciles[-1],
            "exchange_seconds": over_ranks(watch.exchange, self.device),
            "attention_seconds": over_ranks(watch.attention, self.device),
            "wire_bytes": sent,
            "loss": statistics.mean(case.losses) if self.arguments.models else None,
            **{
                name: over_ranks(value, self.device)
                for name, value in zip(HANDED_OVER, handed_over, strict=True)
            },
        }

    def _handed_over(self, parallel: SequenceParallel, prompt: Prefilled) -> tuple[float, ...]:
        """Values of HANDED_OVER on rank 0: seconds until it has the context, and from there until
        the first token after a question; bytes of the context's pages. 0 on the others."""
        seconds, packed = seconds_of(lambda: parallel.context(prompt), self.device)
        if packed is None:
            return 0.0, 0.0, 0
        llm, one = parallel.llm, SamplingParams(max_new_tokens=1)
        assert llm is not None
        question = prompt.token_ids[:QUESTION].tolist()
        first, _ = seconds_of(lambda: llm.generate([question], one, context=packed), self.device)
        return seconds, first, packed.num_bytes


def folded(plain: Any, spec: CacheSpec) -> Any:
    """A copy of a random model that stores what `spec` says, by maps as random, their padding too:
    for latents of one rank."""
    model, family = shared_copy(plain), family_of(plain.config)
    with torch.device(plain.device):
        for index in range(len(spec.layers)):
            attention = family.swap(model, spec, index).to(plain.dtype).requires_grad_(False)
            for parameter in attention.parameters():
                parameter.data.normal_(0, 0.02)
    family.connect(model)
    mark(model, spec, {})
    return model


def show(rows: list[dict[str, Any]]) -> None:
    """Each beside the fastest uncompressed one by all ranks of the same prompts."""
    head = "seconds", "speed", "exchanges", "attention", "MB sent", "less", "loss"
    print(f"{'tokens':>7} {'ranks':>5}  {'':22}" + "".join(f"{x:>11}" for x in head))
    for row in rows:
        first = next(x for x in rows if x["tokens"] == row["tokens"])
        many = [x for x in rows if (x["tokens"], x["ranks"]) == (row["tokens"], first["ranks"])]
        best = min(x["seconds"] for x in many if x["kept_fraction"] == 1)
        less = 1 - row["wire_bytes"] / first["wire_bytes"] if row["wire_bytes"] else 0
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        print(
            f"{row['tokens']:7} {row['ranks']:5}  {row['name']:22}{row['seconds']:11.3f}"
            f"{best / row['seconds']:10.2f}x{row['exchange_seconds']:11.3f}"
            f"{row['attention_seconds']:11.3f}{row['wire_bytes'] / 1e6:11.1f}{less:11.1%}{loss:>11}"
        )
        if row["context_bytes"]:
            print(
                f"{'':15}rank 0 has {row['context_bytes'] / 1e6:.1f} MB after"
                f" {row['handover_seconds']:.3f} s, the first token"
                f" {row['first_token_seconds']:.3f} s later"
            )


def counted(shape: str, tokens: list[int], ps: list[float]) -> list[dict[str, Any]]:
    """Bytes on the wire of a shape in 16 bits: of ranks as p says, to the number, and of recipes
    whose latents heads share."""
    geometry = SHAPES[shape]
    specs = {PLAIN: plain_spec(geometry)}
    specs |= {f"p {p:g}": variant_layout(geometry, kept(p, geometry.head_dim, 1)).spec for p in ps}
    half = {"swift": Variant(keys=(0.5,), values=(0.5,), shares=(1, 1 << 30))}
    half |= {"lean": VARIANTS["lean-35"], "small": VARIANTS["small-25"]}
    specs |= {name: variant_layout(geometry, variant).spec for name, variant in half.items()}
    rows = []
    for size in tokens:
        for ranks in (2, 4, 8, 16):
            for name, spec in specs.items():
                found = {"name": name, "kept_fraction": spec.kept_fraction, "ranks": ranks}
                rows.append(found | {"tokens": size, "wire_bytes": wire_bytes(spec, size, ranks)})
    return rows


def show_bytes(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        alike = (x for x in rows if (x["ranks"], x["tokens"]) == (row["ranks"], row["tokens"]))
        less = 1 - row["wire_bytes"] / next(alike)["wire_bytes"]
        print(
            f"{row['tokens']:7} tokens, {row['ranks']:2} ranks, {row['name']:14} kept"
            f" {row['kept_fraction']:.3f}: {row['wire_bytes'] / 1e9:7.2f} GB, {less:6.1%} less"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--p", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("--models", nargs="+", default=[], help="the first is uncompressed")
    parser.add_argument("--engines", type=int, nargs="+", default=[], metavar="BITS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", action="store_true", help="count alone")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.bytes:
        rows = counted(arguments.shape, arguments.tokens, arguments.p)
        show_bytes(rows)
        save(arguments, torch.device("cpu"), None, rows)
    else:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        bench, rows = Bench(arguments, device), []
        for tokens in arguments.tokens:
            found = bench.measure(tokens)
            rows += found
            if dist.get_rank() == 0:
                show(found)
                save(arguments, device, bench.size, rows)
        dist.destroy_process_group()


def save(
    arguments: argparse.Namespace, device: torch.device, ranks: int | None, rows: list[Any]
) -> None:
    if arguments.json is None:
        return
    settings = {key: str(value) for key, value in vars(arguments).items() if key != "json"}
    machine = {"threads": torch.get_num_threads()}
    report = {"benchmark": "sequence-parallel", "settings": settings, "ranks": ranks}
    found = {"versions": versions(device), "machine": machine, "rows": rows}
    write_json(arguments.json, report | found)


if __name__ == "__main__":
    main()
