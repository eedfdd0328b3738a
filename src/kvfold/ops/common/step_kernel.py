"""Compile kernels of a decode step once, for any number of sequences and any table addresses."""

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
    """Like `triton.jit`, but compiled once. Triton specialises on whether a number is 1 or
    divisible by 16 and on whether a pointer is aligned, so that a step with other sequences would
    wait for the compiler. The arguments listed here gain nothing from that: they are read one
    number at a time."""
    return triton.jit(function, do_not_specialize=SIZES, do_not_specialize_on_alignment=TABLES)
