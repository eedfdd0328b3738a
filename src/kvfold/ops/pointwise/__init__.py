"""What lies between a layer's products, for steps of few tokens: norms, RoPE and small maps.

In PyTorch each is several operations, whose calls take longer than their work where tokens are few.
`numba` has them for CPUs; on GPUs they are compiled from PyTorch (see `models.pointwise`).
"""
