"""Prefill one long prompt on several GPUs: Ulysses sequence parallelism over compressed queries,
keys and values (ZDC §5.3).

Each rank has N / P of the tokens for everything that works on single tokens (projections, MLPs),
and some heads of all tokens for attention. All-to-all exchanges of compressed numbers switch
between the two.
"""

from kvfold.parallel.prefill import Prefilled, SequenceParallel
from kvfold.parallel.shares import wire_bytes

__all__ = ["Prefilled", "SequenceParallel", "wire_bytes"]
