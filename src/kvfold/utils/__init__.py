"""Utilities for all layers: errors, files, text, tokens, versions of other libraries."""
