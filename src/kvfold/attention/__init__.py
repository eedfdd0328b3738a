"""Attention over the stored tokens of one layer: the interface, and the backends that read the page
pool."""
