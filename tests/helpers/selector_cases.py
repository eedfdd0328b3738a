"""What tests of selector share with others."""

from kvfold.layout import Geometry

GEOMETRY = Geometry(
    hidden_size=32,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_layers=1,
    rope=True,
    key_norm=False,
    scaling=0.25,
)
