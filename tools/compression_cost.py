"""What it takes to compress a large model: seconds by stage and peak memory, with random weights.

Latency and memory do not need trained weights, so any shape can be measured without a download.

    python tools/compression_cost.py --recipe small --keep 0.25 --json cost.json
"""

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvfold import recipes
from kvfold.cli.common import versions
from kvfold.compression.compressor import Compressor
from kvfold.hub.loading import default_device, load_tokenizer
from kvfold.utils.files import write_json

SHAPES = {
    "llama-3.1-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    ),
    "tiny": LlamaConfig(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    ),
}


def random_model(config: LlamaConfig, device: torch.device) -> Any:
    """A model of random bf16 weights, made on the device."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


class Meter:
    """Seconds of every stage, and the peak memory over all of them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict[str, float]()
        self.begin = time.perf_counter()

    def lap(self, stage: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[stage], self.begin = now - self.begin, now
        print(f"{stage}: {self.seconds[stage]:.1f} s", flush=True)

    def peak(self) -> int:
        """Most bytes held: by PyTorch on a GPU, by the process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(config: LlamaConfig, recipe: str, keep: float, device: torch.device) -> dict[str, Any]:
    """One compression, from the loaded model to the folded one."""
    model = random_model(config, device)
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    stages: list[str] = []
    meter = Meter(device)

    def progress(stage: str, done: int, total: int) -> None:
        if done == total and stage not in stages:
            stages.append(stage)
            meter.lap(stage)

    compressor = Compressor(model, recipes.get(recipe), load_tokenizer("reference:gqa"))
    meter.lap("checks")
    prepared = compressor.prepare(None, progress)
    meter.lap("candidates")
    spec = prepared.plan(keep)
    meter.lap("ranks")
    prepared.fold(spec, {})
    meter.lap("fold")
    return {
        "recipe": recipe,
        "keep": keep,
        "kept_fraction": spec.kept_fraction,
        "seconds": sum(meter.seconds.values()),
        "stages": meter.seconds,
        "model_bytes": model_bytes,
        "peak_bytes": meter.peak(),
        "peak_over_model": meter.peak() / model_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    device = torch.device(default_device())
    row = measure(SHAPES[arguments.shape], arguments.recipe, arguments.keep, device)
    report = {"shape": arguments.shape, "versions": versions(device), **row}
    write_json(arguments.json, report)
    print(report)


if __name__ == "__main__":
    main()
