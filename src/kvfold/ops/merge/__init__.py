"""Merge attention over two sets of entries by their log-sum-exps.

Shapes: B sequences, Hq query heads, T queries, dv numbers of an output, at most; a query is merged
on its own.
"""

from torch import Tensor

from kvfold.ops.backend import Operation

# Each module has `merged`, which supports all data.
MERGE = Operation(__name__, {"triton": lambda: None})


def merged(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over both sets: its output [B, Hq, T, dv], of the dtype of `out`, and its
    log2-sum-exp2, fp32 [B, Hq, T].

    out [B, Hq, T, dv] and other_out [B, Hq, T, d <= dv], which counts as 0 beyond d: last stride 1.
    lse, other_lse: fp32 [B, Hq, T], log2-sum-exp2 of the scores, -inf for a set without entries,
        whose output may hold any numbers. A query without entries in both gets 0 and -inf.
    """
    module = MERGE.choose(out.device.type).module
    result: tuple[Tensor, Tensor] = module.merged(out, lse, other_out, other_lse)
    return result
