"""Load GGUF files through transformers, dequantised to ordinary weights."""

import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.integrations.gguf import read_gguf_metadata

from kvfold.hub.gguf_check import check_file
from kvfold.utils.errors import first_line

PACKAGES = ("gguf", "accelerate")
_DTYPES = {0: torch.float32, 1: torch.float16}  # by general.file_type
CONVERSION = 2  # raise it when `convert` writes other files for the same GGUF file
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
# Byte-level vocabularies (tokenizer.ggml.pre) that add BOS unless the file says otherwise: those of
# Llama 3 and Mistral Nemo, as in llama.cpp.
_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "tekken")
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file."""
    return name.lower().endswith(".gguf")


def load_config(path: str) -> Any:
    """The transformers config of a GGUF file, with the dtype in which its weights are loaded:
    float32 or float16 if the file holds these, else bfloat16. Raises ValueError for a file that is
    missing or damaged, has an architecture that transformers cannot read, or RoPE scaling."""
    check_installed()
    if not Path(path).is_file():
        raise ValueError(f"GGUF file {path} does not exist")
    try:
        metadata, tensors = read_gguf_metadata(path)
        check_file(path, metadata)
    except Exception as error:  # a damaged file raises any class of error, here and below
        raise ValueError(f"{path} is not a readable GGUF file: {first_line(error)}") from error
    _check_rope(path, metadata, tensors)
    try:
        config = AutoConfig.from_pretrained(**_place(path))
    except Exception as error:
        raise ValueError(f"cannot load a model from {path!r}: {first_line(error)}") from error
    window = metadata.get(f"{metadata['general.architecture']}.attention.sliding_window")
    if window and getattr(config, "sliding_window", 0) is None:  # Phi-3's, which is left out
        config.sliding_window = window
    config.dtype = _DTYPES.get(metadata.get("general.file_type", -1), torch.bfloat16)
    return config


def load_model(path: str, *, dtype: str | torch.dtype = "auto", **options: Any) -> Any:
    """Load a causal LM with the dequantised weights of a GGUF file. dtype: "auto" is that of
    `load_config`. Raises ValueError as `load_config`, and for missing weights."""
    config = load_config(path)
    reader: Any = AutoModelForCausalLM.from_pretrained
    try:
        with _quiet():
            model, info = reader(
                **_place(path),
                config=config,
                dtype=config.dtype if dtype == "auto" else dtype,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                **options,
            )
    except Exception as error:
        raise ValueError(f"cannot load a model from {path!r}: {first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{path} has no weights for {missing[0]} and {len(missing) - 1} others: the file is one"
            " part of several, or incomplete; give a GGUF file that holds the whole model"
        )
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:  # transformers 5.17
        quantizer.remove_quantization_config(model)
    return model


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a GGUF file, with its chat template. The file's metadata decides
    whether BOS and EOS are added. Raises ValueError if there is none."""
    check_installed()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(**_place(path))
        metadata, _ = read_gguf_metadata(path)
        for name, key in _SPECIAL.items():  # transformers 5.17 takes the first token for the last
            if (number := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
                setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))
    except Exception as error:
        raise ValueError(f"cannot load a tokenizer from {path!r}: {first_line(error)}") from error
    # transformers 5.17 reads neither of these.
    tokenizer.add_bos_token = _adds_bos(metadata)
    tokenizer.add_eos_token = bool(metadata.get("tokenizer.ggml.add_eos_token"))
    if metadata.get("tokenizer.ggml.pre") == "smollm":  # transformers leaves numbers whole
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return tokenizer


def _adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether the tokenizer adds BOS: as the file says, else as is usual for its kind of
    vocabulary."""
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    default = sentencepiece or metadata.get("tokenizer.ggml.pre") in _WITH_BOS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def check_installed() -> None:
    """Raises ValueError if a package that reads GGUF files is missing."""
    for name in PACKAGES:
        if find_spec(name) is None:
            raise ValueError(
                f"GGUF files need the package {name}, which is not installed; "
                'run: pip install "kvfold[gguf]"'
            )


def _place(path: str) -> dict[str, str]:
    """Arguments of `from_pretrained` for a file. Its path is absolute, since a bare name would be
    looked for in the working directory."""
    file = Path(path).absolute()
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": str(file)}


def _check_rope(path: str, metadata: dict[str, Any], tensors: tuple[str, ...]) -> None:
    """Raises ValueError for scaled rotary positions, which transformers ignores silently."""
    scaling = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none")
    if scaling != "none" or any(name in tensors for name in _ROPE_TENSORS):
        raise ValueError(
            f"{path} scales its rotary positions, which transformers does not read from GGUF files;"
            " use the original checkpoint"
        )


def _quiet() -> AbstractContextManager[Any]:
    """Context manager: hide transformers' progress bar unless stderr is a terminal."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO())
