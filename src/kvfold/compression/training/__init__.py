"""Training of a compressed model towards its original."""
