"""Train the two embedded reference models on one GPU in minutes.

Both are small enough to travel with the package and good enough to measure a cache on: they read
English prose and retrieve numbered facts from up to 4096 tokens. From the repository root, first
the tokenizer and the grouped-query model, then the multi-head model with the same tokenizer:

    PYTHONPATH=src python3 tools/train_reference.py --family gqa --minutes 4 --seed 0 \\
        --texts wiki.txt.xz books.txt.xz --heldout wiki-heldout.txt --out reference-gqa
    PYTHONPATH=src python3 tools/train_reference.py --family mha --minutes 4 --seed 0 \\
        --texts wiki.txt.xz books.txt.xz --heldout wiki-heldout.txt --out reference-mha \\
        --tokenizer reference-gqa

Every code path in a minute on two CPU cores:

    PYTHONPATH=src python3 tools/train_reference.py --family gqa --minutes 0.2 --device cpu \\
        --texts sample.txt --heldout sample.txt --out reference-try --no-compile \\
        --contexts 128,256,512 --tokens-per-step 2048

Shapes: B rows of a step, T tokens of a row (the context), V vocabulary; B * T = tokens per step.
Each row is running text; about 40 % of them carry a retrieval episode in the wording of
`kvfold.evaluation.needle`, put together from token ids so that rows cost microseconds.
"""

import argparse
import json
import lzma
import math
import multiprocessing
import os
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
)

from kvfold.data import read_text
from kvfold.evaluation.haystack import ANSWER, FACT, INTRO, QUESTION, load_words
from kvfold.evaluation.needle import evaluate_needle

SEPARATOR = "<|endoftext|>"
VOCABULARY = 4096
MAX_CONTEXT = 4096
LIMIT_MB = 15
PHASE_ENDS = (0.30, 0.60, 1.0)
EPISODE_SHARE = 0.4
EPISODE_FIRST = 0.75
MIN_SPAN = 200
MAX_FACTS = 24
MAX_QUESTIONS = 8
ANSWER_WEIGHT = 5
LEARNING_RATES = {"gqa": 4e-3, "mha": 2e-3}


def say(*parts: object) -> None:
    print(*parts, flush=True)


# --- Documents ------------------------------------------------------------------------------------


def read_documents(paths: Sequence[Path]) -> list[str]:
    """Documents of plain or xz-compressed text files, separated by `<|endoftext|>` lines."""
    documents = []
    for path in paths:
        opener = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            documents += [d.strip() for d in file.read().split(SEPARATOR)]
    return [d for d in documents if d]


def letters(text: str) -> bytes:
    """Only a-z: what is left is the same however the text was wrapped, quoted or marked up."""
    return re.sub(rb"[^a-z]+", b"", text.lower().encode())


def packaged_probes(every: int = 4000, size: int = 80) -> list[bytes]:
    """`size` letters out of every `every` of the packaged calibration and filler text."""
    text = letters(read_text("calibration.txt").replace(SEPARATOR, "") + read_text("filler.txt"))
    return [text[i : i + size] for i in range(0, len(text) - size, every)]


def is_packaged(document: str, probes: Sequence[bytes]) -> bool:
    text = letters(document)
    return any(probe in text for probe in probes)


