"""What attention over rebuilt keys is given beside pages: packed maps, angles, slices and room.

Shapes as in `rebuild`; L layers; GP query heads of a value latent, padded; I items of a pass, S
slices of it (see `plan`); W 16-bit words of a key row, of C codes; K powers of a `Drift`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.ops.backend import has_gluon
from kvfold.ops.common.plan import Slices, padded_queries, padded_width, power_of_two
from kvfold.ops.common.plan_triton import plan_slices
from kvfold.ops.decode.triton import launch_options, multiprocessors
from kvfold.ops.decode.tuning import Tuning
from kvfold.ops.latent_decode.reference import KeyMaps, RebuildGroups, rebuild_groups
from kvfold.spec import LayerSpec
from kvfold.spec.layout import Group

SPAN = 16  # rows that share a top
HOPPER_BLOCK = 64  # rows of a tile of `rebuild_scores_gluon`: what a warp group multiplies
REACHES = (512, 256, 128, 64)  # rows of a stretch
TOLERANCE = 1e-3  # of a cosine: less than bf16 rounds off


@dataclass(frozen=True, eq=False)
class Drift:
    """Pairs that turn slowly, from `fast` on: over `reach` rows their cosine and sine are
    polynomials, so that queries go through the map instead of these pairs of every key.

    powers fp32 [K, slow pairs]: coefficients of the offset from the stretch's middle over reach /
    2; even powers make up the cosine, odd ones the sine.
    """

    fast: int
    reach: int
    powers: Tensor


@dataclass(frozen=True, eq=False)
class Packed:
    """A layer's maps as kernels take them.

    up A^T [Hk, C, 2, W, F] by code of a word and half of the pairs; beside [Hk / share, C, W, share
    * 2 * fast]: of `share` heads both halves of the pairs that are rebuilt; sums fp32 [Hk, 6, F]:
    halves of mu, of what the codes' middle adds to A z, and of A's sums over the latent. All are
    multiplied by `KeyMaps.scaling` where they are rotated.
    """

    up: Tensor
    beside: Tensor
    share: int
    sums: Tensor
    drift: Drift


def find_drift(inv_freq: Tensor, pairs: int, queries: int) -> Drift:
    """The slower half of `pairs` on the longest stretch that K powers follow; none if none do.

    queries: query heads of a KV head. Waits for the device.
    """
    order, fast = num_powers(queries), pairs // 2
    freq = torch.zeros(pairs, dtype=torch.float64)
    freq[: len(inv_freq)] = inv_freq.double().cpu()
    for reach in REACHES if fast >= 16 else ():
        offset = torch.arange(-reach // 2, reach // 2, dtype=torch.float64)
        angles = offset[:, None] * freq[fast:]
        basis = (offset[:, None] * 2 / reach) ** torch.arange(order)
        powers, error = torch.zeros(order, pairs - fast, dtype=torch.float64), 0.0
        for first, wanted in ((0, angles.cos()), (1, angles.sin())):
            powers[first::2] = torch.linalg.lstsq(basis[:, first::2], wanted).solution
            missed = basis[:, first::2] @ powers[first::2] - wanted
            error = max(error, float(missed.abs().max()))
        if error < TOLERANCE:
            return Drift(fast, reach, powers.float().to(inv_freq.device))
    return no_drift(pairs, queries, inv_freq.device)


def no_drift(pairs: int, queries: int, device: torch.device) -> Drift:
    return Drift(pairs, REACHES[0], torch.zeros(num_powers(queries), 0, device=device))


def num_powers(queries: int) -> int:
    """As many as fill the 8 columns of a product, at least 4."""
    return max(4, 8 // power_of_two(queries))


def rope_table(inv_freq: Tensor, positions: int, head_dim: int) -> Tensor:
    """cos and sin of positions 0 .. as two fp16s of an int32 [positions + longest reach, F]; dims
    that are not rotated turn by 0. One for all layers with these angles."""
    pairs = torch.zeros(padded_width(head_dim // 2), device=inv_freq.device)
    pairs[: len(inv_freq)] = inv_freq
    number = torch.arange(positions + REACHES[0], device=inv_freq.device)
    angles = number[:, None].float() * pairs
    both = torch.stack((angles.cos(), angles.sin()), -1).half()
    return both.view(torch.int32)[..., 0]


def pack_maps(
    maps: KeyMaps, about: RebuildGroups, queries: int, dtype: torch.dtype, share: int
) -> Packed:
    """What kernels need of `maps`, made once: waits for the device."""
    bits, d, half = about.bits[0], maps.up.shape[1], maps.rotary // 2
    codes, words = 16 // bits, sum(pieces(about))
    up, mean = maps.up.float(), maps.mean.float()
    factor = torch.ones(d, device=up.device)
    factor[: 2 * half] = maps.scaling
    both = torch.cat((up, mean[..., None]), -1) * factor[:, None]
    rest = (d - 2 * half) // 2
    both = torch.cat((both[:, :half], both[:, 2 * half : 2 * half + rest],
                      both[:, half : 2 * half], both[:, 2 * half + rest :]), 1)  # fmt: skip
    padded = both.new_zeros(len(both), 2, padded_width(d // 2), codes * words + 1)
    padded[:, :, : d // 2, : up.shape[-1]] = both[..., :-1].unflatten(1, (2, -1))
    padded[:, :, : d // 2, -1] = both[..., -1].unflatten(1, (2, -1))
    by_code = padded[..., :-1].unflatten(-1, (words, codes)).permute(0, 4, 1, 3, 2)
    each = torch.ones(codes, device=up.device)
    each[1::2] = 16 if bits == 4 else 1  # unpack leaves these codes as many times as large
    packed = (by_code / each[:, None, None, None]).to(dtype if bits == 16 else torch.float16)
    kept = packed.float()
    total = (kept * each[:, None, None, None]).sum((1, 3))
    low = 0.0 if about.zeros else (2**bits - 1) / 2
    middle = total * (-low / 2**24)  # in units of unpacked codes
    sums = torch.cat((padded[..., -1], middle, total), 1).contiguous()
    num_pairs = padded.shape[2]
    if about.tracked:
        drift = no_drift(num_pairs, queries, up.device)
    else:
        drift = find_drift(maps.inv_freq, num_pairs, queries)
    beside = packed[..., : drift.fast].unflatten(0, (-1, share)).permute(0, 2, 4, 1, 3, 5)
    return Packed(packed.contiguous(), beside.flatten(3).contiguous(), share, sums, drift)


def pieces(about: RebuildGroups) -> tuple[int, int]:
    """Words of a key row as two powers of 2, the second 0 where one is as good."""
    words = max(16, about.widths[0] * about.bits[0] // 16)
    first = 1 << (words.bit_length() - 1)
    second = padded_width(words - first) if words > first else 0
    return (first, second) if second < first else (first + second, 0)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How both passes are cut. heads: KV heads of a program of `rebuild_scores_gluon`; 0: the other
    kernel scores."""

    scores: Tuning
    values: Tuning
    heads: int = 0

    def share(self, about: RebuildGroups) -> int:
        """How many of `heads` read the same latent, in a layer."""
        return self.heads if self.heads and about.heads[2] % self.heads == 0 else 1

    @classmethod
    def of(cls, abouts: Sequence[RebuildGroups], queries: int, head_dim: int) -> "Passes":
        """What was fastest on an H200 for rows as wide as these layers'; queries: of a KV head."""
        about = max(abouts, key=lambda x: x.widths)
        words, bits = sum(pieces(about)), about.bits[1]
        numbers = padded_width(about.widths[1]) * padded_queries(about.heads[1] * queries)
        scores = Tuning(block=64, stages=2, warps=4, slices=2)
        if words <= 64:  # one warp's registers hold a tile: no barriers
            scores = Tuning(block=32, stages=3, warps=1, slices=8)
        elif words > 256:
            scores = Tuning(block=64, stages=1, warps=8, slices=1)
        values = Tuning(block=32 if bits == 16 else 64, stages=3, warps=4, slices=2)
        if numbers <= 1024:
            values = Tuning(block=64, stages=3, warps=1, slices=8)
        elif numbers > 8192:
            values = Tuning(block=32, stages=2, warps=8, slices=1)
        heads = hopper_heads(abouts, queries, head_dim)
        most = words * 16 // about.bits[0]
        if heads and most <= 64 and all(x.narrowest[0] == x.widths[0] for x in abouts):
            scores = Tuning(block=HOPPER_BLOCK, stages=1, warps=4, slices=3, registers=168)
        elif heads:
            scores = Tuning(block=HOPPER_BLOCK, stages=1, warps=4, slices=1 if most > 256 else 2)
        return cls(scores=scores, values=values, heads=heads)


