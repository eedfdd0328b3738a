"""Policies that read the context once more."""

from kvfold.cache.eviction.replay import ReplayPolicy


def kvzip() -> ReplayPolicy:
    """KVzip: attention while the context is repeated, one ranking over all layers and heads."""
    return ReplayPolicy(name="kvzip", scope="all", sinks=4)
