"""Prefill one long prompt on all ranks of a process group.

Shapes: N tokens of the prompt, n of this rank; D width, V vocabulary, R numbers of a cache entry.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache

from kvfold.attention.base import AttentionContext
from kvfold.engine.api.llm import LLM
from kvfold.engine.api.pack import check_pages
from kvfold.engine.requests.packed import PackedContext
from kvfold.hub.checkpoint import spec_of
from kvfold.layout.pages import plain_spec
from kvfold.models.adapter import PAGED
from kvfold.models.copies import shared_copy
from kvfold.models.families import check_model, family_of
from kvfold.models.fold import fold_plain
from kvfold.models.positions import entries_of
from kvfold.models.rotary import LONG_ROPE, rope_type
from kvfold.parallel.context import UlyssesContext
from kvfold.parallel.mixed import MixedRankContext
from kvfold.parallel.shares import check_low_rank, shares_of, token_counts
from kvfold.utils.errors import SettingError
from kvfold.utils.versions import cache_argument


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefilled:
    """The result of a prefill.

    token_ids int64 [N]: of the prompt.
    logits [V]: after the last token, on every rank.
    counts: tokens of each rank; a rank's tokens are consecutive.
    hidden [n, D]: last hidden states of this rank's tokens.
    entries: cache entries [n, R] of this rank's tokens per layer; empty if they were not kept.
    """

    token_ids: Tensor
    logits: Tensor
    counts: tuple[int, ...]
    hidden: Tensor
    entries: tuple[Tensor, ...]


class SequenceParallel:
    """A model whose prompts are prefilled by all ranks of a group (Ulysses; ZDC §5.3).

    Each rank has the whole model on its own device, and N / P of a prompt's tokens; for attention
    it has some heads of all tokens. With a compressed model, ranks exchange compressed numbers:
    queries and keys of r numbers per head (or the latents from which keys are reconstructed), and
    compressed outputs.
    """

    def __init__(
        self,
        model: Any,
        group: dist.ProcessGroup | None = None,
        *,
        low_rank_exchange: bool = False,
    ) -> None:
        """model: a causal LM of transformers, folded or not, which is not changed; or a kvfold.LLM,
            whose engine can go on with the prompts (`context`).
        group: ranks in the order of a prompt's tokens (None: all ranks).
        low_rank_exchange: for a model compressed with `hybrid`: send the low-rank queries, keys and
            values of unimportant tokens, which then attend and are attended to at that rank
            (`MixedRankContext`). Off, all tokens are sent at full rank.

        Raises SettingError without a process group, if this process is not in the group, and for
        models and engines that cannot be split or have no low rank; raises ValueError if the ranks'
        models or settings differ.
        """
        self.llm = model if isinstance(model, LLM) else None
        if self.llm is None:
            check_model(model, "a loaded causal LM, such as kvfold.load gives, or a kvfold.LLM")
            if model.config._attn_implementation == PAGED:
                raise SettingError(
                    "`model` belongs to an engine already: give the kvfold.LLM itself, or load the"
                    " model again"
                )
        else:
            _check_engine(self.llm)
            model = self.llm.model
        self.group = _group(group, model.device)
        if rope_type(model.config) in LONG_ROPE:
            raise SettingError(
                f"`model` has rope_type {rope_type(model.config)!r}, whose angles depend on how "
                "long a prompt is, and each rank sees only a part: prefill it on one device"
            )
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.folded, self._forward = True, self._run_model
        if self.llm is not None:
            runner = self.llm.runner
            self.model, self.family = model, runner.family
            self.spec, self._forward = runner.pool.layout.spec, runner.forward
        else:
            saved = spec_of(model)
            self.family, self.folded = family_of(model.config), saved is not None
            self.spec = saved or plain_spec(self.family.geometry(model.config))
            self.model = shared_copy(model).eval()
        description = f"{self.spec} {model.dtype}".encode()
        self._agree(description, "another model", "load the same one on every rank")
        setting = repr(low_rank_exchange).encode()
        self._agree(setting, "another low_rank_exchange", "give every rank the same")
        if low_rank_exchange:
            check_low_rank(self.spec)
        self.low_rank_exchange = low_rank_exchange
        if not self.folded:
            fold_plain(self.model, self.spec)
        self.model.config._attn_implementation = PAGED
        geometry = self.spec.geometry
        self.shares = [shares_of(layer, geometry, self.size) for layer in self.spec.layers]

    def _run_model(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Last hidden states [n, D] of tokens at positions int64 [n]."""
        out = self.model.base_model(
            input_ids=tokens[None],
            position_ids=positions[None],
            **cache_argument(context),
            use_cache=False,
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int] | Tensor, *, keep_entries: bool = False) -> Prefilled:
        """Prefill a prompt: the same N token ids on every rank, at least one per rank.

        Collective: every rank must call it. keep_entries: keep the cache entries of this rank's
            tokens. Raises SettingError for invalid ids and for too few or too many, and ValueError
            if the ranks' ids differ.
        """
        tokens = self._checked(ids)
        counts = token_counts(len(tokens), self.size)
        context = UlyssesContext(self.shares, counts, self.group, keep_entries)
        if self.low_rank_exchange:
            context = MixedRankContext(self.shares, counts, self.group, keep_entries, self.spec)
        positions = torch.arange(context.tokens.start, context.tokens.stop, device=tokens.device)
        with nullcontext() if self.llm is None else self.llm.engine.lock.hold():
            hidden = self._forward(tokens[positions], positions, context)
        logits = self.family.logits(self.model, hidden[-1])
        dist.broadcast(logits, dist.get_global_rank(self.group, self.size - 1), group=self.group)
        return Prefilled(
            token_ids=tokens,
            logits=logits,
            counts=tuple(counts),
            hidden=hidden,
            entries=tuple(context.entries),
        )

    def context(self, prompt: Prefilled, rank: int = 0) -> PackedContext | None:
        """The prompt as a packed context on rank `rank`, whose LLM goes on with it:
        `llm.generate(question, context=context)`. None on the other ranks. Collective.

        Entries are sent layer by layer and quantised on that rank. Raises SettingError if this was
        made with a model and not an LLM, if the entries were not kept, and on rank `rank` if they
        do not fit its pool.
        """
        _check_entries(prompt)
        if self.llm is None:
            raise SettingError(
                "`model`: a context is for an engine, and this is a model alone: make it with"
                " SequenceParallel(kvfold.LLM(...)), or use `cache`"
            )
        if rank not in range(self.size):
            raise SettingError(f"`rank` must be in 0..{self.size - 1}, got {rank!r}")
        entries = (self._sent(x, prompt.counts, rank) for x in prompt.entries)
        try:
            if rank != self.rank:
                return None
            return self.llm.pack_entries(prompt.token_ids.tolist(), entries)
        finally:
            for _ in entries:  # others wait until theirs are taken
                pass

    @torch.inference_mode()
    def cache(self, prompt: Prefilled) -> DynamicCache:
        """The cache entries of all ranks as a transformers cache, with which the original model can
        go on, on any rank. Collective. Raises SettingError if the entries were not kept."""
        _check_entries(prompt)
        if self.llm is not None:
            raise SettingError(
                "`model`: an engine's entries are for its own pages: use `context`, or make it with"
                " SequenceParallel(kvfold.load(...))"
            )
        cache = DynamicCache(config=self.model.config)
        g = self.spec.geometry
        for layer, rank_entries in enumerate(prompt.entries):
            entries = self._gathered(rank_entries, prompt.counts)[None]
            rotated = g.rope and self.spec.layers[layer].keys == "pre_rope"
            positions = torch.arange(entries.shape[1], device=entries.device)[None]
            sides = entries_of(entries, positions if rotated else None)
            if not self.folded:
                heads = entries.unflatten(-1, (2, g.num_kv_heads, g.head_dim))
                sides = heads[:, :, 0].transpose(1, 2), heads[:, :, 1].transpose(1, 2)
            cache.update(*sides, layer)
        return cache

    def _gathered(self, entries: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather [n, R] of all ranks: [N, R]."""
        parts = [entries.new_empty(count, entries.shape[1]) for count in counts]
        parts[self.rank].copy_(entries)
        for rank, part in enumerate(parts):
            dist.broadcast(part, dist.get_global_rank(self.group, rank), group=self.group)
        return torch.cat(parts)

    def _sent(self, entries: Tensor, counts: Sequence[int], to: int) -> Tensor:
        """Gather [n, R] of all ranks on rank `to`: [N, R], and [0, R] on the others. In one
        exchange, for which NCCL is connected already: `send` and `recv` connect pairs anew."""
        width = entries.shape[1]
        sizes = [count * width if self.rank == to else 0 for count in counts]
        sent = [entries.numel() if rank == to else 0 for rank in range(self.size)]
        received = entries.new_empty(sum(sizes))
        dist.all_to_all_single(received, entries.flatten(), sizes, sent, group=self.group)
        return received.view(-1, width)

    def _checked(self, ids: Sequence[int] | Tensor) -> Tensor:
        """The ids as int64 [N]. All ranks raise an error that occurs on one of them, because none
        could go on."""
        tokens = _tensor(ids)
        text = "" if tokens is None else repr(tokens.tolist())
        self._agree(text.encode(), "other ids", "give every rank the whole prompt")
        if tokens is None:
            raise SettingError(f"`ids` must be the token ids of one prompt; got {ids!r:.100}")
        if tokens.ndim != 1 or tokens.dtype not in (torch.int64, torch.int32):
            raise SettingError(
                "`ids` must be the token ids of one prompt, whole numbers in one dimension; got"
                f" {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        limit = self.model.config.max_position_embeddings
        if not self.size <= len(tokens) <= limit:
            raise SettingError(
                f"`ids` must be {self.size} tokens at least, one a rank, and {limit} at most, the"
                f" model's positions; got {len(tokens)}"
            )
        lowest, highest = (int(x) for x in tokens.aminmax())
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if lowest < 0 or highest >= vocabulary:
            raise SettingError(
                f"`ids` must be of the model's {vocabulary} tokens; got some from {lowest} to"
                f" {highest}"
            )
        return tokens.to(self.model.device, torch.int64)

    def _agree(self, content: bytes, what: str, way_out: str) -> None:
        """Raises ValueError if ranks pass different bytes. Collective."""
        digest = int.from_bytes(sha256(content).digest()[:8], signed=True)
        mine = torch.tensor([digest], device=self.model.device)
        all_digests = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(all_digests, mine, group=self.group)
        if different := [
            rank for rank, x in enumerate(all_digests) if int(x) != int(all_digests[0])
        ]:
            listed = ", ".join(map(str, different))
            raise ValueError(f"rank {listed} has {what} than rank 0: {way_out}")


def _check_entries(prompt: Prefilled) -> None:
    """Raises SettingError if the cache entries were not kept."""
    if not prompt.entries:
        raise SettingError("`prompt` has no cache entries: prefill it with keep_entries=True")


def _check_engine(llm: LLM) -> None:
    """Raises SettingError if an engine's prompts cannot be prefilled by several ranks."""
    check_pages(llm.runner)
    if llm.runner.policy is not None:
        raise SettingError(
            "`model` evicts tokens by what it sees of their attention, of which each rank has a"
            " part: leave `evict` out"
        )
    geometry = llm.runner.pool.layout.spec.geometry
    has_sinks = any(layer.has_sinks for layer in llm.runner.attention.layers)
    if has_sinks or geometry.value_dim not in (None, geometry.head_dim):
        raise SettingError(
            "`model` has attention sinks, or values of another width than its keys, which several"
            " ranks cannot attend to: prefill it on one device"
        )


def _tensor(ids: Any) -> Tensor | None:
    """The ids as a tensor; None if that is impossible."""
    try:
        return torch.as_tensor(ids)
    except (RuntimeError, TypeError, ValueError):
        return None


def _group(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    """The group (None: of all ranks), after checking that this process and a model on `device` can
    use it. Raises SettingError."""
    if not dist.is_available() or not dist.is_initialized():
        raise SettingError(
            "`group`: this process is in no process group: start it with torchrun, and call"
            " torch.distributed.init_process_group first"
        )
    group = group or dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise SettingError(
            f"`group`: this process, rank {dist.get_rank()} of {dist.get_world_size()}, is none of"
            " its ranks: call it on those alone"
        )
    backend, wanted = dist.get_backend(group), "nccl" if device.type == "cuda" else "gloo"
    if backend in ("nccl", "gloo") and backend != wanted:
        raise SettingError(
            f"`group` is of backend {backend!r}, and the model is on {device}: make it with"
            f" {wanted!r}, or move the model"
        )
    return group
