"""The decode kernel against float64 on the same cache: every path of it, ragged and poisoned.

Without a GPU it runs in Triton's interpreter, and every cut of the tuning table is compiled for
sm_90a in another process. Interpreted cases are tiny; on a GPU the same tests have longer rows.
"""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
if not GPU and __name__ != "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

if not GPU and __name__ != "__main__" and not isinstance(tl.sum, interpreter.InterpretedFunction):
    pytest.skip(
        "Triton was imported before TRITON_INTERPRET=1 was set: set it for the whole run",
        allow_module_level=True,
    )

from kvfold.benchmark import timing  # noqa: E402
from kvfold.benchmark.workload import SHAPES, Variant  # noqa: E402
from kvfold.ops import decode_triton  # noqa: E402
from kvfold.ops import tuning as tuning_table  # noqa: E402
from kvfold.ops.backend import use_triton  # noqa: E402
from kvfold.ops.decode import decode, decode_groups  # noqa: E402
from kvfold.ops.decode_triton import DecodePlan, plan_layers  # noqa: E402
from kvfold.ops.plan import longest_first, stream_k  # noqa: E402
from kvfold.ops.tuning import Shape, Tuning, table  # noqa: E402
from test_decode import Case, error, mixed, per_head  # noqa: E402
from test_store import DEVICE  # noqa: E402

TOOL = Path(__file__).parents[1] / "tools" / "tune_decode.py"
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
LSE = 1e-3
right_dot, right_casts = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float


def widen(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """bf16, whose bits the interpreter multiplies as integers, as fp32."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype("uint32") << 16).view("float32"), tl.float32)


def dot(self, a, b, *rest):
    return right_dot(self, widen(a), widen(b), *rest)


def cast(x, source, target, mode):
    """bf16 as PyTorch rounds: the interpreter rounds ties up and loses a mantissa's carry."""
    if (source, target) == (tl.float32, tl.bfloat16):
        there = torch.from_numpy(x.view("float32").copy()).bfloat16()
        return there.view(torch.uint16).numpy()
    return right_casts(x, source, target, mode)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch) -> Iterator[None]:
    """What is allocated and not written is NaN; interpreted bf16 is right."""
    if not GPU:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        monkeypatch.setattr(interpreter, "_convert_float", cast)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"),
]


