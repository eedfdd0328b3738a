"""Trains a folded model towards its original."""
