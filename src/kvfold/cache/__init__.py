"""The paged KV cache: page pool, prefix sharing and eviction."""
