"""A digest of everything that decides the bytes of a cached block besides its tokens: weights, maps
and layout. It imports no vLLM."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 1 << 24  # 32-bit words that are summed at a time


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of named tensors of any dtype and device, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(_checksums(tensor))
    return digest.hexdigest()


@torch.inference_mode()
def _checksums(tensor: Tensor) -> bytes:
    """A 64-bit sum for every CHUNK of a tensor's 32-bit words, each word times a random odd number
    that depends on its place. It is computed on the tensor's device."""
    data = tensor.detach().contiguous().view(-1)
    if not data.numel():
        return b""
    data = data.view(torch.uint8)
    rest = -len(data) % 4
    if rest or data.storage_offset() % 4:
        data = torch.cat((data, data.new_zeros(rest)))
    words = data.view(torch.int32)
    factors = _factors(data.device)
    sums = [(chunk.long() * factors[: len(chunk)]).sum() for chunk in words.split(CHUNK)]
    return torch.stack(sums).cpu().numpy().tobytes()


@lru_cache(maxsize=2)
def _factors(device: torch.device) -> Tensor:
    """Random odd numbers int64 [CHUNK], the same on every device."""
    make = torch.Generator().manual_seed(0)
    limits = torch.iinfo(torch.int64)
    return (torch.randint(limits.min, limits.max, (CHUNK,), generator=make) | 1).to(device)


def model_digest(model: nn.Module) -> str:
    """A digest of a model's parameters and buffers, RoPE tables included.

    Raises ValueError for parameters whose numbers are elsewhere.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel():
            raise ValueError(
                f"kvfold: the numbers of {name} are not in the model, so its blocks cannot be told"
                " from those of other weights: leave the KV connector out, or load the weights"
                " another way (--load-format, --quantization)"
            )
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    digest = tensors_digest(sorted(tensors.items(), key=lambda item: item[0]))
    _factors.cache_clear()
    return digest


def note_weights(model: nn.Module) -> None:
    """Note the digest of a model's weights in its modules with a KV cache, where the disk connector
    finds it."""
    digest = model_digest(model)
    for module in model.modules():
        if hasattr(module, "kv_cache"):
            module.weights_digest = digest  # type: ignore[assignment]


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of nested dataclasses, sequences and mappings, by path."""
    if isinstance(value, Tensor):
        yield name, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from named_tensors(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, Mapping):
        for key in value:
            yield from named_tensors(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from named_tensors(entry, f"{name}.{index}")


def facts_digest(facts: Mapping[str, Any]) -> str:
    """A digest of plain facts; what JSON does not know counts by its repr."""
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()
