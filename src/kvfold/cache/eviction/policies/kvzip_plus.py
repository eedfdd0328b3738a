"""The KVzip+ policy: attention in a re-scoring pass, weighted by its effect on the hidden
states."""

from kvfold.cache.eviction.replay import ReplayPolicy


def kvzip_plus() -> ReplayPolicy:
    """KVzip+ (KVzap, Jégou and Jeblick 2026, arXiv 2601.07891): attention of the re-scoring pass,
    times the norm of W_O v, over the norm of the querying token's hidden states."""
    return ReplayPolicy(name="kvzip+", scope="all", sinks=4, by_output=True)
