"""Decode attention in one pass over rows whose values all KV heads share, on Hopper.

Two passes (`decode.triton_split`) write the weights to memory and read them again for every piece
of the values; here they stay on chip, and a page is read once. Keys are scored as they are stored
(`stored.cu`), or rebuilt before RoPE (`rebuilt.cu`). Measured on an H200, 64 x 8192 tokens of
Llama-3.1-8B's shape, us a layer: 143 to 193 for stored keys, caches 4 to 6 times smaller, and 401
for `lean` 6 times smaller, where cuDNN's bf16 takes 481. Fastest are keys in runs of 8 and 4 bits,
and value runs of an odd number of 16 bytes, whose rows lie in unlike banks of shared memory.
"""

from kvfold.ops.one_pass.launch import ROWS, OnePassPlan, decode, plan_layers
from kvfold.ops.one_pass.rows import serves, unread

__all__ = ["ROWS", "OnePassPlan", "decode", "plan_layers", "serves", "unread"]
