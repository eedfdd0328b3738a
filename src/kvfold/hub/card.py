"""Summaries of a compressed model, for the command line and for the README of its checkpoint or
maps."""

import re
from pathlib import Path
from typing import Any

from kvfold.hub import reference
from kvfold.layout import CacheSpec
from kvfold.layout.pages import cache_layout

_TEXT = """\
# {source}, with a smaller KV cache

Base model: {base}

Made by kvfold from `{source}` with the recipe `{recipe}`:

{facts}

## Loading it

It is an ordinary checkpoint that needs kvfold:

```python
import kvfold

model = kvfold.load("path/to/this/folder")  # a transformers model, with transformers' own cache
llm = kvfold.LLM("path/to/this/folder")  # kvfold's engine and paged cache{planned}
```

Other programs load it through transformers, after `import kvfold`:

```python
import kvfold
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
```

Without that import transformers warns of `Unknown quantization type, got kvfold` and lists tensors
as UNEXPECTED and MISSING. Mostly it then ends with an error, `You set ignore_mismatched_sizes to
False`; where no shape differs it goes on with random attention, which writes nonsense. Its advice,
to delete `quantization_config` from config.json, does not help.
"""


_MAPS = """\
---
{metadata}library_name: kvfold
tags:
- kvfold
- kv-cache
---

# Maps for a smaller KV cache of {source}

Base model: {base}

Made by kvfold from `{source}` ({kind}) with the recipe `{recipe}`. The model's weights are not in
here and do not change: they may be of any dtype, quantised, or have a LoRA.

{facts}

## What is stored

`kvfold.json` says what the cache stores, how that was chosen, and numbers that tell `{source}` from
other models. `kvfold.safetensors` holds the maps of every layer, in float16 where
that holds their numbers, else in float32.

## Using it

Below, MAPS is the hub id of this repository, `USER/NAME` or `USER/NAME@REVISION`, or a folder with
these files.

transformers, with its own cache and attention:

```python
{loading}
kvfold.attach(model, "MAPS")
```

kvfold's engine, or its server with `kvfold serve {source} --maps MAPS`:

```python
import kvfold

llm = kvfold.LLM("{source}", maps="MAPS")
```
{vllm}"""
_FROM_HUB = """\
import kvfold
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{source}")"""
_PACKAGED = """\
import kvfold

model = kvfold.load("{source}")"""
_VLLM = """
vLLM, where kvfold is installed:

```sh
vllm serve {source} --additional-config '{{"kvfold": {{"maps": "MAPS"}}}}'
```
"""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def maps_text(spec: CacheSpec, provenance: dict[str, Any]) -> str:
    """The README of a folder of maps, in Markdown with hub metadata."""
    name = str(provenance.get("model", "a model"))
    hub, is_packaged = _hub_id(name), name.startswith(reference.PREFIX)
    is_packaged &= hub is None
    source = hub or (name if is_packaged else Path(name).name)
    return _MAPS.format(
        metadata="" if hub is None else f"base_model: {hub}\n",
        base=_base(name),
        source=source,
        kind=provenance.get("model_type", "a causal LM"),
        recipe=provenance.get("recipe", {}).get("name", "plain"),
        facts="\n".join(f"- {line}" for line in facts(spec, provenance)),
        loading=(_PACKAGED if is_packaged else _FROM_HUB).format(source=source),
        vllm="" if is_packaged else _VLLM.format(source=source),
    )


def text(spec: CacheSpec, provenance: dict[str, Any]) -> str:
    """The README of a folded checkpoint, in Markdown."""
    name = str(provenance.get("model", "a model"))
    return _TEXT.format(
        base=_base(name),
        source=name,
        recipe=provenance["recipe"]["name"],
        facts="\n".join(f"- {line}" for line in facts(spec, provenance)),
        planned=", with the planned bits" if spec.planned else "",
    )


