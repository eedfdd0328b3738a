"""Page layouts of the layers of a model."""

from dataclasses import replace

from kvfold import recipes
from kvfold.bench.variants import SHAPES
from kvfold.compression.planning.default import even_spec
from kvfold.layout import CacheSpec, plain_layer
from kvfold.layout.pages import cache_layout


def test_layers_that_store_alike_share_their_layouts() -> None:
    """A model has many layers and few kinds of them, so each kind is computed once."""
    geometry = replace(SHAPES["tiny"], num_layers=4)
    plain, small = plain_layer(geometry), even_spec(recipes.get("swift"), geometry, 0.5).layers[0]
    spec = CacheSpec(geometry=geometry, layers=(plain, small, plain, plain))
    layout = cache_layout(spec, bits=4, tracked=[False, False, False, True])
    first, second, third, fourth = (layout.groups_of_layer(i) for i in range(4))
    assert all(x.layout is y.layout for x, y in zip(first, third, strict=True))
    assert [x.layer for x in third] == [2] * len(third)
    assert not any(x.layout == y.layout for x, y in zip(first, fourth, strict=True))
    assert not any(x.layout == first[0].layout for x in second)
    assert all(x.layout.tracked for x in fourth) and not any(x.layout.tracked for x in third)
