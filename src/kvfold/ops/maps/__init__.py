"""Apply the linear maps around attention over a compressed cache, for the tokens of one step.

Before attention, queries, keys and values become queries in score space and cache entries; after
it, the weighted sums of values become the model's outputs.

Shapes: N tokens; Hq / Hk query / KV heads, G = Hq / Hk; d, dv head dims of keys and values; n value
latents, each shared by h adjacent heads; r, s largest ranks of keys and values; R numbers of a
cache entry; B sequences of T tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvfold.ops.backend import Operation
from kvfold.ops.common.recording import compute

__all__ = ["MAPS", "EntryMaps", "OutputMaps", "outputs", "score_space", "with_mean"]


def _unsupported(dtype: torch.dtype) -> str | None:
    return None if dtype.itemsize == 2 else f"numbers of {dtype}"


# Each module has `score_space` and `outputs`, and `pack_entries` and `pack_outputs`, which prepare
# the weights for them.
MAPS = Operation(__name__, {"triton": _unsupported})


@dataclass(frozen=True, kw_only=True, eq=False)
class EntryMaps:
    """Weights that turn queries, keys and values into score-space queries and cache entries.

    key_up, key_down [Hk, d, r] and key_shift [Hk, r]: one key latent per KV head. value_down
    [n, h dv, s], value_shift [n, s]: per value latent. key_ranks, value_ranks: numbers stored per
    latent; the maps are zero beyond them. head_dim: dv. queries: G. packed: weights in the layout
    that the kernel reads, None for plain PyTorch.
    """

    key_up: Tensor
    key_down: Tensor
    key_shift: Tensor
    value_down: Tensor
    value_shift: Tensor
    key_ranks: tuple[int, ...]
    value_ranks: tuple[int, ...]
    head_dim: int
    queries: int
    packed: Any = field(init=False)

    def __post_init__(self) -> None:
        assert len(self.key_ranks) == len(self.key_down), "a key latent a KV head"
        assert len(self.value_ranks) == len(self.value_down), "a rank a value latent"
        object.__setattr__(self, "packed", _module(self.key_up).pack_entries(self))

    @property
    def entry_width(self) -> int:
        """Numbers of a cache entry, R."""
        return sum(self.key_ranks) + sum(self.value_ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputMaps:
    """Weights that turn attention's weighted sums of values into the model's outputs.

    value_up [Hk, dv, s] and mean [Hk, dv]: per KV head. ranks: of each KV head's latent; the maps
    are zero beyond it. queries: G. packed: weights in the layout that the kernel reads, None for
    plain PyTorch.
    """

    value_up: Tensor
    mean: Tensor
    ranks: tuple[int, ...]
    queries: int
    packed: Any = field(init=False)

    def __post_init__(self) -> None:
        assert len(self.ranks) == len(self.value_up) == len(self.mean), "a rank a KV head"
        object.__setattr__(self, "packed", _module(self.value_up).pack_outputs(self))

    @property
    def output_width(self) -> int:
        """Numbers of a token's output, Hq dv."""
        return self.mean.numel() * self.queries


def score_space(
    maps: EntryMaps, query: Tensor, key: Tensor | None, value: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return queries [Hq, N, r] in score space, and the cache entries [N, R] of the tokens.

    query [N, Hq, d], key [N, Hk, d], value [N, n h, dv]: any strides. If another layer stores keys
    and values, key and value are None, and so are the entries.
    """
    result: tuple[Tensor, Tensor | None]
    result = _module(maps.key_up).score_space(maps, query, key, value)
    return result


def outputs(
    maps: OutputMaps, out: Tensor, into: Tensor | None = None, *, mapped: bool = False
) -> Tensor:
    """Map attention's sums, out [B, Hq, T, s], to the model's outputs [B, T, Hq dv].

    into: contiguous memory for the result, not used if autograd records the call. mapped: values
        were mapped before attention, so out is [B, Hq, T, dv] and only the mean is added.
    """
    if mapped:
        return with_mean(maps, out.transpose(1, 2).unflatten(2, (-1, maps.queries)), into)
    result: Tensor = _module(maps.value_up).outputs(maps, out, into)
    return result


def with_mean(maps: OutputMaps, out: Tensor, into: Tensor | None = None) -> Tensor:
    """Add the mean of each KV head to out [B, T, Hk, G, dv], in one pass: [B, T, Hq dv]."""
    if torch.is_grad_enabled() and out.requires_grad:
        return (out + maps.mean[:, None]).flatten(2)
    to = out.new_empty(*out.shape[:2], maps.output_width) if into is None else into
    compute(torch.add, out, maps.mean[:, None], out=to.view(out.shape))
    return to


def _module(weight: Tensor) -> Any:
    return MAPS.choose(weight.device.type, weight.dtype).module