def cut(case: Case, tuning: Tuning, num_slices: int) -> DecodePlan:
    """A plan of exactly so many slices, down to one tile each."""
    q, _, _, lengths, groups, slots, _ = case.args
    counts, queries = lengths[slots], q.shape[1] // len(groups)
    plan = plan_layers([groups], counts, queries, tuning, num_slices)[0]
    tiles = -(-counts.flatten() // tuning.block)
    cost = torch.arange(1, len(groups) + 1, device=q.device).repeat(len(counts))
    return replace(plan, slices=stream_k(tiles, cost, 1, num_slices))


def run(case: Case, tuning: Tuning, num_slices: int) -> tuple[Tensor, Tensor]:
    return decode_triton.decode(*case.args, plan=cut(case, tuning, num_slices))


def check(case: Case, out: Tensor, lse: Tensor) -> None:
    q = case.args[0]
    assert out.dtype is q.dtype and out.shape == case.out.shape and lse.dtype is torch.float32
    assert error(out, case.out) <= LIMITS.get(q.dtype, LIMITS[torch.float16])
    empty = case.lse.isinf()
    assert torch.equal(lse.cpu().isinf(), empty) and not out.cpu()[empty].any()
    assert ((lse.cpu().double() - case.lse)[~empty].abs() <= LSE).all()


def spread(page: int, block: int, seed: int) -> list[list[int]]:
    """Lengths of 2 groups of some sequences: what is around a page and a tile, and some longer."""
    near = [0, 1, page - 1, page, page + 1, block - 1, block + 1, 100 + 7 * seed]
    if GPU:
        near += [4095, 700, 2 * block, 2 * page + 1, 333, 1, 0, 5 * block + 3]
    random.Random(seed).shuffle(near)
    few = near if GPU else near[:4]
    return [few[i : i + 2] for i in range(0, len(few), 2)]


# -- every pair of properties -------------------------------------------------------------------

PROPERTIES = {
    "queries": (1, 2, 4, 7, 8, 16),
    "block": (16, 32, 64, 128),
    "page": (16, 32, 64),
    "bits": (None, 8, 4),
    "ranks": (
        ((64, 64), (64, 64)),
        ((96, 48), (16, 128)),
        ((0, 64), (48, 0)),
        ((128, 16), (64, 96)),
    ),
    "zeros": (False, True),
    "tracked": (False, True),
    "dtype": (torch.float16, torch.bfloat16),
}


def pairs(case: dict) -> set:
    return set(combinations(case.items(), 2))


def covering() -> list[dict]:
    """Few cases in which every two values of different properties meet: greedy, always the same."""
    chance = random.Random(0)
    wanted = {
        ((a, x), (b, y))
        for a, b in combinations(PROPERTIES, 2)
        for x, y in product(PROPERTIES[a], PROPERTIES[b])
    }
    found = []
    while wanted:
        (a, x), (b, y) = min(wanted, key=str)
        tries = [
            {name: chance.choice(values) for name, values in PROPERTIES.items()} | {a: x, b: y}
            for _ in range(60)
        ]
        found.append(max(tries, key=lambda case: len(pairs(case) & wanted)))
        wanted -= pairs(found[-1])
    return found


def name_of(case: dict) -> str:
    return "-".join(str(x).removeprefix("torch.") for x in case.values()).replace(" ", "")


@pytest.mark.parametrize("how", covering(), ids=name_of)
def test_kernel_is_the_formula(how: dict) -> None:
    layout = per_head(
        how["ranks"],
        page=how["page"],
        bits=how["bits"],
        zeros=how["zeros"],
        tracked=how["tracked"],
    )
    seed = len(name_of(how)) + how["queries"]
    lengths = spread(how["page"], how["block"], seed % 10)
    case = Case.of(layout, lengths, how["queries"], how["dtype"], seed=seed)
    check(case, *run(case, Tuning(block=how["block"]), 40 if GPU else 3))


def test_the_cases_meet_every_pair() -> None:
    found = set().union(*map(pairs, covering()))
    assert all(
        ((a, x), (b, y)) in found
        for a, b in combinations(PROPERTIES, 2)
        for x, y in product(PROPERTIES[a], PROPERTIES[b])
    )


# -- numbers ------------------------------------------------------------------------------------

RAGGED = [(48, 32), (64, 16), (0, 64)]


def ragged(*, bits: int | None = 8, batch: int = 2, **options) -> Case:
    """Three unequal groups of two queries, of a few pages."""
    lengths = [[70, 1, 33], [0, 64, 17]][:batch]
    return Case.of(per_head(RAGGED, page=16, bits=bits), lengths, 2, torch.float16, **options)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("zeros", [False, True])
def test_large_scores(bits: int | None, zeros: bool, dtype: torch.dtype) -> None:
    layout = per_head([(64, 64)], page=16, bits=bits, zeros=zeros)
    case = Case.of(layout, [[300 if GPU else 60]], 2, dtype, peak=60.0)
    check(case, *run(case, Tuning(block=16), 2))


@pytest.mark.parametrize("bits", [(8, 4), (16, 8), (4, 16)])
def test_keys_and_values_of_different_bits(bits: tuple[int, int]) -> None:
    case = Case.of(mixed(bits, bits, zeros=True), [[40, 17]], 2, torch.float16)
    check(case, *run(case, Tuning(block=16), 2))


@pytest.mark.parametrize("ranks", [[(0, 16), (0, 48)], [(16, 0), (64, 0)], [(0, 0)]])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_side_that_stores_nothing(ranks: list, bits: int | None) -> None:
    layout = per_head(ranks, page=16, bits=bits)
    case = Case.of(layout, [[20] * len(ranks)], 1, torch.float16)
    check(case, *run(case, Tuning(block=16), 1))


def test_codes_of_a_model_in_single_precision() -> None:
    layout = per_head([(32, 64)], page=16, itemsize=4, bits=8)
    case = Case.of(layout, [[40]], 4, torch.float32)
    check(case, *run(case, Tuning(block=16), 2))


def test_groups_in_any_order() -> None:
    layout = per_head(RAGGED, page=16)
    layout = replace(layout, groups=layout.groups[::-1])
    case = Case.of(layout, [[20, 33, 1]], 2, torch.float16)
    check(case, *run(case, Tuning(block=32), 2))


@pytest.mark.skipif(not GPU, reason="the interpreter copies the arena of 2 GiB")
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_pages_beyond_two_gigabytes(bits: int | None) -> None:
    case = ragged(bits=bits, page_offset=2**25)
    check(case, *run(case, Tuning(block=16), 7))


# -- slices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [None, 4])
def test_any_number_of_slices(bits: int | None) -> None:
    """The result moves by no more than rounding, and not at all when it is asked for again."""
    case, tuning = ragged(bits=bits, batch=2 if GPU else 1), Tuning(block=16)
    want, _ = first = run(case, tuning, 1)
    check(case, *first)
    for num_slices in (7, 132, 400):
        found = run(case, tuning, num_slices)
        check(case, *found)
        assert error(found[0], want.cpu().double()) <= LIMITS[torch.float16] / 2
        if num_slices == 7 or GPU:
            again = run(case, tuning, num_slices)
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_more_parts_than_are_merged_at_once() -> None:
    case = Case.of(per_head([(16, 16)], page=16), [[16 * 18 - 1]], 8, torch.float16, peak=20.0)
    check(case, *run(case, Tuning(block=16), 99))


@pytest.mark.parametrize("num_slices", [1, 3, 20])
def test_longest_first(num_slices: int) -> None:
    """ZACK's order computes the same, also with more slices than items."""
    case, tuning = ragged(), Tuning(block=16)
    plan = cut(case, tuning, num_slices)
    lengths, slots = case.args[3], case.args[5]
    tiles = (-(-lengths[slots] // tuning.block)).flatten().tolist()
    slices = longest_first(tiles, [3, 2, 1] * len(slots), num_slices)
    assert slices.order.tolist() != sorted(slices.order.tolist()) or num_slices > 1
    names = ("starts", "firsts", "counts", "order")
    slices = replace(slices, **{name: getattr(slices, name).to(DEVICE) for name in names})
    check(case, *decode_triton.decode(*case.args, plan=replace(plan, slices=slices)))


def test_layers_planned_together() -> None:
    """Two layers of unlike groups in one arena's tables; q a part of more."""
    cases = [ragged(seed=1), ragged(seed=2)]
    counts = [case.args[3][case.args[5]] for case in cases]
    layers = [case.args[4] for case in cases]
    plans = plan_layers(layers, torch.cat(counts, 1), 2, Tuning(block=16), 5)
    for case, plan in zip(cases, plans, strict=True):
        q, arena, tables, lengths, *rest = case.args
        q = torch.cat((q, q), 1)[:, : q.shape[1]]
        tables, lengths = (torch.cat((x, x), 1)[:, : x.shape[1]] for x in (tables, lengths))
        check(case, *decode_triton.decode(q, arena, tables, lengths, *rest, plan=plan))


def test_decode_takes_the_kernel_where_there_is_one(monkeypatch) -> None:
    monkeypatch.setenv("KVFOLD_BACKEND", "triton")
    use_triton.cache_clear()
    case = ragged()
    q, *rest = case.args
    check(case, decode(q, *rest), decode_triton.decode(q, *rest)[1])
    monkeypatch.setattr(decode_triton, "decode", lambda *_: pytest.fail("no kernel for 3 bits"))
    case = Case.of(per_head([(16, 16)], page=16, bits=3), [[9]], 2, torch.float16)
    assert error(decode(*case.args), case.out) <= LIMITS[torch.float16]
    use_triton.cache_clear()


# -- tuning -------------------------------------------------------------------------------------


@pytest.fixture
def tool(monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune_decode", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(timing, "WARM_UP", 0)
    return module


def test_the_table_can_be_made_again(tool: ModuleType, monkeypatch, tmp_path) -> None:
    """All that is swept may be launched, and what is written is what is read."""
    entries = []
    for bits, kept, page in product(tool.BITS, tool.KEPT, tool.PAGES):
        variant = Variant(keys=(kept,), values=(kept,), bits=bits, page=page)
        shape = tool.shape_of(SHAPES["llama-3.1-8b"], variant)
        cuts = tool.candidates(shape)
        assert 1 < len(cuts) <= 6
        assert all(page % x.block == 0 or x.block % page == 0 for x in cuts)
        assert shape not in table() or table()[shape] in cuts
        entries.append(tool.entry(shape, {cut: 1.0 + i for i, cut in enumerate(cuts)}))
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"entries": entries}), "utf-8")
    monkeypatch.setattr(tuning_table, "FILE", path)
    found = table.__wrapped__()
    assert len(found) == 12 and set(table()) <= set(found)
    assert all(cut == tool.candidates(shape)[0] for shape, cut in found.items())


def test_a_sweep(tool: ModuleType, capsys) -> None:
    cuts = [Tuning(block=16, slices=1), Tuning(block=32, slices=1)]
    variant = Variant(bits=8)
    size = {"batch": 1, "tokens": 17, "rounds": 1, "device": DEVICE}
    found = tool.sweep(SHAPES["tiny"], variant, cuts, **size)
    assert set(found) == set(cuts) and list(found.values()) == sorted(found.values())
    tool.print_sweep(tool.shape_of(SHAPES["tiny"], variant), found)
    assert "bits (8, 8), widths (16, 16), page 32" in capsys.readouterr().out


# -- compiled for Hopper ------------------------------------------------------------------------

POINTERS = dict.fromkeys(("lse", "part", "part_ml"), "*fp32")
POINTERS |= dict.fromkeys(("tables", "lengths", "groups", "starts", "counts", "order"), "*i32")
STEPS = dict.fromkeys(("q_stride", "table_slot", "table_group", "length_slot"), "i32")
SHARED = 227 * 1024  # bytes of a block on sm_90


def assembly(known: Shape, tuning: Tuning, queries: int, hard: bool) -> tuple[str, int]:
    """SASS of the kernel for one entry of the table, and its shared memory. hard: with groups of
    several widths, with zeros."""
    bits = None if known.bits == (16, 16) else known.bits[0]
    narrow = (known.widths[0] // 2, known.widths[1] // 4) if hard else known.widths
    groups = per_head([known.widths, narrow] * 4, page=known.page, bits=bits, zeros=hard).groups
    about = decode_groups(groups, queries, torch.device("cpu"))
    codes = ["*bf16" if bits == 16 else "*u16" for bits in about.bits]
    types = POINTERS | STEPS | {"q": "*bf16", "out": "*bf16", "slots": "*i64", "scale": "fp32"}
    types |= {"keys": codes[0], "values": codes[1], "scales": "*i32" if about.paired else "*fp16"}
    keys, values = about.widths
    constants = {"G": len(groups), "N": queries, "GP": decode_triton.padded_queries(queries)}
    constants |= {"DQ": keys, "DO": values, "DK": keys, "DV": values}
    constants |= {"EXACT": about.exact(keys, values)}
    constants |= {"KEY_BITS": about.bits[0], "VALUE_BITS": about.bits[1], "ZEROS": about.zeros}
    constants |= {"PAIRED": about.paired, "PAGE": about.page, "ALIGN": about.align, "ORDER": False}
    constants |= {"BLOCK": tuning.block, "STAGES": tuning.stages}
    kernel = decode_triton.decode_kernel
    names = kernel.arg_names
    assert set(names) == {*types, *constants}
    source = triton.compiler.ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind[0] == "*" or name in ("q_stride", "table_slot", "table_group", "length_slot")
        },
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    options = {"num_warps": tuning.warps, "maxnreg": tuning.registers}
    compiled = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return listing, compiled.metadata.shared


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


def hot_loop(names: list[str], labels: dict[str, int]) -> list[str]:
    """The shortest loop that multiplies matrices and copies ahead of itself."""
    loops = []
    for end, name in enumerate(names):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", name)
        if target and labels.get(target[1], end + 1) <= end:
            body = [re.split(r"[. ]", x)[0] for x in names[labels[target[1]] : end]]
            if {"HMMA", "LDGSTS"} <= set(body):
                loops.append(body)
    return min(loops, key=len, default=[])


def products(known: Shape, tuning: Tuning) -> int:
    """Matrix products of 16 x 8 x 16 that a warp has to do for a tile: scores, outputs and, for
    codes, the sums of the weights."""
    each = sum(known.widths) // 16 // tuning.warps + (known.bits[1] < 16)
    return tuning.block // 16 * each * (known.queries // 8)


def compile_all() -> None:
    """Every entry as it was measured; those with few registers also as they are hardest."""
    for known, tuning in table().items():
        for hard in (False, True) if tuning.registers else (False,):
            listing, shared = assembly(known, tuning, known.queries // (1 if hard else 2), hard)
            names, labels = operations(listing)
            body = hot_loop(names, labels)
            spills = sum(name.startswith(("STL", "LDL")) for name in names)
            report = {"shape": str(known), "tuning": str(tuning), "hard": hard}
            report |= {"instructions": len(body), "spills": spills, "shared": shared}
            report |= {"copies": body.count("LDGSTS"), "products": body.count("HMMA")}
            print(json.dumps(report | {"wanted": products(known, tuning)}), flush=True)


@pytest.mark.slow
def test_every_cut_compiles_well_for_hopper() -> None:
    """In a process of its own: this one's kernels belong to the interpreter."""
    try:
        tools = [triton.knobs.nvidia.ptxas.path, triton.knobs.nvidia.nvdisasm.path]
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"this Triton cannot compile for sm_90a: {error}")
    assert all(map(Path.exists, map(Path, tools)))
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = {"PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
    done = subprocess.run(
        [sys.executable, __file__], env=known | path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    limited = sum(tuning.registers is not None for tuning in table().values())
    assert len(reports) == len(table()) + limited
    for report in reports:
        assert report["spills"] == 0 and report["shared"] <= SHARED, report
        assert report["products"] == report["wanted"], report
        assert report["copies"], report


if __name__ == "__main__":
    compile_all()
