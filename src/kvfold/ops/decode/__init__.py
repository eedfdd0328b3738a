"""Attention of one new token a sequence over rows in score space."""
