"""The model side of the engine: a batch to logits, and requests to fewer pages."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.base import AttentionContext, LayerAttention
from kvfold.attention.metadata import AttentionMetadata
from kvfold.attention.observer import StepPart
from kvfold.attention.paged import PagedAttention, PagedContext
from kvfold.attention.selector import PLAIN
from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.rescoring import as_rescoring
from kvfold.cache.sharing import SharingPool
from kvfold.engine.requests.request import Batch, CacheParams, Request
from kvfold.engine.runner import few
from kvfold.engine.runner.compiled import Compiled, wanted
from kvfold.engine.runner.demotion import Demotion
from kvfold.engine.runner.eviction import Eviction
from kvfold.engine.runner.graphs import DecodeGraphs
from kvfold.engine.runner.metadata import decodes, metadata_of
from kvfold.engine.runner.repair import Repair
from kvfold.engine.runner.replay import Replay
from kvfold.engine.runner.scored import score_prompts
from kvfold.maps.engine_model import forward_context
from kvfold.models.adapter import PAGED, Family, decoder_of
from kvfold.models.families import family_of
from kvfold.ops.backend import no_numba
from kvfold.ops.common.launch import upload
from kvfold.ops.store import Fill
from kvfold.utils.versions import cache_argument


class ModelRunner:
    """Runs a folded model over a pool. The model is the runner's own: it can do nothing else after.

    policy: what is evicted (None: nothing is observed or evicted); cache: budget of requests that
    set none of their own; tokenizer: for policies that read a context again; twin: as of `Replay`;
    repairs: whether rows that stay are fitted to what goes; family, layers: of a model whose maps
    lie beside its weights.
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
        observed = policy is not None or pool.low_rank is not None
        assert not observed or pool.layout.tracked, "this needs positions and metrics of rows"
        self.model, self.pool, self.policy, self.device = model.eval(), pool, policy, pool.device
        self.model.config._attn_implementation = PAGED
        self.family = family or family_of(model.config)
        modules: list[Any] = list(self.family.attentions(model))
        self.beside = layers is not None
        layers = [module.description for module in modules] if layers is None else layers
        self.sliding = [
            (where, layer.window)
            for where, layer in zip(pool.layout.layer_groups, layers, strict=True)
            if layer.window is not None
        ]
        tracked = all(pool.layout.groups[where.start].layout.tracked for where, _ in self.sliding)
        assert tracked, "layers with a sliding window need positions, to free what is behind it"
        dtype = model.dtype if self.beside else modules[0].o_proj.weight.dtype
        self.attention = PagedAttention(layers, pool, policy, dtype)
        self.repair = Repair(self.attention.view, modules) if repairs else None
        how = policy, cache or CacheParams(), self.sliding, seed, self.repair
        self.eviction = Eviction(self.attention, *how)
        self.demotion = None if pool.low_rank is None else Demotion(self.eviction)
        self.replay = None
        if policy is not None and as_rescoring(policy):
            rope = pool.layout.spec.geometry.rope
            learned = None if rope else model.config.get_text_config().max_position_embeddings
            view = self.attention.view
            self.replay = Replay(view, policy, tokenizer, self._forward, twin, learned)
        self.compiled = None
        if wanted(self.device.type):
            self.compiled = Compiled(self.model, self.family)
            self.compiled.warm_up(self._forward, self.device)
        if no_numba(self.device.type) is None and not self.beside:
            few.install(self.model, self.family)
        self.graphs = self._graphs() if self.attention.supports_graphs else None

    def _graphs(self) -> DecodeGraphs:
        most, spare = self.pool.num_slots, self.pool.padding_slot
        assert spare is not None, "graphs need a spare slot"
        return DecodeGraphs(self.device, most=most, spare=spare)

    def warm_up(self) -> None:
        """Do before requests come what would keep one waiting."""
        if self.graphs is not None:
            try:
                with torch.inference_mode():
                    self.graphs.warm_up(self._decode)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.graphs = None
                warnings.warn(
                    "the model's steps cannot be held in CUDA graphs, so that they take longer:"
                    f" {str(error).splitlines()[0]}",
                    stacklevel=2,
                )

    def _tensor(self, values: list[int]) -> Tensor:
        return upload(np.array(values, dtype=np.int64), self.device)

    @property
    def can_rewind(self) -> bool:
        """Whether `Pool.shrink` to earlier lengths takes a sequence back: not where pages were
        packed (a residual), freed behind a window, or became narrow since."""
        return not (self.sliding or self.pool.layout.residual or self.demotion)

    # -- forward ------------------------------------------------------------------------------

    @property
    def goes_ahead(self) -> bool:
        """As of `Runner`: where graphs hold steps, and none but the scheduler frees rows."""
        return self.graphs is not None and not self.sliding

    @property
    def long_chunks(self) -> bool:
        """As of `Runner`: where kernels read prompts, and nothing is observed."""
        plain = self.goes_ahead and self.policy is None
        return plain and set(PLAIN).isdisjoint(self.attention.selected.prefill)

    @property
    def unit(self) -> int:
        """As of `Runner`."""
        return 1 if self.policy is None else self.policy.scorer.prefill_multiple

    @torch.inference_mode()
    def run(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        """Store every chunk's rows; logits [chunks with logits, V] of the model's type, which the
        next call may overwrite. tokens: as of `Runner.run`."""
        if self.graphs is not None and self.graphs.fits(batch):
            graphs = self.graphs
            with self._observed(batch):
                return graphs.run(batch, self._decode, tokens)
        hidden = self._hidden(batch, tokens)
        score_prompts(batch, hidden, self._logits)
        ends, end = [], 0
        for chunk in batch.chunks:
            end += len(chunk.tokens)
            if chunk.wants_logits:
                ends.append(end - 1)
        return self._logits(hidden[self._tensor(ends)])

    @torch.inference_mode()
    def run_all(self, batch: Batch) -> Tensor:
        """The same with logits of every token, fp32 [N, V]."""
        return self._logits(self._hidden(batch)).float()

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.family.logits(self.model, hidden)

    def _hidden(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        """Last hidden states [N, D]."""
        if tokens is None:
            tokens = self._tensor([token for chunk in batch.chunks for token in chunk.tokens])
        positions = self._tensor(
            [chunk.start + i for chunk in batch.chunks for i in range(len(chunk.tokens))]
        )
        with self._observed(batch):
            return self._forward(tokens, positions, self._step(batch, positions))

    @property
    def repeatable(self) -> bool:
        """Whether `run` may be called again with a part of a batch that it failed for: not where a
        full tail was packed meanwhile, and its place written over, nor where attention was added to
        the metrics of rows, which would then count it twice and keep others."""
        return not (self.pool.layout.residual or self.attention.view.observing)

    @torch.inference_mode()
    def slide(self, batch: Batch) -> None:
        """Free what no token after a batch that is done sees."""
        for chunk in batch.chunks if self.sliding else ():
            self.eviction.slide(chunk.request.open_slot, chunk.start + len(chunk.tokens))

    @contextmanager
    def _observed(self, batch: Batch) -> Iterator[None]:
        """Around a step: its decoding queries are kept, or added to metrics."""
        if (observer := self.attention.observer) is None:
            yield
            return
        each = ((x.request, x.start) for x in batch.chunks)
        turns = [StepPart(x.open_slot, x, start, self.eviction.evicts(x)) for x, start in each]
        with observer.step(turns, len(decodes(batch))):
            yield

    def _forward(self, tokens: Tensor, positions: Tensor, step: AttentionContext) -> Tensor:
        """tokens, positions int64 [N] -> last hidden states [N, D]."""
        with forward_context(step) as here:
            out = decoder_of(self.model)(
                input_ids=tokens[None],
                position_ids=positions[None],
                **cache_argument(here if self.beside else step),
                use_cache=False,
            )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _decode(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """One token a sequence, with nothing from the host: logits [B, V]."""
        part = AttentionMetadata.for_decodes(self.attention.view, slots, positions)
        last = torch.full_like(slots, -1)
        step = PagedContext(self.attention, [part], slots, last, positions.int())
        return self._logits(self._forward(tokens, positions, step))

    def _step(self, batch: Batch, positions: Tensor) -> PagedContext:
        slots: list[int] = []
        index: list[int] = []
        for chunk in batch.chunks:
            slots += [chunk.request.open_slot] * len(chunk.tokens)
            index += range(-len(chunk.tokens), 0)
        fill = None
        if self.pool.layout.residual:
            rows = (self.pool.host_lengths[slots, 0] + index).tolist()
            fill = Fill.of(slots, rows, self.pool.layout.residual, self.device)
        parts = metadata_of(self.attention.view, batch, positions, self.eviction.evicts)
        where = self._tensor(slots), self._tensor(index), positions.int()
        watch = None if self.repair is None else self.repair.watch(batch, self.eviction.evicts)
        return PagedContext(self.attention, parts, *where, fill, watch)

    # -- fewer rows ---------------------------------------------------------------------------

    def needs_compression(self, request: Request) -> bool:
        if self.demotion is not None:
            return self.demotion.is_over(request)
        return self.eviction.is_over(request) and self.pool.can_make_private(request.open_slot)

    @property
    def demotes(self) -> bool:
        """As of `Runner`: tokens of a sequence become narrow as it goes on."""
        return self.demotion is not None

    @torch.inference_mode()
    def compress(self, requests: list[Request]) -> None:
        """Evict to each one's budget and give the pages back to the pool. Pages that others read
        are copied first: raises PoolFull where there is no room. Or make rows narrow."""
        if self.demotion is not None:
            self.demotion.demote(requests)
            return
        for request in requests:
            self.pool.make_private(request.open_slot)
        if self.replay is not None:
            for request in requests:
                self.replay.score(request)
        self.eviction.compress(requests)

    def unread(self, request: Request) -> bool:
        """As of `Runner`: for policies that read a context again."""
        return self.replay is not None and request.num_scored < request.num_computed

    def read(self, request: Request) -> None:
        """As of `Runner`."""
        assert self.replay is not None
        self.replay.read(request)
