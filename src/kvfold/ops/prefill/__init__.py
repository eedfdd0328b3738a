"""Attention of a prompt's chunk over gathered rows."""
