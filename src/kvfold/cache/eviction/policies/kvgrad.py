"""The KVgrad policy: attention in a re-scoring pass, weighted by the gradient of the last hidden
states."""

from kvfold.cache.eviction.replay import ReplayPolicy


def kvgrad() -> ReplayPolicy:
    """KVgrad (openreview.net/forum?id=cg1wTCJjjk): attention of the re-scoring pass, times the norm
    of W_O v, times the norm of the gradient of sum_p |h_p|^2 with respect to the attention output
    of the querying token; h: the last layer's hidden states before the norm. Segments of 512
    tokens, as in KVpress."""
    return ReplayPolicy(name="kvgrad", scope="all", sinks=4, chunk=512, by_gradient=True)
