"""KVgrad: what a second reading looks at, by how much the last hidden states depend on it."""

from kvfold.cache.eviction.replay import ReplayPolicy


def kvgrad() -> ReplayPolicy:
    """KVgrad (openreview.net/forum?id=cg1wTCJjjk): attention of the second reading, times the norm
    of W_O v and that of the gradient of sum_p |h_p|^2 by what attention adds to the token that
    looks; h: the last layer's hidden states before the norm. Pieces of 512 tokens, as in KVpress.
    """
    return ReplayPolicy(name="kvgrad", scope="all", sinks=4, chunk=512, by_gradient=True)
