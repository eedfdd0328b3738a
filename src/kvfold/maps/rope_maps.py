"""The maps of a layer whose keys are stored before RoPE: for each score they are reconstructed,
then rotated.

Shapes: as in `layer_maps`; S cached tokens; m key latents, each of h adjacent heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.layout import LayerSpec
from kvfold.maps.layer_maps import NAMES, Maps, stacked
from kvfold.maps.rotation import Rotation
from kvfold.models.fold import LatentMaps
from kvfold.models.positions import DIGITS, digits_of, positions_of
from kvfold.utils.errors import SettingError


@dataclass(frozen=True, kw_only=True, eq=False)
class RopeMaps(Maps):
    """Projections of one layer whose keys are stored before RoPE.

    key_down, key_up [m, h d, r], key_shift [m, r], key_mean [Hk, d]: for the unrotated keys of h
    heads key_down^T k - key_shift is stored. To score, key_up z + key_mean is rotated at its
    token's position. Keys and queries are in `rotation.order`.

    joint: keys and values of a latent's heads share its numbers; the sum of both projections is
        stored.

    A transformers cache stores a token's position next to its numbers, as DIGITS additional
    numbers. So positions follow whatever the cache does to its tokens: cropping, reordering,
    copying, dropping.
    """

    key_mean: Tensor
    rotation: Rotation
    joint: bool

    names: ClassVar[tuple[str, ...]] = (*NAMES, "key_mean")

    @classmethod
    def before_rope(
        cls, layer: LayerSpec, latents: Sequence[LatentMaps], rotation: Rotation
    ) -> "RopeMaps":
        """Maps from the latents of a layer, in its order. Their keys are in `rotation.order`."""
        pairs = list(zip(layer.latents, latents, strict=True))
        joint = layer.latents[0].side == "kv"
        if joint:
            keys, values = ([_half(x, i) for x in latents] for i in (0, 1))
        else:
            keys, values = ([x for latent, x in pairs if latent.side == s] for s in "kv")
        heads = sum(len(x.heads) for x in layer.key_latents)
        return cls(
            key_down=stacked([x.down for x in keys]),
            key_up=stacked([x.up for x in keys]),
            key_shift=stacked([x.down.mT @ x.mean for x in keys]),
            value_down=stacked([x.down for x in values]),
            value_up=stacked([x.up for x in values]),
            value_shift=stacked([x.down.mT @ x.mean for x in values]),
            value_mean=torch.cat([x.mean for x in values]).view(heads, -1),
            key_mean=torch.cat([x.mean for x in keys]).view(heads, -1),
            rotation=rotation,
            joint=joint,
        )

    @property
    def num_heads(self) -> int:
        return self.key_mean.shape[0]

    @property
    def head_dim(self) -> int:
        return self.key_mean.shape[1]

    def check(self) -> None:
        super().check()
        angles, order = self.rotation.inv_freq, self.rotation.order
        if not bool(angles.isfinite().all()):
            raise ValueError("inv_freq holds NaN or infinite numbers")
        if sorted(order.tolist()) != list(range(self.head_dim)):
            raise ValueError(f"order is no order of {self.head_dim} numbers")
        if 2 * len(angles) > self.head_dim:
            raise ValueError(f"inv_freq has {len(angles)} angles for keys of {self.head_dim}")

    @property
    def _key_numbers(self) -> int:
        return self.key_mean.numel()

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        keys, values, count = self.key_down.shape[2], self.value_down.shape[2], len(self.value_down)
        return (keys + DIGITS, 0, count) if self.joint else (keys, values + DIGITS, count)

    def tensors(self) -> dict[str, Tensor]:
        rotation = {"inv_freq": self.rotation.inv_freq, "order": self.rotation.order}
        return {**super().tensors(), **rotation}

    def to(self, *args: object) -> "RopeMaps":
        moved = super().to(*args)
        return replace(moved, rotation=self.rotation.to(moved.key_mean.device))

    def latents(self, k: Tensor, v: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        k = self.rotation.unrotated(k, self._token_positions(k, positions)[:, None])
        whole = k.unflatten(1, (len(self.key_down), -1)).transpose(2, 3).flatten(3)
        keys, values = whole @ self.key_down - self.key_shift[:, None], self.values(v)
        if self.joint:
            keys = keys + values
            values = values[..., :0]
        return keys, values

    def stored(self, k: Tensor, v: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        keys, values = self.latents(k, v, positions)
        with_digits = keys if self.joint else values
        digits = digits_of(self._token_positions(k, positions))[:, None].expand(
            *with_digits.shape[:3], DIGITS
        )
        with_digits = torch.cat((with_digits, digits.to(with_digits.dtype)), -1)
        return (with_digits, values) if self.joint else (keys, with_digits)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with_digits = k if self.joint else v
        # Without gaps between tokens: PyTorch's kernels read 16 bytes at once, wherever they lie.
        numbers, digits = with_digits[..., :-DIGITS].contiguous(), with_digits[:, 0, :, -DIGITS:]
        z = numbers if self.joint else k
        return self.queries(q), self.reconstructed(z, digits), self.per_head(numbers)

    def reconstructed(self, z: Tensor, digits: Tensor) -> Tensor:
        """Keys [B, Hk, S, d] reconstructed from stored numbers [B, m, S, r] and rotated. digits
        [B, S, DIGITS]: stored positions."""
        k = (z @ self.key_up.mT).unflatten(3, (-1, self.head_dim)).transpose(2, 3).flatten(1, 2)
        return self.rotation.rotated(k + self.key_mean[:, None], positions_of(digits)[:, None])

    def _token_positions(self, k: Tensor, positions: Tensor | None) -> Tensor:
        """Positions [B or 1, T] of the tokens of keys [B, Hk, T, d]. Raises SettingError if they
        are unknown but needed."""
        if positions is not None:
            return positions
        if self.rotation.rotates:
            raise SettingError(
                "attention was not told at which positions its tokens are, which maps of keys"
                " before RoPE need: pass `position_ids` [batch, tokens] to the model"
            )
        return torch.zeros(1, k.shape[2], dtype=torch.int64, device=k.device)

    def queries(self, q: Tensor) -> Tensor:
        """Queries [B, Hq, T, d] in `rotation.order`, which score reconstructed keys."""
        return self.rotation.ordered(q)


def _half(latent: LatentMaps, i: int) -> LatentMaps:
    """The key part (i = 0) or value part (i = 1) of a joint latent."""
    return LatentMaps(*(x.chunk(2)[i] for x in latent))
