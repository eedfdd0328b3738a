"""Kernels are compiled once, however many sequences decode and wherever their tables begin."""

from collections import defaultdict
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from hopper import run_alone  # noqa: E402

VARIANTS = "bf16-half", "int4-half", "swift-5x", "lean-8x"


def count_all() -> None:
    """A line a kernel: what a step of 1 to 12 sequences of as many pages would compile."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend, binders = make_backend(GPUTarget("cuda", 90, 32)), {}
    found: dict[str, set[str]] = defaultdict(set)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if kernel not in binders:
            made = create_function_from_signature(kernel.signature, kernel.params, backend)
            binders[kernel] = made
        _, specialised, _ = binders[kernel](*args, **options, debug=False, instrumentation_mode="")
        found[kernel.__name__].add(str(specialised))

    JITFunction.run = run
    for name in VARIANTS:
        found.clear()
        for sequences in range(1, 13):
            a_step(name, sequences)
        for kernel, keys in sorted(found.items()):
            print(name, kernel, len(keys))


def a_step(name: str, sequences: int) -> None:
    """Of three layers, whose slices begin at addresses of their own."""
    from kvfold.bench.variants import SHAPES, VARIANTS, variant_layout
    from kvfold.ops.common.pages import LayerPages
    from kvfold.ops.decode import triton as plain
    from kvfold.ops.decode import triton_split as split
    from kvfold.ops.store import triton as store

    layout = variant_layout(SHAPES["llama-3.1-8b"], VARIANTS[name], 3)
    layers = [layout.groups_of_layer(i) for i in range(3)]
    groups, page, slots = len(layers[0]), layers[0][0].layout.page, torch.arange(sequences)
    tables = torch.zeros(sequences, groups, sequences, dtype=torch.int32)
    lengths = torch.full((sequences, 3 * groups), page * sequences, dtype=torch.int32)
    own, rows = lengths[:, :groups].contiguous(), page * sequences**2 * groups
    q = torch.zeros(sequences, 32, 128, dtype=torch.bfloat16)
    module = split if name == "swift-5x" else plain
    plans = [None] * 3 if name == "lean-8x" else module.plan_layers(layers, lengths, 4, rows)
    for own_groups, plan in zip(layers, plans, strict=True):
        pages = LayerPages(torch.zeros(1 << 16, dtype=torch.uint8), tables, own, own_groups)
        width = sum(x.width for group in own_groups for x in group.layout.segments)
        new = torch.zeros(sequences, width, dtype=torch.bfloat16)
        store.append(pages, new, slots, own.long()[:, :1].expand(-1, groups))
        store.gather(pages, slots, own, torch.bfloat16, size=sequences)
        if plan is not None:
            module.decode(q, pages, slots, 0.1, plan)


def test_steps_compile_nothing_anew() -> None:
    lines = run_alone(__file__)
    assert {line.split()[0] for line in lines} == set(VARIANTS)
    several = {"plan_kernel"}  # of both passes
    assert not [x for x in lines if x.split()[1] not in several and not x.endswith(" 1")], lines


if __name__ == "__main__":
    count_all()
