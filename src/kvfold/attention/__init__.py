"""Attention of one layer over its stored rows: the contract, and the backends over a pool."""
