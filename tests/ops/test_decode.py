"""One token's attention over pages: the reference against the formula, and who runs it."""

import logging
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from decode_cases import LAYOUTS, LENGTHS
from kvfold.layout.pages import Group, Latent
from kvfold.ops import backend
from kvfold.ops.backend import GPU, Operation, use_triton
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.decode import decode
from kvfold.ops.decode.groups import DecodeGroups, decode_groups, unsupported_reason
from kvfold.ops.decode.reference import decode as decode_reference
from kvfold.ops.decode.tuning import FILE, Shape, table, tuning_for
from pages import Case, Ranks, mixed, per_head
from store_cases import one_layer

pytestmark = pytest.mark.gpu

# -- the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 4, 7])
@pytest.mark.parametrize("name", LAYOUTS)
def test_reference_is_the_formula(name: str, queries: int) -> None:
    layout = per_head(**{"page": 16, "itemsize": 4} | LAYOUTS[name])
    case = Case.of(layout, LENGTHS, queries, torch.float32)
    found, lse = decode_reference(*case.args)
    assert found.shape == case.out.shape and found.dtype is torch.float32
    assert case.is_near(found).all()
    assert not found[2].any()  # no rows in any group
    lse, empty = lse.cpu(), case.lse.isinf()
    assert lse.dtype is torch.float32 and torch.equal(lse.isinf(), empty)
    assert ((lse - case.lse).abs() <= case.slack[1])[~empty].all()


def test_reference_in_any_order_of_groups() -> None:
    layout = per_head([(8, 16), (24, 4), (0, 12)], page=8, itemsize=4)
    case = Case.of(replace(layout, groups=layout.groups[::-1]), LENGTHS, 2, torch.float32)
    assert case.is_near(decode_reference(*case.args)[0]).all()


def test_reference_without_any_row() -> None:
    layout = per_head([(8, 16), (24, 4)], page=8)
    case = Case.of(layout, [[0, 0]], 2, torch.float16)
    found, _ = decode_reference(*case.args)
    assert found.shape == (1, 4, 16) and found.dtype is torch.float16 and not found.any()


# -- what the kernels read ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": [(64, 64)] * 2},
        {"ranks": [(0, 16), (96, 0)], "bits": 4, "zeros": True},
        {"ranks": [(0, 0), (2, 4)], "bits": 8},
        {"ranks": [(64, 64)], "bits": 4, "itemsize": 4},
        {"ranks": [(0, 5)]},
        {"ranks": [(0, 0)]},
        {"ranks": [(64, 64)], "sub_group": 8},
    ],
)
def test_supported(options: dict) -> None:
    assert not unsupported_reason(per_head(page=16, **options).groups)


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": [(64, 64)], "itemsize": 4},
        {"ranks": [(64, 64)], "bits": 3},
        {"ranks": [(64, 62)], "bits": 4},
        {"ranks": [(64, 63)], "bits": 8},
        {"ranks": [(64, 64)], "bits": 4, "sub_group": 32},
        {"ranks": [(64, 64)], "bits": 4, "format": "kivi"},
    ],
)
def test_not_supported(options: dict) -> None:
    assert unsupported_reason(per_head(page=16, **options).groups)


def test_bits_are_one_number_a_side() -> None:
    assert not unsupported_reason(mixed((8, 4), (8, 4), zeros=True).groups)
    assert not unsupported_reason(mixed((16, 8), (16, 8), zeros=True).groups)
    assert unsupported_reason(mixed((8, 4), (4, 4), zeros=True).groups)
    assert unsupported_reason(mixed((8, 4), (8, 4)).groups)  # fp8 scales
    assert unsupported_reason(mixed((16, 8), itemsize=4, zeros=True).groups)


def test_shared_latents_are_not_supported() -> None:
    for latent in (
        Latent(side="kv", heads=(0,), rank=16),
        Latent(side="k", heads=(0, 1), rank=16),
    ):
        assert unsupported_reason(one_layer([latent], page=16).groups)


def described(groups: tuple[Group, ...], queries: int = 4) -> DecodeGroups:
    return decode_groups(groups, queries, torch.device("cpu"))


