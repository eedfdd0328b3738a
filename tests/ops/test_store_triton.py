"""The page store's Triton kernels against the reference: the same bytes, the same rows.

Without a GPU they run in Triton's interpreter, and are compiled for sm_90a in another process.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

from hopper import run_alone  # noqa: E402
from kvfold.layout.formats.integers import PLANES  # noqa: E402
from kvfold.layout.pages import CacheLayout, Latent  # noqa: E402
from kvfold.ops.store import kernels as pages_triton  # noqa: E402
from kvfold.ops.store import reference as store  # noqa: E402
from kvfold.ops.store import triton as store_triton  # noqa: E402
from kvfold.ops.store.segments import Piece, plan_pieces, unserved  # noqa: E402
from matrix import slow  # noqa: E402
from store_cases import DEVICE, FLOATS, Store, numbers, one_layer, random_layouts, split  # noqa: E402

right_casts = interpreter._convert_float
CASTS = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
}


def cast(x, source, target, mode):
    """The interpreter rounds ties up and loses a mantissa's carry: PyTorch's cast in its place."""
    if source != tl.float32 or target not in CASTS:
        return right_casts(x, source, target, mode)
    to, bits = CASTS[target]
    return torch.from_numpy(x.view("float32").copy()).to(to).view(bits).numpy()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch) -> None:
    """Exact casts, and few large tiles, since the interpreter is slow by the program."""
    if not GPU:
        monkeypatch.setattr(interpreter, "_convert_float", cast)
        monkeypatch.setattr(store_triton, "tile", lambda width: (32 * width, 4))


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]
few = settings(max_examples=5, deadline=None)


def both(layout: CacheLayout, num_rows: int, seed: int) -> tuple[Store, Store]:
    return Store.of(layout, 2, num_rows, seed), Store.of(layout, 2, num_rows, seed)


def fill(append, on: Store, rows: Tensor, num_rows: int) -> None:
    """Rows [2 * T, R] of two sequences, T to each, with positions."""
    slots, index = torch.cartesian_prod(torch.arange(2), torch.arange(num_rows)).unbind(-1)
    index = index[:, None].expand(-1, len(on.groups))
    positions = torch.arange(2 * num_rows, dtype=torch.int32) + 7
    tensors = (x.to(DEVICE) for x in (rows, slots, index, positions))
    append(on.pages, *tensors)


def check_rows(on: Store, lengths: Tensor, dtype: torch.dtype, size: int | None = None) -> None:
    """Both gathers agree bit for bit, NaN where nothing was stored and garbage in the tables."""
    order = torch.tensor([1, 0])
    on.forget(lengths)
    args = (on.pages, order.to(DEVICE), lengths[order].to(DEVICE), dtype)
    want, found = store.gather(*args, size=size), store_triton.gather(*args, size=size)
    assert torch.equal(found.rows, want.rows) and found.rows.dtype is dtype
    assert torch.equal(found.valid, want.valid) and found.valid.dtype is torch.bool
    assert torch.equal(found.positions, want.positions)


@few
@given(layout=random_layouts(), seed=st.integers(0, 999), data=st.data())
def test_bytes_and_rows_equal_the_references(layout: CacheLayout, seed: int, data) -> None:
    dtype = data.draw(st.sampled_from(FLOATS[layout.groups[0].layout.itemsize]))
    num_rows = min(19, 3 * layout.page)
    (mine, reference) = both(layout, num_rows, seed)
    rows = numbers(seed, dtype, 2 * num_rows, mine.width)
    fill(store.append, reference, rows, num_rows)
    fill(store_triton.append, mine, rows, num_rows)
    if GPU:  # sums in another order may choose another scale: compare what cannot differ
        assert (mine.arena == reference.arena).float().mean() > 0.99
    else:
        assert torch.equal(mine.arena, reference.arena)
    shape = 2, len(layout.groups)
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, num_rows + 1, shape, generator=chance)
    check_rows(reference, lengths, dtype)


@pytest.mark.parametrize("tiers,zeros", [([16], False), ([8, 4], True), ([16, 3, 6, 2, 1], False)])
def test_mixed_widths_and_lengths(tiers: list[int], zeros: bool) -> None:
    """Ranks 0, odd, 64 and 96, and a joint latent wider than a tile; lengths around a page."""
    page, dtype = 8, torch.float16
    latents = [Latent(side="k", heads=(h,), rank=r) for h, r in enumerate((0, 33, 96))]
    latents += [Latent(side="v", heads=(h,), rank=r) for h, r in enumerate((0, 64, 140))]
    latents = [replace(x, tiers=split(x.rank, tiers)) for x in latents]
    layout = one_layer(latents, page=page, zeros=zeros, tracked=zeros)
    mine, reference = both(layout, 3 * page, seed=1)
    rows = numbers(1, dtype, 6 * page, mine.width)
    fill(store.append, reference, rows, 3 * page)
    fill(store_triton.append, mine, rows, 3 * page)
    assert torch.equal(mine.arena, reference.arena) or GPU
    lengths = torch.tensor([[0, page - 1, page + 1], [1, page, 3 * page]], dtype=torch.int32)
    check_rows(reference, lengths, dtype, size=3 * page)


@pytest.mark.parametrize("bits,scale", [(1, 2), (2, 2), (4, 2), (8, 2), (3, 1), (6, 1)])
def test_scales_are_as_good_as_the_references(bits: int, scale: int) -> None:
    """1024 groups of 8: 99.9 % of the pages' bytes agree, and no error is worse by 1e-6."""
    latent = Latent(side="kv", heads=(0,), rank=8, tiers=((8, bits),) if scale == 1 else None)
    layout = one_layer([latent], itemsize=4, bits=None if scale == 1 else bits)
    assert layout.groups[0].layout.scale == scale
    rows = numbers(bits, torch.float32, 1024, 8) * torch.logspace(-1, 1, 1024)[:, None]
    slots, lengths = torch.arange(2, device=DEVICE), torch.full((2, 1), 512, device=DEVICE)
    found = []
    for append, on in zip((store_triton.append, store.append), both(layout, 512, 0), strict=True):
        fill(append, on, rows, 512)
        back = store.gather(on.pages, slots, lengths, torch.float32, 512).rows.cpu()
        found.append((on.arena.cpu(), (back.flatten(0, 1) - rows).norm(dim=-1)))
    (mine, error), (reference, best) = found
    assert (error <= best * (1 + 1e-6)).all()
    assert (mine != reference).float().mean() <= 1e-3


