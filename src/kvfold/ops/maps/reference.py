"""The maps around attention in plain PyTorch. Shapes as in `ops.maps`."""

import torch
from torch import Tensor

from kvfold.ops.common.head_products import up_project
from kvfold.ops.maps import EntryMaps, OutputMaps, with_mean


def pack_entries(maps: EntryMaps) -> None:
    """Return None: plain PyTorch reads the weights as they are."""


def pack_outputs(maps: OutputMaps) -> None:
    """Return None: plain PyTorch reads the weights as they are."""


def score_space(
    maps: EntryMaps, query: Tensor, key: Tensor | None, value: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Like `ops.maps.score_space`."""
    grouped = query.unflatten(1, (len(maps.key_up), -1))
    q = torch.einsum("nhgd,hdr->hgnr", grouped, maps.key_up).flatten(0, 1)
    if key is None or value is None:
        return q, None
    latents = value.reshape(len(value), *maps.value_down.shape[:2])
    keys = key.transpose(0, 1) @ maps.key_down - maps.key_shift[:, None]
    values = latents.transpose(0, 1) @ maps.value_down - maps.value_shift[:, None]
    parts = _parts(keys, maps.key_ranks) + _parts(values, maps.value_ranks)
    return q, torch.cat(parts, 1)


def _parts(z: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
    """Return latents z [n, N, r] without padding: tensors [N, .] to concatenate."""
    if all(rank == z.shape[2] for rank in ranks):
        return [z.transpose(0, 1).flatten(1)]
    return [latent[:, :rank] for latent, rank in zip(z, ranks, strict=True)]


def outputs(maps: OutputMaps, out: Tensor, into: Tensor | None = None) -> Tensor:
    """Like `ops.maps.outputs`."""
    return with_mean(maps, up_project(out, maps.value_up), into)
