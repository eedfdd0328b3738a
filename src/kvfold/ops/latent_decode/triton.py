"""Launches the kernel `triton`: decode attention with reconstructed keys, in two passes.

Chosen on CUDA for latents of one segment, at most `groups.WIDEST` numbers wide. Keys are best
computed with a program per KV head, which keeps the head's map A on chip; values with one program
for all heads that read them. So the first pass (`scores_triton`, on Hopper `scores_gluon`) turns
every tile of a KV head into softmax weights exp2(s - top) and the maxima `top`; its tiles are
independent. The second pass (`values_triton`) sums values with these weights. The weights cost as
many bytes as Hq numbers per entry, written and read once. For slowly rotating pairs `fold_kernel`
runs before (see `maps.Drift`), and `common.combine` merges partial results at the end.

Shapes as in `latent_decode`.
"""
# mypy: allow-untyped-defs

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.combine import combine
from kvfold.ops.common.launch import launch_options, multiprocessors
from kvfold.ops.common.pages import LayerPages, words_of
from kvfold.ops.common.plan import Slices, padded_queries, padded_width, power_of_two
from kvfold.ops.common.plan_triton import plan_slices
from kvfold.ops.common.recording import launch
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.latent_decode.fold_triton import fold_kernel
from kvfold.ops.latent_decode.groups import LatentGroups, Layer, latent_groups
from kvfold.ops.latent_decode.maps import KeyMaps, Packed, pack_maps
from kvfold.ops.latent_decode.plan import SPAN, LatentPlan, Passes, workspace
from kvfold.ops.latent_decode.scores_triton import score_kernel
from kvfold.ops.latent_decode.values_triton import value_kernel

FOLDING = 1024  # approximate number of programs of `fold_kernel`


