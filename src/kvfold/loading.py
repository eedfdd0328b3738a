"""Finding and loading models: a directory, a GGUF file, a hub id, or `reference:NAME`."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import kvfold.artifact  # noqa: F401  (registers the checkpoint format with transformers)
from kvfold import gguf, smollm2
from kvfold.gguf import first_line
from kvfold.hub import where, why_not
from kvfold.models.families import family_of
from kvfold.place import check_device, check_dtype

PACKAGED = ("gqa", "mha")
REFERENCES = (*PACKAGED, "smollm2")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def resolve(name: str) -> str:
    """A directory, GGUF file or hub id for `name`; `reference:gqa` is inside the package.

    Raises ValueError for an unknown reference model, and as `smollm2.local`.
    """
    if not name.startswith("reference:"):
        return name
    kind = name.removeprefix("reference:")
    if kind not in REFERENCES:
        raise ValueError(
            f"unknown reference model {kind!r}; reference models: "
            + ", ".join(f"reference:{item}" for item in REFERENCES)
        )
    if kind == "smollm2":
        return smollm2.resolve()
    return str(resources.files("kvfold.models.reference").joinpath(kind))


def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    **options: Any,
) -> Any:
    """A causal language model, folded or plain, ready for inference.

    name: a directory, a GGUF file, a hub id or `reference:gqa` / `reference:mha` /
    `reference:smollm2`; dtype as in transformers, "auto" for a GGUF file of packed numbers is
    bfloat16; device defaults to CUDA where there is one. Raises ValueError for anything that is not
    one.
    """
    check_dtype(dtype)
    if device is not None:
        check_device(device)
    name = str(name)
    config = load_config(name)
    if family_of(config).softcap(config) is not None:
        # sdpa of transformers 5.17 leaves the cap out and says nothing.
        options.setdefault("attn_implementation", "eager")
    path = resolve(name)
    if gguf.is_gguf(path):
        return gguf.load_model(path, dtype=dtype, **options).eval().to(device or default_device())
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, **{**where(path), **options}
        )
    except SafetensorError as error:
        raise ValueError(f"the weights in {name!r} are damaged: {first_line(error)}") from error
    except (OSError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot load a model from {name!r}: {first_line(error)}") from error
    return model.eval().to(device or default_device())


def load_config(name: str) -> Any:
    """The transformers config of a model of a supported family. Raises ValueError for another, and
    for a GGUF file of a family that needs more than is read from one."""
    path = resolve(str(name))
    packed = gguf.is_gguf(path)
    config = gguf.load_config(path) if packed else _directory_config(str(name), path)
    family = family_of(config)
    if packed and family.not_in_gguf is not None:
        raise ValueError(
            f"{path} is a {config.model_type} model, and transformers does not read from GGUF files"
            f" {family.not_in_gguf}; use the original checkpoint"
        )
    return config


def _directory_config(name: str, path: str) -> Any:
    """The config of a directory or a hub id."""
    _check_directory(path)
    try:
        return AutoConfig.from_pretrained(path, **where(path))
    except (OSError, KeyError, json.JSONDecodeError) as error:
        if path == smollm2.HUB:
            raise ValueError(f"{smollm2.advice()} ({first_line(error)})") from error
        if not Path(path).exists():
            raise ValueError(f"cannot load a model from {name!r}: {why_not(error)}") from error
        raise ValueError(f"cannot load a model from {name!r}: {first_line(error)}") from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer that belongs to `name`."""
    path = resolve(str(name))
    if gguf.is_gguf(path):
        return gguf.load_tokenizer(path)
    try:
        return AutoTokenizer.from_pretrained(path, **where(path))
    except (OSError, ValueError, KeyError) as error:
        if path == smollm2.HUB:
            raise ValueError(f"{smollm2.advice()} ({first_line(error)})") from error
        raise ValueError(f"cannot load a tokenizer from {name!r}: {first_line(error)}") from error


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def reference(kind: str = "gqa", **options: Any) -> Any:
    """The embedded trained model `gqa` (Llama) or `mha` (OPT), in fp32 unless asked otherwise."""
    return load(f"reference:{kind}", **{"dtype": torch.float32, **options})


def _check_directory(path: str) -> None:
    folder = Path(path)
    if not folder.exists():
        if path.startswith((".", "/", "~")):
            raise ValueError(f"model directory {path} does not exist")
        return
    if not folder.is_dir() or not (folder / "config.json").exists():
        raise ValueError(f"{path} is not a model directory: it has no config.json")
    if not any((folder / name).exists() for name in _WEIGHTS):
        raise ValueError(f"{path} has no weights ({' or '.join(_WEIGHTS)}): the copy is incomplete")