@pytest.mark.parametrize("bits", [16, *PLANES])
def test_a_segment_wider_than_a_tile_is_read_in_parts(bits: int) -> None:
    layout = one_layer([Latent(side="kv", heads=(0,), rank=145)], page=8, bits=bits)
    on, _ = both(layout, 9, seed=0)
    fill(store.append, on, numbers(0, torch.float16, 18, 145), 9)
    check_rows(on, torch.tensor([[9], [3]]), torch.float16)


def test_unusual_groups() -> None:
    """Zero, constant, tiny, huge, infinite and missing numbers."""
    layout = one_layer([Latent(side="kv", heads=(0,), rank=12)], page=16, itemsize=4, bits=3)
    mine, reference = both(layout, 4, seed=0)
    values = [0.0, 2.5, 1e-30, 1e30, 3e38, torch.inf, torch.nan, -65504.0]
    rows = torch.tensor(values)[:, None] * torch.tensor([1.0, -1.0]).repeat(6)
    fill(store.append, reference, rows, 4)
    fill(store_triton.append, mine, rows, 4)
    entries = [(x.pages, torch.arange(2).to(DEVICE)) for x in (mine, reference)]
    lengths = torch.full((2, 1), 4, device=DEVICE)
    found = [store.gather(*e, lengths, torch.float32, 4).rows for e in entries]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)


