"""What Prometheus reads: vLLM's names where the thing is the same, ours beside them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvfold.engine.api.llm import LLM
from kvfold.engine.core.engine import Hooks
from kvfold.engine.requests.packed import PackedContext
from kvfold.engine.requests.request import FinishReason, Request, ScheduledChunk

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.3, 0.5, 1, 2.5, 5)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a choice.", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("After a choice's first one.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the end.", SECONDS),
    "request_queue_time_seconds": ("From arrival to the first slot.", SECONDS),
    "request_prefill_time_seconds": ("From that to the first token.", SECONDS),
    "request_decode_time_seconds": ("From that to the end.", SECONDS),
}
COUNTERS = {
    "prompt_tokens": "Of choices that have their first token.",
    "generation_tokens": "Chosen by the engine.",
    "request_success": "Choices that ended, by reason.",
}


@dataclass
class _Times:
    """Of one request, in seconds of `time.monotonic`."""

    arrived: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0


class Metrics(Hooks):
    """Follows an engine, as its hooks. model: what the label `model_name` says. contexts: those of
    the label `context`.

    Times are those of the engine's steps; what text takes is not in them.
    """

    def __init__(
        self, llm: LLM, model: str, contexts: Mapping[str, PackedContext] | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._times: dict[int, _Times] = {}
        names = tuple(self._labels)
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", text, names, buckets=buckets, registry=self.registry
            ).labels(model)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(
                f"vllm:{name}",
                text,
                (*names, "finished_reason") if name == "request_success" else names,
                registry=self.registry,
            )
            for name, text in COUNTERS.items()
        }
        self._contexts = {id(x): name for name, x in (contexts or {}).items()}
        self._begun = Counter(
            "kvfold:context_requests",
            "Choices let in that begin with a packed context.",
            (*names, "context"),
            registry=self.registry,
        )
        for name in contexts or {}:
            self._begun.labels(model, name)
        self.registry.register(_Now(llm, model, contexts or {}))

    @property
    def text(self) -> bytes:
        return generate_latest(self.registry)

    def ended(self, reason: FinishReason) -> None:
        """A choice ended, as its reader sees it: at a stop string the engine was told to cancel."""
        self._counters["request_success"].labels(**self._labels, finished_reason=reason).inc()

    def on_request_init(self, request: Request) -> None:
        self._times[request.id] = _Times()
        if name := self._contexts.get(id(request.context)):
            self._begun.labels(**self._labels, context=name).inc()

    def on_context_step_end(self, chunks: Sequence[ScheduledChunk]) -> None:
        self._stepped([chunk for chunk in chunks if chunk.wants_logits])

    def on_generation_step_end(self, chunks: Sequence[ScheduledChunk]) -> None:
        self._stepped(chunks)

    def _stepped(self, chunks: Sequence[ScheduledChunk]) -> None:
        """These have a token more."""
        now = time.monotonic()
        for chunk in chunks:
            if (times := self._times.get(chunk.request.id)) is None:
                continue
            if times.first is None:
                self._began(chunk.request, times, now)
            else:
                self._histograms["inter_token_latency_seconds"].observe(now - times.last)
            times.last = now
        self._counters["generation_tokens"].labels(**self._labels).inc(len(chunks))

    def _began(self, request: Request, times: _Times, now: float) -> None:
        times.first = now
        self._counters["prompt_tokens"].labels(**self._labels).inc(request.num_prompt)
        self._histograms["time_to_first_token_seconds"].observe(now - times.arrived)
        started = request.started or now
        self._histograms["request_queue_time_seconds"].observe(started - times.arrived)
        self._histograms["request_prefill_time_seconds"].observe(now - started)

    def on_request_finish(self, request: Request) -> None:
        times = self._times.pop(request.id, None)
        if times is None or times.first is None:
            return
        taken = time.monotonic() - times.first
        self._histograms["e2e_request_latency_seconds"].observe(time.monotonic() - times.arrived)
        self._histograms["request_decode_time_seconds"].observe(taken)
        if request.num_outputs > 1:
            each = self._histograms["request_time_per_output_token_seconds"]
            each.observe(taken / (request.num_outputs - 1))


class _Now(Collector):
    """What an engine is and holds when it is asked."""

    def __init__(self, llm: LLM, model: str, contexts: Mapping[str, PackedContext]) -> None:
        self.llm, self.model, self.contexts = llm, model, contexts

    def collect(self) -> Iterator[Metric]:
        pool, scheduler = self.llm.runner.pool, self.llm.engine.scheduler
        layout, used = pool.layout, pool.used_bytes
        geometry = layout.spec.geometry
        yield self._gauge("vllm:num_requests_running", "Choices.", len(scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Choices.", len(scheduler.waiting))
        share = used / pool.num_bytes
        yield self._gauge("vllm:kv_cache_usage_perc", "Used share of the pool, 1 is all.", share)
        prefixes, compressions = scheduler.prefix_cache, scheduler.compressions
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Tokens of choices let in.", prefixes.num_queries),
            ("vllm:prefix_cache_hits", "Of them those known already.", prefixes.num_hits),
            ("vllm:num_preemptions", "Choices that lost their pages.", scheduler.num_preemptions),
            ("kvfold:compressions", "Of choices, to their budgets.", compressions.num_done),
            ("kvfold:evicted_tokens", "Averaged over groups of heads.", compressions.num_evicted),
        ):
            found = CounterMetricFamily(name, text, labels=["model_name"])
            found.add_metric([self.model], value)
            yield found
        held = GaugeMetricFamily("kvfold:pool_bytes", "Of pages.", labels=["model_name", "state"])
        for state, count in (
            ("total", pool.num_bytes),
            ("used", used),
            ("kept", pool.evictable_bytes),
            ("free", pool.free_bytes),
        ):
            held.add_metric([self.model, state], count)
        yield held
        token = GaugeMetricFamily(
            "kvfold:token_bytes",
            "Of a token: uncompressed at 16 bits, with the dimensions that are kept, with their "
            "bits, and in pages.",
            labels=["model_name", "axis"],
        )
        for axis, size in (
            ("uncompressed", 2 * geometry.full_numbers),
            ("dimensions", layout.spec.bytes_per_token()),
            ("bits", layout.bits_per_token / 8),
            ("pages", layout.page_bytes / layout.page),
        ):
            token.add_metric([self.model, axis], size)
        yield token
        if self.contexts:
            yield self._loaded()
        yield self._config()

    def _loaded(self) -> Metric:
        prefixes = self.llm.engine.scheduler.prefix_cache
        labels = ["model_name", "context"]
        found = GaugeMetricFamily(
            "kvfold:context_bytes", "Of a packed context in the pool; 0: not loaded.", labels=labels
        )
        for name, context in self.contexts.items():
            size = context.num_bytes if prefixes.is_loaded(context) else 0
            found.add_metric([self.model, name], size)
        return found

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        found = GaugeMetricFamily(name, text, labels=["model_name"])
        found.add_metric([self.model], value)
        return found

    def _config(self) -> Metric:
        """vLLM's way: settings are labels."""
        cache, pool = self.llm.cache, self.llm.runner.pool
        said = {
            "model_name": self.model,
            "block_size": str(pool.layout.page),
            "num_gpu_blocks": str(pool.num_bytes // pool.layout.page_bytes),
            "bits": str(cache.bits),
            "enable_prefix_caching": str(self.llm.shares_no_prefix is None),
            "evict": str(cache.evict),
            "keep_tokens": str(cache.keep_tokens),
            "repair": str(cache.repair),
            "max_cache_tokens": str(cache.max_cache_tokens),
        }
        found = GaugeMetricFamily("vllm:cache_config_info", "Of the cache.", labels=list(said))
        found.add_metric(list(said.values()), 1)
        return found
