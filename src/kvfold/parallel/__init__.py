"""Prompts that several GPUs read together: Ulysses over compressed queries, keys and values.

ZDC §5.3. A rank has N / P of the tokens for all that works on tokens alone, and some heads of all
tokens for attention; between the two stands an all-to-all of what compression has left.
"""

from kvfold.parallel.prefill import Prefilled, SequenceParallel
from kvfold.parallel.shares import wire_bytes

__all__ = ["Prefilled", "SequenceParallel", "wire_bytes"]
