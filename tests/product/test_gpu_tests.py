"""`make gpu-test` runs every kernel that ships: it selects the tests marked `gpu`."""

import ast
import re
from pathlib import Path

import kvfold

SOURCE, TESTS = Path(kvfold.__file__).parent, Path(__file__).parents[1]
KERNEL = re.compile(r"^@((triton|gluon)\.jit|step_kernel)|_nvrtc_compile\(", re.MULTILINE)
MARK = "pytest.mark.gpu"
DEVICE = re.compile(r"\bDEVICE\b|cuda\.is_available\(\)")  # tensors are on a GPU where there is one


def modules() -> dict[str, Path]:
    """Files of operations by the name that they are imported by."""
    found = {}
    for file in SOURCE.glob("ops/**/*.py"):
        name = ".".join(("kvfold", *file.relative_to(SOURCE).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = file
    return found


def imported(file: Path) -> set[str]:
    """Names of modules that a file imports, at its top or later."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {x.name for x in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{x.name}" for x in node.names)}
    return found


def test_every_kernel_is_run_by_a_marked_test() -> None:
    files = modules()
    kernels = {name for name, file in files.items() if KERNEL.search(file.read_text("utf-8"))}
    assert {"kvfold.ops.decode.kernels", "kvfold.ops.one_pass.build"} <= kernels
    marked = [file for file in TESTS.rglob("test_*.py") if MARK in file.read_text("utf-8")]
    seen: set[str] = set()
    new = set().union(*map(imported, marked)) & files.keys()
    while new:
        seen |= new
        new = set().union(*(imported(files[name]) for name in new)) & files.keys() - seen
    assert kernels <= seen


def test_every_test_file_that_uses_a_gpu_is_marked() -> None:
    using = {file for file in TESTS.rglob("test_*.py") if DEVICE.search(file.read_text("utf-8"))}
    using |= set(TESTS.rglob("test_*_triton.py")) | set(TESTS.rglob("test_one_pass*.py"))
    left_out = [x.name for x in using - {Path(__file__)} if MARK not in x.read_text("utf-8")]
    assert not left_out
