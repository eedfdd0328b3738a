"""A stub model for the engine's loop, whose next token is a hash of what its cache holds.

The stub keeps tokens by (slot, position). A token that is lost, written twice, put elsewhere or
left over from another sequence changes the hash, and so every token after it.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.cache.pool import Pool, PoolFull
from kvfold.cache.sharing import SharingPool
from kvfold.engine.api.stream import OutputDecoder, Stream
from kvfold.engine.core.compression import Schedule
from kvfold.engine.core.engine import Engine, Hooks
from kvfold.engine.core.prefix_cache import PrefixCache
from kvfold.engine.requests import request as sequences
from kvfold.engine.requests.request import Batch, CacheParams, SamplingParams, StepOutput
from kvfold.engine.runner.sampler import sample
from kvfold.layout import CacheSpec, Geometry, Latent, LayerSpec
from kvfold.layout.pages import CacheLayout, cache_layout

VOCAB, PAGE, EOS = 29, 4, 0
TABLE = 3 * torch.randn(997, VOCAB, generator=torch.Generator().manual_seed(0))


def logits_after(seen: Sequence[int | None]) -> Tensor:
    return TABLE[hash(tuple(-2 if x is None else x for x in seen)) % len(TABLE)]


class FakePool:
    """Pages of two groups, counted on the host alone: fast enough for long runs."""

    coarse = None

    def __init__(self, num_pages: int, *, num_slots: int, max_tokens: int) -> None:
        self.num_pages, self.num_slots, self.max_tokens = num_pages, num_slots, max_tokens
        self.host_lengths = np.zeros((num_slots, 2), dtype=np.int64)
        self.is_open = [False] * num_slots
        self.num_bytes = self.kv_bytes = num_pages  # of one byte each
        self.layout = SimpleNamespace(
            max_tokens_in_step=lambda row: max_tokens,  # no tails
            groups=(0, 1),
        )

    def kv_bytes_for(self, tokens: int) -> int:
        return 2 * -(-tokens // PAGE)

    @property
    def used_bytes(self) -> int:
        return int((-(-self.host_lengths // PAGE)).sum())

    def capacity(self, chunk: int | None = None) -> int:
        return min(self.num_pages // 2 * PAGE, self.max_tokens)

    def fits(self, tokens: int, chunk: int | None = None) -> bool:
        return tokens <= self.capacity()

    def pages_needed(self, lengths: np.ndarray, tokens: Sequence[int], chunk: int) -> np.ndarray:
        after = lengths + np.array(tokens, dtype=np.int64)[:, None]
        return ((-(-after // PAGE)).sum() - (-(-lengths // PAGE)).sum())[None]

    def make_room(self, pages: np.ndarray) -> bool:
        return bool(self.used_bytes + pages.sum() <= self.num_pages)

    def allocate_slot(self) -> int:
        slot = self.is_open.index(False)
        self.is_open[slot] = True
        return slot

    @property
    def open_slots(self) -> list[int]:
        return [slot for slot, is_open in enumerate(self.is_open) if is_open]

    def free_slot(self, slot: int) -> None:
        assert self.is_open[slot]
        self.host_lengths[slot], self.is_open[slot] = 0, False

    def grown(self, slots: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        assert all(self.is_open[slot] for slot in slots) and len(set(slots)) == len(slots)
        lengths = self.host_lengths.copy()
        lengths[list(slots)] += np.array(tokens, dtype=np.int64)[:, None]
        return lengths

    def make_room_to_extend(self, slots: Sequence[int], tokens: Sequence[int]) -> bool:
        lengths = self.grown(slots, tokens)
        pages = (-(-lengths // PAGE)).sum()
        return bool(pages <= self.num_pages and lengths.max() <= self.max_tokens)

    def extend(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        if not self.make_room_to_extend(slots, tokens):
            raise PoolFull
        self.host_lengths = self.grown(slots, tokens)

    def truncate(self, slot: int, lengths: np.ndarray) -> None:
        assert (lengths <= self.host_lengths[slot]).all()
        self.host_lengths[slot] = lengths

    def check_integrity(self) -> None:
        assert self.used_bytes <= self.num_pages
        closed = [not is_open for is_open in self.is_open]
        assert not self.host_lengths[closed].any()


def two_classes(tracked: bool = False) -> CacheLayout:
    """Two layers of one group each, with pages of different bytes, so that slabs are traded."""
    geometry = Geometry(
        hidden_size=8,
        num_query_heads=1,
        num_kv_heads=1,
        head_dim=24,
        num_layers=2,
        rope=True,
        key_norm=False,
        scaling=1.0,
    )
    layers = tuple(
        LayerSpec(keys="plain", values="plain", latents=(Latent(side="kv", heads=(0,), rank=rank),))
        for rank in (8, 24)
    )
    return cache_layout(CacheSpec(geometry=geometry, layers=layers), page=PAGE, tracked=tracked)


def real_pool(num_pages: int, *, num_slots: int, max_tokens: int) -> Pool:
    layout = two_classes()
    return Pool(
        layout, num_pages // 2 * layout.page_bytes, num_slots=num_slots, max_tokens=max_tokens
    )


def sharing_pool(tracked: bool, num_pages: int, *, num_slots: int, max_tokens: int) -> SharingPool:
    layout = two_classes(tracked)
    size = num_pages // 2 * layout.page_bytes
    return SharingPool(layout, size, num_slots=num_slots, max_tokens=max_tokens)


POOLS: dict[str, Callable[..., Any]] = {
    "fake": FakePool,
    "real": real_pool,
    "shared": partial(sharing_pool, False),  # requests read pages of others
    "tracked": partial(sharing_pool, True),  # or copies of them
}


class StubRunner:
    """Checks every batch against the rules of the scheduler.

    supports_async: whether steps come whose tokens the device alone knows; num_ahead: how many did.
    fail: is raised once. culprits, poisoned: ids of requests that it fails for, or gives NaN.
    piece: tokens that are read again at once, if any are; pieces: (id, end).
    """

    prefill_multiple, piece = 1, 0

    def __init__(self, pool: Pool, *, chunk: int, max_batch_tokens: int) -> None:
        self.pool, self.chunk, self.max_batch_tokens = pool, chunk, max_batch_tokens
        self.cells: dict[tuple[int, int], int] = {}
        self.rows = np.zeros_like(pool.host_lengths)
        self.fail: BaseException | None = None
        self.can_retry = True
        self.supports_async, self.num_ahead = False, 0
        self.supports_long_chunks = False
        self.culprits: set[int] = set()
        self.poisoned: set[int] = set()
        self.batches: list[list[tuple[int, int, int]]] = []  # (id, start, tokens)
        self.rounds: list[list[int]] = []  # ids compressed together
        self.pieces: list[tuple[int, int]] = []

    def run(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        batch = self.known(batch, tokens)
        self.check(batch)
        self._fail([chunk.request for chunk in batch.chunks])
        found = []
        for piece in batch.chunks:
            slot, stop = piece.request.open_slot, piece.start + len(piece.tokens)
            self.cells |= {(slot, piece.start + i): t for i, t in enumerate(piece.tokens)}
            self.rows[slot] = self.pool.host_lengths[slot]
            if piece.wants_logits:
                logits = logits_after([self.cells.get((slot, p)) for p in range(stop)])
                bad = piece.request.id in self.poisoned
                found.append(logits * torch.nan if bad else logits)
        return torch.stack(found) if found else torch.empty(0, VOCAB)

    def known(self, batch: Batch, tokens: Tensor | None) -> Batch:
        """The batch with tokens that nobody has read."""
        if tokens is None:
            return batch
        assert self.supports_async and all(
            x.tokens == (sequences.UNKNOWN_TOKEN,) for x in batch.chunks
        )
        self.num_ahead += 1
        each = zip(batch.chunks, tokens.tolist(), strict=True)
        return Batch(chunks=tuple(replace(x, tokens=(token,)) for x, token in each))

    def check(self, batch: Batch) -> None:
        decode = [piece.is_decode for piece in batch.chunks]
        assert decode == sorted(decode, reverse=True) and sum(decode) == batch.num_decode
        sizes = [len(piece.tokens) for piece in batch.chunks]
        longest = (
            self.max_batch_tokens if self.supports_long_chunks and not any(decode) else self.chunk
        )
        assert sum(sizes) <= self.max_batch_tokens and max(sizes) <= longest and min(sizes) >= 1
        assert all(len(p.tokens) == 1 and p.wants_logits for p in batch.chunks if p.is_decode)
        for piece in batch.chunks:
            slot = piece.request.open_slot
            before = 0 if piece.start == 0 else self.rows[slot]
            assert (before + len(piece.tokens) == self.pool.host_lengths[slot]).all()
        self.batches.append([(p.request.id, p.start, len(p.tokens)) for p in batch.chunks])

    def _fail(self, chosen: list[sequences.Request]) -> None:
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        if found := self.culprits.intersection(x.id for x in chosen):
            raise RuntimeError(f"no kernel for {sorted(found)}")

    def free_outside_windows(self, batch: Batch) -> None:
        """Nothing slides."""

    demotes = False

    def num_demotable(self, sequence: sequences.Request) -> int:
        return 0

    def demote(self, sequence: sequences.Request) -> None:
        raise AssertionError("there is nothing to demote")

    def needs_compression(self, sequence: sequences.Request) -> bool:
        most = sequence.cache.max_cache_tokens
        return most is not None and self.pool.host_lengths[sequence.slot].max() > most

    def needs_rescoring(self, sequence: sequences.Request) -> bool:
        return bool(self.piece) and sequence.num_scored < sequence.num_computed

    def rescore_segment(self, sequence: sequences.Request) -> None:
        self._fail([sequence])
        sequence.num_scored = min(sequence.num_scored + self.piece, sequence.num_computed)
        self.pieces.append((sequence.id, sequence.num_scored))

    def compress(self, chosen: list[sequences.Request]) -> None:
        """Forget the oldest; the second group keeps one page more, where it has it."""
        self.rounds.append([sequence.id for sequence in chosen])
        assert not any(map(self.needs_rescoring, chosen))
        self._fail(chosen)
        for sequence in chosen:
            slot, most = sequence.open_slot, sequence.cache.max_cache_tokens
            assert most is not None
            kept = np.minimum(self.rows[slot], [most, most + PAGE])
            self.pool.truncate(slot, kept)
            self.rows[slot] = kept
            for position in range(sequence.num_computed - most):
                self.cells.pop((slot, position), None)


class PagedStub(StubRunner):
    """The same, whose rows lie in the pool's pages and are read through its tables: (token + 1,
    position) in every group."""

    def run(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        batch = self.known(batch, tokens)
        self.check(batch)
        self._fail([chunk.request for chunk in batch.chunks])
        found = []
        for piece in batch.chunks:
            slot = piece.request.open_slot
            for group in range(2):
                first = int(self.pool.host_lengths[slot, group]) - len(piece.tokens)
                for i, token in enumerate(piece.tokens):
                    self._cell(slot, group, first + i)[:] = token + 1, piece.start + i
        for piece in batch.chunks:
            slot, stop = piece.request.open_slot, piece.start + len(piece.tokens)
            if piece.wants_logits:
                held = {position: token - 1 for token, position in self._rows_of(slot, 0)}
                other = {position: token - 1 for token, position in self._rows_of(slot, 1)}
                assert all(other.get(position, x) == x for position, x in held.items())
                assert len(held) == self.pool.host_lengths[slot, 0] <= len(other)
                logits = logits_after([held.get(position) for position in range(stop)])
                bad = piece.request.id in self.poisoned
                found.append(logits * torch.nan if bad else logits)
        return torch.stack(found) if found else torch.empty(0, VOCAB)

    def check(self, batch: Batch) -> None:
        for piece in batch.chunks:
            slot = piece.request.open_slot
            self.rows[slot] = self.pool.host_lengths[slot] - len(piece.tokens)
        super().check(batch)

    def _cell(self, slot: int, group: int, row: int) -> np.ndarray:
        page = int(self.pool.block_tables[slot, group, row // PAGE]) * 16
        return self.pool.arena.numpy().view(np.int32)[page + 4 * (row % PAGE) :][:2]

    def _rows_of(self, slot: int, group: int) -> list[list[int]]:
        count = int(self.pool.host_lengths[slot, group])
        return [self._cell(slot, group, row).tolist() for row in range(count)]

    def compress(self, chosen: list[sequences.Request]) -> None:
        self.rounds.append([sequence.id for sequence in chosen])
        assert not any(map(self.needs_rescoring, chosen))
        self._fail(chosen)
        for sequence in chosen:
            slot, most = sequence.open_slot, sequence.cache.max_cache_tokens
            assert most is not None
            self.pool.make_private(slot)
            kept = np.minimum(self.pool.host_lengths[slot], [most, most + PAGE])
            for group, count in enumerate(kept):
                for i, row in enumerate(self._rows_of(slot, group)[-count:]):
                    self._cell(slot, group, i)[:] = row
            self.pool.truncate(slot, kept)


class Bench:
    """An engine on a stub, and everything it delivered. supports_async: of a runner, unless `ahead`
    is given."""

    supports_async = False

    def __init__(
        self,
        num_pages: int = 1000,
        *,
        num_slots: int = 4,
        max_tokens: int = 10_000,
        pool: str = "fake",
        chunk: int = 7,
        max_batch_tokens: int = 64,
        headroom: int = 1,
        schedule: Schedule | None = None,
        hooks: Hooks | None = None,
        ahead: bool | None = None,
    ) -> None:
        self.pool = POOLS[pool](num_pages, num_slots=num_slots, max_tokens=max_tokens)
        shares = isinstance(self.pool, SharingPool)
        stub = PagedStub if shares else StubRunner
        self.runner = stub(self.pool, chunk=chunk, max_batch_tokens=max_batch_tokens)
        self.runner.supports_async = self.supports_async if ahead is None else ahead
        self.prefixes = PrefixCache(self.pool) if shares else None
        self.engine = Engine(
            self.runner,
            self.pool,
            eos_ids=[EOS],
            hooks=hooks,
            chunk=chunk,
            max_batch_tokens=max_batch_tokens,
            headroom=headroom,
            schedule=schedule,
            prefix_cache=self.prefixes,
        )
        self.scheduler = self.engine.scheduler
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, StepOutput] = {}

    def add(self, prompt: Sequence[int], cache: CacheParams | None = None, **sampling) -> int:
        return self.engine.add(prompt, SamplingParams(**sampling), cache)

    def step(self) -> list[StepOutput]:
        outputs = self.engine.step()
        assert len({x.id for x in outputs}) == len(outputs)
        for x in outputs:
            assert x.id not in self.ended
            self.tokens.setdefault(x.id, []).extend(x.token_ids)
            if x.finish_reason:
                self.ended[x.id] = x
        return outputs

    def drain(self, most: int = 5000) -> "Bench":
        while self.engine.has_work:
            self.step()
            assert (most := most - 1)
        self.check()
        assert self.pool.used_bytes == 0
        return self

    def check(self) -> None:
        """Nothing is lost, nothing owned twice, and only running sequences own pages."""
        self.pool.check_integrity()
        scheduler = self.scheduler
        held = [*scheduler.waiting, *scheduler.running, *scheduler.finished]
        assert sorted(s.id for s in held) == sorted(self.engine._requests)
        assert len({s.id for s in held}) == len(held)
        slots = [s.slot for s in scheduler.running]
        assert len(set(slots)) == len(slots) and None not in slots
        assert all(s.slot is None for s in (*scheduler.waiting, *scheduler.finished))
        closed = [slot for slot in range(self.pool.num_slots) if slot not in slots]
        assert not self.pool.host_lengths[closed].any()


def reference(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return list(alone(tuple(prompt), params))


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """One request's outputs, without engine, cache or batch."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_new_tokens:
        logits = logits_after(tokens)[None]
        place = [params.seed or 0], [len(tokens)]
        token = sample(logits, [params], *place).on_host([params])[0].token
        assert token is not None
        tokens.append(token)
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tuple(tokens[len(prompt) :])


def mixed_requests(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 9, 17, 30]))],
            SamplingParams(
                max_new_tokens=rng.choice([1, 5, 33, 33]),
                temperature=rng.choice([0.0, 0.0, 0.0, 1.5]),
                top_k=rng.choice([None, 5]),
                seed=i,
                ignore_eos=rng.random() < 0.7,
            ),
        )
        for i in range(count)
    ]


def stream(
    bench: Bench, prompt: list[int], params: SamplingParams, cache: CacheParams | None = None
) -> Stream:
    """Outputs of one request, without text."""
    request = bench.engine.request(prompt, params, cache)
    return Stream(bench.engine).submit(
        [(request, OutputDecoder(None, prompt, params, whole=False))]
    )


def in_threads(count: int, work: Callable[[int], None], seconds: float = 60) -> None:
    """Run work(0), work(1) .. at once; the first error is raised here."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