def _hub_id(name: str) -> str | None:
    """The hub id of a model, which some reference models have too; None for others."""
    if name.startswith(reference.PREFIX):
        model = reference.MODELS.get(name.removeprefix(reference.PREFIX))
        return None if model is None else model.hub
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _base(name: str) -> str:
    """A sentence on the model that was compressed, and where it is."""
    hub = _hub_id(name)
    if not name.startswith(reference.PREFIX):
        if hub is None:
            return f"`{Path(name).name}`, from a folder or file of this name."
        return f"`{hub}` on the Hugging Face hub." if "/" in hub else f"`{hub}`."
    if hub is None:
        return (
            f"`{name}`, a small model that comes with kvfold. It is not on the Hugging Face hub;"
            f' `kvfold.load("{name}")` loads it.'
        )
    return (
        f"`{hub}` on the Hugging Face hub. kvfold calls it `{name}`; where a GGUF file of it is"
        " installed, that is read, which has fewer bits."
    )


def _measured(figures: dict[str, Any]) -> list[str]:
    """Lines about the measured loss of maps, and the cache with which it was measured."""
    lines = []
    if (lost := figures.get("lost")) is not None:
        error = figures["lost_se"]
        near = "" if error is None else f" (standard error {error:.4f})"
        lines.append(
            f"{lost:.4f} nats a token lost{near} on {figures['tokens']} tokens of text that"
            f" calibration did not read, through the cache of {figures['through']}"
        )
    lines.append(
        f"{figures['divergence']:.4f} nats a token from the original, over"
        f" {figures['answer_tokens']} tokens of its answer to a short prompt"
    )
    return lines


def _accuracy(figures: dict[str, Any], allowed: str) -> str:
    """A line about the accuracy that a search kept."""
    reached, error, needed = (figures[x] for x in ("reached", "reached_error", "needed"))
    line = (
        f"accuracy {figures['accuracy']:.3f} ± {figures['accuracy_error']:.3f} on"
        f" {figures['questions']} questions, {100 * reached:.1f} % of the original's"
        f" {figures['original']:.3f}, {allowed} allowed; paired by question, the standard error is"
        f" {100 * error:.1f} %"
    )
    if needed is None or needed <= figures["questions"]:
        return line
    return f"{line}, more than the loss allowed: {needed} questions would make it that small"


def facts(spec: CacheSpec, provenance: dict[str, Any]) -> list[str]:
    """Lines about sizes before and after, and the measured loss."""
    full = 2 * spec.geometry.full_numbers
    lines = [
        f"{spec.kept_fraction:.4f} of the numbers kept: {full} -> {spec.bytes_per_token()} bytes"
        f" per token at 16 bits, {1 / spec.kept_fraction:.2f} times smaller"
    ]
    if spec.planned:
        bits = cache_layout(spec).bits_per_token
        bit_widths = {
            tier_bits
            for layer in spec.layers
            for x in layer.latents
            for _, tier_bits in x.tiers or ()
        }
        levels = ", ".join(map(str, sorted(bit_widths, reverse=True)))
        lines.append(
            f"{bits / 8:.0f} bytes per token with the planned bits ({levels}) and scales, "
            f"{8 * full / bits:.2f} times smaller on the paged cache"
        )
    if spec.low_rank is not None and spec.hybrid is not None:
        full_rank, low_rank = (
            sum(x.row_width for x in stored.layers) for stored in (spec, spec.low_rank)
        )
        shares = spec.hybrid.important
        lines.append(
            f"{2 * full_rank} bytes of important tokens, {min(shares):.0%} to {max(shares):.0%} of"
            f" a layer's, {2 * low_rank} of others on the paged cache; elsewhere all take the first"
        )
    if ratio := provenance.get("ratio"):
        allowed = provenance["budget"]
        lines.append(f"perplexity ratio {ratio:.4f} on held-out text, {allowed} allowed")
    if accuracy := provenance.get("accuracy"):
        lines.append(_accuracy(accuracy, provenance["budget"]))
    if measured := provenance.get("measured"):
        lines += _measured(measured)
    if recovery := provenance.get("recovery"):
        lines.append(
            f"recovered in {recovery['steps']} steps: {recovery['before']:.4f} to"
            f" {recovery['after']:.4f} nats a token from the original"
        )
    if lora := provenance.get("lora"):
        lines.append(
            f"low-rank additions of {lora['steps']} steps merged: {lora['before']:.4f} to"
            f" {lora['after']:.4f} nats a token"
            + (" from the original" if lora["original"] else " of text that they did not see")
        )
    return lines
