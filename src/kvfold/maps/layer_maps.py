"""The maps of one layer: what is stored of its keys and values, and what they come back as.

Shapes: B batch, T tokens; Hq / Hk query / KV heads, G = Hq / Hk; d, dv head dims of keys and
values; n value latents, each of h adjacent heads; r, s numbers that the widest key and value latent
store. Shorter latents are padded with zeros.
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
    """key_down, key_up [Hk, d, r], key_shift [Hk, r]: key_down^T k - key_shift is stored, and
    scored by key_up^T q. A shift adds the same to all scores of a query, which softmax does not
    see; where scores are capped or a sink stands beside them it is zero.

    value_down, value_up [n, h dv, s], value_shift [n, s], value_mean [Hk, dv]: of the values of h
    heads value_down^T v - value_shift is stored; what attention adds up of it comes back through
    value_up, plus value_mean. Both are zero where a sink stands beside the scores, since weights
    then add up to less than one.
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
        """Of a layer's latents: one of keys a KV head, those of values of as many heads each."""
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
        """Raises ValueError for tensors whose shapes do not belong together, and for numbers that
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
        """Of the keys of all heads."""
        return self.key_down.shape[:2].numel()

    def tensors(self) -> dict[str, Tensor]:
        """All that there is to save."""
        return {name: getattr(self, name) for name in self.names}

    @property
    def value_ups(self) -> Tensor:
        """value_up of every KV head [Hk, dv, s]."""
        return self.value_up.unflatten(1, (-1, self.value_mean.shape[1])).flatten(0, 1)

    def are_stored(self, k: Tensor, v: Tensor) -> bool:
        """Whether keys and values [B, heads, T, width] are as stored, by their shapes. Takes maps
        of `with_stored_shape`."""
        return (k.shape[3], v.shape[3], v.shape[1]) == self.stored_shape

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """Numbers of a key and of a value as stored, and how many values there are of a token."""
        return self.key_down.shape[2], self.value_down.shape[2], self.value_down.shape[0]

    def with_stored_shape(self) -> "Maps":
        """The same maps, which store other shapes than the model has, and something: where they do
        not, keys or values get zeros."""
        maps = self
        if not maps.key_down.shape[2]:
            maps = maps._padded("key")
        if not maps.value_down.shape[2]:
            maps = maps._padded("value")
        model = self.head_dim, self.value_mean.shape[1], self.num_heads
        return maps._padded("key") if maps.stored_shape == model else maps

    def _padded(self, side: Literal["key", "value"]) -> "Maps":
        """The same maps, which store zeros behind every key or value."""
        names = [f"{side}_{x}" for x in ("down", "up", "shift")]
        return replace(self, **{x: pad(getattr(self, x), (0, ZEROS)) for x in names})

    def digest(self) -> str:
        """What tells these maps from others, in hex: of the numbers as a sidecar holds them."""
        digest = sha256()
        for tensor in self.tensors().values():
            digest.update(tensor.detach().float().contiguous().cpu().numpy().data)
        return digest.hexdigest()

    def rotated(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Self:
        """With what every latent of keys and of values stores rotated, by [r, r] of its rank."""
        k = torch.stack([_square(q, self.key_up.shape[2]) for q in keys]).to(self.key_down)
        v = torch.stack([_square(q, self.value_up.shape[2]) for q in values]).to(self.value_down)
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
        """The same in another dtype, on another device, or as a tensor is."""
        return replace(self, **{name: getattr(self, name).to(*args) for name in self.names})

    def latents(self, k: Tensor, v: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys [B, Hk, T, d] and values [B, Hk, T, dv] of tokens at positions int64 [B or 1, T], as
        what the layer's plan stores of each."""
        return self.keys(k), self.values(v)

    def stored(self, k: Tensor, v: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same as a transformers cache stores them [B, ., T, .]."""
        return self.latents(k, v, positions)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, Hq, T, d], and what a transformers cache stores of all tokens, as attention
        takes them."""
        return self.queries(q), k, self.per_head(v)

    def keys(self, k: Tensor) -> Tensor:
        """Keys [B, Hk, T, d] as they are stored [B, Hk, T, r]."""
        return k @ self.key_down - self.key_shift[:, None]

    def values(self, v: Tensor) -> Tensor:
        """Values [B, Hk, T, dv] as they are stored [B, n, T, s]."""
        n = self.value_down.shape[0]
        whole = v.unflatten(1, (n, -1)).transpose(2, 3).flatten(3)
        return whole @ self.value_down - self.value_shift[:, None]

    def queries(self, q: Tensor) -> Tensor:
        """Queries [B, Hq, T, d] that score stored keys [B, Hq, T, r]."""
        grouped = q.unflatten(1, (self.num_heads, -1))
        return torch.einsum("bhgtd,hdr->bhgtr", grouped, self.key_up).flatten(1, 2)

    def per_head(self, z: Tensor) -> Tensor:
        """Stored values [B, n, T, s] for every KV head [B, Hk, T, s], without a copy where a latent
        serves one head or all."""
        n, heads = z.shape[1], self.num_heads
        if n == heads:
            return z
        if n == 1:
            return z.expand(-1, heads, -1, -1)
        return z.repeat_interleave(heads // n, 1)

    def outputs(self, out: Tensor) -> Tensor:
        """What attention adds up [B, T, Hq, s] as the model's own outputs [B, T, Hq, dv]."""
        grouped = out.unflatten(2, (self.num_heads, -1))
        mapped = torch.einsum("bthgs,hds->bthgd", grouped, self.value_ups)
        return (mapped + self.value_mean[:, None]).flatten(2, 3)


def rounded(latent: LatentMaps) -> LatentMaps:
    """The same maps, fp32, with numbers of down and up that fp16 holds, so that a sidecar takes 16
    bits for each. Tensors that are out of fp16's range stay as they are.

    up is adapted to the rounded down, so that down^T up = I up to the rounding of up alone.
    """
    down = _in_half(latent.down)
    inverse = torch.linalg.inv(down.double().mT @ latent.up.double())
    return LatentMaps(down, _in_half(latent.up.double() @ inverse), latent.mean.float())


def _in_half(x: Tensor) -> Tensor:
    """x [n, r] as fp32, with numbers that fp16 holds where that leaves its columns NEAR."""
    x = x.float()
    half = x.half().float()
    near = (half - x).norm(dim=0) <= NEAR * x.norm(dim=0)
    return half if bool(near.all()) else x


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Tensors [.., r] of as many numbers but the last dim's, as one, padded with zeros there."""
    widest = max(x.shape[-1] for x in parts)
    return torch.stack([pad(x, (0, widest - x.shape[-1])) for x in parts])


def _square(x: Tensor, size: int) -> Tensor:
    """x [r, r] in the corner of zeros [size, size]."""
    more = size - len(x)
    return pad(x, (0, more, 0, more))
