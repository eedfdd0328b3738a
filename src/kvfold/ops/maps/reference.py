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
    products = compute(torch.bmm, contiguous(grouped).flatten(1, 2), maps.key_up)
    q = products.unflatten(1, grouped.shape[1:3]).flatten(0, 1)
    if key is None or value is None:
        return q, None
    if value.stride()[1:] != (value.shape[2], 1):
        value = contiguous(value)
    latents = value.view(len(value), *maps.value_down.shape[:2]).transpose(0, 1)
    keys = compute(_product_less, maps.key_shift[:, None], key.transpose(0, 1), maps.key_down)
    values = compute(_product_less, maps.value_shift[:, None], latents, maps.value_down)
    return q, compute(_entries, maps, keys, values)


def _entries(maps: EntryMaps, keys: Tensor, values: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return cache entries [N, R] of keys [Hk, N, r] and values [n, N, s]."""
    parts = _parts(keys, maps.key_ranks) + _parts(values, maps.value_ranks)
    return torch.cat(parts, 1, out=out)


def _parts(z: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
    """Return latents z [n, N, r] without padding: tensors [N, .] to concatenate."""
    if all(rank == z.shape[2] for rank in ranks):
        return [z.transpose(0, 1).flatten(1)]
    return [latent[:, :rank] for latent, rank in zip(z, ranks, strict=True)]


def outputs(maps: OutputMaps, out: Tensor, into: Tensor | None = None) -> Tensor:
    """Like `ops.maps.outputs`."""
    return with_mean(maps, up_project(out, maps.value_up), into)