def test_bytes_do_not_depend_on_the_chunk() -> None:
    latents = [Latent(side=side, heads=(0,), rank=130, tiers=((66, 4), (64, 2))) for side in "kv"]
    layout = one_layer(latents, page=16, tracked=True)
    whole, steps = both(layout, 24, seed=0)
    index = (torch.arange(48) // 2)[:, None]
    rows = numbers(0, torch.float16, 48, whole.width)
    tensors = [x.to(DEVICE) for x in (rows, torch.arange(48) % 2, index, torch.arange(48).int())]
    store_triton.append(whole.pages, *tensors)
    for a, b in pairwise([0, 1, 33, 48]):
        part = (x[a:b] for x in tensors)
        store_triton.append(steps.pages, *part)
    assert torch.equal(whole.arena, steps.arena)


@few
@given(layout=random_layouts(), seed=st.integers(0, 999))
def test_move_copies_as_the_reference_does(layout: CacheLayout, seed: int) -> None:
    mine, reference = both(layout, 20, seed)
    noise = torch.randint(0, 256, mine.arena.shape, dtype=torch.uint8).to(DEVICE)
    mine.arena.copy_(noise)
    reference.arena.copy_(noise)
    order = torch.rand(2, len(layout.groups), 20).argsort(-1)[..., :6]
    slot, group, _ = torch.cartesian_prod(*map(torch.arange, (*order.shape[:2], 3))).unbind(-1)
    source, target = order[..., :3].flatten(), order[..., 3:].flatten()
    moves = [x.to(DEVICE) for x in (slot, group, source, target)]
    for move, on in ((store.move, reference), (store_triton.move, mine)):
        move(on.pages, *moves)
    assert torch.equal(mine.arena, reference.arena)


@few
@given(layout=random_layouts(tracked=True), seed=st.integers(0, 999))
def test_metrics_equal_the_references(layout: CacheLayout, seed: int) -> None:
    mine, reference = both(layout, 20, seed)
    rows = torch.zeros(40, mine.width, dtype=FLOATS[layout.groups[0].layout.itemsize][0])
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 21, (2, len(layout.groups)), generator=chance)
    for on in (mine, reference):
        fill(store.append, on, rows, 20)
        on.forget(lengths)
    valid = torch.arange(20) < lengths[..., None]
    values = torch.where(valid, torch.rand(valid.shape, generator=chance), torch.nan).to(DEVICE)
    slots, valid, lengths = torch.arange(2).to(DEVICE), valid.to(DEVICE), lengths.to(DEVICE)
    for name, on in ((store, reference), (store_triton, mine)):
        for _ in range(2):
            name.add_metrics(on.pages, slots, values, valid)
    assert torch.equal(mine.arena, reference.arena)
    common = (mine.pages, slots)
    found = store_triton.read_tracked(*common, lengths, 23)
    # The reference wants a table entry for every row, the kernels only for valid ones.
    want = store.read_tracked(*common, lengths, 20)
    for x, y in zip(found, want, strict=True):
        assert torch.equal(x[..., :20], y) and x.dtype is y.dtype and not x[..., 20:].any()


def test_nothing_stored_yet() -> None:
    latents = [Latent(side="k", heads=(0,), rank=0), Latent(side="v", heads=(0,), rank=8)]
    on = Store.of(one_layer(latents, page=16, bits=4, tracked=True), 2, 16, seed=0)
    before = on.arena.clone()
    check_rows(on, torch.zeros(2, 1, dtype=torch.int32), torch.float16)
    check_rows(on, torch.zeros(2, 1, dtype=torch.int32), torch.float16, size=5)
    empty = torch.zeros(0, 1, dtype=torch.int64, device=DEVICE)
    rows = torch.zeros(0, 8, device=DEVICE)
    store_triton.append(on.pages, rows, empty[:, 0], empty, empty[:, 0].int())
    store_triton.move(on.pages, *[empty[:, 0]] * 4)
    assert torch.equal(on.arena, before)


@pytest.mark.skipif(not GPU, reason="the interpreter copies the arena of 2 GiB")
def test_pages_beyond_two_gigabytes() -> None:
    layout = one_layer([Latent(side="kv", heads=(0,), rank=40)], page=16, bits=4, tracked=True)
    on = Store.of(layout, 2, 16, seed=0)
    on.tables += 2**25
    on.arena = torch.full((2**31 + len(on.arena),), 255, dtype=torch.uint8, device=DEVICE)
    fill(store_triton.append, on, numbers(0, torch.float16, 32, 40), 16)
    assert (on.arena[: 2**31] == 255).all()
    check_rows(on, torch.tensor([[16], [9]]), torch.float16)


def test_what_a_layout_cannot_hold_is_refused() -> None:
    layout = one_layer([Latent(side="kv", heads=(0,), rank=8)], tracked=True)
    on = Store.of(layout, 1, 4, seed=0)
    rows, zero = torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64)
    pages = on.pages
    with pytest.raises(AssertionError, match="float32"):
        store_triton.append(pages, rows, zero, zero[:, None], zero.int())
    with pytest.raises(AssertionError, match="positions"):
        store_triton.append(pages, rows.half(), zero, zero[:, None])
    with pytest.raises(AssertionError, match="not 8"):
        store_triton.append(pages, rows[:, 1:].half(), zero, zero[:, None], zero.int())
    with pytest.raises(AssertionError, match="float32"):
        store_triton.gather(pages, zero, zero[:, None], torch.float32)
    keys = Latent(side="k", heads=(0,), rank=8)
    (kivi,) = one_layer([keys, replace(keys, side="v")], format="kivi", bits=2).groups
    assert kivi.layout.residual_block is not None
    assert unserved((replace(kivi, layout=kivi.layout.residual_block),)) is None
    assert unserved((kivi,)) == "rows wait unquantised in a tail"
    paged = replace(kivi, layout=replace(kivi.layout, residual=0))
    assert unserved((paged,)) == "no kernel stores format kivi"


