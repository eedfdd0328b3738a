"""Prefill one long prompt on several GPUs: Ulysses sequence parallelism over compressed queries,
keys and values (ZDC §5.3).

Each rank has N / P of the tokens for everything that works on single tokens, and some heads of all
tokens for attention. Between the two, an all-to-all exchanges compressed numbers.
"""

from kvfold.parallel.prefill import Prefilled, SequenceParallel
from kvfold.parallel.shares import wire_bytes

__all__ = ["Prefilled", "SequenceParallel", "wire_bytes"]
