"""The published attention-based policies; all are settings of `AttentionPolicy`."""

from dataclasses import replace

from kvfold.cache.eviction.attention import AttentionPolicy


def kv_compress() -> AttentionPolicy:
    """KV-Compress, KVC-w8-L2 (§4.3, §5.2): the last 8 queries, squared attention; all groups
    compete."""
    return AttentionPolicy(
        name="kv-compress", window=8, power=2, pool=7, scope="all", continual=True
    )


def kv_compress_full() -> AttentionPolicy:
    """KV-Compress, KVC-full-L2 (§4.3, §5.2): all queries but the first 10, squared attention, no
    pooling.

    The last 32 tokens are protected, as in its released experiments.
    """
    return AttentionPolicy(
        name="kv-compress-full", power=2, exclude=10, scope="all", recent=32, continual=True
    )


def kvc_w8() -> AttentionPolicy:
    """KVC-w8-L2 in pages of 16 (KV-Compress §5.1; released with the last 8 tokens protected)."""
    return replace(kv_compress(), name="kvc-w8", page=16)


def kvc_w32() -> AttentionPolicy:
    """KVC-w32-L2 in pages of 16 (KV-Compress §5.2; released with the last 32 tokens protected)."""
    return replace(kvc_w8(), name="kvc-w32", window=32)


def kvc_w32_l1() -> AttentionPolicy:
    """KVC-w32-L1 in pages of 16: the same without squares (KV-Compress table 2)."""
    return replace(kvc_w32(), name="kvc-w32-l1", power=1)


def kvc_full() -> AttentionPolicy:
    """KVC-full-L2 in pages of 16 (KV-Compress §5.1)."""
    return replace(kv_compress_full(), name="kvc-full", page=16)


def snapkv() -> AttentionPolicy:
    """SnapKV: the last 32 queries, max-pooled over 7 (released LongBench runs, w32_k7_maxpool)."""
    return AttentionPolicy(name="snapkv", window=32, pool=7, continual=True)


def snapkv_w8() -> AttentionPolicy:
    """SnapKV with the window 8 and pool 7 of KV-Compress §5.1."""
    return replace(snapkv(), name="snapkv-w8", window=8)


def h2o() -> AttentionPolicy:
    """H2O: attention summed over all queries, the same budget for each group, half of it for the
    most recent tokens (`heavy_ratio` equals `recent_ratio` in its released scripts)."""
    return AttentionPolicy(name="h2o", recent_share=0.5, continual=True)


def h2o_r32() -> AttentionPolicy:
    """H2O with 32 recent tokens protected, whatever the budget."""
    return replace(h2o(), name="h2o-r32", recent=32, recent_share=0.0)


def pyramidkv() -> AttentionPolicy:
    """PyramidKV: SnapKV with budgets that decrease linearly from the first layer to the last."""
    return AttentionPolicy(name="pyramidkv", window=8, pool=7, scope="pyramid", continual=True)


def ada_snapkv() -> AttentionPolicy:
    """Ada-SnapKV: SnapKV with one budget per layer, for which the layer's groups compete, except
    for a fifth of it that is divided evenly (released LongBench runs, w32_k7_maxpool, floor_alpha
    0.2)."""
    return replace(snapkv(), name="ada-snapkv", scope="layer", floor=0.2)


def ada_snapkv_w8() -> AttentionPolicy:
    """Ada-SnapKV with the window 8 and pool 7 of KV-Compress §5.1, without the safeguard."""
    return replace(ada_snapkv(), name="ada-snapkv-w8", window=8, floor=0.0)
