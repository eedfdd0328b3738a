"""The model side of a step: inputs, attention metadata, CUDA graphs, sampling, eviction."""
