"""Find and load models: a directory, a GGUF file, a hub id, or `reference:NAME`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvfold.config import Setting
from kvfold.hub import gguf
from kvfold.hub import reference as reference_models
from kvfold.hub.checkpoint import spec_of  # also registers the checkpoint format
from kvfold.hub.device import check_device, check_dtype
from kvfold.hub.download import hub_options, why_not_found
from kvfold.models.families import check_model, family_of, has_family
from kvfold.models.weights import check_complete, check_finite
from kvfold.utils.errors import SettingError, first_line
from kvfold.utils.files import check_here
from kvfold.utils.text import json_object

PACKAGED = ("gqa", "mha")
REFERENCES = (*PACKAGED, *reference_models.MODELS)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Names of numbers in a config.json that are divisors, or bases of powers.
_POSITIVE = re.compile(r"(^rope_theta|_theta|_base|_eps|_epsilon|_factor|_scaling|scalar)$")
MANY_LAYERS = 1000  # more take minutes to create, so they are counted in the weights first
_SIZES = (  # settings of a config.json that must be positive integers, if present
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def resolve(name: str) -> str:
    """A directory, GGUF file or hub id for `name`; `reference:gqa` is part of the package.

    Raises ValueError for an unknown reference model, and as `reference_models.local`.
    """
    if not name.startswith("reference:"):
        return name
    kind = name.removeprefix("reference:")
    if kind not in REFERENCES:
        raise ValueError(
            f"unknown reference model {kind!r}; reference models: "
            + ", ".join(f"reference:{item}" for item in REFERENCES)
        )
    if kind in reference_models.MODELS:
        return reference_models.resolve(kind)
    return str(resources.files("kvfold.data.reference").joinpath(kind))


def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    **options: Any,
) -> Any:
    """Load a causal language model of any type, folded or plain, for inference.

    name: a directory, a GGUF file, a hub id or `reference:NAME` with a NAME of REFERENCES.
    dtype: as in transformers, but "auto" is float32 on a CPU, because 16-bit arithmetic is slow on
        most CPUs and inaccurate on all (elsewhere: the checkpoint's own; bfloat16 for a GGUF file
        of quantised numbers).
    device: CUDA if available by default.

    Raises ValueError for a name that is not a model, and for weights that are missing, belong to
    another model, or are not finite.
    """
    if not isinstance(name, str | Path):
        raise SettingError(
            f"`name` must be a directory, a GGUF file or a hub id; got {name!r:.100}"
        )
    if "torch_dtype" in options:
        raise ValueError(f"torch_dtype is called dtype here: pass dtype={options['torch_dtype']!r}")
    check_dtype(dtype)
    if device is not None:
        check_device(device)
    device, name = device or default_device(), str(name)
    if dtype == "auto" and torch.device(device).type == "cpu":
        dtype = torch.float32
    config = load_config(name)
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        # sdpa of transformers 5.17 leaves the cap out and says nothing.
        options.setdefault("attn_implementation", "eager")
    path = resolve(name)
    read = gguf.load_model if gguf.is_gguf(path) else _load_directory
    model = read(path, dtype=dtype, **options).eval().to(device)
    check_finite(model)
    with _naming(f"generation_config.json of {name!r}"):
        ends = model.generation_config.eos_token_id
        Setting().check("eos_token_id", ends, int | list[int] | None)
    return model


def check_loaded(model: Any, device: str | None, dtype: str | torch.dtype) -> None:
    """Raises ValueError for anything but a loaded causal LM, and for device and dtype settings,
    which apply to loading only."""
    if device is not None or dtype != "auto":
        raise ValueError(
            "device and dtype are of a model that is loaded by its name; this one is loaded "
            "already: leave them out, and move it before with model.to(...)"
        )
    check_model(model)


def _load_directory(path: str, **options: Any) -> Any:
    """Load the model of a directory or a hub id, if its checkpoint has all of its weights."""
    checked = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # checked below
    read: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, info = read(path, **{**hub_options(path), **options, **checked})
    except SafetensorError as error:
        raise ValueError(f"the weights in {path!r} are damaged: {first_line(error)}") from error
    except ValueError:
        raise
    except Exception as error:  # a damaged or edited config.json raises any class of error
        raise ValueError(f"cannot load a model from {path!r}: {first_line(error)}") from error
    check_complete(
        path,
        missing=info["missing_keys"],
        unexpected=info["unexpected_keys"],
        mismatched=[name for name, *_ in info["mismatched_keys"]],
        folded=spec_of(model) is not None,
    )
    return model


def load_config(name: str) -> Any:
    """The transformers config of a model. Raises ValueError if there is none, and for a GGUF file
    of a type without a family, or that lacks necessary settings."""
    check_here()
    path = resolve(str(name))
    if not gguf.is_gguf(path):
        return _directory_config(str(name), path)
    config = gguf.load_config(path)
    if not has_family(config):
        raise ValueError(
            f"{path} is a {config.model_type} model, and kvfold reads GGUF files of the types alone"
            " that it folds; use the original checkpoint"
        )
    family = family_of(config)
    if family.not_in_gguf is not None:
        raise ValueError(
            f"{path} is a {config.model_type} model, and transformers does not read from GGUF files"
            f" {family.not_in_gguf}; use the original checkpoint"
        )
    return config


def _directory_config(name: str, path: str) -> Any:
    """The config of a directory or a hub id."""
    _check_directory(path)
    with _reading("config.json", name, path):
        return AutoConfig.from_pretrained(path, **hub_options(path))


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of `name` and tokenise a text once, so that a setting of a wrong type
    fails here."""
    path = resolve(str(name))
    if gguf.is_gguf(path):
        return gguf.load_tokenizer(path)
    with _reading("tokenizer files", name, path):
        tokenizer = AutoTokenizer.from_pretrained(path, **hub_options(path))
        tokenizer("", verbose=False)
        return tokenizer


