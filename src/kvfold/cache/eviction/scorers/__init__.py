"""The scorers of eviction policies. `policies.POLICIES` names them as "file.Class"."""
