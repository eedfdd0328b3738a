"""What tests of engine loop share with others."""

from kvfold.engine.requests.request import CacheParams, SamplingParams
from stub import Bench, reference


class Events:
    """Random requests, steps, cancels and failures; every end is checked against the reference."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.requests: dict[int, tuple[list[int], SamplingParams, CacheParams]] = {}
        self.checked: set[int] = set()

    def add(self, prompt: list[int], params: SamplingParams, cache: CacheParams) -> None:
        self.requests[self.bench.engine.add(prompt, params, cache)] = (prompt, params, cache)

    def cancel(self, which: int) -> None:
        if alive := sorted(self.bench.engine._requests):
            self.bench.engine.cancel(alive[which % len(alive)])

    def step(self) -> None:
        for output in self.bench.step():
            if output.finish_reason:
                self.check_end(output.id)

    def check_end(self, id: int) -> None:
        self.checked.add(id)
        prompt, params, cache = self.requests[id]
        tokens, reason = self.bench.tokens[id], self.bench.ended[id].finish_reason
        if cache.max_cache_tokens is not None:
            assert len(tokens) <= params.max_new_tokens
            return
        wanted = reference(prompt, params)
        assert tokens == wanted[: len(tokens)]
        full = len(prompt) + len(tokens) > self.bench.pool.capacity()
        assert reason != "pool" or full
        if reason == "eos" or (reason == "length" and not full):
            assert tokens == wanted

    def finish(self) -> None:
        self.bench.drain()
        for id in set(self.bench.ended) - self.checked:
            self.check_end(id)
        assert self.bench.ended.keys() == self.requests.keys()
