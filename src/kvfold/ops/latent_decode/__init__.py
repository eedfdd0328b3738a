"""Attention of one new token a sequence over keys rebuilt from latents."""