def test_groups_of_whole_numbers() -> None:
    found = described(per_head([(48, 16), (0, 32)], page=16).groups)
    # 16 rows of 48 keys; values begin behind them, or at once where there are none.
    assert found.table.tolist() == [
        [48, 16, 48, 16, 768, 1024, 0, 0],
        [0, 32, 0, 32, 0, 512, 0, 4],
    ]
    assert found.widths == (48, 32) and found.narrowest == (0, 16) and found.bits == (16, 16)
    assert found.align == 16 and not found.zeros and not found.paired and found.page == 16
    assert not found.exact(48, 32)


def test_groups_of_codes() -> None:
    found = described(per_head([(64, 32)] * 2, page=32, bits=4, zeros=True).groups, queries=7)
    # 32 rows of 32 and of 16 bytes, then two scales and two zeros a row.
    row = [64, 32, 16, 8, 512, 768, 4]
    assert found.table.tolist() == [[*row, 0], [*row, 7]]
    assert found.bits == (4, 4) and found.zeros and found.paired and found.align == 8
    assert found.exact(64, 32) and not found.exact(64, 64)


def test_one_scale_is_no_pair() -> None:
    found = described(per_head([(8, 8), (0, 6)], page=16, bits=8).groups)
    assert not found.paired and found.align == 1
    assert found.table[1].tolist() == [0, 6, 0, 3, 0, 48, 1, 4]
    assert described(mixed((16, 8), zeros=True).groups).bits == (16, 8)


# -- who runs it --------------------------------------------------------------------------------


@pytest.fixture
def choose(monkeypatch):
    """Sets the backend; what is chosen once a process is chosen again."""

    def change(name: str | None) -> None:
        use_triton.cache_clear()
        if name is None:
            monkeypatch.delenv("KVFOLD_BACKEND", raising=False)
        else:
            monkeypatch.setenv("KVFOLD_BACKEND", name)

    yield change
    use_triton.cache_clear()


@pytest.mark.parametrize(
    "name,installed,cpu,cuda",
    [
        (None, True, False, True),
        ("auto", True, False, True),
        ("auto", False, False, False),
        ("triton", True, True, True),
        ("reference", True, False, False),
        ("reference", False, False, False),
    ],
)
def test_backend(name, installed, cpu, cuda, choose, monkeypatch, caplog) -> None:
    choose(name)
    monkeypatch.setattr(backend, "find_spec", lambda _: object() if installed else None)
    monkeypatch.setattr(backend, "_interpreted", lambda: True)
    with caplog.at_level(logging.INFO, logger="kvfold"):
        assert [use_triton("cpu"), use_triton("cuda"), use_triton("cuda")] == [cpu, cuda, cuda]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2  # once a type of device
    assert f"cuda: {'triton' if cuda else 'reference'}" in lines[1]


def test_unknown_backend(choose) -> None:
    choose("cuda")
    with pytest.raises(ValueError, match="one of auto, triton, numba, reference; got 'cuda'"):
        use_triton("cpu")


def test_triton_is_missing(choose, monkeypatch) -> None:
    choose("triton")
    monkeypatch.setattr(backend, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="pip install triton"):
        use_triton("cpu")


def test_numba_is_missing_or_on_a_gpu(choose, monkeypatch) -> None:
    choose("numba")
    with pytest.raises(ValueError, match="run on a CPU, and this model is on cuda"):
        use_triton("cuda")
    monkeypatch.setattr(backend, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="pip install numba"):
        use_triton("cpu")


def test_decode_is_the_reference_without_kernels(choose) -> None:
    choose("reference")
    case = Case.of(per_head([(8, 16), (24, 4)], page=8), [[3, 20]], 2, torch.float16)
    assert torch.equal(decode(*case.args)[0], decode_reference(*case.args)[0])


