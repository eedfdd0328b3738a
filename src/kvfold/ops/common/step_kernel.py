"""Kernels of which a step changes how many sequences there are, and where their tables begin."""

from collections.abc import Callable
from typing import Any

import triton

SIZES = (
    "items", "length_slot", "most_items", "num_kept", "num_moves", "num_tokens", "size",
    "slot_step", "group_step", "page_step", "token_step", "number_step", "sequence_step",
    "table_slot", "table_group",
)  # fmt: skip
TABLES = (
    "bases", "counts", "firsts", "index", "lengths", "order", "positions", "slots", "sources",
    "starts", "tables", "targets", "valid",
)  # fmt: skip


def step_kernel(function: Callable[..., Any]) -> Any:
    """As `triton.jit`, compiled once: Triton asks of every number whether it is 1 or 16 divides it,
    and of every pointer whether it is aligned, so that steps with other sequences would wait for a
    compiler. What is listed here is read number by number anyway."""
    return triton.jit(function, do_not_specialize=SIZES, do_not_specialize_on_alignment=TABLES)
