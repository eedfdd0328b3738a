"""More baselines than `kvfold bench attention` has: other kernels on an uncompressed cache.

Shapes: as in `kvfold.bench.baselines`, and P tokens a page.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kvfold.bench import baselines as shipped
from kvfold.bench.baselines import Baseline, BuildBaseline, FullCache, sdpa
from kvfold.bench.common import Unavailable
from kvfold.bench.variants import DTYPE

FLASHINFER_PAGE = 16
WORKSPACE = 256 << 20  # bytes; FlashInfer recommends 128 MB, or more where keys are split often


def _flex(cache: FullCache) -> Baseline:
    """FlexAttention, compiled anew for every size: otherwise a limit on recompilations makes it
    silently fall back to eager code."""
    if cache.q.device.type != "cuda":
        raise Unavailable("FlexAttention is compiled for CUDA devices only")
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    q, num_layers = cache.q[:, :, None], len(cache.k)

    def step(layer: int) -> Tensor:
        k, v = cache.k[layer % num_layers], cache.v[layer % num_layers]
        out: Tensor = attend(q, k, v, scale=cache.scale, enable_gqa=cache.queries_per_kv > 1)
        return out

    return Baseline(step=step, k=cache.k[0, 0], v=cache.v[0, 0])


def _flashinfer(cache: FullCache) -> Baseline:
    """FlashInfer's batch decode (0.6.13), planned once. It reads the same bytes as the others, as
    pages [P, d] of a head: the numbers are random, so their order does not matter."""
    if not find_spec("flashinfer"):
        raise Unavailable("flashinfer is not installed")
    import flashinfer

    num_layers, batch, kv_heads, tokens, dim = cache.k.shape
    if tokens % FLASHINFER_PAGE:
        raise Unavailable(f"{tokens} tokens are not whole pages of {FLASHINFER_PAGE}")
    device, num_pages = cache.q.device, tokens // FLASHINFER_PAGE
    paged = (num_layers, batch * num_pages, kv_heads, FLASHINFER_PAGE, dim)
    k, v = cache.k.view(paged), cache.v.view(paged)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE, dtype=torch.uint8, device=device),
        "HND",
        use_tensor_cores=cache.queries_per_kv > 1,
    )
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * num_pages,
        torch.arange(batch * num_pages, dtype=torch.int32, device=device),
        torch.full((batch,), FLASHINFER_PAGE, dtype=torch.int32, device=device),
        cache.q.shape[1],
        kv_heads,
        dim,
        FLASHINFER_PAGE,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
        sm_scale=cache.scale,
    )
    first = (x[0, :num_pages].transpose(0, 1).flatten(1, 2) for x in (k, v))

    def step(layer: int) -> Tensor:
        out: Tensor = wrapper.run(cache.q, (k[layer % num_layers], v[layer % num_layers]))
        return out

    return Baseline(step=step, k=next(first), v=next(first))


BASELINES: dict[str, BuildBaseline] = {
    "sdpa-flash": shipped.BASELINES["sdpa-flash"],
    "sdpa-flash-folded": sdpa(SDPBackend.FLASH_ATTENTION, grouped=True),
    "sdpa-cudnn": shipped.BASELINES["sdpa-cudnn"],
    "sdpa-cudnn-folded": sdpa(SDPBackend.CUDNN_ATTENTION, grouped=True),
    "flex": _flex,
    "flashinfer": _flashinfer,
}
