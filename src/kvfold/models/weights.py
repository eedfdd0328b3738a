"""Write and check a checkpoint's tensors: complete, of the right shapes, and finite."""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

FEW = 3  # names that an error lists
# Parameters of a folded attention alone.
_FOLDED = re.compile(r"\.(down_proj\.\w+|key_(up|down|shift|mean)|value_up|score_map)$")


def write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model, and its tokenizer if it has one."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextmanager
def stored(files: Collection[str]) -> Iterator[dict[str, Any]]:
    """Context manager: slices of the tensors in safetensors files by name; shapes and values are
    read on demand."""
    with ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))  # transformers loads where the default is meta
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        yield {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118


def check_complete(
    name: str,
    *,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[str],
    folded: bool = False,
) -> None:
    """Raises ValueError if a checkpoint does not hold the weights that its config.json asks for.

    Plain checkpoints may hold tensors that are not used, folded ones may not.
    """
    stripped = not folded and any(_FOLDED.search(x) for x in unexpected)
    if not (missing or mismatched or stripped or (folded and unexpected)):
        return
    kinds = {"missing": missing, "of another shape": mismatched, "unexpected": unexpected}
    problems = "; ".join(f"{len(x)} {kind} ({_few(x)})" for kind, x in kinds.items() if x)
    way_out = "its files are incomplete or not of one checkpoint: copy all of them again"
    if stripped:
        way_out = (
            "this looks like a kvfold checkpoint whose quantization_config was removed from"
            " config.json: put it back, or compress the model again"
        )
    raise ValueError(f"cannot load a model from {name!r}: tensors {problems}; {way_out}")


def _few(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:FEW]) + (", ..." if len(names) > FEW else "")


def check_finite(model: torch.nn.Module) -> None:
    """Raises ValueError that names the first parameter with NaN or infinity. Reads all weights
    once: a few milliseconds for 10 million."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta or is_packed(parameter):  # offloaded weights are not read here
            continue
        if not torch.isfinite(parameter.detach().sum(dtype=torch.float32)):
            raise ValueError(
                f"parameter {name} holds NaN or infinite numbers; the checkpoint is damaged or was "
                "saved from a diverged run: use another one"
            )


def is_packed(x: torch.Tensor) -> bool:
    """Whether a tensor holds quantised numbers: packed bits, or a tensor class of a library."""
    return type(x.data) is not torch.Tensor or not x.is_floating_point() or x.itemsize < 2


def sample(tensors: Mapping[str, Any]) -> Iterator[bytes]:
    """Names, shapes and first rows of tensors or of a file's slices: enough to tell compressions of
    a model apart."""
    for name, tensor in sorted(tensors.items()):
        row = tensor[:1].flatten().cpu().contiguous()
        yield f"{name} {list(shape(tensor))}".encode()
        yield row.view(torch.uint8).numpy().tobytes()


def digests(tensors: Iterable[tuple[str, Any]]) -> list[bytes]:
    """One line per tensor or slice of a file, sorted: name, shape, dtype and SHA-256 of its
    numbers. Reads all numbers on all cores, at about 2 GB per second and core."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return sorted(pool.map(_digest, tensors))


def _digest(item: tuple[str, Any]) -> bytes:
    name, x = item[0], item[1][...].detach().cpu().contiguous()
    numbers = hashlib.sha256(x.flatten().view(torch.uint8).numpy().data).hexdigest()
    return f"{name} {list(x.shape)} {x.dtype} {numbers}\n".encode()


def in_layer(name: str) -> bool:
    """Whether a tensor belongs to a numbered layer."""
    return any(part.isdigit() for part in name.split("."))


def check_numbers(name: str, tensors: Mapping[str, Any]) -> None:
    """Raises ValueError for slices of files that hold integers instead of floats."""
    for tensor, x in tensors.items():
        if not x.get_dtype().startswith(("F", "BF")):
            raise ValueError(
                f"cannot load a model from {name!r}: tensor {tensor} is of dtype {x.get_dtype()},"
                " and weights are not whole numbers; the file was edited: copy it again"
            )


def shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


def fingerprint(model: torch.nn.Module) -> str:
    """A digest of a model's parameter names, shapes, and about a thousand numbers of each
    parameter.

    It uses numbers instead of sums, because sums depend on the number of threads.
    """
    digest = hashlib.sha256()
    for name, numbers in _numbers(model):
        numbers = numbers.detach()
        digest.update(f"{name}{tuple(numbers.shape)}".encode())
        if type(numbers) is not torch.Tensor:  # a library's own, which few operations take
            numbers = numbers.dequantize()
        sample = numbers.flatten()[:: max(1, numbers.numel() // 1024)].float().cpu()
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]


class Unchanged:
    """Whether a model's parameters have changed since this object was created.

    Compares PyTorch's version counter, dtype, device and one number of each parameter. Their memory
    may move, because engines merge products of the same inputs.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = [
            (name, x)
            for name, x in model.named_parameters()
            if x.numel() and not (x.is_meta or is_packed(x))
        ]
        self.was = self._state()

    def first(self) -> str | None:
        """The name of the first parameter that changed, or None."""
        for (name, _), before, now in zip(self.parameters, self.was, self._state(), strict=True):
            if before != now:
                return name
        return None

    def _state(self) -> list[tuple[Any, ...]]:
        kinds = [(x.device, x.dtype) for _, x in self.parameters]
        numbers: dict[Any, list[torch.Tensor]] = {kind: [] for kind in kinds}
        for kind, (_, x) in zip(kinds, self.parameters, strict=True):
            numbers[kind].append(x.detach()[tuple(size // 2 for size in x.shape)])
        read = {kind: iter(torch.stack(x).tolist()) for kind, x in numbers.items()}  # one copy each
        return [
            (*kind, 0 if x.is_inference() else x._version, next(read[kind]))
            for kind, (_, x) in zip(kinds, self.parameters, strict=True)
        ]


def _numbers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's parameters and packed buffers by name; offloaded ones are loaded one module at a
    time."""
    names = {name for name, _ in model.named_parameters()}
    names |= {name for name, x in model.named_buffers() if is_packed(x) and x.dtype != torch.bool}
    for prefix, module in model.named_modules():
        with _loaded(module):
            tensors = (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            )
            for name, x in tensors:
                if (full_name := f"{prefix}.{name}" if prefix else name) in names:
                    yield full_name, x


def _loaded(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Context manager: load a module's parameters to its device if accelerate has offloaded
    them."""
    if not any(x.is_meta for x in module.parameters(recurse=False)):
        return nullcontext()
    from accelerate.utils import align_module_device

    loaded: AbstractContextManager[None] = align_module_device(module)
    return loaded


@contextmanager
def rounded(model: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Context manager: cast a model's parameters, not its buffers, to a dtype (None: leave
    them)."""
    originals = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, data in originals:
            parameter.data = data if dtype is None else data.to(dtype)
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data
