"""The attention geometry of a model."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The attention geometry of a model, independent of its family.

    scaling, softcap: scores are softcap * tanh(scaling * q k / softcap), or scaling * q k without a
        softcap (None).
    value_dim: dimension of a head's values; None: head_dim.
    """

    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    rope: bool
    key_norm: bool
    scaling: float
    softcap: float | None = None
    value_dim: int | None = None

    @property
    def queries_per_kv(self) -> int:
        return self.num_query_heads // self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Dimension of the keys of one token in one layer: Hk * d."""
        return self.num_kv_heads * self.head_dim

    def head_width(self, side: str) -> int:
        """Dimension of one head's keys ("k"), values ("v") or both ("kv")."""
        widths = {"k": self.head_dim, "v": self.value_dim or self.head_dim}
        return sum(widths[x] for x in side)

    @property
    def full_numbers(self) -> int:
        """Numbers that one token stores in the uncompressed cache, over all layers."""
        return self.num_kv_heads * self.head_width("kv") * self.num_layers
