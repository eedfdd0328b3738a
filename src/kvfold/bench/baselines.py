"""Decode attention of others on an uncompressed cache: the bar to clear.

Shapes: B sequences of T tokens each, Hq query heads, Hk KV heads, G = Hq / Hk, d head dim, N
layers, P tokens a page.

A baseline is a function of `Contiguous` to a `Built`; it raises Unavailable where it cannot run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvfold.bench.timing import Step
from kvfold.bench.variants import DTYPE
from kvfold.layout import Geometry

FLASHINFER_PAGE = 16
WORKSPACE = 256 << 20  # bytes; FlashInfer recommends 128 MB, or more where keys are split often


class Unavailable(Exception):
    """Why a baseline cannot run here."""


@dataclass(frozen=True, kw_only=True)
class Contiguous:
    """q [B, Hq, d]; k, v [N, B, Hk, T, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float

    @property
    def per_kv(self) -> int:
        return self.q.shape[1] // self.k.shape[2]


@dataclass(frozen=True, kw_only=True)
class Built:
    """step gives [B, Hq, 1, d] or [B, Hk, G, d] or [B, Hq, d]; k, v [Hk, T, d] are what it takes
    for the first sequence's, in layer 0."""

    step: Step
    k: Tensor
    v: Tensor


def full_bytes(geometry: Geometry, batch: int, tokens: int) -> int:
    """Bytes of a layer's keys and values."""
    return 2 * DTYPE.itemsize * geometry.kv_width * batch * tokens


def build_contiguous(
    geometry: Geometry, *, batch: int, tokens: int, num_layers: int, device: torch.device
) -> Contiguous:
    """Normal numbers in DTYPE."""
    generator = torch.Generator(device).manual_seed(0)
    size = (num_layers, batch, geometry.num_kv_heads, tokens, geometry.head_dim)
    q = torch.empty(batch, geometry.num_query_heads, geometry.head_dim, dtype=DTYPE, device=device)
    k, v = (torch.empty(size, dtype=DTYPE, device=device) for _ in range(2))
    for x in (q, k, v):
        x.normal_(generator=generator)
    return Contiguous(q=q, k=k, v=v, scale=geometry.scaling)


def _sdpa(backend: SDPBackend, folded: bool) -> Callable[[Contiguous], Built]:
    """SDPA with one backend. folded: the G query heads of a KV head are so many queries of it, none
    of which is masked, so that a kernel without grouped queries reads keys and values once."""

    def build(at: Contiguous) -> Built:
        if backend is SDPBackend.CUDNN_ATTENTION and at.q.device.type != "cuda":
            raise Unavailable("cuDNN needs a CUDA device")
        if folded and at.per_kv == 1:
            raise Unavailable("every query head has keys of its own: nothing to fold")
        q = at.q.unflatten(1, (-1, at.per_kv)) if folded else at.q[:, :, None]
        grouped = q.shape[1] != at.k.shape[2]

        def step(layer: int) -> Tensor:
            k, v = at.k[layer % len(at.k)], at.v[layer % len(at.v)]
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, scale=at.scale, enable_gqa=grouped)

        return Built(step=step, k=at.k[0, 0], v=at.v[0, 0])

    return build


def _flex(at: Contiguous) -> Built:
    """FlexAttention, compiled anew for every size: a limit on recompilations would else make it
    fall back to eager code in silence."""
    if at.q.device.type != "cuda":
        raise Unavailable("FlexAttention is compiled for CUDA devices only")
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    q, num_layers = at.q[:, :, None], len(at.k)

    def step(layer: int) -> Tensor:
        k, v = at.k[layer % num_layers], at.v[layer % num_layers]
        found: Tensor = attend(q, k, v, scale=at.scale, enable_gqa=at.per_kv > 1)
        return found

    return Built(step=step, k=at.k[0, 0], v=at.v[0, 0])


def _flashinfer(at: Contiguous) -> Built:
    """FlashInfer's batch decode (0.6.13), planned once. The same bytes as everyone's, taken as
    pages [P, d] of each head: the numbers are random, so no other order is asked for."""
    if not find_spec("flashinfer"):
        raise Unavailable("flashinfer is not installed")
    import flashinfer

    num_layers, batch, kv_heads, tokens, dim = at.k.shape
    if tokens % FLASHINFER_PAGE:
        raise Unavailable(f"{tokens} tokens are not whole pages of {FLASHINFER_PAGE}")
    device, each = at.q.device, tokens // FLASHINFER_PAGE
    paged = (num_layers, batch * each, kv_heads, FLASHINFER_PAGE, dim)
    k, v = at.k.view(paged), at.v.view(paged)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE, dtype=torch.uint8, device=device),
        "HND",
        use_tensor_cores=at.per_kv > 1,
    )
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * each,
        torch.arange(batch * each, dtype=torch.int32, device=device),
        torch.full((batch,), FLASHINFER_PAGE, dtype=torch.int32, device=device),
        at.q.shape[1],
        kv_heads,
        dim,
        FLASHINFER_PAGE,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
        sm_scale=at.scale,
    )
    first = (x[0, :each].transpose(0, 1).flatten(1, 2) for x in (k, v))

    def step(layer: int) -> Tensor:
        found: Tensor = wrapper.run(at.q, (k[layer % num_layers], v[layer % num_layers]))
        return found

    return Built(step=step, k=next(first), v=next(first))


BASELINES: dict[str, Callable[[Contiguous], Built]] = {
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION, folded=False),
    "sdpa-flash-folded": _sdpa(SDPBackend.FLASH_ATTENTION, folded=True),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, folded=False),
    "sdpa-cudnn-folded": _sdpa(SDPBackend.CUDNN_ATTENTION, folded=True),
    "flex": _flex,
    "flashinfer": _flashinfer,
}
