"""The attention geometry of a model."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The attention geometry of a model, independent of its family."""

    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    rope: bool
    key_norm: bool
    scaling: float

    @property
    def queries_per_kv(self) -> int:
        return self.num_query_heads // self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Numbers of the keys (or the values) of one token in one layer: Hk * d."""
        return self.num_kv_heads * self.head_dim

    @property
    def full_numbers(self) -> int:
        """Numbers that one token stores in the uncompressed cache, all layers."""
        return 2 * self.kv_width * self.num_layers
