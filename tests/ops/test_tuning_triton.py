"""The tool that makes the tuning table: what it sweeps can be launched, what it writes is read."""

import json
from dataclasses import replace
from types import ModuleType

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import tune_decode
from kvfold.bench import timing
from kvfold.bench.variants import SHAPES, Variant
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.decode import tuning as tuning_table
from kvfold.ops.decode.tuning import Shape, table
from store_cases import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]


@pytest.fixture
def tool(monkeypatch) -> ModuleType:
    monkeypatch.setattr(timing, "WARM_UP", 0)
    return tune_decode


def test_the_table_can_be_made_again(tool: ModuleType, monkeypatch, tmp_path) -> None:
    """All that is swept may be launched, and what is written is what is read."""
    entries = []
    for name, *how in tool.MEASURED:
        variant = tool.variant_of(*how)
        shape = tool.shape_of(SHAPES[name], variant)
        cuts = tool.candidates(shape)
        assert 1 < len(cuts) <= 6
        assert all(shape.page % x.block == 0 or x.block % shape.page == 0 for x in cuts)
        assert shape not in table() or table()[shape] in cuts
        entries.append(tool.entry(shape, {cut: 1.0 + i for i, cut in enumerate(cuts)}))
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"entries": entries}), "utf-8")
    monkeypatch.setattr(tuning_table, "FILE", path)
    found = table.__wrapped__()
    assert len(found) == len(tool.MEASURED)
    assert all(cut == tool.candidates(shape)[0] for shape, cut in found.items())


def test_a_shape_that_was_not_measured(monkeypatch) -> None:
    """The nearest one's cut; its registers only where the compiled kernel is the same."""
    shape = Shape(bits=(4, 4), widths=(64, 64), page=32, queries=4)
    cut = Tuning(block=64, slices=16, registers=128)
    monkeypatch.setattr(tuning_table, "table", lambda: {shape: cut})
    near = tuning_table._nearest.__wrapped__
    assert near((4, 4), (64, 64), 32, 1) == near((4, 4), (64, 64), 32, 7) == cut
    loose = replace(cut, registers=None, slices=Tuning.slices)
    assert near((4, 4), (64, 64), 16, 4) == near((4, 4), (64, 64), 32, 9) == loose


def test_a_sweep(tool: ModuleType, capsys) -> None:
    cuts = [Tuning(block=16, slices=1), Tuning(block=32, slices=1)]
    variant = Variant(bits=8)
    size = {"batch": 1, "tokens": 17, "rounds": 1, "device": DEVICE}
    found = tool.sweep(SHAPES["tiny"], variant, cuts, **size)
    assert set(found) == set(cuts) and list(found.values()) == sorted(found.values())
    tool.print_sweep(tool.shape_of(SHAPES["tiny"], variant), found)
    assert "bits (8, 8), widths (16, 16), page 32" in capsys.readouterr().out