@contextmanager
def _reading(files: str, name: str, path: str) -> Iterator[None]:
    """Context manager: turn all errors of transformers about a model's files into one ValueError.
    Damaged or edited files raise any class of error, those of tokenizers plain Exception."""
    try:
        yield
    except Exception as error:
        if (advice := reference_models.advice(path)) is not None:
            raise ValueError(f"{advice} ({first_line(error)})") from error
        if not Path(path).exists():
            raise ValueError(
                f"cannot load a model from {name!r}: {why_not_found(error)}"
            ) from error
        for file in sorted(Path(path).glob("*token*.json")):
            _object(file)
        way_out = "" if isinstance(error, ValueError) else "; copy it again"
        why = first_line(error)
        raise ValueError(f"cannot read the {files} of {name!r}: {why}{way_out}") from error


def _object(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model. Raises ValueError that names the file."""
    with _naming(file):
        return json_object(file.read_bytes())


@contextmanager
def _naming(file: Path | str) -> Iterator[None]:
    """Context manager: name the file that a ValueError is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}; copy it again") from None


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def reference(kind: str = "gqa", **options: Any) -> Any:
    """Load the packaged trained model `gqa` (Llama) or `mha` (OPT), in fp32 by default."""
    return load(f"reference:{kind}", **{"dtype": torch.float32, **options})


def _check_directory(path: str) -> None:
    folder = Path(path)
    if not folder.exists():
        if path.startswith((".", "/", "~")):
            raise ValueError(f"model directory {path} does not exist")
        return
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"{path} is an adapter of PEFT, not a model: load its base and merge it, with"
            " peft.PeftModel.from_pretrained(base, ...).merge_and_unload()"
        )
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise ValueError(f"{path} is not a model directory: it has no config.json")
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise ValueError(f"{path} has no weights ({' or '.join(_WEIGHTS)}): the copy is incomplete")
    config = _object(folder / "config.json")
    with _naming(folder / "config.json"):
        for size in _SIZES:
            Setting(least=1).check(size, config.get(size), int | None)
        Setting().check("quantization_config", config.get("quantization_config"), dict | None)
        for key, value in _numbers(config):
            if value != value or (_POSITIVE.search(key) and not 0 <= value < inf):
                raise ValueError(f"{key} must be a finite number, not below 0; got {value}")
        layers = config.get("num_hidden_layers") or 0
        if layers > MANY_LAYERS and layers > (tensors := _num_tensors(folder)):
            raise ValueError(
                f"num_hidden_layers is {layers}, and its weights are {tensors} tensors"
            )


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a config by name, except those of the kvfold section."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(item, name) if name != "quantization_config" else ()
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, key)
    elif isinstance(value, int | float):
        yield key, value


def _num_tensors(folder: Path) -> int:
    """Number of tensors in a model's safetensors files, by their index or the file's header."""
    index = folder / _WEIGHTS[1]
    with _naming(index):
        if not (folder / _WEIGHTS[0]).is_file():
            return len(json_object(index.read_bytes()).get("weight_map", ()))
    try:
        with safe_open(folder / _WEIGHTS[0], framework="pt") as file:
            return len(file.keys())
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {str(folder)!r} are damaged: {first_line(error)}"
        ) from error
