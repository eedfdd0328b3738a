"""The maps around attention in plain PyTorch. Shapes as in `ops.maps`."""

from functools import partial

import torch
from torch import Tensor

from kvfold.ops.common.head_products import up_project
from kvfold.ops.common.recording import compute, contiguous
from kvfold.ops.maps import EntryMaps, OutputMaps, with_mean


def pack_entries(maps: EntryMaps) -> None:
    """Return None: plain PyTorch reads the weights as they are."""


def pack_outputs(maps: OutputMaps) -> None:
    """Return None: plain PyTorch reads the weights as they are."""


_product_less = partial(torch.baddbmm, beta=-1)  # (shift, x, weight): x @ weight - shift


def score_space(
    maps: EntryMaps, query: Tensor, key: Tensor | None, value: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Like `ops.maps.score_space`."""
    grouped = query.unflatten(1, (len(maps.key_up), -1)).permute(1, 2, 0, 3)
    q = query.new_empty(*query.shape[:2], maps.key_up.shape[2])  # the layout that decoding reads
    to = q.unflatten(1, grouped.shape[:2]).permute(1, 2, 0, 3)
    compute(torch.matmul, grouped, maps.key_up[:, None], out=to)
    if key is None or value is None:
        return q.transpose(0, 1), None
    if value.stride()[1:] != (value.shape[2], 1):
        value = contiguous(value)
    latents = value.view(len(value), *maps.value_down.shape[:2]).transpose(0, 1)
    keys = maps.key_shift[:, None], key.transpose(0, 1), maps.key_down
    values = maps.value_shift[:, None], latents, maps.value_down
    sides = (keys, maps.key_ranks), (values, maps.value_ranks)
    entries = query.new_empty(len(query), maps.entry_width)
    parts = entries[:, : sum(maps.key_ranks)], entries[:, sum(maps.key_ranks) :]
    for part, (factors, ranks) in zip(parts, sides, strict=True):
        widest = factors[-1].shape[2]
        if all(rank == widest for rank in ranks):
            to = part.unflatten(1, (len(ranks), widest)).transpose(0, 1)
            compute(_product_less, *factors, out=to)
        else:
            compute(_without_padding, compute(_product_less, *factors), ranks, out=part)
    return q.transpose(0, 1), entries


def _without_padding(z: Tensor, ranks: tuple[int, ...], *, out: Tensor | None = None) -> Tensor:
    """The first ranks[i] columns of every latent of z [n, N, r] side by side: [N, .]."""
    parts = [latent[:, :rank] for latent, rank in zip(z, ranks, strict=True)]
    return torch.cat(parts, 1, out=out)


def outputs(maps: OutputMaps, out: Tensor, into: Tensor | None = None) -> Tensor:
    """Like `ops.maps.outputs`."""
    return with_mean(maps, up_project(out, maps.value_up), into)
