"""The paged cache: layout, bits, pool and eviction."""