@pytest.mark.parametrize(
    "options,reason",
    [
        ({"bits": 3}, "keys in 3 bits: the kernels read 16, 8 and 4"),
        ({"itemsize": 4}, "numbers of 32 bits: the kernels read 16, and codes"),
        (
            {"bits": 4, "format": "kivi"},
            "keys with a scale a channel: the kernels read a scale a row",
        ),
    ],
)
def test_a_reason_says_why_the_reference_runs(options, reason, choose, monkeypatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(backend, "_interpreted", lambda: True)
    kernels = Operation("kvfold.ops.decode", {"triton": unsupported_reason})
    choose("triton")
    assert kernels.why_not("cpu", per_head([(16, 16)], page=16).groups) is None
    groups = per_head([(16, 16)], page=16, **options).groups
    assert kernels.why_not("cpu", groups) == reason
    choose(None)
    assert kernels.why_not("cpu", groups) == "Triton's kernels run on cuda, not on cpu"
    choose("reference")
    assert kernels.why_not("cuda", groups) == "KVFOLD_BACKEND is reference"


def test_the_first_that_serves_is_chosen_and_logged_once(choose, monkeypatch, caplog) -> None:
    """Implementations are asked in order, behind their backend; the last serves all."""
    choose(None)
    backend._log.cache_clear()
    monkeypatch.setattr(backend, "import_module", lambda path: SimpleNamespace())
    refusals = {"triton_split": lambda n: "small", "other": lambda n: "odd" if n % 2 else None}
    operation = Operation("ops.sum", refusals)
    with caplog.at_level(logging.INFO, logger="kvfold.ops.backend"):
        assert [operation.choose("cpu", n).name for n in (2, 3, 4, 5)] == ["other", "reference"] * 2
    away = "Triton's kernels run on cuda, not on cpu"
    assert operation.why_not("cpu", 2) is None and operation.why_not("cpu", 3) == f"{away}; odd"
    lines = [x.getMessage() for x in caplog.records if "sum on" in x.getMessage()]
    assert lines == [f"sum on cpu: other ({away})", f"sum on cpu: reference ({away}; odd)"]
    choose("reference")
    assert operation.choose("cpu", 2).name == "reference"


def test_any_machine_tells_what_a_gpu_would_do(choose, monkeypatch) -> None:
    """Whatever is installed and set here; nothing is imported for it."""
    choose("reference")
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    monkeypatch.setattr(backend, "import_module", None)
    kernels = Operation("kvfold.ops.decode", {"triton": unsupported_reason})
    reasons = [
        kernels.why_not(GPU, per_head([(16, 16)], page=16, bits=bits).groups) for bits in (4, 3)
    ]
    assert reasons == [None, "keys in 3 bits: the kernels read 16, 8 and 4"]


def test_operations_are_imported_without_triton() -> None:
    names = "decode", "latent_decode", "prefill", "observe"
    lines = [f"import kvfold.ops.{name}" for name in names]
    program = "; ".join((*lines, "import sys", "sys.exit('triton' in sys.modules)"))
    subprocess.run([sys.executable, "-c", program], check=True)


# -- tuning -------------------------------------------------------------------------------------


def shape(about: DecodeGroups, queries: int) -> Shape:
    return Shape(bits=about.bits, widths=about.widths, page=about.page, queries=queries)


def test_what_was_measured_is_used() -> None:
    for known, cut in table().items():
        bits = None if known.bits == (16, 16) else known.bits[0]
        groups = per_head([known.widths] * 2, page=known.page, bits=bits).groups
        assert shape(described(groups), known.queries) == known
        assert tuning_for(described(groups, known.queries), known.queries) == cut


def test_every_cut_can_be_launched() -> None:
    assert FILE.exists() and table()
    for known, cut in table().items():
        assert known.page % cut.block == 0 or cut.block % known.page == 0, known
        assert cut.block >= 16 and cut.warps in (1, 2, 4, 8) and cut.slices >= 1, known
        assert min(cut.block, known.widths[1] * known.bits[1] // 16) // 16 >= cut.warps, known


@pytest.mark.parametrize("ranks", [[(0, 0)], [(16, 48)], [(100, 128)], [(256, 256)]])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("page,queries", [(16, 1), (32, 4), (64, 16), (128, 8)])
def test_others_take_the_nearest(ranks: Ranks, bits, page: int, queries: int) -> None:
    about = described(per_head(ranks, page=page, bits=bits).groups, queries)
    cut = tuning_for(about, queries)
    assert page % cut.block == 0 or cut.block % page == 0
    if cut not in table().values():
        assert cut.registers is None and cut.slices <= Tuning().slices


def test_nearest_is_near() -> None:
    """Bits before bytes of a row, before the page, before queries."""
    wanted = Shape(bits=(8, 4), widths=(64, 64), page=32, queries=8)
    far = [
        replace(wanted, queries=16),
        replace(wanted, page=64),
        replace(wanted, widths=(64, 128)),
        replace(wanted, bits=(8, 8)),
        replace(wanted, bits=(16, 8)),
    ]
    assert sorted((far[i] for i in (4, 2, 0, 3, 1)), key=wanted.distance) == far
    assert wanted.distance(wanted) == (0, 0, 0, 0)
