"""Describe in words how large a cache is, and how much it holds."""

from kvfold.attention.selector import kernels
from kvfold.config import CacheConfig
from kvfold.engine.runner.runner import ModelRunner


def cache_summary(runner: ModelRunner, cache: CacheConfig) -> list[tuple[str, str]]:
    """(name, value) pairs about a runner's pool. cache: the settings that limit what a request
    keeps."""
    pool, layout = runner.pool, runner.pool.layout
    spec, geometry = layout.spec, layout.spec.geometry
    full_bytes, num_bytes = 2 * geometry.full_numbers, spec.bytes_per_token()
    stored = layout.bits_per_token / 8
    per_token = layout.page_bytes / layout.page
    keep_share = cache.keep_tokens
    if cache.max_cache_tokens:
        keep_share = min(1.0, cache.max_cache_tokens / pool.max_tokens)
    tokens = pool.num_bytes / per_token
    num_requests = min(pool.num_slots, int(tokens / (pool.max_tokens * (keep_share or 1.0))))
    rows = [
        ("pool", f"{pool.num_bytes / 2**20:.1f} MiB of {layout.page}-entry pages"),
        ("fits", f"{int(tokens)} tokens; {num_requests} requests of {pool.max_tokens} tokens"),
        ("a token, uncompressed", f"{full_bytes} B at 16 bits"),
        ("dimensions kept", f"{num_bytes} B ({full_bytes / max(num_bytes, 1):.2f}x smaller)"),
        ("bits", f"{stored:.0f} B ({full_bytes / stored:.2f}x smaller)"),
        ("in pages", f"{per_token:.0f} B, with {_wide(runner)}rounding and what eviction needs"),
    ]
    if layout.window:
        size, total = (x / 2**20 for x in (layout.window_bytes, pool.window_bytes))
        exact = (
            f"last {layout.window} tokens of a request, {size:.1f} MiB; of all requests and one"
            f" spare, {total:.1f} MiB, which kv_bytes counts with the pool"
        )
        rows.append(("exact window", exact))
    if keep_share is not None:
        policy = runner.policy
        least = policy.sinks + policy.protected_recent(0) if policy else 0
        floor = f", and never fewer than {least} tokens" if least else ""
        rows.append(("tokens kept", f"{keep_share:.2f} of a request after its prompt{floor}"))
    if pool.device.type == "cuda":
        layers, view = runner.attention.layers, runner.attention.view
        weighed = view.observes_decodes and view.needs_weights
        rows.append(("layers with kernels", str(kernels(layers, layout, view.dtype, weighed))))
    return rows


def _wide(runner: ModelRunner) -> str:
    """The dtype of numbers that are not quantised, where it has more than 16 bits."""
    layouts = [group.layout for group in runner.pool.layout.groups]
    size = max(
        (x.itemsize for x in layouts if any(not part.quantized for part in x.segments)), default=0
    )
    if size <= 2:
        return ""
    dtype = str(runner.model.dtype).removeprefix("torch.")
    return f"unquantised numbers in {dtype} ({size} B each), "
