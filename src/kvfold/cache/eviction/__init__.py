"""Choose which tokens to evict, and move the remaining ones together to free whole pages."""
