"""PyTorch's decode attention over an uncompressed cache, which kvfold's kernels are compared with.

Shapes: B sequences of T tokens each, Hq query heads, Hk KV heads, G = Hq / Hk, d head dim, N
layers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvfold.bench.common import Unavailable
from kvfold.bench.timing import Step
from kvfold.bench.variants import DTYPE
from kvfold.layout import Geometry


@dataclass(frozen=True, kw_only=True)
class FullCache:
    """q [B, Hq, d]; k, v [N, B, Hk, T, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float

    @property
    def queries_per_kv(self) -> int:
        return self.q.shape[1] // self.k.shape[2]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Attention that is ready to run. step(layer) returns [B, Hq, 1, d], [B, Hk, G, d] or [B, Hq,
    d]; k, v [Hk, T, d] are what it reads for the first sequence in layer 0."""

    step: Step
    k: Tensor
    v: Tensor


BuildBaseline = Callable[[FullCache], Baseline]  # raises Unavailable where it cannot run


def full_bytes(geometry: Geometry, batch: int, tokens: int) -> int:
    """Bytes of one layer's uncompressed keys and values."""
    return 2 * DTYPE.itemsize * geometry.kv_width * batch * tokens


def build_full_cache(
    geometry: Geometry, *, batch: int, tokens: int, num_layers: int, device: torch.device
) -> FullCache:
    """A cache and queries of normally distributed numbers in DTYPE."""
    generator = torch.Generator(device).manual_seed(0)
    size = (num_layers, batch, geometry.num_kv_heads, tokens, geometry.head_dim)
    q = torch.empty(batch, geometry.num_query_heads, geometry.head_dim, dtype=DTYPE, device=device)
    k, v = (torch.empty(size, dtype=DTYPE, device=device) for _ in range(2))
    for x in (q, k, v):
        x.normal_(generator=generator)
    return FullCache(q=q, k=k, v=v, scale=geometry.scaling)


def sdpa(backend: SDPBackend, grouped: bool = False) -> BuildBaseline:
    """SDPA with one backend.

    grouped: pass the G query heads of a KV head as G queries of it. None of them is masked, so a
    kernel without grouped queries then reads keys and values once.
    """

    def build(cache: FullCache) -> Baseline:
        if backend is SDPBackend.CUDNN_ATTENTION and cache.q.device.type != "cuda":
            raise Unavailable("cuDNN needs a CUDA device")
        if grouped and cache.queries_per_kv == 1:
            raise Unavailable("every query head has keys of its own: nothing to fold")
        q = cache.q.unflatten(1, (-1, cache.queries_per_kv if grouped else 1))
        gqa = q.shape[1] != cache.k.shape[2]

        def step(layer: int) -> Tensor:
            k, v = cache.k[layer % len(cache.k)], cache.v[layer % len(cache.v)]
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, scale=cache.scale, enable_gqa=gqa)

        return Baseline(step=step, k=cache.k[0, 0], v=cache.v[0, 0])

    return build


def expected_outputs(cache: FullCache, baseline: Baseline) -> Tensor:
    """The first sequence's outputs in layer 0, fp32 [Hq, d], in plain PyTorch. Reads the keys and
    values that the baseline reads."""
    q = cache.q[0].float().unflatten(0, (-1, cache.queries_per_kv))
    weights = (q @ baseline.k.float().mT * cache.scale).softmax(-1)
    return (weights @ baseline.v.float()).flatten(0, 1)


BASELINES: dict[str, BuildBaseline] = {
    "sdpa-flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
}
