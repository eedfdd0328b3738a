"""Decode attention in one pass over entries whose values all KV heads share, on Hopper. CUDA C++.

Not an `Operation`: `decode.triton_split.plan_layers` and `latent_decode.triton_pieces.plan_layers`
choose it where it supports all layers and there are at least ROWS entries. The two-pass kernels
there write softmax weights to memory and read them again for every piece of the values; here the
weights stay on chip and every page is read once. Scores are computed with keys as they are stored
(`stored.cu`) or reconstructed before RoPE (`reconstructed.cu`); `tools.cu` explains the kernel, and
`kernel.cu` is the common part.

Measured on an H200, 64 x 8192 tokens of Llama-3.1-8B's shape, us per layer: 143 to 193 for stored
keys in caches 4x to 6x smaller, and 401 for `lean` 6x smaller; cuDNN's bf16 takes 481. Fastest are
keys in segments of 8 and 4 bits, and value segments of an odd number of 16-byte units, which spread
entries over the banks of shared memory.
"""

from kvfold.ops.one_pass.launch import ROWS, OnePassPlan, decode, plan_layers
from kvfold.ops.one_pass.rows import serves, unsupported_reason

__all__ = ["ROWS", "OnePassPlan", "decode", "plan_layers", "serves", "unsupported_reason"]
