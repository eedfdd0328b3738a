"""One attention for every model: maps of keys and values that act where a model calls attention.

An attention layer is a function of q, k and v after the model's own norms, biases and rotation.
What is stored in their place, k' = B^T k and v' = C^T v, is scored by q' = A^T q, and what comes
back is mapped by D. Nothing of a model's family is known, and no weight changes.
"""
