"""KVzip+: what a second reading looks at, by how much that moves it."""

from kvfold.cache.eviction.replay import ReplayPolicy


def kvzip_plus() -> ReplayPolicy:
    """KVzip+ (KVzap, Jégou and Jeblick 2026, arXiv 2601.07891): attention of the second
    reading, times the norm of W_O v and over that of the hidden states that ask."""
    return ReplayPolicy(name="kvzip+", scope="all", sinks=4, by_output=True)
