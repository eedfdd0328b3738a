"""What rows were attended to: eviction metrics from queries that were kept."""
