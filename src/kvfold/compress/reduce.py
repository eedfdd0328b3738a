"""ZDC's reduction of calibration rows before the SVD (ZDC §5.1): topic pruning, then k-means."""

import numpy as np
import torch
from torch import Tensor

from kvfold.compress.statistics import Moment

KEEP_OF_TOPIC = 0.5  # ZDC §6.3: half of the sequences of every topic
CENTROIDS_PER_DIM = 4


def reduced_rows(rows: list[Tensor], topics: Tensor | None, seed: int) -> Moment:
    """Second moments of k-means centroids of [Q; K] and of V, per head.

    rows: one [3, Hk, T, d] of q (mean over the group), k and v per window; topics [n]. Half of
    each topic's windows are dropped first. Returns second [Hk, 2, d, d] (sums over centroids).
    """
    kept = prune(len(rows), topics, seed)
    stacked = torch.cat([rows[i] for i in kept], dim=2)  # [3, Hk, N, d]
    clusters = min(CENTROIDS_PER_DIM * stacked.shape[-1], stacked.shape[2] // 2)
    q, k, v = (torch.stack([_centroids(head, clusters, seed) for head in part]) for part in stacked)
    pairs = (torch.cat((q, k), dim=1), v)
    second = torch.stack([x.mT @ x for x in pairs], dim=1)
    first = torch.stack([x.sum(1) for x in pairs], dim=1)
    weight = torch.tensor([x.shape[1] for x in pairs], dtype=torch.double)
    return Moment(second=second, first=first, weight=weight.expand(len(q), 2).clone())


def prune(count: int, topics: Tensor | None, seed: int) -> list[int]:
    """Indices of the windows that stay: a random half of every topic, at least one."""
    random = np.random.default_rng(seed)
    labels = np.zeros(count, dtype=int) if topics is None else topics.numpy()
    kept: list[int] = []
    for topic in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == topic))
        kept += members[: max(1, round(len(members) * KEEP_OF_TOPIC))].tolist()
    return sorted(kept)


def _centroids(points: Tensor, clusters: int, seed: int) -> Tensor:
    """points [N, d] -> [clusters, d], fp64."""
    from sklearn.cluster import MiniBatchKMeans  # takes a second to import, and few need it

    kmeans = MiniBatchKMeans(clusters, random_state=seed, n_init=1, max_iter=20, batch_size=4096)
    kmeans.fit(points.numpy())
    return torch.from_numpy(kmeans.cluster_centers_).double()
