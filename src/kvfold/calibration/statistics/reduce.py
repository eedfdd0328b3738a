"""ZDC's reduction of calibration vectors before the SVD (ZDC §5.1): topic pruning, then k-means.

Shapes: n windows, T tokens of a window, Hk KV heads, G query heads per KV head, d head dim,
D model width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvfold.calibration.statistics.moments import Moment

KEEP_OF_TOPIC = 0.5  # ZDC §6.1: half of the sequences of every topic
TOPICS = 22  # of The Pile, which ZDC prunes
CENTROIDS = 10_000  # the fewest of ZDC Fig. 26b; its 1M take 250 times as long
_PASSES = 2

Rows = tuple[Tensor, Tensor, Tensor]  # q [Hk, G T, d], k [Hk, T, d], v [Hk, T, d]


def window_topics(embedded: Tensor, seed: int) -> Tensor:
    """Topics of windows [n] by k-means over their mean token embeddings; embedded [n, D].

    ZDC's text, The Pile, names its topics; other text does not. There are at most TOPICS, with at
    least four windows on average, so that half of a topic can be dropped.
    """
    from sklearn.cluster import KMeans  # takes a second to import, and few need it

    count = max(1, min(TOPICS, len(embedded) // 4))
    points = embedded.detach().float().cpu().numpy()
    return torch.from_numpy(KMeans(count, random_state=seed, n_init=1).fit_predict(points))


def prune(topics: Tensor, seed: int) -> list[int]:
    """Indices of the windows that remain: a random half of every topic [n], at least one."""
    random = np.random.default_rng(seed)
    labels = topics.numpy()
    remaining: list[int] = []
    for topic in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == topic))
        remaining += members[: max(1, round(len(members) * KEEP_OF_TOPIC))].tolist()
    return sorted(remaining)


def num_centroids(centroids: int | None) -> int:
    """The number of centroids that `reduced_rows` takes at most."""
    return CENTROIDS if centroids is None else centroids


def reduced_rows(rows: Sequence[Rows], centroids: int | None, seed: int) -> Moment:
    """Second moments of k-means centroids of [Q; K] and of V, per KV head: [Hk, 2, d, d].

    rows: one per window; q holds the queries of all query heads of a KV head. centroids: for each
    of q, k and v, at most half of their N vectors (ZDC takes 1M). None: CENTROIDS, which
    bounds the time. k-means takes two passes of mini-batches.
    """
    most = num_centroids(centroids)
    q, k, v = (
        torch.stack([_centroids(head, min(most, len(head) // 2), seed) for head in torch.cat(x, 1)])
        for x in zip(*rows, strict=True)
    )
    pairs = (torch.cat((q, k), dim=1), v)
    second = torch.stack([x.mT @ x for x in pairs], dim=1)
    first = torch.stack([x.sum(1) for x in pairs], dim=1)
    weight = torch.tensor([x.shape[1] for x in pairs], dtype=torch.double)
    return Moment(second=second, first=first, weight=weight.expand(len(q), 2).clone())


def _centroids(points: Tensor, count: int, seed: int) -> Tensor:
    """Centroids [count, d] of points [N, d], fp64. Starts from random points, as k-means++ takes
    longer than everything else."""
    from sklearn.cluster import MiniBatchKMeans

    kmeans = MiniBatchKMeans(
        max(1, count),
        init="random",
        n_init=1,
        max_iter=_PASSES,
        batch_size=4096,
        compute_labels=False,
        random_state=seed,
    )
    kmeans.fit(points.numpy())
    return torch.from_numpy(kmeans.cluster_centers_).double()
