"""Tiny checkpoints with quantised weights, packed by hand as their libraries publish them: what
vLLM loads is the same on every machine.

Shapes: [O, I] a weight's outputs and inputs; G numbers of it share a scale.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output each four bits of a word hold


def gptq(weight: Tensor) -> dict[str, Tensor]:
    """Symmetric, which is all that vLLM takes: codes less 8. Zeros are stored less one."""
    codes, scales, _ = four_bits(weight, zeros=False)
    outputs, inputs = weight.shape
    return {
        "qweight": packed(codes.T, 0),
        "scales": scales.T.half().contiguous(),
        "qzeros": packed(torch.full((inputs // GROUP, outputs), 7), 1),
        "g_idx": (torch.arange(inputs) // GROUP).int(),
    }


def awq(weight: Tensor) -> dict[str, Tensor]:
    codes, scales, zeros = four_bits(weight, zeros=True)
    return {
        "qweight": packed(codes.T, 1, AWQ_ORDER),
        "scales": scales.T.half().contiguous(),
        "qzeros": packed(zeros.T, 1, AWQ_ORDER),
    }


def w8a8(weight: Tensor) -> dict[str, Tensor]:
    """A scale an output; inputs get theirs as they come."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def four_bits(weight: Tensor, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..15 int64 [O, I], scales [O, I / G] and zeros int64 of the same shape."""
    x = weight.unflatten(1, (-1, GROUP))
    low, high = x.amin(2).clamp(max=0), x.amax(2).clamp(min=0)
    scales = ((high - low) / 15 if zeros else torch.maximum(high, -low) / 7).half().float()
    zero = (-low / scales).round() if zeros else torch.full_like(scales, 8)
    codes = (x / scales[..., None]).round() + zero[..., None]
    return codes.clamp(0, 15).flatten(1).long(), scales, zero.long()


def packed(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes along a dimension as an int32."""
    each = codes.movedim(dim, -1).unflatten(-1, (-1, 8))
    words = sum(each[..., place] << 4 * i for i, place in enumerate(order))
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.int().movedim(-1, dim).contiguous()


ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token"}
SCHEME = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "input_activations": ACTIVATIONS | {"dynamic": True},
}
KINDS: Mapping[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "gptq": (
        gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
            "checkpoint_format": "gptq",
            "lm_head": False,
        },
    ),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "w8a8": (
        w8a8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": SCHEME},
            "ignore": ["lm_head"],
        },
    ),
}


def quantised(kind: str, path: str, folder: Path) -> str:
    """A checkpoint with the linear layers of another one's decoder quantised."""
    pack, config = KINDS[kind]
    shutil.copytree(path, folder)
    tensors: dict[str, Tensor] = {}
    for name, x in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            own = pack(x.float())
            tensors |= {f"{name.removesuffix('weight')}{part}": y for part, y in own.items()}
        else:
            tensors[name] = x
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    return str(folder)
