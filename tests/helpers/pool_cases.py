"""What tests of pool share with others."""

from kvfold.cache.pool import Pool
from kvfold.layout import CacheSpec, Geometry, Latent, LayerSpec
from kvfold.layout.pages import CacheLayout, cache_layout

MIXED = (8, 24, 40, 24, 8, 72)  # pages of 64, 192, 320 and 576 bytes at 4 rows


def layout(*widths: int, page: int = 4) -> CacheLayout:
    """One group a layer, whose rows have `widths` numbers of two bytes."""
    geometry = Geometry(
        hidden_size=64,
        num_query_heads=1,
        num_kv_heads=1,
        head_dim=64,
        num_layers=len(widths),
        rope=True,
        key_norm=False,
        scaling=1.0,
    )
    layers = tuple(
        LayerSpec(
            keys="pre_rope", values="fused", latents=(Latent(side="kv", heads=(0,), rank=width),)
        )
        for width in widths
    )
    return cache_layout(CacheSpec(geometry=geometry, layers=layers), page=page)


def pool(
    widths: tuple[int, ...] = MIXED,
    num_bytes: int = 1 << 16,
    page: int = 4,
    num_slots: int = 8,
    max_tokens: int = 200,
    device: str = "cpu",
) -> Pool:
    built = layout(*widths, page=page)
    return Pool(built, num_bytes, num_slots=num_slots, max_tokens=max_tokens, device=device)
