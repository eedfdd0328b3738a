"""What a cache takes, and how much it holds, in words."""

from kvfold.attention.selector import kernels
from kvfold.config import CacheConfig
from kvfold.engine.runner.runner import ModelRunner


def sizes(runner: ModelRunner, cache: CacheConfig) -> list[tuple[str, str]]:
    """Of a runner's pool, as (name, value); cache: what every request keeps of its tokens."""
    pool, layout = runner.pool, runner.pool.layout
    spec, geometry = layout.spec, layout.spec.geometry
    full, dims = 2 * geometry.full_numbers, spec.bytes_per_token()
    stored = layout.bits_per_token / 8
    per_token = layout.page_bytes / layout.page
    kept = cache.keep_tokens
    if cache.max_cache_tokens:
        kept = min(1.0, cache.max_cache_tokens / pool.max_tokens)
    tokens = pool.num_bytes / per_token
    at_once = min(pool.num_slots, int(tokens / (pool.max_tokens * (kept or 1.0))))
    rows = [
        ("pool", f"{pool.num_bytes / 2**20:.1f} MiB of {layout.page}-row pages"),
        ("fits", f"{int(tokens)} tokens; {at_once} requests of {pool.max_tokens} tokens"),
        ("a token, uncompressed", f"{full} B at 16 bits"),
        ("dimensions kept", f"{dims} B ({full / max(dims, 1):.2f}x smaller)"),
        ("bits", f"{stored:.0f} B ({full / stored:.2f}x smaller)"),
        ("in pages", f"{per_token:.0f} B, with rounding and what eviction needs"),
    ]
    if kept is not None:
        policy = runner.policy
        least = policy.sinks + policy.protected_recent(0) if policy else 0
        floor = f", and never fewer than {least} tokens" if least else ""
        rows.append(("tokens kept", f"{kept:.2f} of a request after its prompt{floor}"))
    if pool.device.type == "cuda":
        layers, view = runner.attention.layers, runner.attention.view
        rows.append(("layers with kernels", str(kernels(layers, layout, view.dtype))))
    return rows
