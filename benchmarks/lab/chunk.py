"""One chunk of a prompt, its rows, and those who attend: ours, cut in any way, and others.

Shapes: B sequences, Hq query heads, Hk KV heads, S tokens of a sequence, the last T of which are
the chunk; dk, dv widest key and value rank.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kvfold.bench.common import Unavailable, check_outputs
from kvfold.bench.timing import Step
from kvfold.bench.variants import DTYPE
from kvfold.layout import Geometry
from kvfold.ops.prefill import KVView, Seen, prefill, why_not
from kvfold.ops.prefill.plan import Cut, Widths, rescaled_cut
from kvfold.ops.prefill.reference import prefill as prefill_reference

CHECKED = 128  # queries of the first sequence that are compared with the reference
Run = Callable[..., tuple[Tensor, Tensor]]  # of kvfold.ops.prefill.prefill
CUT = re.compile(r"(\d+)x(\d+)w(\d+)s(\d+)(?:r(\d+))?")

# What is kept of keys and of values, in turn over the KV heads.
KEPT: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "full": ((1.0,), (1.0,)),
    "half": ((0.5,), (0.5,)),
    "half-ragged": ((0.25, 0.5, 0.5, 0.75), (0.75, 0.5, 0.5, 0.25)),
    "half-uneven": ((0.25, 0.5, 0.5, 0.75), (0.25, 0.5, 0.5, 0.75)),
    "quarter": ((0.25,), (0.25,)),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """A chunk's queries q [B, Hq, T, dk] at `queries` int32 [B, T], and the rows of every layer,
    keys beside values, counts int32 [B, Hk]; flops: of a layer, on what is not masked."""

    q: Tensor
    sides: list[tuple[KVView, KVView]]
    counts: Tensor
    queries: Tensor
    scale: float
    flops: float

    def step(self, run: Run = prefill) -> Step:
        """`run` over layer after layer."""
        return lambda layer: self.attend(run, layer)[0]

    def attend(self, run: Run, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self.sides[layer % len(self.sides)]
        seen = Seen(
            counts=self.counts,
            owner=tuple(range(len(keys.ranks))),
            positions=None,
            queries=self.queries,
        )
        return run(self.q, keys, values, seen, self.scale)

    def check(self, name: str, out: Tensor) -> None:
        """Raises RuntimeError where `out` [B, Hq, T, >= dv] of layer 0 is wrong."""
        at = torch.linspace(0, self.q.shape[2] - 1, CHECKED, device=self.q.device).long().unique()
        keys, values = (replace(x, data=x.data[:1]) for x in self.sides[0])
        few = replace(
            self,
            q=self.q[:1, :, at],
            sides=[(keys, values)],
            counts=self.counts[:1],
            queries=self.queries[:1, at],
        )
        want, _ = few.attend(prefill_reference, 0)
        check_outputs(name, out[0, :, at].flatten(0, 1), want[0].flatten(0, 1).float())


def build_work(
    geometry: Geometry,
    kept: tuple[tuple[float, ...], tuple[float, ...]],
    case: tuple[int, ...],
    num_layers: int,
    device: torch.device,
) -> Work:
    """Normal numbers, the same every time."""
    batch, tokens, chunk = case
    generator = torch.Generator(device).manual_seed(0)
    heads, group = geometry.num_kv_heads, geometry.queries_per_kv
    ranks = [
        tuple(int(cycle[h % len(cycle)] * geometry.head_dim) for h in range(heads))
        for cycle in kept
    ]
    ends = [sum(ranks[0][:h]) for h in range(heads)]
    starts = tuple(ends), tuple(sum(ranks[0]) + sum(ranks[1][:h]) for h in range(heads))

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=DTYPE, device=device).normal_(generator=generator)

    sides = []
    for _ in range(num_layers):
        rows = normal(batch, tokens, sum(map(sum, ranks)))
        sides.append((KVView(rows, starts[0], ranks[0]), KVView(rows, starts[1], ranks[1])))
    q = normal(batch, heads * group, chunk, max(ranks[0]))
    for head, rank in enumerate(ranks[0]):
        q[:, head * group : (head + 1) * group, :, rank:] = 0
    queries = torch.arange(tokens - chunk, tokens, dtype=torch.int32, device=device)
    seen = chunk * (tokens - chunk) + chunk * (chunk + 1) // 2
    return Work(
        q=q,
        sides=sides,
        counts=torch.full((batch, heads), tokens, dtype=torch.int32, device=device),
        queries=queries.repeat(batch, 1),
        scale=geometry.scaling,
        flops=2.0 * batch * group * seen * sum(map(sum, ranks)),
    )


def _sdpa(backend: SDPBackend) -> Callable[[Work], Step]:
    """SDPA with one backend on the whole heads of `Work`, laid out as it likes them."""

    def build(work: Work) -> Step:
        if backend is SDPBackend.CUDNN_ATTENTION and work.q.device.type != "cuda":
            raise Unavailable("cuDNN needs a CUDA device")
        layers = [
            tuple(
                torch.stack([x.head(h) for h in range(len(x.ranks))], 1).contiguous() for x in sides
            )
            for sides in work.sides
        ]
        chunk, tokens = work.q.shape[2], layers[0][0].shape[2]
        if backend is SDPBackend.CUDNN_ATTENTION and chunk < tokens:
            raise Unavailable("PyTorch lets cuDNN's causal mask only begin at the first row")
        whole = chunk == tokens
        mask = None if whole else causal_lower_right(chunk, tokens)
        grouped = work.q.shape[1] != layers[0][0].shape[1]

        def step(layer: int) -> Tensor:
            k, v = layers[layer % len(layers)]
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    work.q, k, v, mask, is_causal=whole, scale=work.scale, enable_gqa=grouped
                )

        return step

    return build


BASELINES: dict[str, Callable[[Work], Step]] = {
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
}


def variant_step(name: str, work: Work) -> Step:
    """The engine's own `prefill`, or its kernel cut as the name says."""
    how = name.partition("@")[2]
    if not how:
        return work.step()
    if why_not(work.q, *work.sides[0]):
        raise Unavailable("there is no kernel to cut here")
    from kvfold.ops.prefill import triton as prefill_triton

    names = ("pairs", "rows", "warps", "stages", "registers")
    found = CUT.fullmatch(how)
    numbers = zip(names, found.groups(), strict=True) if found else ()
    cut = Cut(**{name: int(n) for name, n in numbers if n})
    keys, values = work.sides[0]
    most = max(map(sum, zip(keys.ranks, values.ranks, strict=True)))

    def cut_for(widths: Widths) -> Cut:
        return cut if found else rescaled_cut(widths, most)

    return work.step(lambda *place: prefill_triton.prefill(*place, cut=cut_for))
