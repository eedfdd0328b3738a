"""A step of the model: inputs, attention metadata, graphs, sampling, eviction."""
