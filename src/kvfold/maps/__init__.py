"""Maps: small per-layer projections of keys and values that work with any transformers model.

A map acts where a model calls transformers' attention interface, on q, k and v after the model's
own norms, biases and RoPE. The cache stores k' = B^T k and v' = C^T v; queries become q' = A^T q,
and attention outputs are projected back by D. The code knows nothing about the model's family and
changes no weight.
"""
