"""What `small` loses where decoding rebuilds the keys of a few rows only, chosen by cheap scores.

    python benchmarks/selection.py --text wiki.txt --factor 8 --scored 256 --json selection.json

A window's first tokens are a prompt, which sees everything; each of the last --scored ones attends
to its first and its last rows and to the best others by an estimate of their scores: `latent` (the
query before RoPE against the leading share of a latent, without positions, as SALS does), `slow`
(the pairs that turn slowest, exactly, the others ignored) or `exact` (the bound). Shapes: H KV
heads, G query heads of each, T queries, S rows, d head dim, r rank, R numbers of a row.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

import quality
from kvfold import recipes
from kvfold.attention.base import AttentionContext, LayerAttention
from kvfold.compression.compressor import Compressor
from kvfold.compression.training.rounded_cache import round_to_bits
from kvfold.evaluation.dense import DenseSession
from kvfold.evaluation.perplexity import window_perplexity
from kvfold.evaluation.session import Footprint, Session, Sessions
from kvfold.models.adapter import PAGED
from kvfold.ops.common.attention import Tables, attention, rotate
from kvfold.utils.versions import cache_argument

FIRST = 4  # rows that every token sees
Prefix = dict[int, tuple[Tensor, Tensor, Tensor]]  # rows, keys and values of every layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Which rows a decoding token attends to.

    estimate: exact, slow or latent; share: of the pairs or of the latent that it reads; best: rows
    beside the first and last ones, or the share of the prompt that they are; last: rows; unit: rows
    are chosen a head, a layer by the mean of its heads' attention, or a layer by the plain sum of
    scores; rest: other rows are dropped, or attended to by the estimate; whole: layers at the start
    that attend to all.
    """

    estimate: str = "exact"
    share: float = 1.0
    best: float = 1 / 8
    last: int = 64
    unit: str = "head"
    rest: str = "dropped"
    whole: int = 0

    def scores(
        self, layer: LayerAttention, q: Tensor, keys: Tensor, rows: Tensor, turned: Tables
    ) -> Tensor:
        """Estimates [H, G, T, S] of the scaled scores of q [H, G, T, d], rotated by turned."""
        if self.estimate == "latent":
            assert layer.key_up is not None, "keys before RoPE are reconstructed"
            z = layer.key_columns.spread(layer.key_columns.gather(rows))[0]
            up = layer.key_columns.per_head(layer.key_up, q.shape[-1])
            read = max(1, round(self.share * z.shape[-1]))
            back = rotate(q, *turned, sign=-1)
            folded = torch.einsum("hgtd,hdr->hgtr", back, up[..., :read])
            middle = torch.einsum("hgtd,hd->hgt", back, layer.key_mean)
            return (folded @ z[:, None, :, :read].mT + middle[..., None]) * layer.scale
        slow = torch.arange(q.shape[-1]) % (q.shape[-1] // 2)
        slow = slow >= round((1 - self.share) * q.shape[-1] / 2)
        return q[..., slow] @ keys[:, None, :, slow].mT * layer.scale

    def choose(self, estimate: Tensor, seen: Tensor, prompt: int) -> Tensor:
        """Rows that each query sees, bool [H, 1, T, S] or [1, 1, T, S]; seen [T, S]: those before
        it."""
        weights = estimate.masked_fill(~seen, -torch.inf)
        if self.unit != "sum":
            weights = weights.softmax(-1)
        weights = weights.mean(1) if self.unit == "head" else weights.flatten(0, 1).mean(0)[None]
        age = seen.sum(-1, keepdim=True) - 1 - torch.arange(seen.shape[1])
        near = seen & ((age < self.last) | (torch.arange(seen.shape[1]) < FIRST))
        weights = weights.masked_fill(~seen | near, -torch.inf)
        count = round(self.best * prompt) if self.best < 1 else int(self.best)
        top = weights.topk(min(count, weights.shape[-1]), -1, sorted=False).indices
        chosen = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, top, True)
        return ((chosen & seen) | near)[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a rule, or None for all rows; plan: of `small`, or None for the original."""

    name: str
    rule: Rule | None = None
    factor: float | None = None


def cases(section: str) -> Iterator[tuple[str, Rule]]:
    """Rules with their names."""
    slow, latent = Rule(estimate="slow", share=0.5), Rule(estimate="latent", share=0.5)
    if section == "shares":
        for best in (4, 8, 16):
            yield f"exact, 1/{best}", Rule(best=1 / best)
            for share in (0.5, 0.75):
                yield f"slow {share:g}, 1/{best}", replace(slow, share=share, best=1 / best)
            for share in (0.25, 0.5, 1):
                yield f"latent {share:g}, 1/{best}", replace(latent, share=share, best=1 / best)
    if section == "rows":
        for best in (256, 512, 1024):
            for name, rule in {"exact": Rule(), "slow 0.5": slow, "latent 0.5": latent}.items():
                yield f"{name}, {best} rows", replace(rule, best=best)
    if section == "variants":
        for last in (64, 288):
            yield f"the last {last} alone", Rule(best=0, last=last)
        for last in (0, 32, 128):
            yield f"slow 0.5, 1/8, last {last}", replace(slow, last=last)
        for name, rule in {"exact": Rule(), "slow 0.5": slow, "latent 0.5": latent}.items():
            yield f"{name}, 1/8, by layer", replace(rule, unit="layer")
            yield f"{name}, 1/8, first two layers whole", replace(rule, whole=2)
            yield f"{name}, 1/8, others estimated", replace(rule, rest="estimated")
        yield "latent 0.5, 1/8, by sum", replace(latent, unit="sum")
    if section == "estimated":
        for share in (0.5, 0.75):
            rule = replace(slow, share=share, rest="estimated")
            for best in (16, 32):
                yield f"slow {share:g}, 1/{best}, others estimated", replace(rule, best=1 / best)
            for last in (64, 288):
                label = f"slow {share:g}, the last {last}, others estimated"
                yield label, replace(rule, best=0, last=last)


class SelectedRows(AttentionContext):
    """A cache of one sequence's rows as pages hold them, with their keys and values.

    prefix: what it begins with; rule: which rows new tokens attend to, None for all before them;
    prompt: its tokens; found: gets the share of exact attention that falls on rows of the rule.
    """

    def __init__(self, prefix: Prefix, rule: Rule | None, prompt: int, found: list[float]) -> None:
        self.kept, self.rule, self.prompt, self.found = dict(prefix), rule, prompt, found

    def attend(self, layer: LayerAttention, q: Tensor, rows: Tensor) -> Tensor:
        rows = round_to_bits(rows, layer.spec)
        past = self.kept.get(layer.index)
        before = past[0].shape[1] if past else 0
        count = before + rows.shape[1]
        assert layer.rope is not None, "keys before RoPE are rebuilt"
        turned = layer.rope.tables(q, torch.arange(before, count), count)
        mapped = layer.value_up is not None
        z = layer.full_values(rows) if mapped else layer.value_columns.gather(rows)
        new = rows, layer.score_keys(rows, turned), z.transpose(1, 2)
        if past:
            first, second, third = zip(past, new, strict=True)
            new = torch.cat(first, 1), torch.cat(second, 2), torch.cat(third, 2)
        self.kept[layer.index] = new
        seen = torch.ones(q.shape[2], count, dtype=torch.bool).tril(before)
        if self.rule is None or layer.index < self.rule.whole:
            out, _ = attention(q, new[1], new[2], seen[None, None], layer.scale)
        else:
            out = self._chosen(self.rule, layer, q, seen, turned)
        return layer.merge_heads(out, mapped=mapped)

    def _chosen(
        self, rule: Rule, layer: LayerAttention, q: Tensor, seen: Tensor, turned: Tables
    ) -> Tensor:
        """Attention [1, Hq, T, .] of q [1, Hq, T, d] to the rows of a rule."""
        rows, keys, values = self.kept[layer.index]
        grouped = q[0].unflatten(0, (keys.shape[1], -1))
        exact = (grouped @ keys[0, :, None].mT * layer.scale).masked_fill(~seen, -torch.inf)
        estimate = rule.scores(layer, grouped, keys[0], rows, turned)
        chosen = rule.choose(estimate, seen, self.prompt)
        self.found.append(float((exact.softmax(-1) * chosen).sum(-1).mean()))
        others = estimate.masked_fill(~seen, -torch.inf) if rule.rest == "estimated" else -torch.inf
        weights = torch.where(chosen, exact, others).softmax(-1)
        return (weights @ values[0, :, None]).flatten(0, 1)[None]


class SelectedSession(Session):
    """One sequence whose tokens see everything up to `compress`, and then what a rule says.

    prompts: what was read before by its tokens, for all rules of a model.
    """

    whole_windows = False

    def __init__(
        self, model: Any, rule: Rule | None, prompts: dict[Any, Any], found: list[float]
    ) -> None:
        super().__init__(chunk=512)
        self.model, self.rule, self.prompts, self.found = model, rule, prompts, found

    def __enter__(self) -> Self:
        self.kept: Prefix = {}
        self.tokens: list[int] = []
        self.prompt = 0
        return self

    def __exit__(self, *error: object) -> None:
        self.kept = {}

    def chunks(self, ids: Tensor, **how: Any) -> Iterator[Tensor]:
        known = None if self.tokens else self.prompts.get(tuple(ids[0].tolist()))
        if known is None:
            yield from super().chunks(ids, **how)
        else:
            self.tokens, (self.kept, self.logits) = ids[0].tolist(), known
            yield self.logits

    def _append(self, ids: Tensor, last: bool) -> Tensor:
        rule = self.rule if self.prompt else None
        context = SelectedRows(self.kept, rule, self.prompt, self.found)
        positions = torch.arange(len(self.tokens), len(self.tokens) + ids.shape[1])
        hidden = self.model.base_model(
            input_ids=ids, position_ids=positions[None], **cache_argument(context), use_cache=False
        ).last_hidden_state
        self.kept, self.tokens = context.kept, [*self.tokens, *ids[0].tolist()]
        self.logits = self.model.get_output_embeddings()(hidden[:, -1:] if last else hidden)
        return self.logits

    def _end_prompt(self, position: int) -> None:
        """`compress` ends it."""

    def compress(self) -> None:
        self.prompts[tuple(self.tokens)] = self.kept, self.logits
        self.prompt = len(self.tokens)

    def footprint(self) -> Footprint:
        """Nothing is counted: what is stored does not change."""
        return Footprint(tokens=len(self.tokens), cache_bytes=0)

    def mark(self) -> tuple[Prefix, list[int]]:
        return self.kept, self.tokens

    def rewind(self, mark: tuple[Prefix, list[int]]) -> None:
        self.kept, self.tokens = mark


class Bench(quality.Bench):
    """Prompts are read once a plan."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        small, most = recipes.get("small"), arguments.calib_tokens
        compressor = Compressor(self.model, small, self.tokenizer, max_tokens=most)
        prepared = compressor.prepare(arguments.stats)
        self.spec = prepared.plan_factor(arguments.factor)
        self.folded = prepared.folded_copy(self.spec)
        self.folded.config._attn_implementation = PAGED  # no masks are made
        self.prompts: dict[Any, Any] = {}

    def row(self, case: Case) -> dict[str, Any]:
        begin = time.perf_counter()
        found: dict[str, Any] = {**dataclasses.asdict(case), "texts": {}}
        mass: list[float] = []
        if case.factor is None:
            sessions: Sessions = partial(DenseSession, self.model)
        else:
            sessions = partial(SelectedSession, self.folded, case.rule, self.prompts, mass)
        with torch.no_grad():
            for name, ids in self.texts.items():
                start = ids.shape[1] - self.arguments.scored
                result, _ = window_perplexity(sessions, ids, scored_from=start)
                found["texts"][name] = dataclasses.asdict(result)
            found["attention"] = sum(mass) / len(mass) if mass else 1.0
            found["needle"] = self.needle(sessions)
        return found | {"seconds": time.perf_counter() - begin}


def main() -> None:
    parser = quality.parser(__doc__, model="reference:gqa", ctx=2048, windows=16)
    sections = ("shares", "rows", "variants", "estimated")
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--factor", type=float, default=8.0)
    parser.add_argument("--scored", type=int, default=256, help="tokens of a window that decode")
    parser.add_argument("--contexts", type=int, default=13)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048])
    arguments = parser.parse_args()
    bench = Bench(arguments)
    name = f"{arguments.factor:g}x"
    plan = Case(name=f"{name}, all rows", factor=arguments.factor)
    rules = [pair for section in arguments.sections for pair in cases(section)]
    wanted = [replace(plan, name=f"{name}, {label}", rule=rule) for label, rule in rules]
    for row in bench.run(bench.wanted([Case(name="original"), plan, *wanted]), bench.row):
        right = (f"{length} {x['exact']:.2f}" for length, x in row["needle"].items())
        losses = (f"{name} {x['nll']:.4f}" for name, x in row["texts"].items())
        print(row["name"], *losses, *right, f"{row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
