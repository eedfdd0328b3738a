"""Store the attention weights and maxima that the first of two decode passes leaves for the second.
Triton functions."""
# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def store_weights(
    s, weights, tops, to, there, rows, BLOCK: tl.constexpr, NP: tl.constexpr, NQ: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Store the weights and maxima of a tile's scores s [BLOCK, NP] (log2), of which `rows` tokens
    exist. to [NP]: columns of the tile's first span."""
    SPANS: tl.constexpr = BLOCK // SPAN
    s = tl.reshape(s, [SPANS, SPAN, NP])
    top = tl.maximum(tl.max(s, 1), -1e30)  # of rows that exist, if any
    weight = tl.exp2(s - top[:, None, :])
    span, row = tl.arange(0, SPANS), tl.arange(0, SPAN)
    at = to[None, :] + span[:, None] * NQ
    there = there[None, :] & (span * SPAN < rows)[:, None]
    tl.store(tops + at, top, there)
    tl.store(weights + at[:, None, :] * SPAN + row[None, :, None], weight, there[:, None, :])
