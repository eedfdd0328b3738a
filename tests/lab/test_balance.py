"""benchmarks/balance.py counts what the plans cut."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
import balance


@pytest.mark.parametrize("how", balance.WAYS)
def test_all_work_is_in_some_slice(how: str) -> None:
    tiles, cost = [40, 3, 0, 17], [700, 500, 500, 900]
    loads = balance.loads_of(balance.slices_of(how, tiles, cost, 5), tiles, cost)
    work = [n * c for n, c in zip(tiles, cost, strict=True)]
    items = (sum(loads) - sum(work)) / balance.OVERHEAD  # parts of items that slices begin
    assert items == int(items) and 3 <= items <= 5 + 3
    if how == "whole":
        assert loads == [x + balance.OVERHEAD if x else 0 for x in work]
    if how == "longest-first":
        assert max(loads) == max(work) + balance.OVERHEAD
    if how == "stream-k":
        assert max(loads) < 0.4 * sum(loads)


def test_programs_take_the_place_that_is_free_first(monkeypatch) -> None:
    monkeypatch.setattr(balance, "SMS", 2)
    # Places 0 and 2 are of one multiprocessor: 4 and 1, then 2 where the 1 ended; 3 and 9 are of
    # the other.
    assert balance.dealt([4, 3, 1, 9, 2], 2) == (12, 18)
    assert balance.dealt([5, 5], 1) == (5, 5)


def test_chunks_read_rows_once_a_tile() -> None:
    cut = {"pairs": 128, "rows": 64, "warps": 8}
    compiled = {"cut": cut, "ranks": [64, 64], "registers": 128, "shared": 65536}
    loads, numbers = balance.programs(compiled, 2, 128, 64, 4)
    # Two tiles of 32 queries, which see two tiles of 64 rows, of two heads.
    assert loads == 4 * [128 * 128 * 129.0] and numbers == 2 * 2 * 128 * 128
    assert balance.residents(compiled) == 2
