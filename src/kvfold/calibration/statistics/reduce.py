"""ZDC's reduction of calibration rows before the SVD (ZDC §5.1): topic pruning, then k-means.

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
MAX_CENTROIDS = 1_000_000  # ZDC §6.1
FAST_CENTROIDS = 512  # what 32K tokens of a small model are clustered to in seconds, not minutes
_PASSES = 2

Rows = tuple[Tensor, Tensor, Tensor]  # q [Hk, G T, d], k [Hk, T, d], v [Hk, T, d]


def window_topics(embedded: Tensor, seed: int) -> Tensor:
    """Topics of windows [n] by k-means over their mean token embeddings; embedded [n, D].

    ZDC's text, The Pile, has its topics written beside it, and other text has not. At most TOPICS,
    of four windows on average at least, so that half of one can be dropped.
    """
    from sklearn.cluster import KMeans  # takes a second to import, and few need it

    count = max(1, min(TOPICS, len(embedded) // 4))
    points = embedded.detach().float().cpu().numpy()
    return torch.from_numpy(KMeans(count, random_state=seed, n_init=1).fit_predict(points))


def prune(topics: Tensor, seed: int) -> list[int]:
    """Indices of the windows that stay: a random half of every topic [n], at least one."""
    random = np.random.default_rng(seed)
    labels = topics.numpy()
    kept: list[int] = []
    for topic in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == topic))
        kept += members[: max(1, round(len(members) * KEEP_OF_TOPIC))].tolist()
    return sorted(kept)


def reduced_rows(rows: Sequence[Rows], centroids: int | None, seed: int) -> Moment:
    """Second moments of k-means centroids of [Q; K] and of V, per KV head.

    rows: one per window, queries of all of a KV head's query heads. centroids: of q, of k and of v
    each, no more than half of their N rows (ZDC takes 1M). None: min(1M, N / 2), but no more than
    FAST_CENTROIDS, which bounds the default's time; two passes of mini-batches either way. Returns
    second [Hk, 2, d, d], sums over centroids.
    """
    most = min(MAX_CENTROIDS, FAST_CENTROIDS) if centroids is None else centroids
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
    """points [N, d] -> [count, d], fp64. Starts from random points: k-means++ takes longer than
    everything else."""
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
