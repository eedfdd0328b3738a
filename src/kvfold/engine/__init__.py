"""Continuous batching over the paged cache."""
