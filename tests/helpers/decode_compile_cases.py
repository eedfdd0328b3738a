"""What tests of decode compile share with others."""

import re
import subprocess
import tempfile
from types import ModuleType
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from kvfold.layout.pages import Group  # noqa: E402
from kvfold.ops.common.pages import LayerPages  # noqa: E402

OPTIONS = ("num_warps", "maxnreg", "launch_pdl")


SHARED = 227 * 1024  # bytes of a block on sm_90


TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint16: "u16",
    torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64",
    float: "fp32", int: "i32",
}  # fmt: skip


class Recorder:
    """Stands for a kernel in a launch and compiles it with what it was given."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> "Recorder":
        return self

    def __call__(self, *args: Any, **constants: Any) -> None:
        self.options = {name: constants.pop(name, None) for name in OPTIONS}
        names = self.kernel.arg_names
        constants = {"PDL": False} | constants if "PDL" in names else constants
        given = dict(zip(names, args, strict=False))
        constants |= {name: None for name, x in given.items() if x is None}
        types = {
            name: f"*{TYPES[x.dtype]}" if isinstance(x, torch.Tensor) else TYPES[type(x)]
            for name, x in given.items()
            if x is not None
        }
        assert set(names) == {*types, *constants} and len(names) == len(types) + len(constants)
        # Strides and addresses as a pool has them: multiples of 16.
        sixteen = [(names.index(name),) for name, kind in types.items() if kind != "fp32"]
        compiles = GluonASTSource if self.kernel.is_gluon() else triton.compiler.ASTSource
        self.source = compiles(
            self.kernel,
            {name: types.get(name, "constexpr") for name in names},
            {(names.index(name),): value for name, value in constants.items()},
            {place: [["tt.divisibility", 16]] for place in sixteen},
        )

    def compiled(self) -> tuple[str, int]:
        """SASS, and bytes of shared memory."""
        target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
        found = triton.compile(self.source, target=target, options=self.options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(found.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
            listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return listing, found.metadata.shared


def recorders(module: ModuleType, *kernels: str) -> dict[str, Recorder]:
    """For `mock.patch.multiple`."""
    return {name: Recorder(getattr(module, name)) for name in kernels}


def one_sequence(groups: tuple[Group, ...], queries: int, width: int) -> tuple[Any, ...]:
    """q and pages of a row in every group, as `decode` takes them."""
    size = max(group.layout.page_units for group in groups) * 64
    return (
        torch.zeros(1, queries, width, dtype=torch.bfloat16),
        LayerPages(
            torch.zeros(size, dtype=torch.uint8),
            torch.zeros(1, len(groups), 1, dtype=torch.int32),
            torch.ones(1, len(groups), dtype=torch.int32),
            groups,
        ),
    )


def operations(listing: str) -> tuple[list[str], dict[str, int]]:
    """Names of all instructions, in order, and which of them follows each label."""
    names: list[str] = []
    labels = {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S.*?);", line):
            names.append(found[1])
    return names, labels