def unwrap(document: str) -> str:
    """Hard-wrapped paragraphs on one line each; other documents as they are."""
    lines = document.splitlines()
    if len(lines) < 50 or sorted(map(len, lines))[len(lines) * 99 // 100] > 90:
        return document
    paragraphs = re.split(r"\n\s*\n", document)
    return "\n".join(re.sub(r"\s+", " ", p).strip() for p in paragraphs if p.strip())


def prepare_documents(paths: Sequence[Path]) -> list[str]:
    """Documents without those that contain packaged text; every second one is unwrapped.

    Held-out books come in both forms, so the models should have met both.
    """
    documents = read_documents(paths)
    holds_probe = partial(is_packaged, probes=packaged_probes())
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        packaged = pool.map(holds_probe, documents, chunksize=64)
        kept = [d for d, hit in zip(documents, packaged, strict=True) if not hit]
        kept[::2] = pool.map(unwrap, kept[::2], chunksize=64)
    megabytes = sum(map(len, kept)) / 1e6
    say(f"{len(kept)} documents, {megabytes:.1f} MB; {sum(packaged)} dropped for packaged text")
    return kept


# --- Tokenizer and tokens -------------------------------------------------------------------------


def train_tokenizer(documents: Sequence[str], seed: int, size: int = 20_000_000) -> Any:
    """Byte-level BPE on about `size` characters; digits stand alone; one special token."""
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    sample, taken = [], 0
    for index in order:
        if taken >= size:
            break
        sample.append(documents[index][:200_000])
        taken += len(sample[-1])
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(sample, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=SEPARATOR,
        add_bos_token=True,
        eos_token=SEPARATOR,
        pad_token=SEPARATOR,
        model_max_length=MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode_documents(tokenizer: Any, documents: Sequence[str], end: int) -> np.ndarray:
    """All documents as one uint16 array, each followed by the token `end`."""
    core = tokenizer.backend_tokenizer
    pieces = re.compile(r".{1,20000}\S*", re.DOTALL)  # cut before white space: never in a word
    parts: list[np.ndarray] = []
    batch: list[str] = []
    for document in documents:
        batch += [*pieces.findall(document), ""]
        if len(batch) > 2000:
            parts += _encode_batch(core, batch, end)
            batch = []
    return np.concatenate([*parts, *_encode_batch(core, batch, end)])


def _encode_batch(core: Tokenizer, batch: list[str], end: int) -> list[np.ndarray]:
    encodings = core.encode_batch_fast(batch, add_special_tokens=False)
    return [
        np.asarray(e.ids if text else [end], dtype=np.uint16)
        for text, e in zip(batch, encodings, strict=True)
    ]


# --- Retrieval episodes from token ids ------------------------------------------------------------


class Phrases:
    """Facts and questions as token ids, equal to what the tokenizer makes of the whole strings."""

    def __init__(self, tokenizer: Any) -> None:
        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        adjectives, nouns = load_words()
        self.end = tokenizer.eos_token_id
        self.adjectives = [encode(" " + word) for word in adjectives]
        self.nouns = [encode(" " + word) for word in nouns]
        self.digits = [encode(str(digit))[0] for digit in range(10)]
        self.space, self.newline = encode(" "), encode("\n")
        self.intro = [tokenizer.bos_token_id, *encode(INTRO)]
        head, tail = FACT.split(" {key}")
        middle, period = tail.split(" {value}")
        self.fact_pieces = [encode(" " + head), encode(middle), encode(period)]
        self.question_pieces = [encode(piece) for piece in QUESTION.split(" {key}")]
        self._check(encode, adjectives, nouns)
        texts = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.ends_sentence = np.array([t.endswith((".", "!", "?")) for t in texts])
        self.opens_word = np.array([t.startswith(("Ġ", "Ċ")) for t in texts])
        key = max(map(len, self.adjectives)) + max(map(len, self.nouns))
        self.longest_fact = sum(map(len, self.fact_pieces)) + key + 6
        self.longest_question = sum(map(len, self.question_pieces)) + 2 * key + 7

    @property
    def num_keys(self) -> int:
        return len(self.adjectives) * len(self.nouns)

    def key(self, index: int) -> list[int]:
        adjective, noun = divmod(index, len(self.nouns))
        return self.adjectives[adjective] + self.nouns[noun]

    def answer(self, value: int) -> list[int]:
        return self.space + [self.digits[int(digit)] for digit in str(value)]

    def fact(self, index: int, value: int) -> list[int]:
        head, middle, period = self.fact_pieces
        return head + self.key(index) + middle + self.answer(value) + period

    def question(self, index: int) -> list[int]:
        first, second, third = self.question_pieces
        return first + self.key(index) + second + self.key(index) + third

    def _check(self, encode: Callable[[str], list[int]], adjectives: Any, nouns: Any) -> None:
        """Assert on a few samples that joined pieces are the tokens of the joined text."""
        for index in range(0, self.num_keys, self.num_keys // 7):
            adjective, noun = divmod(index, len(nouns))
            key, value = f"{adjectives[adjective]} {nouns[noun]}", 10_000 + 7919 * (index % 11)
            fact = " " + FACT.format(key=key, value=value)
            asked = QUESTION.format(key=key) + ANSWER.format(value=value) + "\n"
            assert encode(fact) == self.fact(index, value), fact
            ids = self.question(index) + self.answer(value) + self.newline
            assert encode(asked) == ids, asked


class Rows:
    """Training rows from a token array: running text, some of it with a retrieval episode."""

    def __init__(self, tokens: np.ndarray, phrases: Phrases) -> None:
        self.tokens, self.phrases = tokens, phrases

    def batch(
        self, rng: np.random.Generator, context: int, tokens_per_step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int32 [B, T + 1] and loss weights uint8 [B, T + 1]."""
        num_rows = max(1, tokens_per_step // context)
        ids = np.empty((num_rows, context + 1), np.int32)
        weights = np.ones((num_rows, context + 1), np.uint8)
        for row in range(num_rows):
            self._fill(rng, ids[row], weights[row])
        return torch.from_numpy(ids), torch.from_numpy(weights)

    def _text(self, rng: np.random.Generator, size: int) -> np.ndarray:
        begin = int(rng.integers(len(self.tokens) - size))
        return self.tokens[begin : begin + size]

    def _fill(self, rng: np.random.Generator, ids: np.ndarray, weights: np.ndarray) -> None:
        ids[:] = self._text(rng, len(ids))
        if rng.random() < 0.5:
            ids[0] = self.phrases.end
        if rng.random() >= EPISODE_SHARE:
            return
        episode, answers = self._episode(rng, len(ids))
        room = len(ids) - len(episode)
        begin = 0 if rng.random() < EPISODE_FIRST else int(rng.integers(room + 1))
        ids[begin : begin + len(episode)] = episode
        for answer in answers:
            weights[begin + answer : begin + answer + 5] = ANSWER_WEIGHT

    def _episode(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, list[int]]:
        """At most `size` tokens, and where the digits of each answer begin in them."""
        phrases = self.phrases
        room = size - len(phrases.intro) - 2
        shortest = min(MIN_SPAN, room // 2)
        most = min(MAX_QUESTIONS, (room - shortest) // phrases.longest_question)
        if most < 1:
            return np.empty(0, np.int32), []
        num_questions = int(rng.integers(1, most + 1))
        longest = room - num_questions * phrases.longest_question
        span = self._span(rng, shortest, longest)
        facts = self._facts(rng, span)
        pieces = [phrases.intro, *self._hide(rng, facts, span), phrases.newline]
        position, answers = sum(map(len, pieces)), []
        for index in rng.permutation(len(facts))[:num_questions]:
            key, value = facts[index]
            question = phrases.question(key) + phrases.answer(value)
            position += len(question)
            answers.append(position - 5)
            pieces += [question, phrases.newline]
            position += len(phrases.newline)
        return np.concatenate([*pieces, [phrases.end]]).astype(np.int32), answers

    @staticmethod
    def _span(rng: np.random.Generator, shortest: int, longest: int) -> int:
        """Half of the spans uniform in their logarithm, half uniform: long ones are not rare."""
        if rng.random() < 0.5:
            return int(rng.integers(shortest, longest + 1))
        return int(math.exp(rng.uniform(math.log(shortest), math.log(longest + 1))))

    def _facts(self, rng: np.random.Generator, span: int) -> list[tuple[int, int]]:
        """Distinct (key, value) pairs that take at most half of `span` tokens."""
        most = max(1, min(MAX_FACTS, span // 2 // self.phrases.longest_fact))
        num_facts = int(rng.integers(1, most + 1))
        keys = {int(key) for key in rng.integers(self.phrases.num_keys, size=num_facts)}
        return [(key, int(rng.integers(10_000, 100_000))) for key in sorted(keys)]

    def _hide(
        self, rng: np.random.Generator, facts: list[tuple[int, int]], span: int
    ) -> Iterator[Sequence[int] | np.ndarray]:
        """Running text of `span` tokens with the facts at random sentence ends, in random order."""
        hidden = [self.phrases.fact(key, value) for key, value in facts]
        text = self._text(rng, max(8, span - sum(map(len, hidden))))
        text = text[text != self.phrases.end]
        is_end = self.phrases.ends_sentence[text[:-1]] & self.phrases.opens_word[text[1:]]
        gaps = np.append(np.flatnonzero(is_end) + 1, len(text))
        chosen = np.sort(rng.choice(gaps, len(hidden), replace=len(gaps) < len(hidden)))
        parts = np.split(text, chosen)
        for part, index in zip(parts, rng.permutation(len(hidden)), strict=False):
            yield part
            yield hidden[index]
        yield parts[-1]


class RowStream(torch.utils.data.IterableDataset):
    """Endless batches at the context that `phase` (shared with the workers) points to."""

    def __init__(self, rows: Rows, plan: "Plan", phase: Any) -> None:
        self.rows, self.plan, self.phase = rows, plan, phase

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        rng = np.random.default_rng([self.plan.seed, info.id if info else 0])
        while True:
            context = self.plan.contexts[self.phase.value]
            yield self.rows.batch(rng, context, self.plan.tokens_per_step)


# --- Model ----------------------------------------------------------------------------------------


def gqa_config() -> LlamaConfig:
    """Llama: 7 layers, 4 query and 2 KV heads of 128, rotary positions.

    Keys and values together are twice as wide as the model, as in Qwen3-0.6B or Llama-2.
    """
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=MAX_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,  # a padding index would freeze the embedding of <|endoftext|>
    )


def mha_config() -> OPTConfig:
    """OPT: 6 layers, 4 heads of 64, learned positions, biases."""
    return OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        activation_function="relu",
        max_position_embeddings=MAX_CONTEXT,
        dropout=0.0,
        attention_dropout=0.0,
        do_layer_norm_before=True,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )


CONFIGS = {"gqa": gqa_config, "mha": mha_config}


def causal_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Whole-row causal attention, [B, H, T, d] -> [B, T, H, d].

    transformers materialises a mask under torch.compile before torch 2.14, which rules out the
    flash kernel; rows here have neither padding nor a cache, so no mask is needed.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(
        query.to(value.dtype), key.to(value.dtype), value, is_causal=True, scale=scaling
    )
    return out.transpose(1, 2).contiguous(), None


def build_model(family: str, seed: int) -> torch.nn.Module:
    """A freshly initialised fp32 model that trains with `causal_attention`."""
    AttentionInterface.register("reference_causal", causal_attention)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[family](), attn_implementation="reference_causal", dtype=torch.float32
    )
    megabytes = sum(p.numel() for p in model.parameters()) * 2 / 1e6
    say(f"{family}: {megabytes / 2:.2f} M parameters, {megabytes:.1f} MB in bf16 of {LIMIT_MB} MB")
    if megabytes >= LIMIT_MB:
        raise ValueError(f"the model takes {megabytes:.1f} MB in bf16; the limit is {LIMIT_MB} MB")
    return model


def weighted_loss(
    model: torch.nn.Module, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean loss to train on, and the sums [text nats, answer nats, answer tokens]."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    targets = ids[:, 1:].flatten().long()
    nats = F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
    weight = weights[:, 1:].flatten().float()
    is_answer = (weight > 1).float()
    loss = (nats * weight).sum() / weight.sum()
    seen = nats.detach()
    sums = torch.stack([(seen * (1 - is_answer)).sum(), (seen * is_answer).sum(), is_answer.sum()])
    return loss, sums


# --- Training -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run is asked to do. `minutes` is wall-clock training time, compilation excluded."""

    family: str
    minutes: float
    seed: int
    tokens_per_step: int
    contexts: tuple[int, ...]
    learning_rate: float
    compile: bool
    workers: int


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 2 % of the time, then a cosine down to 5 % of the peak."""
    if progress < 0.02:
        return peak * max(progress, 1e-3) / 0.02
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - 0.02) / 0.98))
    return peak * (0.05 + 0.95 * cosine)


def make_optimizer(model: torch.nn.Module, peak: float, device: torch.device) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device.type == "cuda")


class Trainer:
    """Steps against the clock: time decides the context, the learning rate and the end."""

    def __init__(self, model: torch.nn.Module, plan: Plan, rows: Rows, device: torch.device):
        self.plan, self.rows, self.device = plan, rows, device
        self.phase = multiprocessing.get_context("fork").Value("i", 0)
        self.batches = self._start_workers()  # before CUDA starts: the workers are forks
        self.model = model.to(device).eval()  # no dropout here, and OPT's layer drop breaks graphs
        self.optimizer = make_optimizer(self.model, plan.learning_rate, device)
        self.loss = torch.compile(weighted_loss, dynamic=False) if plan.compile else weighted_loss
        self.curve: list[dict[str, float]] = []
        self.steps = self.tokens = 0

    def _start_workers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        stream = RowStream(self.rows, self.plan, self.phase)
        if self.plan.workers == 0:
            return iter(stream)
        loader = torch.utils.data.DataLoader(
            stream,
            batch_size=None,
            num_workers=self.plan.workers,
            prefetch_factor=2,
            multiprocessing_context="fork",
        )
        return iter(loader)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _backward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ids, weights = self._move(ids), self._move(weights)
        enabled = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            loss, sums = self.loss(self.model, ids, weights)
        loss.backward()
        return sums

    def warm_up(self) -> None:
        """Compile for every context on throw-away gradients."""
        rng = np.random.default_rng(self.plan.seed)
        for context in self.plan.contexts:
            begin = time.perf_counter()
            for _ in range(3):
                self._backward(*self.rows.batch(rng, context, self.plan.tokens_per_step))
                self.optimizer.zero_grad(set_to_none=True)
            self._synchronise()
            say(f"context {context}: ready after {time.perf_counter() - begin:.1f} s")

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _step(self, progress: float) -> torch.Tensor:
        """One optimiser step; returns the sums of `weighted_loss`."""
        ids, weights = next(self.batches)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress, self.plan.learning_rate)
        sums = self._backward(ids, weights)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.tokens += ids.shape[0] * (ids.shape[1] - 1)
        self.context = ids.shape[1] - 1
        return sums

    def train(self) -> None:
        """Train until the budget is spent; the curve holds a point for every 5 %."""
        self.warm_up()
        begin = last = time.perf_counter()
        sums, tokens = torch.zeros(3, device=self.device), 0
        progress, mark = 0.0, 0.05
        while progress < 1:
            self.phase.value = sum(progress >= end for end in PHASE_ENDS[:-1])
            sums += self._step(progress)
            progress = min(1.0, (time.perf_counter() - begin) / (60 * self.plan.minutes))
            if progress >= mark:
                self._synchronise()
                now, seen = time.perf_counter(), self.tokens - tokens
                self._log(progress, sums.tolist(), seen, seen / (now - last))
                last, tokens, mark = now, self.tokens, progress + 0.05 - 1e-3
                sums.zero_()
        self._synchronise()

    def _log(self, progress: float, sums: list[float], seen: int, speed: float) -> None:
        text, answer, num_answers = sums
        point = {
            "progress": round(progress, 3),
            "step": self.steps,
            "tokens": self.tokens,
            "context": self.context,
            "text_loss": round(text / max(1.0, seen - num_answers), 4),
            "answer_loss": round(answer / max(1.0, num_answers), 4),
            "learning_rate": learning_rate(progress, self.plan.learning_rate),
            "tokens_per_second": round(speed),
        }
        self.curve.append(point)
        say(
            f"{progress:5.0%}  step {self.steps}  tokens {self.tokens / 1e6:.1f} M  "
            f"context {self.context}  loss {point['text_loss']:.3f}  "
            f"answers {point['answer_loss']:.3f}  lr {point['learning_rate']:.2e}  "
            f"{speed / 1e6:.3f} M tokens/s"
        )


# --- Saving and measuring -------------------------------------------------------------------------


def save(model: Any, tokenizer: Any, out: Path) -> float:
    """Write bf16 weights, configuration and tokenizer; returns the weights' size in MB."""
    out.mkdir(parents=True, exist_ok=True)
    model.to("cpu", torch.bfloat16).eval()
    model.config.dtype = torch.bfloat16
    model.generation_config.pad_token_id = 0
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    sample = f"It's 48213 o'clock.\n\n{SEPARATOR}Naïve – {FACT}"
    again = AutoTokenizer.from_pretrained(out)
    assert again(sample)["input_ids"] == tokenizer(sample)["input_ids"], "tokenizer changed"
    megabytes = sum(f.stat().st_size for f in out.glob("*.safetensors")) / 1e6
    say(f"saved {out}: {megabytes:.2f} MB of weights (limit {LIMIT_MB} MB)")
    assert megabytes < LIMIT_MB, f"{megabytes:.2f} MB of weights, limit {LIMIT_MB} MB"
    return megabytes


@torch.no_grad()
def perplexity(model: Any, tokens: np.ndarray, window: int, most: int = 200) -> tuple[float, int]:
    """exp(mean loss) over the first `most` disjoint windows, and how many windows there were."""
    count = min(most, len(tokens) // window)
    ids = torch.from_numpy(tokens[: count * window].astype(np.int64)).view(count, window)
    losses = []
    for rows in ids.split(4):
        rows = rows.to(model.device)
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) * len(rows))
    return math.exp(sum(map(float, losses)) / count), count


def measure(out: Path, heldout: Path | None, plan: Plan, device: torch.device) -> dict[str, Any]:
    """Held-out perplexity and needle retrieval of the saved model, reloaded in bf16."""
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    model = model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    results: dict[str, Any] = {}
    if heldout is not None:
        tokens = encode_documents(tokenizer, read_documents([heldout]), tokenizer.eos_token_id)
        window = min(2048, plan.contexts[-1])
        value, count = perplexity(model, tokens, window)
        results["heldout"] = {"perplexity": round(value, 3), "windows": count, "window": window}
        say(f"held-out perplexity {value:.2f} over {count} windows of {window} tokens")
    lengths = [n for n in (512, 1024, 2048, 4096) if n <= plan.contexts[-1]]
    needles = evaluate_needle(model, tokenizer, lengths=lengths, num_contexts=13) if lengths else []
    for needle in needles:
        say(f"needle at {needle.length}: {needle.exact:.1%} +- {needle.exact_se:.1%}")
    results["needle"] = [asdict(needle) for needle in needles]
    return results


def write_card(out: Path, report: dict[str, Any]) -> None:
    """`train_log.json` with everything, and `model_card.md` made from it."""
    (out / "train_log.json").write_text(json.dumps(report, indent=1) + "\n")
    plan, curve = report["plan"], report["curve"]
    curve_rows = [
        f"| {p['progress']:.0%} | {p['step']} | {p['tokens'] / 1e6:.0f} M | {p['context']} "
        f"| {p['text_loss']:.3f} | {p['answer_loss']:.3f} | {p['tokens_per_second'] / 1e6:.2f} M |"
        for p in curve
    ]
    needle_rows = [
        f"| {n['length']} | {n['exact']:.1%} | {n['exact_se']:.1%} | {n['num_questions']} |"
        for n in report["results"]["needle"]
    ]
    heldout = report["results"].get("heldout")
    quality = (
        f"{heldout['perplexity']:.2f} on the first {heldout['windows']} windows of "
        f"{heldout['window']} tokens of held-out text"
        if heldout
        else "not measured"
    )
    lines = [
        f"# kvfold reference model, {plan['family']}",
        "",
        str(CONFIGS[plan["family"]].__doc__).splitlines()[0],
        f"{report['parameters'] / 1e6:.2f} M parameters, {report['megabytes']:.1f} MB in bf16, "
        f"vocabulary of {VOCABULARY} (byte-level BPE, single digits), {MAX_CONTEXT} positions.",
        "It exists to test and demonstrate KV-cache compression without a download; it is no "
        "assistant and states no facts.",
        "",
        "## Data and licence",
        "",
        "- English Wikipedia (2014), CC BY-SA 3.0.",
        "- Project Gutenberg books, public domain. Books that the package quotes as calibration "
        "or filler text were left out.",
        "- Retrieval episodes generated from that text, in RULER's wording.",
        "",
        "The weights are licensed under Apache-2.0. They were trained in part on CC BY-SA text.",
        "",
        "## Training",
        "",
        f"Seed {plan['seed']}, {plan['minutes']:g} minutes on {report['device']}, "
        f"{report['tokens_seen'] / 1e6:.0f} M tokens seen of {report['tokens_distinct'] / 1e6:.1f} "
        f"M distinct, {plan['tokens_per_step']} a step, contexts {plan['contexts']}, AdamW with a "
        f"peak rate of {plan['learning_rate']:g}; torch {report['versions']['torch']}, "
        f"transformers {report['versions']['transformers']}. Wall-clock time ends a run, so a "
        "rerun with this seed sees the same kind of rows but not the same number of them.",
        "",
        "| time | step | tokens | context | text loss | answer loss | tokens/s |",
        "|---|---|---|---|---|---|---|",
        *curve_rows,
        "",
        "Losses are in nats per token.",
        "",
        "## Quality",
        "",
        f"Perplexity: {quality}.",
        "",
        "Facts retrieved exactly, four facts a context, greedy decoding:",
        "",
        "| tokens | exact | standard error | questions |",
        "|---|---|---|---|",
        *needle_rows,
    ]
    (out / "model_card.md").write_text("\n".join(lines) + "\n")


# --- Command line ---------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--family", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, required=True, help="wall-clock training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens-per-step", type=int, default=131072)
    parser.add_argument("--contexts", default="512,2048,4096", help="three, shortest first")
    parser.add_argument("--learning-rate", type=float, help="default: 4e-3 for gqa, 2e-3 for mha")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="reuse; default: train one")
    parser.add_argument("--heldout", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers",
        type=int,
        help="row builders; 0: none beside the trainer",
        default=min(6, (os.cpu_count() or 2) - 1),
    )
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args(argv)


def make_plan(arguments: argparse.Namespace) -> Plan:
    contexts = tuple(int(part) for part in arguments.contexts.split(","))
    if len(contexts) != 3 or list(contexts) != sorted(contexts) or contexts[-1] > MAX_CONTEXT:
        raise ValueError(
            f"--contexts is {arguments.contexts}; give three lengths, shortest first, "
            f"of at most {MAX_CONTEXT} tokens, such as 512,2048,4096"
        )
    return Plan(
        family=arguments.family,
        minutes=arguments.minutes,
        seed=arguments.seed,
        tokens_per_step=arguments.tokens_per_step,
        contexts=contexts,
        learning_rate=arguments.learning_rate or LEARNING_RATES[arguments.family],
        compile=not arguments.no_compile,
        workers=arguments.workers,
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def prepare_rows(arguments: argparse.Namespace, plan: Plan) -> tuple[Any, Rows]:
    """The tokenizer (reused or trained) and the rows of the whole corpus."""
    begin = time.perf_counter()
    documents = prepare_documents(arguments.texts)
    say(f"documents ready after {time.perf_counter() - begin:.1f} s")
    if arguments.tokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    else:
        tokenizer = train_tokenizer(documents, plan.seed)
    say(f"tokenizer of {len(tokenizer)} ready after {time.perf_counter() - begin:.1f} s")
    tokens = encode_documents(tokenizer, documents, tokenizer.eos_token_id)
    say(f"{len(tokens) / 1e6:.1f} M tokens after {time.perf_counter() - begin:.1f} s")
    return tokenizer, Rows(tokens, Phrases(tokenizer))


def main(argv: Sequence[str]) -> None:
    arguments = parse_arguments(argv)
    plan, device = make_plan(arguments), torch.device(arguments.device)
    torch.set_float32_matmul_precision("high")
    model = build_model(plan.family, plan.seed)
    tokenizer, rows = prepare_rows(arguments, plan)
    trainer = Trainer(model, plan, rows, device)
    trainer.train()
    megabytes = save(model, tokenizer, arguments.out)
    report = {
        "plan": asdict(plan),
        "device": device_name(device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "texts": [path.name for path in arguments.texts],
        "parameters": sum(p.numel() for p in model.parameters()),
        "megabytes": megabytes,
        "steps": trainer.steps,
        "tokens_seen": trainer.tokens,
        "tokens_distinct": len(rows.tokens),
        "curve": trainer.curve,
        "results": {"needle": []},
    }
    write_card(arguments.out, report)  # first without results: they must not cost the log
    report["results"] = measure(arguments.out, arguments.heldout, plan, device)
    write_card(arguments.out, report)


if __name__ == "__main__":
    main(sys.argv[1:])
