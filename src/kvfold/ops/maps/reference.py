"""Maps around attention in plain PyTorch. Shapes as in `ops.maps`."""

import torch
from torch import Tensor

from kvfold.ops.maps import EntryMaps, OutputMaps, with_mean


def pack_entries(maps: EntryMaps) -> None:
    """Nothing is packed."""


def pack_outputs(maps: OutputMaps) -> None:
    """Nothing is packed."""


def score_space(
    maps: EntryMaps, query: Tensor, key: Tensor | None, value: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """As `ops.maps.score_space`."""
    grouped = query.unflatten(1, (len(maps.key_up), -1))
    q = torch.einsum("nhgd,hdr->hgnr", grouped, maps.key_up).flatten(0, 1)
    if key is None or value is None:
        return q, None
    latents = value.reshape(len(value), *maps.value_down.shape[:2])
    sides = (
        (key, maps.key_down, maps.key_shift, maps.key_ranks),
        (latents, maps.value_down, maps.value_shift, maps.value_ranks),
    )
    parts = []
    for x, down, shift, ranks in sides:
        z = torch.baddbmm(shift[:, None], x.transpose(0, 1), down, beta=-1)
        parts += [latent[:, :rank] for latent, rank in zip(z, ranks, strict=True)]
    return q, torch.cat(parts, 1)


def outputs(maps: OutputMaps, out: Tensor, into: Tensor | None = None) -> Tensor:
    """As `ops.maps.outputs`."""
    grouped = out.unflatten(1, (-1, maps.queries))
    mapped = torch.einsum("bhgts,hds->bthgd", grouped, maps.value_up)
    return with_mean(maps, mapped, into)
