"""Layers point one way, and what ships is what was promised."""

import ast
from pathlib import Path

import pytest
import torch

import kvfold

SOURCE = Path(kvfold.__file__).parent
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "kinds": set(),
    "versions": set(),
    "registration": {"versions"},
    "files": set(),
    "weights": set(),
    "bounded": set(),
    "text": {"bounded", "errors"},
    "search": {"errors"},
    "place": {"errors"},
    "formats": set(),
    "spec": {"formats"},
    "card": {"spec"},
    "ops": {"formats", "spec"},
    "gguf_check": set(),
    "gguf": {"gguf_check"},
    "hub": {"errors", "gguf"},
    "reference_models": {"files", "gguf", "weights"},
    "cache": {"errors", "formats", "spec", "ops"},
    "attention": {"spec", "ops", "cache"},
    "models": {"errors", "formats", "spec", "ops", "attention", "weights"},
    "config": {"errors", "kinds", "formats", "cache"},
    "step_time": {"attention", "config", "errors", "models", "ops", "spec", "text"},
    "recipes": {"config"},
    "artifact": {"spec", "models", "weights"},
    "parallel": {"spec", "ops", "attention", "models", "artifact", "errors", "versions"},
    "compression": {"formats", "spec", "ops", "models", "config", "recipes", "artifact"}
    | {"step_time"}
    | {"errors", "files", "search", "text", "versions", "weights"},
    "loading": {"artifact", "models", "gguf", "hub", "place", "reference_models", "weights"}
    | {"config", "errors", "files", "text"},
    "seam": {
        "attention",
        "formats",
        "spec",
        "ops",
        "models",
        "config",
        "recipes",
        "compression",
        "loading",
        "card",
        "hub",
    }
    | {"errors", "files", "text"},
    "engine": {"formats", "spec", "ops", "cache", "attention", "models", "config", "artifact"}
    | {"errors", "files", "loading", "seam", "text", "versions", "weights"},
    "capacity": {"cache", "config", "engine", "errors", "models", "spec", "step_time"},
    "server": {"cache", "config", "engine", "errors", "text"},
    "bench": {"formats", "spec", "ops", "cache", "models", "config", "artifact", "engine"}
    | {"errors", "kinds", "text", "versions"},
    "evaluation": {
        "spec",
        "step_time",
        "models",
        "compression",
        "config",
        "recipes",
        "artifact",
        "engine",
        "seam",
    }
    | {"errors", "files", "ops", "search", "text", "versions", "weights"},
    "api": {
        "search",
        "spec",
        "compression",
        "config",
        "recipes",
        "artifact",
        "loading",
        "evaluation",
    }
    | {"errors", "models", "seam"}
    | {"files", "weights", "card", "text"},
    "recovery": {"api", "artifact", "compression", "config", "errors", "files", "loading", "models"}
    | {"spec", "text"},
    "report": {"evaluation", "files", "text"},
}
# The programs, on top: they may use everything, and nothing may use them.
PROGRAMS = {"cli", "vllm_plugin"}


def imported(path: Path) -> set[str]:
    """Top-level kvfold modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [
                f"{node.module}.{a.name}" if node.module == "kvfold" else node.module
                for a in node.names
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("kvfold.")}
    return found


def test_every_module_has_its_layer_and_no_circle_can_be() -> None:
    modules = {
        x.stem for x in SOURCE.iterdir() if x.suffix == ".py" or (x / "__init__.py").exists()
    }
    assert modules - {"__init__", "__main__", "data"} == LAYERS.keys() | PROGRAMS
    seen: set[str] = set()
    for layer, below in LAYERS.items():
        assert below <= seen, layer
        seen.add(layer)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer: str) -> None:
    single = SOURCE / f"{layer}.py"
    files = [single] if single.exists() else list((SOURCE / layer).rglob("*.py"))
    assert files
    for file in files:
        assert imported(file) <= LAYERS[layer] | {layer}, file


@pytest.mark.parametrize("kind", ["gqa", "mha"])
def test_reference_models(kind: str) -> None:
    folder = SOURCE / "models" / "reference" / kind
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 16e6
    assert (folder / "model_card.md").exists()
    model = kvfold.reference(kind)
    assert model.config.max_position_embeddings == 4096
    assert next(model.parameters()).dtype is torch.float32


def test_packaged_calibration_text_is_long_enough() -> None:
    """ZACK §6.6: at least 16K tokens."""
    from kvfold.loading import load_tokenizer
    from kvfold.text import encode, packaged

    assert len(encode(load_tokenizer("reference:gqa"), packaged("calibration.txt"))) >= 65536
