"""What was done to a model, in a few lines: for the command line, and its checkpoint's README."""

from typing import Any

from kvfold.spec import CacheSpec
from kvfold.spec.layout import cache_layout

_TEXT = """\
# {source}, with a smaller KV cache

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


def text(spec: CacheSpec, provenance: dict[str, Any]) -> str:
    """The README of a folded checkpoint, in Markdown."""
    return _TEXT.format(
        source=provenance.get("model", "a model"),
        recipe=provenance["recipe"]["name"],
        facts="\n".join(f"- {line}" for line in facts(spec, provenance)),
        planned=", with the planned bits" if spec.planned else "",
    )


def facts(spec: CacheSpec, provenance: dict[str, Any]) -> list[str]:
    """Sizes before and after, and what was measured of the loss."""
    full = 2 * spec.geometry.full_numbers
    lines = [
        f"{spec.kept_fraction:.4f} of the numbers kept: {full} -> {spec.bytes_per_token()} bytes"
        f" per token at 16 bits, {1 / spec.kept_fraction:.2f} times smaller"
    ]
    if spec.planned:
        bits = cache_layout(spec).bits_per_token
        found = {own for layer in spec.layers for x in layer.latents for _, own in x.tiers or ()}
        levels = ", ".join(map(str, sorted(found, reverse=True)))
        lines.append(
            f"{bits / 8:.0f} bytes per token with the planned bits ({levels}) and scales, "
            f"{8 * full / bits:.2f} times smaller on the paged cache"
        )
    if spec.narrow is not None and spec.hybrid is not None:
        wide, narrow = (sum(x.row_width for x in own.layers) for own in (spec, spec.narrow))
        shares = spec.hybrid.important
        lines.append(
            f"{2 * wide} bytes of important tokens, {min(shares):.0%} to {max(shares):.0%} of a"
            f" layer's, {2 * narrow} of others on the paged cache; elsewhere all take the first"
        )
    if ratio := provenance.get("ratio"):
        allowed = provenance["budget"]
        lines.append(f"perplexity ratio {ratio:.4f} on held-out text, {allowed} allowed")
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