def hopper_heads(abouts: Sequence[RebuildGroups], queries: int, head_dim: int) -> int:
    """KV heads of a program of `rebuild_scores_gluon`; 0 where it does not serve: it takes rows
    without positions, codes of up to 256 numbers, heads of at most 128, 3 to 8 queries a KV head,
    and sm_90."""
    plain = all(x.align % 4 == 0 and not x.tracked for x in abouts)
    if not has_gluon(abouts[0].keys.device) or not plain:
        return 0
    if head_dim > 128 or not 2 < queries <= 8:
        return 0
    # Maps of two heads that are wider would not fit; codes become numbers in registers.
    wide = any(sum(pieces(x)) * 16 // x.bits[0] > 256 for x in abouts)
    if wide and any(x.bits[0] < 16 for x in abouts):
        return 0
    return 1 if wide or any(x.heads[0] % 2 for x in abouts) else 2


@dataclass(frozen=True)
class Workspace:
    """Where passes leave what the next one reads; layers take turns.

    weights [rows / SPAN, heads of a group, SPAN], tops fp32 of the same but rows; part, part_ml as
    `direct_triton` has them; rows: most of a layer.
    """

    weights: Tensor
    tops: Tensor
    part: Tensor
    part_ml: Tensor
    rows: int


@dataclass(frozen=True)
class RebuildPlan:
    """One layer's slices of both passes, and where the spans of every (sequence, group) begin,
    int32 [B * G]."""

    scores: Slices
    values: Slices
    bases: Tensor
    room: Workspace
    passes: Passes


def plan_layers(
    layers: Sequence[LayerSpec],
    groups: Sequence[Sequence[Group]],
    lengths: Tensor,
    queries: int,
    head_dim: int,
    dtype: torch.dtype,
    rows: int,
    passes: Passes | None = None,
) -> list[RebuildPlan]:
    """Plans of layers with equally many groups and latents, made together. No host sync.

    lengths int [B, groups of all layers], the step's own rows included; queries: query heads of a
    KV head; rows: at most as many has a layer, its groups added up.
    """
    each = zip(layers, groups, strict=True)
    abouts = [rebuild_groups(one, tuple(own), queries, lengths.device) for one, own in each]
    about = abouts[0]
    passes = passes or Passes.of(abouts, queries, head_dim)
    first, second = passes.scores, passes.values
    counts = lengths.unflatten(1, (len(layers), -1))  # [B, L, G]
    units = about.heads[0] // max(1, passes.heads)
    scores = _cut(counts.repeat_interleave(units, 2).flatten(1), first, len(layers))
    owners = torch.stack([x.values[:, 6] for x in abouts]).long().expand(len(lengths), -1, -1)
    values = _cut(counts.gather(2, owners).flatten(1), second, len(layers))
    spans = (-(-counts.transpose(0, 1) // SPAN)).flatten(1)
    bases = (spans.cumsum(1) - spans).int()
    parts = values.starts.shape[-2] - 1 + values.counts.shape[-1]
    room = _room(abouts, queries, dtype, rows, counts[:, 0].numel(), parts)
    return [
        RebuildPlan(
            Slices(scores.starts[i], scores.firsts[i], scores.counts[i]),
            Slices(values.starts[i], values.firsts[i], values.counts[i]),
            bases[i],
            room,
            passes,
        )
        for i in range(len(layers))
    ]


def _cut(lengths: Tensor, tuning: Tuning, num_layers: int) -> Slices:
    """Tiles of equal cost; beginning an item costs as much as one. lengths int [B, items of a
    sequence in all layers]."""
    device = lengths.device
    cost = torch.ones(num_layers, lengths.shape[1] // num_layers, dtype=torch.int32, device=device)
    number = tuning.slices * multiprocessors(device)
    options = launch_options(device)
    return plan_slices(lengths, None, cost, tuning.block, 1, number, 1, options)[0]


def _room(
    abouts: Sequence[RebuildGroups],
    queries: int,
    dtype: torch.dtype,
    rows: int,
    runs: int,
    parts: int,
) -> Workspace:
    """runs: sequences times groups; parts: value slices and items (see `plan.Slices`)."""
    about = abouts[0]
    device, (group_heads, value_heads, _) = about.keys.device, about.heads
    spans = rows // SPAN + runs
    # Of codes, at least as many words as a product has rows.
    width = max(*(padded_width(x.widths[1]) for x in abouts), 256 // about.bits[1])
    kept = dtype if about.bits[1] == 16 else torch.float16
    part = torch.empty(parts, padded_queries(value_heads * queries), width, device=device)
    return Workspace(
        weights=torch.empty(spans, group_heads * queries, SPAN, dtype=kept, device=device),
        tops=torch.empty(spans, group_heads * queries, device=device),
        part=part,
        part_ml=part.new_empty(parts, 2, part.shape[1]),
        rows=rows,
    )
