"""As `kvfold.evaluation.measure`, over the engine's pages, with contexts and windows at once.

One sequence at a time leaves a GPU idle: here every context has a slot, as many of them as memory
allows are read and compressed together, and their first questions are answered together, then their
second ones. Shapes: B sequences, T tokens fed, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvfold.config import CacheConfig
from kvfold.engine.requests.request import Batch, Request
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.runner import ModelRunner
from kvfold.evaluation.dense import inference
from kvfold.evaluation.measure import QUESTION_ROOM, Measured, Measurement
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import AFTER, PerplexityResult, mean_and_se, token_nll
from kvfold.evaluation.session import Footprint
from kvfold.evaluation.tasks import SCORES
from kvfold.evaluation.tasks.base import Prompt, TaskAnswer, decode
from kvfold.evaluation.tasks.run import Score, TaskResult, _stop_ids

CHUNK = 512  # tokens of a sequence that are read at a time, as sessions do
TOKENS = 2**15  # of all sequences that go together, which bounds memory

Asked = tuple[Any, Prompt]  # a row of a task, and its prompt


def measure(
    model: Any, tokenizer: Any, what: Measurement, progress: Any = None, label: str = ""
) -> Measured:
    """Texts and questions of `what`, whose `cache` says how, `agnostic` of questions too; needle is
    not asked for here."""
    assert what.cache is not None and not what.needle
    rows = {
        name: [(row, row.prompts(tokenizer)[0]) for row in own] for name, own in what.tasks.items()
    }
    sizes = [len(x.context) + x.num_following for own in rows.values() for _, x in own]
    longest = max([*sizes, *(ids.shape[1] for ids in what.windows.values())])
    most = max(len(x) for own in (rows, what.windows) for x in own.values())
    slots = min(most, max(1, TOKENS // longest))
    pages = Pages(model, tokenizer, what.cache, slots, longest + QUESTION_ROOM)
    texts, tasks, held = {}, {}, None
    with inference(model), patch("kvfold.engine.runner.metadata.BATCHED_DEVICES", {"cpu", "cuda"}):
        for name, ids in what.windows.items():
            texts[name], held = pages.perplexity(ids, what.scored_from or ids.shape[1] // 2)
        for name, own in rows.items():
            tasks[name], found = pages.answered(own, what.agnostic)
            held = held or found
    return Measured(texts=texts, needle={}, tasks=tasks, footprint=held)


class Pages:
    """A runner whose sequences are driven by hand, `slots` at once."""

    def __init__(
        self, model: Any, tokenizer: Any, cache: CacheConfig, slots: int, longest: int
    ) -> None:
        most = min(longest, model.config.max_position_embeddings)
        self.runner: ModelRunner = build_runner(
            model, cache, num_slots=slots, max_tokens=most, tokenizer=tokenizer
        )
        self.tokenizer, self.stops, self.slots = tokenizer, _stop_ids(model, tokenizer), slots

    def read(self, contexts: Sequence[Sequence[int]]) -> list[Request]:
        """Sequences of their own for contexts, read and compressed; with the last logits."""
        pool = self.runner.pool
        requests = [Request.unscheduled(pool.allocate_slot()) for _ in contexts]
        for request, tokens in zip(requests, contexts, strict=True):
            request.prefill_until(len(tokens))
        last: dict[int, Tensor] = {}
        while len(last) < len(requests):
            open_ = [i for i in range(len(requests)) if i not in last]
            parts = [self._next(requests[i], contexts[i]) for i in open_]
            logits = self.feed([requests[i] for i in open_], parts)
            for i, own in zip(open_, logits, strict=True):
                if requests[i].num_computed == len(contexts[i]):
                    last[i] = own
        self.logits = torch.stack([last[i] for i in range(len(requests))])
        if needy := [x for x in requests if self.runner.needs_compression(x)]:
            self.runner.compress(needy)
        return requests

    def _next(self, request: Request, tokens: Sequence[int]) -> Sequence[int]:
        start = request.num_computed
        return tokens[start : start + min(CHUNK, self.runner.pool.layout.max_tokens_in_step(start))]

    @torch.inference_mode()
    def feed(self, requests: list[Request], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to each sequence; logits [B, V] of the last ones."""
        hidden, ends = self._hidden(requests, tokens)
        return self.runner._logits(hidden[ends])

    def _hidden(
        self, requests: list[Request], tokens: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [all, D] of tokens, and where those of the last ones are [B]."""
        counts = [len(own) for own in tokens]
        self.runner.pool.extend([x.open_slot for x in requests], counts)
        for request, own in zip(requests, tokens, strict=True):
            request.token_ids += own
        chunks = (x.next_chunk(count) for x, count in zip(requests, counts, strict=True))
        hidden = self.runner._hidden(Batch(chunks=tuple(chunks)))
        for request, count in zip(requests, counts, strict=True):
            request.advance(count)
        return hidden, torch.tensor(counts, device=hidden.device).cumsum(0) - 1

    def close(self, requests: list[Request]) -> None:
        for request in requests:
            self.runner.pool.free_slot(request.open_slot)

    def footprint(self, request: Request) -> Footprint:
        session = PagedSession(self.runner)
        session.sequence = request
        return session.footprint()

    def perplexity(self, ids: Tensor, start: int) -> tuple[PerplexityResult, Footprint]:
        """As `window_perplexity` on windows [n, T], scored from `start` on."""
        parts = [self._losses(part, start) for part in ids.split(self.slots)]
        each, held = [x for losses, _ in parts for x in losses], parts[-1][1]
        nll, error = mean_and_se(each)
        value = float(torch.tensor(nll).exp())
        return PerplexityResult(
            nll=nll,
            nll_se=error,
            perplexity=value,
            perplexity_se=value * error,
            tokens=len(ids) * (ids.shape[1] - start),
            window_nll=tuple(each),
            cache_bytes_allocated=held.cache_bytes,
            cached_tokens=held.tokens,
        ), held

    def _losses(self, ids: Tensor, start: int) -> tuple[list[float], Footprint]:
        """Mean loss of windows [B, T], and what the last of them holds after its first part."""
        requests = self.read(ids[:, :start].tolist())
        held, logits = self.footprint(requests[-1]), self.logits[:, None]
        losses = [token_nll(logits, ids[:, start : start + 1])]
        while start < ids.shape[1] - 1:
            step = min(AFTER, self.runner.pool.layout.max_tokens_in_step(start))
            part = ids[:, start : min(start + step, ids.shape[1] - 1)]
            with torch.inference_mode():
                hidden, _ = self._hidden(requests, part.tolist())
                logits = self.runner._logits(hidden).view(*part.shape, -1)
            losses.append(token_nll(logits, ids[:, start + 1 : start + 1 + part.shape[1]]))
            start += part.shape[1]
        self.close(requests)
        each = torch.cat(losses, 1).mean(1).tolist()
        assert all(x == x for x in each), "logits are finite"
        return each, held

    def answered(self, rows: Sequence[Asked], agnostic: bool) -> tuple[TaskResult, Footprint]:
        """Greedy answers to all questions, each continuing from its context alone. What cannot be
        rewound reads context and question for each anew, as does what is not to be `agnostic`."""
        if whole := not (agnostic and self.runner.can_rewind):
            prompts = [replace(x, context=[*x.context, *x.question], question=()) for _, x in rows]
            rows = [(row, x) for (row, _), x in zip(rows, prompts, strict=True)]
        contexts: dict[tuple[int, ...], list[int]] = {}
        for index, (_, prompt) in enumerate(rows):
            contexts.setdefault(tuple(prompt.context), []).append(index)
        answers: dict[int, list[int]] = {}
        for some in _groups(list(contexts.items()), self.slots):
            requests = self.read([list(context) for context, _ in some])
            held, asked = self.footprint(requests[-1]), [own for _, own in some]
            for turn in range(max(map(len, asked))):
                pairs = zip(requests, asked, strict=True)
                mine = [(x, own[turn]) for x, own in pairs if turn < len(own)]
                prompts = [rows[index][1] for _, index in mine]
                found = self._continued([x for x, _ in mine], prompts, whole)
                answers |= {index: tokens for (_, index), tokens in zip(mine, found, strict=True)}
            self.close(requests)
        return self._result([row for row, _ in rows], [answers[i] for i in range(len(rows))]), held

    def _result(self, rows: Sequence[Any], answers: Sequence[list[int]]) -> TaskResult:
        scored: dict[str, list[float]] = {}
        main_scores: list[float] = []
        for row, tokens in zip(rows, answers, strict=True):
            answer = TaskAnswer(log_likelihoods=[], tokens=tokens)
            row_scores = row.score(self.tokenizer, [answer])
            for name, value in row_scores.items():
                scored.setdefault(name, []).append(value)
            main_scores.append(row_scores[row.scores[0]])
        return TaskResult(
            num_examples=len(rows),
            truncated=0,
            outputs=tuple(decode(self.tokenizer, tokens) for tokens in answers),
            scores={
                name: Score(*mean_and_se(scored[name]), len(scored[name]))
                for name in SCORES
                if name in scored
            },
            main_scores=tuple(main_scores),
        )

    def _continued(
        self, requests: list[Request], prompts: Sequence[Prompt], whole: bool
    ) -> list[list[int]]:
        """What follows each one's question, or, where the context ended with it, the last logits;
        then sequences are as they were."""
        slots = [x.open_slot for x in requests]
        rows = torch.from_numpy(self.runner.pool.host_lengths[slots].copy())
        starts = [x.num_computed for x in requests]
        questions = [prompt.question for prompt in prompts]
        logits = self.logits if whole else self._ask(requests, questions)
        found: list[list[int]] = [[] for _ in requests]
        open_ = [True] * len(requests)
        for step in range(max(prompt.num_new for prompt in prompts)):
            tokens = logits.argmax(-1).tolist()
            for i, token in enumerate(tokens):
                open_[i] &= token not in self.stops and step < prompts[i].num_new
                if open_[i]:
                    found[i].append(token)
            if not any(open_) or step + 1 == max(prompt.num_new for prompt in prompts):
                break
            logits = self.feed(requests, [[token] for token in tokens])
        if not whole:
            for request, start in zip(requests, starts, strict=True):
                request.rewind(start)
            self.runner.pool.truncate(slots, rows)
        return found

    @torch.inference_mode()
    def _ask(self, requests: list[Request], questions: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, V] after each one's question. All are padded on their right to the longest, so
        that they attend together: no token sees what comes after it, and padding goes again."""
        slots, most = [x.open_slot for x in requests], max(map(len, questions))
        rows = torch.from_numpy(self.runner.pool.host_lengths[slots].copy())
        starts = [x.num_computed for x in requests]
        padded = [[*own, *[own[-1]] * (most - len(own))] for own in questions]
        hidden, _ = self._hidden(requests, padded)
        counts = torch.tensor([len(own) for own in questions])
        last = torch.arange(len(questions)) * most + counts - 1
        logits = self.runner._logits(hidden[last.to(hidden.device)])
        for request, start, count in zip(requests, starts, counts.tolist(), strict=True):
            request.rewind(start + count)
        self.runner.pool.truncate(slots, rows + counts[:, None])
        return logits


def _groups(items: list[Any], most: int) -> Iterator[list[Any]]:
    """As few as can be of at most `most` items, about equally long."""
    size = -(-len(items) // -(-len(items) // most))
    return (items[i : i + size] for i in range(0, len(items), size))
