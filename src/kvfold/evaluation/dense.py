"""Sessions over transformers' caches. For the shapes see `session`."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from kvfold.evaluation.session import Footprint, Session
from kvfold.utils.versions import cache_argument


class DenseSession(Session):
    """B sequences of equal length in a `DynamicCache`, or in a cache that `new_cache` creates."""

    whole_windows = True

    def __init__(
        self, model: Any, chunk: int = 512, new_cache: Callable[[], DynamicCache] | None = None
    ) -> None:
        super().__init__(chunk)
        self.model, self.new_cache = model, new_cache

    def __enter__(self) -> Self:
        new = self.new_cache
        self.cache = DynamicCache(config=self.model.config) if new is None else new()
        self.batch = 0
        return self

    def __exit__(self, *error: object) -> None:
        del self.cache

    def _append(self, ids: Tensor, last: bool) -> Tensor:
        self.batch = len(ids)
        with torch.no_grad():
            out = self.model(
                input_ids=ids.to(self.model.device),
                **cache_argument(self.cache),
                use_cache=True,
                logits_to_keep=int(last),  # 0: all
            )
        logits: Tensor = out.logits
        return logits

    def _end_prompt(self, position: int) -> None:
        """Do nothing, since nothing is evicted."""

    def compress(self) -> None:
        """Do nothing: a folded model stores compressed entries at once."""

    def footprint(self) -> Footprint:
        size = cache_bytes(self.cache)
        if size == 0 and self.new_cache is None:
            kind = type(self.model).__name__
            raise ValueError(
                f"model: {kind} stored nothing in its DynamicCache, so it has no KV cache"
            )
        return Footprint(tokens=self.batch * self.cache.get_seq_length(), cache_bytes=size)

    def mark(self) -> Any:
        if all(type(layer) is DynamicLayer for layer in self.cache.layers):
            return self.cache.get_seq_length()
        # A sliding window drops tokens, which cropping cannot restore.
        before, self.cache = self.cache, copy.deepcopy(self.cache)
        return before

    def rewind(self, mark: Any) -> None:
        if isinstance(mark, int):
            self.cache.crop(mark - self.cache.get_seq_length())
        else:
            self.cache = mark


def cache_bytes(cache: Any) -> int:
    """Count the bytes of memory behind all tensors of a transformers cache.

    Every storage counts once and whole: a small view keeps all of its tensor alive.
    """
    storages = {}
    for layer in cache.layers:
        for tensor in _tensors(vars(layer)):
            storage = tensor.untyped_storage()
            storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@contextmanager
def inference(model: PreTrainedModel) -> Iterator[None]:
    """Turn off gradients and dropout; restore the model's training mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