def test_a_piece_has_as_many_fields_as_the_kernels_read() -> None:
    assert len(fields(Piece)) == pages_triton.FIELDS


STEPS = ("slot_step", "group_step", "page_step")
COMMON = {"arena": "*u8", "tables": "*i32", "pieces": "*i32", "slots": "*i64", "positions": "*i32"}
COMMON |= dict.fromkeys((*STEPS, "number_step"), "i32")
APPEND = COMMON | {"index": "*i64"}
APPEND |= dict.fromkeys(("num_tokens", "row_step", "token_step"), "i32")
GATHER = COMMON | {"lengths": "*i32", "valid": "*i1"}
counts = ("size", "row_width", "num_groups", "num_pieces", "sequence_step")
GATHER |= dict.fromkeys(counts, "i32")
MOVE = {"tables": "*i32", "blocks": "*i32"}
MOVE |= dict.fromkeys(("num_moves", "num_blocks", *STEPS), "i32")
MOVE |= dict.fromkeys(("slots", "groups", "sources", "targets"), "*i64")
TRACK = {"tables": "*i32", "offsets": "*i32", "slots": "*i64", "valid": "*i1", "size": "i32"}
TRACK |= dict.fromkeys(STEPS, "i32")


def spilled(kernel, types: dict[str, str], warps: int = 4, **known) -> int:
    """Bytes that a kernel spills on sm_90a, all pointers aligned to 16 bytes."""
    names = kernel.arg_names
    source = triton.compiler.ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in known.items()},
        {(names.index(x),): [["tt.divisibility", 16]] for x, y in types.items() if y[0] == "*"},
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas, "-v", "--gpu-name", "sm_90a", file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", report)[1])


# Every bit width, both kinds of scale and of grid, the narrowest and the widest pieces; and pieces
# of 8, 4 and 2 bits, narrow and wide.
CASES = [(4, 128, 2, False), *((bits, 128, 2, False) for bits in (16, *PLANES) if bits != 4)]
CASES += [(4, 128, 2, True), (3, 128, 1, False), (4, 8, 2, False), (8, 4096, 2, False)]
CASES += [(0, 130, 2, False)]
WORDS = (4, 1, 2, 8)  # bytes


def compile_all(number: int) -> None:
    """So many cases of each kernel."""
    for bits, width, scale, zeros in CASES[:number]:
        tiers = () if bits else ((8, 8), (width - 40, 4), (32, 2))
        latent = Latent(side="kv", heads=(0,), rank=width, tiers=tiers)
        groups = one_layer([latent], bits=bits or None, zeros=zeros).groups
        form = {"PAGE": 32, "SCALE": scale, "ZEROS": zeros, "TRACKED": True}
        for types, kernel, limit in (
            (APPEND, pages_triton.append_rows, store_triton.WHOLE),
            (GATHER, pages_triton.gather_rows, store_triton.CHUNK),
        ):
            pieces = plan_pieces(groups, limit, torch.device("cpu"))
            numbers, warps = store_triton.tile(pieces.width) if types is APPEND else (0, 4)
            form |= {"FORMS": pieces.forms, "ROWS": 32, "WIDTH": pieces.width}
            form |= {"TILES": pieces.tiles, "SIZE": numbers}
            known = {name: form[name] for name in kernel.arg_names if name in form}
            found = spilled(kernel, types | {"rows": "*bf16"}, warps, **known)
            print(kernel.__name__, bits, width, scale, zeros, found)
    for word in WORDS[:number]:
        width = 4096 // word
        rows = max(1, store_triton.MOVED // width)
        known = {"PAGE": 32, "WORD": word, "ROWS": rows, "WIDTH": width}
        types = MOVE | {"words": f"*i{8 * word}"}
        print("move_rows", word, spilled(pages_triton.move_rows, types, **known))
    for add in (False, True)[:number]:
        types = TRACK | {"words": "*fp32", "values": "*fp32"}
        print(
            "track_rows", add, spilled(pages_triton.track_rows, types, PAGE=32, ADD=add, ROWS=256)
        )


@pytest.mark.parametrize("number", [1, slow(len(CASES))])
def test_no_kernel_spills_on_hopper(number: int) -> None:
    """In a process of its own: this one's kernels belong to the interpreter."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not ptxas.exists():
        pytest.skip("this Triton brings no ptxas to compile for sm_90a")
    lines = run_alone(__file__, str(number))
    wanted = 2 * number + min(number, len(WORDS)) + min(number, 2)
    assert len(lines) == wanted and all(line.endswith(" 0") for line in lines), lines


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
