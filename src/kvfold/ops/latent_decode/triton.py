"""Decode attention on pages whose keys are rebuilt from latents, by kernels: plan, passes, merge.

Shapes as in `rebuild`.

Two passes, because heads disagree on how to share: keys want one program a KV head, which keeps the
head's map A on chip; values want one program for all heads that read them. The first pass turns
every tile of BLOCK rows of a KV head into weights exp2(s - top), their tile's own top beside them;
its tiles are independent. The second is attention with given weights. The weights cost as many
bytes as Hq numbers a row, written and read once.
"""
# mypy: allow-untyped-defs

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.pages import words_of
from kvfold.ops.common.plan import padded_queries, padded_width, power_of_two
from kvfold.ops.decode.kernels import combine_kernel
from kvfold.ops.decode.triton import combine_options, launch_options
from kvfold.ops.latent_decode.fold_triton import fold_kernel
from kvfold.ops.latent_decode.plan import (
    SPAN,
    Packed,
    Passes,
    RebuildPlan,
    pack_maps,
    pieces,
    plan_layers,
)
from kvfold.ops.latent_decode.reference import KeyMaps, RebuildGroups, rebuild_groups
from kvfold.ops.latent_decode.scores_triton import score_kernel
from kvfold.ops.latent_decode.values_triton import value_kernel
from kvfold.spec import LayerSpec
from kvfold.spec.layout import Group

FOLDING = 1024  # programs, about, that fold queries


def decode(
    q: Tensor,
    arena: Tensor,
    tables: Tensor,
    lengths: Tensor,
    layer: LayerSpec,
    groups: Sequence[Group],
    slots: Tensor,
    scale: float,
    maps: KeyMaps,
    rope: Tensor,
    plan: RebuildPlan | None = None,
    passes: Passes | None = None,
) -> tuple[Tensor, Tensor]:
    """`rebuild.decode_reference` on the device. Returns the outputs and the log2-sum-exp2 of the
    scores, fp32 [B, Hq]. rope: `rebuild_plan.rope_table` of `maps.inv_freq` for all positions,
    which layers may share."""
    queries = q.shape[1] // len(maps.up)
    about = rebuild_groups(layer, tuple(groups), queries, arena.device)
    assert q.stride()[1:] == (q.shape[2], 1), "a sequence's queries are one block"
    if plan is None:
        rows = lengths[slots].numel() * tables.shape[2] * about.page
        own = [layer], [groups], lengths[slots], queries, q.shape[2], q.dtype, rows, passes
        plan = plan_layers(*own)[0]
    share = plan.passes.share(about)
    if (key := (about, q.dtype, share)) not in maps.packed:
        maps.packed[key] = pack_maps(maps, about, queries, q.dtype, share)
    packed = maps.packed[key]
    assert rope.shape[1] == packed.up.shape[-1], "the table is of another head dim"
    step = _Step(q, arena, tables, lengths, slots, len(groups), queries, about, plan)
    folded = step.fold(packed, maps.rotary, rope)
    step.score(packed, maps.rotary, rope, folded, scale)
    return step.attend_values()


