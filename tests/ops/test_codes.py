"""The assembly that makes numbers of codes, which Triton's interpreter does not run."""

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from kvfold.ops.common import codes_triton

Word = np.ndarray


def halves(x: Word) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.float16)


def permuted(a: Word, b: Word, selector: int) -> Word:
    """prmt.b32: bytes by the selector's nibbles, a's first."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(a, np.uint64)
    for i in range(4):
        byte = both >> np.uint64(8 * (selector >> 4 * i & 0xF)) & np.uint64(0xFF)
        found |= byte << np.uint64(8 * i)
    return found.astype(np.uint32)


OPERATIONS: dict[str, Callable[..., Word]] = {
    "shl.b32": lambda a, n: a << n,
    "shr.b32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "mov.b32": lambda a: a,
    "lop3.b32": lambda a, b, c, _: a & b | c,
    "sub.f16x2": lambda a, b: (halves(a) - halves(b)).view(np.uint32),
    "prmt.b32": lambda a, b, selector: permuted(a, b, int(selector[0])),
}


def run(text: str, outputs: int, words: Word) -> list[np.ndarray]:
    """What PTX makes of two uint16 words in each of `words` uint32, as fp16 by word."""
    registers: dict[str, Word] = {f"${outputs}": words}

    def value(name: str) -> Word:
        if name in registers:
            return registers[name]
        return np.full(words.shape, int(name, 0), np.uint32)

    for line in filter(None, (x.strip() for x in text.strip("{} ").split(";"))):
        if line.startswith(".reg"):
            continue
        operation, operands = line.split(None, 1)
        to, *given = (x.strip() for x in operands.split(","))
        if operation == "lop3.b32":
            assert given[-1] == "0xEA"  # (a & b) | c
        registers[to] = OPERATIONS[operation](*map(value, given))
    return [halves(registers[f"${j}"]).astype(np.float64) for j in range(outputs)]


WORDS = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)


def codes(bits: int, j: int) -> np.ndarray:
    return (WORDS.view(np.uint16) >> bits * j & (1 << bits) - 1).astype(np.float64)


@pytest.mark.parametrize("bits,text", [
    (8, codes_triton._BYTES), (4, codes_triton._NIBBLES), (2, codes_triton._PAIRS),
])  # fmt: skip
def test_codes_alone_are_so_many_units(bits: int, text) -> None:
    for j, found in enumerate(run(text.value, 16 // bits, WORDS)):
        wanted = codes(bits, j) * codes_triton.factor(bits, j)
        np.testing.assert_array_equal(found * codes_triton.UNIT.value, wanted)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_from_their_middle_are_whole(bits: int) -> None:
    for j, found in enumerate(run(codes_triton._centred(bits), 16 // bits, WORDS)):
        wanted = (2 * codes(bits, j) - (2**bits - 1)) * codes_triton.factor(bits, j)
        np.testing.assert_array_equal(found, wanted)
