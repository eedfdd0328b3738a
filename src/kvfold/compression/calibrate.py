"""One streaming pass over calibration text: the statistics that bases and ranks are made from.

The model runs as it is; a registered attention function sees queries, keys and values of every
layer, records their moments, and taps the gradients of the loss where a recipe asks for them.
Shapes: B windows, T tokens, Hq / Hk query / KV heads, G = Hq / Hk, d head dim, D width.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.compression.positions import shifting
from kvfold.compression.record import GRADIENTS, Recorder
from kvfold.compression.reduce import prune, window_topics
from kvfold.compression.statistics import Statistics, fingerprint
from kvfold.compression.support import support
from kvfold.models.adapter import Family

Progress = Callable[[int, int], None]


def calibrate(
    model: Any,
    family: type[Family],
    windows: Tensor,
    needs: set[str],
    *,
    topics: Tensor | None = None,
    centroids: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Statistics:
    """Collect the moments named in `needs` (see statistics.QUANTITIES).

    windows [n, T] token ids, no padding. For `rows_reduced`: topics [n] of the windows where they
    are known (None: by `reduce.window_topics`), and the number of k-means centroids.

    Gradients are those of the summed loss with labels sampled from the model, in the model's own
    dtype, accumulated in fp64 (squares of `fisher` in fp32); layers of a large model are recomputed
    in the backward pass one at a time. Leaves the model as it was.
    """
    geometry = family.geometry(model.config)
    statistics = Statistics(artifact_key(model, windows, centroids))
    supports = [
        support(family, attention, geometry) if "kv" in needs else None
        for attention in family.attentions(model)
    ]
    recorder = Recorder(model, family, geometry, statistics, needs, supports)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    kept = _kept(model, windows, topics, seed) if "rows_reduced" in needs else []
    with (
        recorder.installed(gradients=bool(needs & GRADIENTS)),
        shifting(family, model) as shift,
    ):
        for done, window in enumerate(windows):
            ids = window[None].to(model.device)
            shift.draw(ids.shape[1])
            recorder.start(ids.shape[1], generator, keeps_rows=done in kept)
            if needs & GRADIENTS:
                recorder.backward_from_sampled_labels(ids)
            else:
                with torch.no_grad():
                    model.base_model(input_ids=ids, use_cache=False)
            if progress is not None:
                progress(done + 1, len(windows))
    recorder.reduce_rows(centroids, seed)
    recorder.reduce_fisher(len(windows))
    return statistics


def artifact_key(model: nn.Module, windows: Tensor, centroids: int | None = None) -> dict[str, Any]:
    """What makes a saved statistics artifact reusable: same model, tokens and ZDC's centroids."""
    text = hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()[:32]
    key = {"model": fingerprint(model), "text": text, "tokens": windows.numel()}
    return key if centroids is None else {**key, "centroids": centroids}


def _kept(model: Any, windows: Tensor, topics: Tensor | None, seed: int) -> list[int]:
    """Windows [n, T] that stay after ZDC's topic pruning."""
    if topics is None:
        with torch.no_grad():
            embed = model.get_input_embeddings()
            means = [embed(window.to(model.device)).float().mean(0) for window in windows]
        topics = window_topics(torch.stack(means), seed)
    return prune(topics, seed)
