"""The small operations between a layer's matrix products, for few tokens: norms, RoPE and small
maps.

In PyTorch each of them takes several calls, which cost more than the work itself if tokens are few.
`numba` implements them for CPUs; on GPUs they are compiled from PyTorch (see `models.pointwise`).
"""
