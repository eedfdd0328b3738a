"""Decode attention on keys rebuilt from latents of any width and of several precisions.

Two passes, as in `triton`: weights by `scores_pieces`, then values by `common.values_triton`.
"""
# mypy: allow-untyped-defs

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.ops import one_pass
from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.codes_triton import factor
from kvfold.ops.common.launch import launch_options
from kvfold.ops.common.pages import LayerPages, owner_of, words_of
from kvfold.ops.common.pieces import value_heads, value_pieces, widest_value
from kvfold.ops.common.plan import power_of_two
from kvfold.ops.common.split import SplitPlan, plan_split
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.common.values_triton import SPAN, attend_values
from kvfold.ops.latent_decode.groups import Layer
from kvfold.ops.latent_decode.maps import KeyMaps, halves_of
from kvfold.ops.latent_decode.pieces import HEAD_FIELDS, PIECE_FIELDS, KeyPieces, key_pieces
from kvfold.ops.latent_decode.scores_pieces import piece_score_kernel
from kvfold.ops.one_pass.rebuilt import drift_of

SCORES = Tuning(block=64, stages=2, warps=4, slices=2)


@dataclass(frozen=True, eq=False)
class PieceMaps:
    """A layer's maps as `piece_score_kernel` takes them."""

    up: Tensor
    sums: Tensor
    means: Tensor


def plan_layers(
    q: Tensor,
    layers: Sequence[Layer],
    lengths: Tensor,
    rows: int,
    maps: Sequence[KeyMaps] = (),
) -> list[SplitPlan] | list[one_pass.OnePassPlan]:
    """As `ops.latent_decode.plan_layers`: in one pass where that serves all of the layers, whose
    maps these are, and rows are many."""
    groups = [groups for _, groups in layers]
    queries, head_dim = q.shape[1] // len(owner_of(groups[0])), q.shape[2]
    whole = len(maps) == len(layers) and rows >= one_pass.ROWS and not any(x.biased for x in maps)
    if whole and all(
        one_pass.serves(tuple(own), queries, lengths.device, head_dim)
        and drift_of(x, head_dim, queries) is not None
        for own, x in zip(groups, maps, strict=True)
    ):
        return one_pass.plan_layers(groups, lengths, queries, rebuilt=True)
    keys = [key_pieces(x, queries, lengths.device) for x in groups]
    tables = [(x.heads, x.cost) for x in keys]
    return plan_split(groups, tables, lengths, queries, rows, SCORES)


def latent_decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, maps: KeyMaps,
    plan: SplitPlan | one_pass.OnePassPlan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `ops.latent_decode.latent_decode`."""
    arena, tables, lengths, groups = pages
    queries = q.shape[1] // len(maps.up)
    if isinstance(plan, one_pass.OnePassPlan):
        return one_pass.decode(q, pages, slots, scale, plan, maps)
    keys = key_pieces(groups, queries, q.device)
    values = value_pieces(groups, queries, q.device)
    if plan is None:
        counts = lengths[slots]
        rows = counts.numel() * tables.shape[2] * groups[0].layout.page
        (plan,) = plan_layers(q, [(maps.layer, groups)], counts, rows)
    assert isinstance(plan, SplitPlan), "one pass is planned with a step's maps"
    if (key := (groups, q.dtype)) not in maps.packed:
        maps.packed[key] = pack(maps, keys, q.dtype)
    packed, cut, room = maps.packed[key], plan.cuts[0], plan.room
    rope, coded = maps.rope, keys.forms[0][0] < 16
    assert q.stride()[1:] == (q.shape[2], 1), "a sequence's queries are one block"
    assert rope.shape[1] == packed.means.shape[-1], "the table is of another head dim"
    piece_score_kernel[(plan.scores.starts.shape[0] - 1,)](
        q, q.stride(0), packed.up, packed.sums, packed.means, rope, rope.view(torch.float16),
        maps.angles, room.weights, room.tops, words_of(arena, torch.uint16 if coded else q.dtype),
        words_of(arena, torch.int32), tables, tables.stride(0), tables.stride(1), lengths,
        lengths.stride(0), slots, keys.heads, keys.pieces, plan.bases, plan.scores.starts,
        scale * LOG2_E,
        FORMS=keys.forms, HEAD_FIELDS=HEAD_FIELDS, PIECE_FIELDS=PIECE_FIELDS, G=len(groups),
        HK=len(maps.up), NQ=q.shape[1] // len(groups), N=queries, NP=power_of_two(queries),
        D=q.shape[2], HALF=maps.rotary // 2, F=rope.shape[1], ZEROS=keys.zeros, SCALE=keys.scale,
        TRACKED=keys.tracked, BIASED=maps.biased, PAGE=groups[0].layout.page,
        ALIGN=keys.align, SPAN=SPAN, BLOCK=cut.block, STAGES=cut.stages, num_warps=cut.warps,
        maxnreg=cut.registers,
        **launch_options(q.device),
    )  # fmt: skip
    return attend_values(
        q, widest_value(groups), pages, slots, values, value_heads(groups) * queries,
        plan.values, plan.bases, room, plan.cuts[1],
    )  # fmt: skip


def pack(maps: KeyMaps, keys: KeyPieces, dtype: torch.dtype) -> PieceMaps:
    """Made once: waits for the device."""
    rank = maps.up.shape[-1]
    words_of_bits = dict(keys.forms)
    most = max(words * 16 // bits for bits, words in keys.forms)
    halves = halves_of(maps, rank + most)  # columns that no piece has are 0
    kept = dtype if keys.forms[0][0] == 16 else torch.float16
    device, pairs = halves.device, halves.shape[2]
    up, sums = [], []
    lines = keys.pieces.tolist()
    for head, line in enumerate(keys.heads.tolist()):
        for _, width, *_, column, bits in lines[line[HEAD_FIELDS] : line[-1]]:
            words, codes = words_of_bits[bits], 16 // bits
            own = halves.new_zeros(2, pairs, words * codes)
            own[..., :width] = halves[head, ..., column : column + width]
            large = torch.tensor([factor(bits, j) for j in range(codes)], device=device)
            each = (own.unflatten(-1, (words, codes)) / large).to(kept)
            total = (each.float() * large).sum((2, 3))
            low = 0.0 if keys.zeros or bits == 16 else (2**bits - 1) / 2
            up.append(each.permute(3, 0, 2, 1).flatten())
            sums.append(torch.cat((total * (-low / 2**24), total)))
    none = halves.new_zeros(1, 4, pairs)
    return PieceMaps(
        up=torch.cat(up) if up else none.to(kept),
        sums=torch.stack(sums) if sums else none,
        means=halves[..., -1].contiguous(),
    )
