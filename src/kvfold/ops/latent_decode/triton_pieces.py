"""Launches the kernel `triton_pieces`: decode attention with keys reconstructed piece by piece.

Chosen on CUDA where `triton` does not support the latents: any width, segments of several bit
widths. It has two passes like `triton`: `scores_pieces` computes softmax weights, then
`common.values_triton` sums the values. If a Hopper GPU supports all layers in `ops.one_pass`
and there are at least `one_pass.ROWS` entries, `plan_layers` chooses that kernel instead.

Shapes as in `latent_decode`; M pieces of all KV heads (see `pieces.KeyPieces`).
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
from kvfold.ops.common.recording import launch
from kvfold.ops.common.split import SplitPlan, plan_split
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.common.values_triton import SPAN, attend_values
from kvfold.ops.latent_decode.groups import Layer
from kvfold.ops.latent_decode.maps import KeyMaps, halves_of
from kvfold.ops.latent_decode.pieces import HEAD_FIELDS, PIECE_FIELDS, KeyPieces, key_pieces
from kvfold.ops.latent_decode.scores_pieces import piece_score_kernel
from kvfold.ops.one_pass.reconstructed import drift_of

SCORES = Tuning(block=64, stages=2, warps=4, slices=2)


@dataclass(frozen=True, eq=False)
class PieceMaps:
    """A layer's maps as `piece_score_kernel` takes them: up, sums and means."""

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
    """See `ops.latent_decode.plan_layers`. Chooses one pass if it supports all layers, whose maps
    are passed, and `rows` is large enough."""
    groups = [groups for _, groups in layers]
    queries, head_dim = q.shape[1] // len(owner_of(groups[0])), q.shape[2]
    may_use_one_pass = (
        len(maps) == len(layers) and rows >= one_pass.ROWS and not any(x.biased for x in maps)
    )
    if may_use_one_pass and all(
        one_pass.serves(tuple(layer_groups), queries, lengths.device, head_dim)
        and drift_of(x, head_dim, queries) is not None
        for layer_groups, x in zip(groups, maps, strict=True)
    ):
        return one_pass.plan_layers(groups, lengths, queries, reconstructed=True)
    keys = [key_pieces(x, queries, lengths.device) for x in groups]
    tables = [(x.heads, x.cost) for x in keys]
    return plan_split(groups, tables, lengths, queries, rows, SCORES)


def latent_decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, maps: KeyMaps,
    plan: SplitPlan | one_pass.OnePassPlan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.latent_decode.latent_decode`."""
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
    assert isinstance(plan, SplitPlan), "without maps no one-pass plan is made"
    if (key := (groups, q.dtype)) not in maps.packed:
        maps.packed[key] = pack(maps, keys, q.dtype)
    packed, tuning, workspace = maps.packed[key], plan.cuts[0], plan.room
    rope, coded = maps.rope, keys.forms[0][0] < 16
    assert q.stride()[1:] == (q.shape[2], 1), "the queries of a sequence must be contiguous"
    assert rope.shape[1] == packed.means.shape[-1], "the RoPE table belongs to another head dim"
    launch(
        piece_score_kernel, (plan.scores.starts.shape[0] - 1,),
        q, q.stride(0), packed.up, packed.sums, packed.means, rope, rope.view(torch.float16),
        maps.angles, workspace.weights, workspace.tops,
        words_of(arena, torch.uint16 if coded else q.dtype), words_of(arena, torch.int32),
        tables, tables.stride(0), tables.stride(1), lengths, lengths.stride(0), slots,
        keys.heads, keys.pieces, plan.bases, plan.scores.starts,
        scale * LOG2_E,
        FORMS=keys.forms, HEAD_FIELDS=HEAD_FIELDS, PIECE_FIELDS=PIECE_FIELDS, G=len(groups),
        HK=len(maps.up), NQ=q.shape[1] // len(groups), N=queries, NP=power_of_two(queries),
        D=q.shape[2], HALF=maps.rotary // 2, F=rope.shape[1], ZEROS=keys.zeros, SCALE=keys.scale,
        TRACKED=keys.tracked, BIASED=maps.biased, PAGE=groups[0].layout.page,
        ALIGN=keys.align, SPAN=SPAN, BLOCK=tuning.block, STAGES=tuning.stages,
        num_warps=tuning.warps, maxnreg=tuning.registers,
        **launch_options(q.device),
    )  # fmt: skip
    return attend_values(
        q, widest_value(groups), pages, slots, values, value_heads(groups) * queries,
        plan.values, plan.bases, workspace, plan.cuts[1],
    )  # fmt: skip


def pack(maps: KeyMaps, keys: KeyPieces, dtype: torch.dtype) -> PieceMaps:
    """Convert a layer's maps for `piece_score_kernel`. Done once per layer: waits for the
    device."""
    rank = maps.up.shape[-1]
    words_of_bits = dict(keys.forms)
    most = max(words * 16 // bits for bits, words in keys.forms)
    halves = halves_of(maps, rank + most)  # zero in columns beyond every piece
    map_dtype = dtype if keys.forms[0][0] == 16 else torch.float16
    device, pairs = halves.device, halves.shape[2]
    up, sums = [], []
    records = keys.pieces.tolist()
    for head, record in enumerate(keys.heads.tolist()):
        for _, width, *_, column, bits in records[record[HEAD_FIELDS] : record[-1]]:
            words, codes = words_of_bits[bits], 16 // bits
            piece_map = halves.new_zeros(2, pairs, words * codes)
            piece_map[..., :width] = halves[head, ..., column : column + width]
            factors = torch.tensor([factor(bits, j) for j in range(codes)], device=device)
            rounded = (piece_map.unflatten(-1, (words, codes)) / factors).to(map_dtype)
            total = (rounded.float() * factors).sum((2, 3))
            low = 0.0 if keys.zeros or bits == 16 else (2**bits - 1) / 2
            up.append(rounded.permute(3, 0, 2, 1).flatten())
            sums.append(torch.cat((total * (-low / 2**24), total)))
    zeros = halves.new_zeros(1, 4, pairs)
    return PieceMaps(
        up=torch.cat(up) if up else zeros.to(map_dtype),
        sums=torch.stack(sums) if sums else zeros,
        means=halves[..., -1].contiguous(),
    )