def plan_layers(
    q: Tensor,
    layers: Sequence[Layer],
    lengths: Tensor,
    rows: int,
    maps: Sequence[KeyMaps] = (),
    passes: Passes | None = None,
) -> list[LatentPlan]:
    """See `ops.latent_decode.plan_layers`. passes: tuning of both passes, by default the fastest
    measured."""
    queries = q.shape[1] // sum(len(latent.heads) for latent in layers[0][0].key_latents)
    tables = [latent_groups(*layer, queries, lengths.device) for layer in layers]
    biased = any(x.biased for x in maps)
    passes = passes or Passes.of(tables, queries, q.shape[2], biased)
    first, second = passes.scores, passes.values
    counts = lengths.unflatten(1, (len(layers), -1))  # [B, L, G]
    units = tables[0].heads[0] // max(1, passes.heads)
    scores = _cut(counts.repeat_interleave(units, 2).flatten(1), first, len(layers))
    owners = torch.stack([x.values[:, 6] for x in tables]).long().expand(len(lengths), -1, -1)
    values = _cut(counts.gather(2, owners).flatten(1), second, len(layers))
    spans = (-(-counts.transpose(0, 1) // SPAN)).flatten(1)
    bases = (spans.cumsum(1) - spans).int()
    parts = values.starts.shape[-2] - 1 + values.counts.shape[-1]
    room = workspace(tables, queries, q.dtype, rows, counts[:, 0].numel(), parts)
    return [
        LatentPlan(scores.layer(i), values.layer(i), bases[i], room, passes)
        for i in range(len(layers))
    ]


def _cut(lengths: Tensor, tuning: Tuning, num_layers: int) -> Slices:
    """Divide tiles among programs, each tile at the same cost; starting an item costs as much as a
    tile.

    lengths int [B, items of a sequence in all layers].
    """
    device = lengths.device
    cost = torch.ones(num_layers, lengths.shape[1] // num_layers, dtype=torch.int32, device=device)
    number = tuning.slices * multiprocessors(device)
    return plan_slices(lengths, None, cost, tuning.block, 1, number, 1)[0]


def latent_decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, maps: KeyMaps,
    plan: LatentPlan | None = None, *, passes: Passes | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.latent_decode.latent_decode`. passes: for the plan if it is made here."""
    queries = q.shape[1] // len(maps.up)
    groups = latent_groups(maps.layer, pages.groups, queries, q.device)
    assert q.stride()[1:] == (q.shape[2], 1), "the queries of a sequence must be contiguous"
    if plan is None:
        lengths = pages.lengths[slots]
        rows = lengths.numel() * pages.tables.shape[2] * groups.page
        plan = plan_layers(q, [(maps.layer, pages.groups)], lengths, rows, passes=passes)[0]
    share = plan.passes.share(groups)
    if (key := (groups, q.dtype, share)) not in maps.packed:
        maps.packed[key] = pack_maps(maps, groups, queries, q.dtype, share)
    packed = maps.packed[key]
    assert maps.rope.shape[1] == packed.up.shape[-1], "the RoPE table belongs to another head dim"
    step = _Step(q, pages, slots, maps, packed, queries, groups, plan)
    step.score(*step.fold(), scale)
    return step.attend_values()


@dataclass(frozen=True)
class _Step:
    """A layer's three launches and the merge of partial results."""

    q: Tensor
    pages: LayerPages
    slots: Tensor
    maps: KeyMaps
    packed: Packed
    queries: int
    groups: LatentGroups
    plan: LatentPlan

    @property
    def _where(self) -> tuple[Tensor | int, ...]:
        _, tables, lengths, _ = self.pages
        steps = tables.stride(0), tables.stride(1)
        return tables, *steps, lengths, lengths.stride(0), self.slots

    @property
    def _same(self) -> dict[str, int | bool]:
        groups = self.groups
        return {
            "G": len(self.pages.groups), "ZEROS": groups.zeros, "PAGE": groups.page,
            "ALIGN": groups.align, "SPAN": SPAN, **launch_options(self.q.device),
        }  # fmt: skip

    @property
    def _heads(self) -> dict[str, int]:
        drift = self.packed.drift
        return {
            "HG": self.groups.heads[0], "N": self.queries, "NP": power_of_two(self.queries),
            "K": len(drift.powers), "D": self.q.shape[-1], "HALF": self.maps.rotary // 2,
            "F": drift.fast, "PAIRS": self.packed.up.shape[-1], "BITS": self.groups.bits[0],
            "REACH": drift.reach,
        }  # fmt: skip

    def fold(self) -> tuple[Tensor, Tensor]:
        """Multiply queries by the map, for slowly rotating pairs: folded and extra of
        `fold_kernel`."""
        groups, packed, device = self.groups, self.packed, self.q.device
        drift, group_heads = packed.drift, groups.heads[0]
        runs = len(self.q) * len(self.pages.groups)
        stretches = self.plan.room.rows // drift.reach + 2 * runs if drift.powers.numel() else 1
        codes, words = packed.up.shape[1], packed.up.shape[3]
        columns = len(drift.powers) * power_of_two(self.queries)
        folded = packed.up.new_empty(stretches, group_heads, codes, words, columns)
        extra = folded.new_empty(stretches, group_heads, 3, columns, dtype=torch.float32)
        if drift.powers.numel():
            items = runs * group_heads
            longest = -(-self.pages.tables.shape[2] * groups.page // drift.reach)
            launch(
                fold_kernel, (max(1, min(longest, FOLDING // items)), items),
                self.q, self.q.stride(0), packed.up, packed.sums, self.maps.angles, drift.powers,
                folded, extra, *self._where[3:], self.plan.bases, G=len(self.pages.groups),
                SPAN=SPAN, WORDS=words, WP=padded_width(words), SHARE=packed.share,
                ZEROS=groups.zeros, num_warps=1 if words <= 64 else 4, **self._heads,
                **launch_options(device),
            )  # fmt: skip
        return folded, extra

    def score(self, folded: Tensor, extra: Tensor, scale: float) -> None:
        """Launch the first pass: weights of all entries into the workspace."""
        groups, plan, tuning = self.groups, self.plan, self.plan.passes.scores
        packed, rope, arena = self.packed, self.maps.rope, self.pages.arena
        bits, (first, second) = groups.bits[0], groups.pieces
        assert rope.shape[0] >= tuning.block, "the RoPE table is shorter than a tile"
        grid = (plan.scores.starts.shape[0] - 1,)
        angles = packed.sums, rope, rope.view(torch.float16)
        inputs = (
            folded, extra, plan.room.weights, plan.room.tops,
            words_of(arena, self.q.dtype if bits == 16 else torch.uint16),
        )  # fmt: skip
        place = *self._where, groups.keys, plan.bases, plan.scores.starts, scale * LOG2_E
        cut = {"W0": first, "W1": second, "num_warps": tuning.warps, "maxnreg": tuning.registers}
        if plan.passes.heads:
            from kvfold.ops.latent_decode import scores_gluon

            alike = groups.narrowest[0] == groups.widths[0]
            launch(
                scores_gluon.score_kernel, grid,
                self.q, self.q.stride(0), packed.up_by_share, *angles, *inputs,
                words_of(arena, torch.float16), *place, G=len(self.pages.groups),
                HEADS=plan.passes.heads, LATENTS=plan.passes.heads // packed.share,
                WIDTH=groups.widths[0] * bits // 16 if alike else 0, VECTOR=min(8, groups.align),
                ZEROS=groups.zeros, PAGE=groups.page, SPAN=SPAN, **cut, **self._heads,
                **launch_options(self.q.device),
            )  # fmt: skip
            return
        launch(
            score_kernel, grid,
            self.q, self.q.stride(0), packed.up, *angles, self.maps.angles, *inputs,
            words_of(arena, torch.int32), *place, TRACKED=groups.tracked,
            BIASED=self.maps.biased, EXACT=groups.narrowest[0] * bits == 16 * (first + second),
            BLOCK=tuning.block, STAGES=tuning.stages, **cut, **self._heads, **self._same,
        )  # fmt: skip

    def attend_values(self) -> tuple[Tensor, Tensor]:
        """Launch the second pass and merge its partial results."""
        q, groups, plan = self.q, self.groups, self.plan
        bits, tune, slices, room = groups.bits[1], plan.passes.values, plan.values, plan.room
        out = q.new_empty(*q.shape[:2], groups.widths[1])
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        heads = groups.heads[1] * self.queries
        widths = {
            "N": heads, "GP": padded_queries(heads), "DO": out.shape[-1], "DV": room.part.shape[-1],
        }  # fmt: skip
        launch(
            value_kernel, (slices.starts.shape[0] - 1,),
            out, lse, room.part, room.part_ml, room.weights, room.tops,
            words_of(self.pages.arena, q.dtype if bits == 16 else torch.uint16),
            words_of(self.pages.arena, torch.int32), *self._where, groups.values, plan.bases,
            slices.starts, slices.counts,
            V=len(groups.values), NQ=groups.heads[0] * self.queries, BITS=bits,
            EXACT=groups.narrowest[1] == room.part.shape[-1], BLOCK=tune.block,
            STAGES=tune.stages, num_warps=tune.warps, maxnreg=tune.registers,
            **widths, **self._same,
        )  # fmt: skip
        combine(out, lse, room.part, room.part_ml, groups.values, slices, heads, widths["DV"])
        return out, lse
