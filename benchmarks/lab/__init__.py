"""What the benchmark scripts measure: modules without a command line."""
