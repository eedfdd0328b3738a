"""Not recommended: kept for comparison, may change or go."""
