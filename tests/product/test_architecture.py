"""Layers point one way, and what ships is what was promised."""

import ast
import re
from pathlib import Path

import pytest
import torch

import kvfold

SOURCE = Path(kvfold.__file__).parent
LAYERS: dict[str, set[str]] = {
    "utils": set(),
    "layout": {"utils"},
    "ops": {"layout"},
    "cache": {"utils", "layout", "ops"},
    "attention": {"layout", "ops", "cache"},
    "config": {"utils", "layout", "cache"},
    "published": {"config"},
    "recipes": {"config", "published"},
    "models": {"utils", "layout", "ops", "attention"},
    "experimental": {"utils", "layout", "ops", "cache", "models", "config"},
    "hub": {"utils", "layout", "models", "config"},
    "calibration": {"utils", "layout", "ops", "models"},
    "compression": {"utils", "layout", "ops", "attention", "models", "config", "recipes", "hub"}
    | {"calibration", "experimental"},
    "maps": {"utils", "layout", "ops", "attention", "models", "config", "recipes", "hub"}
    | {"calibration", "compression"},
    "engine": {"utils", "layout", "ops", "cache", "attention", "models", "config", "hub", "maps"},
    "parallel": {"utils", "layout", "ops", "attention", "models", "hub", "engine"},
    "server": {"utils", "cache", "config", "engine"},
    "bench": {"utils", "layout", "ops", "cache", "models", "config", "hub", "engine"},
    "evaluation": {"utils", "layout", "ops", "cache", "models", "config", "recipes", "hub"}
    | {"calibration", "compression", "experimental", "maps", "engine"},
    "api": {"utils", "layout", "models", "config", "recipes", "hub", "calibration"}
    | {"compression", "maps", "evaluation"},
    "recovery": {"utils", "layout", "models", "config", "hub", "calibration", "compression", "api"},
}
ENGINE = ["requests", "runner", "core", "api"]  # folders of the engine: one uses those before it
# The programs, on top: they may use everything, and nothing may use them.
PROGRAMS = {"cli", "lm_eval", "vllm_plugin"}


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


def test_tests_mirror_the_source() -> None:
    """A folder of tests for a folder of the product; `lab` for benchmarks and tools, `product` for
    what concerns all of it. Tests share what is in `helpers`, and import no other test."""
    tests = Path(__file__).parents[1]
    folders = {x.name for x in tests.iterdir() if any(x.glob("test_*.py"))}
    assert folders - {"product", "lab"} <= {x.name for x in SOURCE.iterdir() if x.is_dir()}
    assert not [*tests.glob("test_*.py")] and not [*(tests / "helpers").glob("test_*.py")]
    for file in tests.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) test_", text, re.MULTILINE), file


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer: str) -> None:
    single = SOURCE / f"{layer}.py"
    files = [single] if single.exists() else list((SOURCE / layer).rglob("*.py"))
    assert files
    for file in files:
        assert imported(file) <= LAYERS[layer] | {layer}, file


@pytest.mark.parametrize("folder", ENGINE)
def test_folders_of_the_engine_point_one_way(folder: str) -> None:
    allowed = ENGINE[: ENGINE.index(folder) + 1]
    for file in (SOURCE / "engine" / folder).glob("*.py"):
        used = re.findall(r"kvfold\.engine\.(\w+)", file.read_text(encoding="utf-8"))
        assert set(used) <= {*allowed}, file


@pytest.mark.parametrize("kind", ["gqa", "mha"])
def test_reference_models(kind: str) -> None:
    folder = SOURCE / "data" / "reference" / kind
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 16e6
    assert (folder / "model_card.md").exists()
    model = kvfold.reference(kind)
    assert model.config.max_position_embeddings == 4096
    assert next(model.parameters()).dtype is torch.float32


def test_packaged_calibration_text_is_long_enough() -> None:
    """ZACK §6.6: at least 16K tokens."""
    from kvfold.hub.loading import load_tokenizer
    from kvfold.utils.text import packaged
    from kvfold.utils.tokens import encode

    assert len(encode(load_tokenizer("reference:gqa"), packaged("calibration.txt"))) >= 65536


# Names that say nothing of the thing, and what to call it instead: the glossary's first lesson.
BANNED = {"found", "own", "each", "kept", "made", "given", "asked", "felt", "unread", "turned"}
BANNED |= {"turns", "lets_by", "take_back"}


def test_names_are_of_things() -> None:
    """No variable, argument, attribute, function or class has a banned name."""
    for file in SOURCE.rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
        assert not {x.strip("_") for x in names} & BANNED, file
