"""The maps of one layer: how keys and values are projected before they are stored, and projected
back.

Shapes: B batch, T tokens; Hq / Hk query / KV heads, G = Hq / Hk; d, dv head dims of keys and
values; n value latents, each of h adjacent heads; r, s widest key and value latent. Shorter latents
are padded with zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.models.fold import LatentMaps

NAMES = ("key_down", "key_up", "key_shift", "value_down", "value_up", "value_shift", "value_mean")
ZEROS = 8  # so that widths stay a multiple of what kernels want
NEAR = 2**-10  # by how much of its length fp16 may change a direction, which is 2^-11 in its range


@dataclass(frozen=True, kw_only=True, eq=False)
class Maps:
    """Projections of one layer whose keys are scored as stored.

    key_down, key_up [Hk, d, r], key_shift [Hk, r]: key_down^T k - key_shift is stored and scored by
    key_up^T q. A shift adds a constant to all scores of a query, which softmax ignores. With capped
    scores or sinks it is zero.

    value_down, value_up [n, h dv, s], value_shift [n, s], value_mean [Hk, dv]: for the values of h
    heads value_down^T v - value_shift is stored. Attention outputs are projected by value_up, and
    value_mean is added. With sinks, shift and mean are zero, because the weights do not add up to
    one.
    """

    key_down: Tensor
    key_up: Tensor
    key_shift: Tensor
    value_down: Tensor
    value_up: Tensor
    value_shift: Tensor
    value_mean: Tensor

    names: ClassVar[tuple[str, ...]] = NAMES  # tensors in the model's dtype

    @classmethod
    def of(cls, keys: Sequence[LatentMaps], values: Sequence[LatentMaps]) -> "Maps":
        """Maps from a layer's latents: one key latent per KV head, and value latents of equally
        many heads each."""
        value_mean = torch.cat([x.mean for x in values])
        return cls(
            key_down=stacked([x.down for x in keys]),
            key_up=stacked([x.up for x in keys]),
            key_shift=stacked([x.down.mT @ x.mean for x in keys]),
            value_down=stacked([x.down for x in values]),
            value_up=stacked([x.up for x in values]),
            value_shift=stacked([x.down.mT @ x.mean for x in values]),
            value_mean=value_mean.view(len(keys), -1),
        )

    @property
    def num_heads(self) -> int:
        """KV heads."""
        return self.key_down.shape[0]

    @property
    def head_dim(self) -> int:
        """Numbers of a key."""
        return self.key_down.shape[1]

    def check(self) -> None:
        """Raises ValueError for tensors whose shapes do not fit each other, and for numbers that
        are not finite."""
        for name in self.names:
            if not bool(getattr(self, name).isfinite().all()):
                raise ValueError(f"{name} holds NaN or infinite numbers")
        if self.value_mean.dim() != 2 or len(self.value_mean) != self.num_heads:
            has = list(self.value_mean.shape)
            raise ValueError(f"value_mean is {has}: no mean of each of {self.num_heads} KV heads")
        sides = (("key", self._key_numbers), ("value", self.value_mean.numel()))
        for side, numbers in sides:
            down, up, shift = (getattr(self, f"{side}_{x}") for x in ("down", "up", "shift"))
            whole = down.dim() == 3 and down.shape[0] * down.shape[1] == numbers
            if not whole or up.shape != down.shape or shift.shape != (*down.shape[::2],):
                shapes = ", ".join(str(list(x.shape)) for x in (down, up, shift))
                raise ValueError(
                    f"{side}_down, _up and _shift are {shapes}: no maps of {numbers} numbers"
                )

    @property
    def _key_numbers(self) -> int:
        """Numbers of the keys of all heads, per token."""
        return self.key_down.shape[:2].numel()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        return {name: getattr(self, name) for name in self.names}

    @property
    def value_ups(self) -> Tensor:
        """value_up per KV head [Hk, dv, s]."""
        return self.value_up.unflatten(1, (-1, self.value_mean.shape[1])).flatten(0, 1)

    def are_stored(self, k: Tensor, v: Tensor) -> bool:
        """Whether keys and values [B, heads, T, width] are projected already, judged by their
        shapes. Only for maps from `with_stored_shape`."""
        return (k.shape[3], v.shape[3], v.shape[1]) == self.stored_shape

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """(numbers of a stored key, numbers of a stored value, stored values per token)."""
        return self.key_down.shape[2], self.value_down.shape[2], self.value_down.shape[0]

    def with_stored_shape(self) -> "Maps":
        """The same maps, padded with zeros if necessary, so that stored keys and values are not
        empty and their shapes differ from the model's."""
        maps = self
        if not maps.key_down.shape[2]:
            maps = maps._padded("key")
        if not maps.value_down.shape[2]:
            maps = maps._padded("value")
        model = self.head_dim, self.value_mean.shape[1], self.num_heads
        return maps._padded("key") if maps.stored_shape == model else maps

    def _padded(self, side: Literal["key", "value"]) -> "Maps":
        """The same maps, which store extra zeros at the end of each key or value."""
        names = [f"{side}_{x}" for x in ("down", "up", "shift")]
        return replace(self, **{x: pad(getattr(self, x), (0, ZEROS)) for x in names})

    def digest(self) -> str:
        """SHA-256 of the maps as a sidecar holds them, in hex."""
        digest = sha256()
        for tensor in self.tensors().values():
            digest.update(tensor.detach().float().contiguous().cpu().numpy().data)
        return digest.hexdigest()

    def rotated(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Self:
        """Maps whose stored latents are rotated. keys, values: an orthogonal matrix [r, r] per
        latent."""
        k = torch.stack([_square(matrix, self.key_up.shape[2]) for matrix in keys]).to(
            self.key_down
        )
        v = torch.stack([_square(matrix, self.value_up.shape[2]) for matrix in values]).to(
            self.value_down
        )
        return replace(
            self,
            key_down=self.key_down @ k,
            key_up=self.key_up @ k,
            key_shift=(self.key_shift[:, None] @ k)[:, 0],
            value_down=self.value_down @ v,
            value_up=self.value_up @ v,
            value_shift=(self.value_shift[:, None] @ v)[:, 0],
        )

    def to(self, *args: object) -> Self:
        """The maps with another dtype or device, or like a tensor, as in `Tensor.to`."""
        return replace(self, **{name: getattr(self, name).to(*args) for name in self.names})

    def latents(self, k: Tensor, v: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Project keys [B, Hk, T, d] and values [B, Hk, T, dv] to their latents
        [B, latents, T, r and s]. positions int64 [B or 1, T]: of the tokens."""
        return self.keys(k), self.values(v)

    def stored(self, k: Tensor, v: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values [B, ., T, .] as a transformers cache stores them. Arguments as in
        `latents`."""
        return self.latents(k, v, positions)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, Hq, T, d], and the stored keys and values of all tokens in a transformers
        cache, converted to what the attention function takes."""
        return self.queries(q), k, self.per_head(v)

    def keys(self, k: Tensor) -> Tensor:
        """Project keys [B, Hk, T, d] to stored keys [B, Hk, T, r]."""
        return k @ self.key_down - self.key_shift[:, None]

    def values(self, v: Tensor) -> Tensor:
        """Project values [B, Hk, T, dv] to stored values [B, n, T, s]."""
        n = self.value_down.shape[0]
        whole = v.unflatten(1, (n, -1)).transpose(2, 3).flatten(3)
        return whole @ self.value_down - self.value_shift[:, None]

    def queries(self, q: Tensor) -> Tensor:
        """Project queries [B, Hq, T, d] to [B, Hq, T, r], which score stored keys."""
        grouped = q.unflatten(1, (self.num_heads, -1))
        return torch.einsum("bhgtd,hdr->bhgtr", grouped, self.key_up).flatten(1, 2)

    def per_head(self, z: Tensor) -> Tensor:
        """Stored values [B, n, T, s] per KV head [B, Hk, T, s], without a copy if a latent serves
        one head or all."""
        n, heads = z.shape[1], self.num_heads
        if n == heads:
            return z
        if n == 1:
            return z.expand(-1, heads, -1, -1)
        return z.repeat_interleave(heads // n, 1)

    def outputs(self, out: Tensor) -> Tensor:
        """Project attention outputs [B, T, Hq, s] back to the model's dimension [B, T, Hq, dv]."""
        grouped = out.unflatten(2, (self.num_heads, -1))
        mapped = torch.einsum("bthgs,hds->bthgd", grouped, self.value_ups)
        return (mapped + self.value_mean[:, None]).flatten(2, 3)


def rounded(latent: LatentMaps) -> LatentMaps:
    """The same maps in fp32, rounded to numbers that fp16 can represent, so that a sidecar takes 16
    bits for each. Tensors out of fp16's range are not rounded.

    up is adapted to the rounded down, so that down^T up = I up to the rounding of up alone.
    """
    down = _in_half(latent.down)
    inverse = torch.linalg.inv(down.double().mT @ latent.up.double())
    return LatentMaps(down, _in_half(latent.up.double() @ inverse), latent.mean.float())


def _in_half(x: Tensor) -> Tensor:
    """Round x [n, r] to fp16 numbers, as fp32, if that changes each column by at most NEAR of its
    norm; else return x."""
    x = x.float()
    half = x.half().float()
    near = (half - x).norm(dim=0) <= NEAR * x.norm(dim=0)
    return half if bool(near.all()) else x


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors [.., r] that differ only in r, padded with zeros to the widest."""
    widest = max(x.shape[-1] for x in parts)
    return torch.stack([pad(x, (0, widest - x.shape[-1])) for x in parts])


def _square(x: Tensor, size: int) -> Tensor:
    """Pad x [r, r] with zeros to [size, size]."""
    padding = size - len(x)
    return pad(x, (0, padding, 0, padding))
