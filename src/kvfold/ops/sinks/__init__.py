"""Attention that was computed without the learned sinks of its layer, as it is with them.

A sink is a score of a query head's own that stands beside those of every query and whose value is
nothing. So outputs shrink by what it takes of the exponentials' sum, and nothing else changes.

Shapes: B sequences, Hq query heads, T queries, dv widest value.
"""

from torch import Tensor

from kvfold.ops.backend import Operation

# Each has `with_sinks`, which serves all data.
SINKS = Operation(__name__, {"triton": lambda: None})


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, Hq, T, dv] times exp(l) / (exp(l) + exp(sink)), and the log2 of that sum.

    out: any strides but 1 for the last, is overwritten; lse fp32 [B, Hq, T]: the log2-sum-exp2 of
    scaled scores, l / log(2), -inf where nothing is seen; sinks fp32 [Hq]: as the model has them.
    """
    module = SINKS.choose(out.device.type).module
    found: tuple[Tensor, Tensor] = module.with_sinks(out, lse, sinks)
    return found
