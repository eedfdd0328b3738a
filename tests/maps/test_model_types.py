"""docs/model-types.md says what the tests' lists of model types say.

KVFOLD_WRITE=1 writes the page anew.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import model_types
import vllm_types
from maps_cases import EXPANDED
from maps_engine_cases import UNSERVED
from maps_rope_cases import REFUSED as AFTER_ROPE_ONLY

PAGE = Path(__file__).parents[2] / "docs" / "model-types.md"
HEAD = """# Model types

Maps beside the weights, and caches of few bits, need no code for a family: what calls attention is
found in the model. This page is written from the tests' lists. Each type was run as a tiny model
with random weights. "yes" means that maps of full rank change nothing, over whole prompts, chunks
and single tokens (a wrong map does), and for vLLM also that maps that drop half give what
transformers gives with them.

- **transformers**: `kvfold.attach`, transformers 5.24.
- **`kvfold.LLM`**: our engine, with maps, few bits or neither. Where it refuses a type, the column
  says why.
- **vLLM**: vLLM 0.32 on a CPU, its own model classes (`make test-vllm`). An empty field was not
  tried. Of `cohere2`, `ernie4_5_moe`, `gemma3n_text` and `lfm2` vLLM itself gives other tokens than
  transformers, so that maps of full rank alone were compared there.
- **before RoPE**: `lean` and `small`, which store keys before RoPE. `swift` works for every type of
  the first table.

| `model_type` | transformers | `kvfold.LLM` | vLLM | before RoPE |
|---|---|---|---|---|
"""
REFUSED = """
## Refused by name

| `model_type` | why |
|---|---|
"""
WHY = {
    "recurrent layers": "no: recurrent",
    "has attention of another shape": "no: heads differ by layer",
    "reads the keys and values of": "no: layers share keys",
    "see their own chunk": "no: chunks",
}


def rows() -> Iterator[str]:
    types = sorted({*model_types.ALL, *vllm_types.TYPES} - {*EXPANDED})
    for name in types:
        attached = "yes" if name in model_types.ALL else ""
        engine = WHY[UNSERVED[name]] if name in UNSERVED else attached
        served = "yes" if name in vllm_types.TYPES else ""
        rope = "no" if name in AFTER_ROPE_ONLY else attached
        yield f"| `{name}` | {attached} | {engine} | {served} | {rope} |\n"


def refused() -> Iterator[str]:
    for name, why in sorted({**model_types.ALL_REFUSED, **model_types.ALL_INDIRECT}.items()):
        if name in EXPANDED or name in model_types.ALL_REFUSED:
            yield f"| `{name}` | {why} |\n"


def test_the_page() -> None:
    text = HEAD + "".join(rows()) + REFUSED + "".join(refused())
    if os.environ.get("KVFOLD_WRITE"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text, "KVFOLD_WRITE=1 writes it anew"
