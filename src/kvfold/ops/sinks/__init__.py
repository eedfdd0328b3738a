"""Correct attention outputs for learned attention sinks.

A sink is a learned score per query head that takes part in the softmax but has no value. So the
correction only scales outputs down by the sink's share of the softmax sum.

Shapes: B sequences, Hq query heads, T queries, dv widest value.
"""

from torch import Tensor

from kvfold.ops.backend import Operation

# Each module has `with_sinks`, which supports all data.
SINKS = Operation(__name__, {"triton": lambda: None})


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale out [B, Hq, T, dv] in place by exp(l) / (exp(l) + exp(sink)); return it with the log2
    of that sum.

    out: last stride 1, overwritten; lse fp32 [B, Hq, T]: log2-sum-exp2 of the scaled scores, l /
        log(2), -inf where a query sees no token; sinks fp32 [Hq]: as in the checkpoint.
    """
    module = SINKS.choose(out.device.type).module
    result: tuple[Tensor, Tensor] = module.with_sinks(out, lse, sinks)
    return result
