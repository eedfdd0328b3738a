"""What tests of split triton share with others."""

from torch import Tensor

from kvfold.layout import Latent
from kvfold.layout.pages import CacheLayout
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.decode import triton_split
from pages import Case
from store_cases import one_layer

SMALL = Tuning(block=16, stages=2, warps=1, slices=1), Tuning(block=16, stages=2, warps=1, slices=1)


Runs = tuple[tuple[int, int], ...]  # (numbers, bits)


def swift(keys: list[Runs], values: list[Runs], heads: int | None = None, **options) -> CacheLayout:
    """Keys of every KV head, values of `heads` of them (None: of all) a latent."""
    heads = heads or len(keys)
    latents = [
        Latent(side="k", heads=(h,), rank=sum(n for n, _ in runs), tiers=runs)
        for h, runs in enumerate(keys)
    ] + [
        Latent(
            side="v",
            heads=tuple(range(i * heads, (i + 1) * heads)),
            rank=sum(n for n, _ in runs),
            tiers=runs,
        )
        for i, runs in enumerate(values)
    ]
    return one_layer(latents, **{"page": 16, **options})


def run(case: Case, cuts: tuple[Tuning, Tuning] = SMALL) -> tuple[Tensor, Tensor]:
    q, pages, slots, scale = case.args
    counts = pages.lengths[slots]
    queries = q.shape[1] // sum(len(group.heads) for group in pages.groups)
    plan = triton_split.plan_layers([pages.groups], counts, queries, int(counts.sum()), cuts)[0]
    return triton_split.decode(q, pages, slots, scale, plan)


LAYOUTS = {
    "four bits": swift([((64, 4),)] * 2, [((96, 4),)]),
    "three precisions": swift(
        [((32, 8), (16, 4), (16, 2)), ((16, 8), (32, 4))],
        [((16, 8), (64, 4), (64, 2))],
    ),
    "long runs": swift([((64, 2),)] * 2, [((160, 8), (288, 4), (272, 2))]),
    "a side in part": swift([((48, 4),), ()], [((40, 8),)]),
    "values a head": swift([((64, 4),), ((32, 8),)], [((32, 8), (32, 2)), ((16, 4),)], heads=1),
    "no values": swift([((64, 4),), ((32, 8),)], [()]),
    "sixteen bits": swift([((64, 16),), ((48, 16),)], [((80, 16),)]),
    "longer pages": swift([((64, 4),)] * 2, [((96, 4),)], page=64),
    "tracked": swift([((64, 4),)] * 2, [((96, 4), (32, 2))], tracked=True),
}