@dataclass(frozen=True)
class _Step:
    """A layer's three launches, and a merge."""

    q: Tensor
    arena: Tensor
    tables: Tensor
    lengths: Tensor
    slots: Tensor
    num_groups: int
    queries: int
    about: RebuildGroups
    plan: RebuildPlan

    @property
    def _where(self) -> tuple[Tensor | int, ...]:
        steps = self.tables.stride(0), self.tables.stride(1)
        return self.tables, *steps, self.lengths, self.lengths.stride(0), self.slots

    @property
    def _same(self) -> dict[str, int | bool]:
        about = self.about
        return {
            "G": self.num_groups, "ZEROS": about.zeros, "PAGE": about.page, "ALIGN": about.align,
            "SPAN": SPAN, **launch_options(self.q.device),
        }  # fmt: skip

    def _heads(self, packed: Packed, rotary: int) -> dict[str, int]:
        drift = packed.drift
        return {
            "HG": self.about.heads[0], "N": self.queries, "NP": power_of_two(self.queries),
            "K": len(drift.powers), "D": self.q.shape[-1], "HALF": rotary // 2, "F": drift.fast,
            "PAIRS": packed.up.shape[-1], "BITS": self.about.bits[0], "REACH": drift.reach,
        }  # fmt: skip

    def fold(self, packed: Packed, rotary: int, rope: Tensor) -> tuple[Tensor, Tensor]:
        """The queries in latents' space, where pairs turn slowly."""
        about, drift, (batch, _, _) = self.about, packed.drift, self.q.shape
        runs = batch * self.num_groups
        stretches = self.plan.room.rows // drift.reach + 2 * runs if drift.powers.numel() else 1
        codes, words = packed.up.shape[1], packed.up.shape[3]
        columns = len(drift.powers) * power_of_two(self.queries)
        device, group_heads = self.q.device, about.heads[0]
        sizes = (
            (stretches, group_heads, codes, words, columns),
            (stretches, group_heads, 3, columns),
        )
        folded = torch.empty(sizes[0], dtype=packed.up.dtype, device=device)
        extra = torch.empty(sizes[1], dtype=torch.float32, device=device)
        if drift.powers.numel():
            items = runs * group_heads
            longest = -(-self.tables.shape[2] * about.page // drift.reach)
            fold_kernel[(max(1, min(longest, FOLDING // items)), items)](
                self.q, self.q.stride(0), packed.up, packed.sums, rope, drift.powers, folded, extra,
                *self._where[3:], self.plan.bases, G=self.num_groups, SPAN=SPAN, WORDS=words,
                WP=padded_width(words), SHARE=packed.share, ZEROS=about.zeros,
                num_warps=1 if words <= 64 else 4, **self._heads(packed, rotary),
                **launch_options(device),
            )  # fmt: skip
        return folded, extra

    def score(
        self,
        packed: Packed,
        rotary: int,
        rope: Tensor,
        folded: tuple[Tensor, Tensor],
        scale: float,
    ) -> None:
        """The first pass."""
        about, plan, tuning = self.about, self.plan, self.plan.passes.scores
        bits, (first, second), heads = about.bits[0], pieces(about), self._heads(packed, rotary)
        assert rope.shape[0] >= tuning.block, "the table is shorter than a tile"
        grid = (plan.scores.starts.shape[0] - 1,)
        inputs = (
            packed.sums, rope, rope.view(torch.float16), *folded, plan.room.weights,
            plan.room.tops, words_of(self.arena, self.q.dtype if bits == 16 else torch.uint16),
        )  # fmt: skip
        place = *self._where, about.keys, plan.bases, plan.scores.starts, scale * LOG2_E
        cut = {"W0": first, "W1": second, "num_warps": tuning.warps, "maxnreg": tuning.registers}
        if plan.passes.heads:
            from kvfold.ops.latent_decode import scores_gluon as rebuild_scores_gluon

            alike = about.narrowest[0] == about.widths[0]
            rebuild_scores_gluon.score_kernel[grid](
                self.q, self.q.stride(0), packed.beside, *inputs,
                words_of(self.arena, torch.float16), *place, G=self.num_groups,
                HEADS=plan.passes.heads, LATENTS=plan.passes.heads // packed.share,
                WIDTH=about.widths[0] * bits // 16 if alike else 0, VECTOR=min(8, about.align),
                ZEROS=about.zeros, PAGE=about.page, SPAN=SPAN, **cut, **heads,
                **launch_options(self.q.device),
            )  # fmt: skip
            return
        score_kernel[grid](
            self.q, self.q.stride(0), packed.up, *inputs, words_of(self.arena, torch.int32),
            *place, TRACKED=about.tracked,
            EXACT=about.narrowest[0] * bits == 16 * (first + second), BLOCK=tuning.block,
            STAGES=tuning.stages, **cut, **heads, **self._same,
        )  # fmt: skip

    def attend_values(self) -> tuple[Tensor, Tensor]:
        """The second pass, and the merge of its parts."""
        q, about, plan = self.q, self.about, self.plan
        bits, tune, slices, room = about.bits[1], plan.passes.values, plan.values, plan.room
        out = q.new_empty(*q.shape[:2], about.widths[1])
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        heads = about.heads[1] * self.queries
        widths = {
            "N": heads,
            "GP": padded_queries(heads),
            "DO": out.shape[-1],
            "DV": room.part.shape[-1],
        }
        value_kernel[(slices.starts.shape[0] - 1,)](
            out, lse, room.part, room.part_ml, room.weights, room.tops,
            words_of(self.arena, q.dtype if bits == 16 else torch.uint16),
            words_of(self.arena, torch.int32), *self._where, about.values, plan.bases,
            slices.starts, slices.counts,
            V=len(about.values), NQ=about.heads[0] * self.queries, BITS=bits,
            EXACT=about.narrowest[1] == room.part.shape[-1], BLOCK=tune.block,
            STAGES=tune.stages, num_warps=tune.warps, maxnreg=tune.registers,
            **widths, **self._same,
        )  # fmt: skip
        items = slices.counts.shape[0]
        combine_kernel[(items, heads)](
            out, lse, room.part, room.part_ml, about.values, slices.firsts, slices.counts,
            slices.firsts, G=len(about.values), ORDER=False, **widths, **launch_options(q.device),
            **combine_options(slices.starts.shape[0], items, widths["DV"]),
        )  # fmt: skip
        return out, lse
