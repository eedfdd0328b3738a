"""The model side of the engine: computes the logits of a batch, and compresses requests."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.base import AttentionContext, LayerAttention
from kvfold.attention.metadata import AttentionMetadata
from kvfold.attention.observer import SequenceChunk
from kvfold.attention.paged import PagedAttention, PagedContext
from kvfold.attention.selector import PLAIN
from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.rescoring import as_rescoring
from kvfold.cache.sharing import SharingPool
from kvfold.engine.requests.request import Batch, CacheParams, Request
from kvfold.engine.runner import cpu_fused
from kvfold.engine.runner.compiled import Compiled, wanted
from kvfold.engine.runner.demotion import Demoter
from kvfold.engine.runner.eviction import Eviction
from kvfold.engine.runner.graphs import DecodeGraphs, Forward
from kvfold.engine.runner.metadata import build_attention_metadata, decodes
from kvfold.engine.runner.page_demotion import PageDemoter
from kvfold.engine.runner.prompt_logprobs import score_prompts
from kvfold.engine.runner.repair import Repair
from kvfold.engine.runner.rescoring import Rescorer
from kvfold.maps.engine_model import forward_context
from kvfold.models.adapter import PAGED, Family, decoder_of
from kvfold.models.families import family_of
from kvfold.ops.backend import no_numba
from kvfold.ops.common.launch import upload
from kvfold.ops.store import Fill
from kvfold.utils.versions import cache_argument


class ModelRunner:
    """Runs a model over a pool: a folded one, or any model with sidecar maps (`layers`). The model
    cannot be used for anything else afterwards.

    policy: eviction policy (None: nothing is observed or evicted).
    cache: budget of requests that set none.
    tokenizer, twin: for re-scoring passes, see `Rescorer`.
    repairs: whether remaining entries are fitted after an eviction.
    family, layers: of a model with sidecar maps.
    """

    def __init__(
        self,
        model: Any,
        pool: SharingPool,
        *,
        policy: Policy | None = None,
        cache: CacheParams | None = None,
        seed: int = 0,
        tokenizer: Any = None,
        twin: Any = None,
        repairs: bool = False,
        family: type[Family] | None = None,
        layers: Sequence[LayerAttention] | None = None,
    ) -> None:
        hybrid = pool.layout.spec.hybrid is not None
        observed = policy is not None or hybrid
        assert not observed or pool.layout.tracked, "the entries need positions and metrics"
        self.model, self.pool, self.policy, self.device = model.eval(), pool, policy, pool.device
        self.model.config._attn_implementation = PAGED
        self.family = family or family_of(model.config)
        modules: list[Any] = list(self.family.attentions(model))
        self.has_sidecar = layers is not None
        layers = [module.description for module in modules] if layers is None else layers
        self.sliding = [
            (where, layer.window)
            for where, layer in zip(pool.layout.layer_groups, layers, strict=True)
            if layer.window is not None
        ]
        tracked = all(pool.layout.groups[where.start].layout.tracked for where, _ in self.sliding)
        assert tracked, "layers with a sliding window need positions, to free what left it"
        dtype = model.dtype if self.has_sidecar else modules[0].o_proj.weight.dtype
        self.attention = PagedAttention(layers, pool, policy, dtype)
        self.repair = Repair(self.attention.view, modules) if repairs else None
        how = policy, cache or CacheParams(), self.sliding, seed, self.repair
        self.eviction = Eviction(self.attention, *how)
        self.demoter = Demoter(self.eviction) if hybrid else None
        fewer_bits = pool.coarse is not None and not hybrid
        self.page_demoter = PageDemoter(self.attention.view) if fewer_bits else None
        self.rescorer = None
        if policy is not None and as_rescoring(policy):
            rope = pool.layout.spec.geometry.rope
            learned = None if rope else model.config.get_text_config().max_position_embeddings
            view = self.attention.view
            self.rescorer = Rescorer(view, policy, tokenizer, self.forward, twin, learned)
        self.compiled = None
        if wanted(self.device.type):
            self.compiled = Compiled(self.model, self.family)
            self.compiled.warm_up(self.forward, self.device)
        if no_numba(self.device.type) is None and not self.has_sidecar:
            cpu_fused.install(self.model, self.family)
        self.graphs = self._graphs() if self.attention.supports_graphs else None
        # Graphs of steps that read demoted pages, too: planning and launches for both pools.
        self.demoted_graphs = self._graphs() if self.graphs and self.page_demoter else None

    def _graphs(self) -> DecodeGraphs:
        most, padding_slot = self.pool.num_slots, self.pool.padding_slot
        assert padding_slot is not None, "graphs need a padding slot"
        return DecodeGraphs(self.device, most=most, padding_slot=padding_slot)

    @contextmanager
    def eager(self) -> Iterator[DecodeGraphs | None]:
        """Run without CUDA graphs, which it yields, and without torch.compile."""
        graphs, demoted = self.graphs, self.demoted_graphs
        self.graphs = self.demoted_graphs = None
        if self.compiled is not None:
            self.compiled.remove()
        try:
            yield graphs
        finally:
            self.graphs, self.demoted_graphs = graphs, demoted
            if self.compiled is not None:
                self.compiled.install()

    def dry_decodes(self, graphs: DecodeGraphs) -> None:
        """Run decode steps of the sizes for which kernels differ. For `CompileAhead`."""
        graphs.dry_run(self._decode)
        if self.page_demoter is not None:
            graphs.dry_run(self._decode_demoted)

    def dry_demotion(self) -> None:
        """Demote pages of a sequence without entries, which ends. For `CompileAhead`."""
        if self.page_demoter is None:
            return
        request = Request.unscheduled(self.pool.allocate_slot())
        try:
            num_tokens = min(self.page_demoter.least_tokens, self.pool.max_tokens)
            self.pool.extend([request.open_slot], [num_tokens])
            request.advance(num_tokens)
            if self.page_demoter.num_pages(request):
                self.page_demoter.demote(request)
        finally:
            self.pool.free_slot(request.open_slot)

    def warm_up(self) -> None:
        """Capture CUDA graphs, so that no request waits for it."""
        if self.graphs is not None:
            try:
                with torch.inference_mode():
                    self.graphs.warm_up(self._decode)
                    if self.demoted_graphs is not None:
                        self.demoted_graphs.warm_up(self._decode_demoted)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.graphs = self.demoted_graphs = None
                warnings.warn(
                    "CUDA graphs of the model could not be captured, so that steps take longer:"
                    f" {str(error).splitlines()[0]}",
                    stacklevel=2,
                )

    def _tensor(self, values: list[int]) -> Tensor:
        return upload(np.array(values, dtype=np.int64), self.device)

    @property
    def can_rewind(self) -> bool:
        """Whether `Pool.truncate` to earlier lengths restores an earlier state of a sequence. Not
        if entries were packed (residual), left a sliding or an exact window, or were demoted
        meanwhile."""
        demotes, layout = self.demoter or self.page_demoter, self.pool.layout
        return not (self.sliding or layout.residual or layout.window or demotes)

    # -- forward ------------------------------------------------------------------------------

    @property
    def supports_async(self) -> bool:
        """See `Runner`: if steps run as CUDA graphs, and only the scheduler frees pages."""
        return self.graphs is not None and not self.sliding

    @property
    def supports_long_chunks(self) -> bool:
        """See `Runner`: if a kernel computes prefill attention, and nothing is observed."""
        plain = self.supports_async and self.policy is None
        return plain and set(PLAIN).isdisjoint(self.attention.selected.prefill)

    @property
    def prefill_multiple(self) -> int:
        """See `Runner`."""
        return 1 if self.policy is None else self.policy.scorer.prefill_multiple

    @torch.inference_mode()
    def run(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        """Run a batch and write its cache entries. Returns logits [chunks with logits, V] of the
        model's dtype, which the next call may overwrite. tokens: see `Runner.run`."""
        graphs: DecodeGraphs | None = self.graphs
        decode: Forward = self._decode
        if self._reads_demoted(batch):
            graphs, decode = self.demoted_graphs, self._decode_demoted
        if graphs is not None and graphs.fits(batch):
            with self._observed(batch):
                return graphs.run(batch, decode, tokens)
        hidden = self._hidden(batch, tokens)
        score_prompts(batch, hidden, self._logits)
        ends, end = [], 0
        for chunk in batch.chunks:
            end += len(chunk.tokens)
            if chunk.wants_logits:
                ends.append(end - 1)
        return self._logits(hidden[self._tensor(ends)])

    def _reads_demoted(self, batch: Batch) -> bool:
        """Whether some sequence of a batch has pages in fewer bits."""
        slots = [chunk.request.open_slot for chunk in batch.chunks]
        return self.page_demoter is not None and self.attention.view.reads_coarse(slots)

    @torch.inference_mode()
    def run_all(self, batch: Batch) -> Tensor:
        """Run a batch, and return the logits of all its tokens, fp32 [N, V]."""
        return self._logits(self._hidden(batch)).float()

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.family.logits(self.model, hidden)

    def _hidden(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        """Last hidden states [N, D] of a batch."""
        if tokens is None:
            tokens = self._tensor([token for chunk in batch.chunks for token in chunk.tokens])
        positions = self._tensor(
            [chunk.start + i for chunk in batch.chunks for i in range(len(chunk.tokens))]
        )
        with self._observed(batch):
            return self.forward(tokens, positions, self._context_of(batch, positions))

    @property
    def can_retry(self) -> bool:
        """See `Runner`. Not with a residual, whose blocks may have been packed and overwritten; nor
        if attention was added to metrics, which would count it twice; nor with an exact
        window, whose oldest tokens a step overwrites."""
        layout, hybrid = self.pool.layout, self.pool.layout.spec.hybrid
        observed = self.attention.view.observing or (hybrid and hybrid.by == "attention")
        return not (layout.residual or layout.window or observed)

    @torch.inference_mode()
    def free_outside_windows(self, batch: Batch) -> None:
        """Free the pages that left all sliding windows, after a batch is computed."""
        for chunk in batch.chunks if self.sliding else ():
            self.eviction.slide(chunk.request.open_slot, chunk.start + len(chunk.tokens))

    @contextmanager
    def _observed(self, batch: Batch) -> Iterator[None]:
        """Around a step: buffer its decode queries, or add them to eviction metrics."""
        if (observer := self.attention.observer) is None:
            yield
            return
        starts = ((x.request, x.start) for x in batch.chunks)
        chunks = [
            SequenceChunk(x.open_slot, x, start, self.eviction.evicts(x)) for x, start in starts
        ]
        with observer.step(chunks, len(decodes(batch))):
            yield

    def forward(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Run the model on tokens, positions int64 [N]. Returns the last hidden states [N, D].

        The attention context is passed as transformers' cache argument: the context itself to a
        folded model, a stand-in cache to a model with sidecar maps.
        """
        with forward_context(context) as cache:
            out = decoder_of(self.model)(
                input_ids=tokens[None],
                position_ids=positions[None],
                **cache_argument(cache if self.has_sidecar else context),
                use_cache=False,
            )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _decode(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, demoted: bool = False
    ) -> Tensor:
        """Decode one token per sequence without host state, for CUDA graphs. demoted: sequences
        may have pages in fewer bits. Returns logits [B, V]."""
        metadata = AttentionMetadata.for_decodes(self.attention.view, slots, positions, demoted)
        last = torch.full_like(slots, -1)
        context = PagedContext(self.attention, [metadata], slots, last, positions.int())
        return self._logits(self.forward(tokens, positions, context))

    def _decode_demoted(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return self._decode(tokens, positions, slots, demoted=True)

    def _context_of(self, batch: Batch, positions: Tensor) -> PagedContext:
        """The attention context of a batch."""
        slots: list[int] = []
        index: list[int] = []
        for chunk in batch.chunks:
            slots += [chunk.request.open_slot] * len(chunk.tokens)
            index += range(-len(chunk.tokens), 0)
        fill = None
        if self.pool.layout.residual:
            entries = (self.pool.host_lengths[slots, 0] + index).tolist()
            fill = Fill.of(slots, entries, self.pool.layout.residual, self.device)
        calls = build_attention_metadata(
            self.attention.view, batch, positions, self.eviction.evicts
        )
        indices = self._tensor(slots), self._tensor(index), positions.int()
        layer_hook = None if self.repair is None else self.repair.watch(batch, self.eviction.evicts)
        return PagedContext(self.attention, calls, *indices, fill, layer_hook)

    # -- compression --------------------------------------------------------------------------

    def needs_compression(self, request: Request) -> bool:
        """See `Runner`. False if there is no room to copy the pages that it shares."""
        if self.demoter is not None:
            return self.demoter.is_over(request)
        return self.eviction.is_over(request) and self.pool.make_room_to_copy(request.open_slot)

    @property
    def demotes(self) -> bool:
        """See `Runner`."""
        return self.demoter is not None

    def num_demotable(self, request: Request) -> int:
        """See `Runner`."""
        return 0 if self.page_demoter is None else self.page_demoter.num_pages(request)

    @torch.inference_mode()
    def demote(self, request: Request) -> None:
        """See `Runner`."""
        assert self.page_demoter is not None
        self.page_demoter.demote(request)

    @torch.inference_mode()
    def compress(self, requests: list[Request]) -> None:
        """Evict entries of requests down to their budgets, and free the pages; or make entries
        low-rank. Shared pages are copied first: raises PoolFull if there are too few free pages."""
        if self.demoter is not None:
            self.demoter.demote_entries(requests)
            return
        for request in requests:
            self.pool.make_private(request.open_slot)
        if self.rescorer is not None:
            for request in requests:
                self.rescorer.score(request)
        self.eviction.compress(requests)

    def needs_rescoring(self, request: Request) -> bool:
        """See `Runner`."""
        return self.rescorer is not None and request.num_scored < request.num_computed

    def rescore_segment(self, request: Request) -> None:
        """See `Runner`."""
        assert self.rescorer is not None
        self.rescorer.rescore_segment(request)
