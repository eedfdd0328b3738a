"""The lab's variants and baselines of attention: right before they are timed."""

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from bench_attention import attention as command
from bench_cases import CPU, TINY, owned_pages, stored_rows
from commands import without_progress
from kvfold.bench import attention, common, variants
from kvfold.bench import baselines as shipped
from kvfold.bench import synthetic_cache as filling
from kvfold.bench import workload as shipped_workload
from kvfold.bench.common import check_outputs
from kvfold.layout import value_kind
from kvfold.ops.backend import use_triton
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.decode import decode as decode_kernel
from kvfold.ops.store.reference import read_tracked
from lab import baselines, workload
from lab.attention import REGISTRY, LabBenchmark
from lab.ceiling import Ceiling, measure_ceiling
from lab.command import run as run_script
from lab.reference import attend, decode_one
from lab.variants import VARIANTS

CEILING = Ceiling(read_tb_per_s=2.0, read_by="int64 amax", copy_tb_per_s=1.5, num_bytes=1 << 20)


def decode(q, pages, slots, scale, plan=None):
    """The reference, sequence by sequence, without log-sum-exps."""
    dv = max(sum(x.width for x in g.layout.segments if x.side == "v") for g in pages.groups)
    found = [decode_one(q[s], pages, s, scale, dv) for s in slots.tolist()]
    return torch.stack(found).to(q.dtype), None


def build(name, *, batch=3, tokens=90, num_layers=2, seed=0):
    return workload.build_workload(
        TINY,
        VARIANTS[name],
        batch=batch,
        tokens=tokens,
        num_layers=num_layers,
        device=CPU,
        seed=seed,
    )


def job(**changes):
    settings = {"shape": "tiny", "cases": ((2, 64),), "variants": ("bf16-full", "int4-half")}
    settings |= {"baselines": tuple(baselines.BASELINES), "layers": 2, "rounds": 2}
    return common.KernelJob(**{**settings, **changes})


def measure(job, batch=2, tokens=64, kernel=decode):
    return attention.measure_case(job, batch, tokens, kernel, CPU, REGISTRY)


def test_ceiling_is_the_fastest_read():
    found = measure_ceiling(CPU, 1)
    assert found.read_by == "int64 amax" and found.num_bytes == 32 << 20
    assert 0 < found.read_tb_per_s < 10 and 0 < found.copy_tb_per_s < 10


@pytest.mark.gpu
def test_the_reading_kernel_reads_all(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    from lab import ceiling_triton

    size = ceiling_triton.BLOCK * ceiling_triton.STEPS
    x = torch.randperm(2 * size, device="cuda" if torch.cuda.is_available() else "cpu")
    assert torch.equal(ceiling_triton.read(x), x.view(2, size).amax(1))
    with pytest.raises(AssertionError):
        ceiling_triton.read(x[1:])


# -- workload --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_pages_have_one_owner_and_lie_in_the_arena(name):
    work = build(name)
    pages = owned_pages(work)
    assert pages[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(pages))
    assert pages[-1][1] * 64 == work.arena.numel()


@pytest.mark.parametrize("name", VARIANTS)
def test_lengths_are_as_asked(name):
    variant = VARIANTS[name]
    lengths = build(name, batch=8, tokens=200).lengths.double()
    assert lengths.mean() == pytest.approx(200 / variant.evict, rel=0.02)
    by_sequence, by_group = (lengths.std(i).max() > 10 for i in (0, 1))
    wanted = {"uniform": (False, False), "pareto": (True, False), "evicted": (True, True)}
    assert (bool(by_sequence), bool(by_group)) == wanted[getattr(variant, "lengths", "uniform")]
    if variant.evict > 1:
        assert lengths.max() <= 200


def test_positions_ascend_where_rows_were_evicted():
    work = build("int4-half-evict8", tokens=640)
    tables, lengths, groups = work.layer(0)
    size = int(lengths.max())
    pages = LayerPages(work.arena, tables, lengths, groups)
    _, positions, valid = read_tracked(pages, work.slots, lengths, size)
    assert size > work.layout.page and torch.equal(positions, torch.arange(size) * valid)


def test_queries_are_zero_beyond_a_heads_rank():
    work = build("bf16-half-ragged")  # keys of 4 and 8 numbers of 16
    assert work.q.shape == (3, 4, 8) and work.dv == 12
    assert not work.q[:, :2, 4:].any() and work.q[:, :2, :4].all() and work.q[:, 2:].all()


@pytest.mark.parametrize(
    ("name", "keys", "values", "most"),
    [
        ("lean-31", 48, 256, 0.3125),
        ("lean-35", 56, 256, 0.35),
        ("small-25", 512, 512, 0.25),
        ("small-10", 192, 192, 0.1),
        ("lorc", 512, 512, 0.5),
    ],
)
def test_recipes_keep_what_they_are_named_for(name, keys, values, most):
    spec = variants.variant_layout(variants.SHAPES["llama-3.1-8b"], VARIANTS[name], 2).spec
    layer = spec.layers[0]
    assert layer.keys == "pre_rope" and most - 0.01 < spec.kept_fraction <= most
    assert {x.rank for x in layer.key_latents} == {keys}
    assert {x.rank for x in layer.value_latents} == {values}
    assert len(layer.groups()) == 1


@pytest.mark.parametrize(("name", "share"), [("palu-g1", 1), ("palu-g4", 4), ("palu-g32", 32)])
def test_palu_keeps_a_quarter_of_keys_and_the_rest_of_values(name, share):
    """§4.5; W_O takes the maps in only where that costs less (not for shared latents)."""
    shape, variant = variants.SHAPES["llama-2-7b"], VARIANTS[name]
    spec = variants.variant_layout(shape, variant, 1).spec
    layer = spec.layers[0]
    assert spec.kept_fraction == 0.5 and layer.keys == "pre_rope"
    assert [len(x.heads) for x in layer.latents] == [share] * 2 * (32 // share)
    assert {x.rank for x in layer.key_latents} == {32 * share}
    assert layer.values == ("fused" if share == 1 else "rebuilt")
    assert layer.values == value_kind(shape, layer.value_latents)


@pytest.mark.parametrize("name", ["lean-35", "small-10", "palu-g4", "lorc"])
def test_rebuilt_attention_is_right_and_counted(name):
    work = build(name)
    assert work.q.shape == (3, 4, 16) and work.num_layers == len(work.maps) == 2
    out, expected = work.step(None)(0), work.expected()
    check_outputs(name, out[0], expected)
    assert work.rank == {"lean-35": 7, "small-10": 6, "palu-g4": 8, "lorc": 16}[name]
    assert work.flops == 2 * 16 * work.rank * 2 * 3 * 90  # 2 d r a KV head and row
    maps = work.maps[0]
    object.__setattr__(maps, "up", -maps.up)
    with pytest.raises(RuntimeError):
        check_outputs(name, out[0], work.expected())


def test_decompressed_attention_is_that_of_the_latents():
    work = build("bf16-half-decompressed")
    for layer in (0, 1):
        place = work.pages(layer), 0, TINY.scaling, work.dv
        check_outputs("decompressed", work.step(None)(layer)[0], decode_one(work.q[0], *place))


@pytest.fixture
def kernels(monkeypatch):
    """Triton's interpreter, which multiplies no bf16."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("KVFOLD_BACKEND", "triton")
    for module in (shipped_workload, filling):
        monkeypatch.setattr(module, "DTYPE", torch.float16)
    use_triton.cache_clear()
    yield
    monkeypatch.undo()
    use_triton.cache_clear()


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
@pytest.mark.parametrize("how", ["longest", "whole"])
@pytest.mark.parametrize("kind", ["", "pareto-", "uneven-", "uneven-pareto-"])
def test_other_cuts_give_the_same(kind, how, kernels):
    """Kernels over whole heads: no item is shared by slices; every slice of `whole` has one."""
    name = kind + how
    work = build(f"bf16-half-{name}")
    plans = []

    def spy(*place, plan):
        plans.append(plan)
        return decode_kernel(*place, plan=plan)

    check_outputs(name, work.step(spy)(1)[0], expected_in(work, 1))
    slices = plans[0].slices
    assert (slices.starts[:, 1] == 0).all() and slices.counts.tolist() == [1] * 6
    assert (slices.order is None) == (how == "whole")
    if how == "whole":
        assert slices.starts[:, 0].tolist() == list(range(7))


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
def test_kernels_rebuild_keys(kernels):
    work = build("lean-35", batch=2, tokens=70)
    assert work.has_kernel
    step = work.step(None)
    check_outputs("lean-35", step(0)[0], work.expected())
    assert not torch.equal(step(0), step(1))


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
@pytest.mark.parametrize("name", ["palu-g1", "palu-g4", "palu-g32"])
def test_palu_without_rope_has_kernels(name, kernels):
    """Absorbed latents of one, four and all heads of a model like OPT."""
    geometry = replace(TINY, num_query_heads=8, num_kv_heads=8, rope=False)
    kept = VARIANTS[name]
    work = workload.build_workload(
        geometry, kept, batch=2, tokens=70, num_layers=2, device=CPU, seed=1
    )
    layer = work.layout.spec.layers[0]
    assert layer.keys == "absorbed" and work.has_kernel and not work.maps
    assert work.q.shape == (2, 8, 4 * min(kept.shares[0], 8))
    check_outputs(name, work.step(decode_kernel)(1)[0], expected_in(work, 1))


def expected_in(work, number):
    return decode_one(work.q[0], work.pages(number), 0, TINY.scaling, work.dv)


# -- right before fast -----------------------------------------------------------------------------


def test_the_reference_is_attention_over_what_is_stored():
    work = build("bf16-half-ragged")
    out, rows = work.step(decode)(1), stored_rows(work, 1).float()
    keys, values = rows[..., :12].split((4, 8), -1), rows[..., 12:].split((12, 8), -1)
    for head in range(4):
        k, v = keys[head // 2], values[head // 2]
        q = work.q[:, head, None, : k.shape[-1]].float()
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=TINY.scaling)
        torch.testing.assert_close(
            out[:, head, : v.shape[-1]].float(), expected[:, 0], atol=0.02, rtol=0.02
        )
        assert not out[:, head, v.shape[-1] :].any()


@pytest.mark.parametrize("name", baselines.BASELINES)
@pytest.mark.parametrize("shape", ["grouped", "one each"])
def test_baselines_are_right_or_say_why_not(name, shape):
    geometry = TINY if shape == "grouped" else replace(TINY, num_kv_heads=4)
    cache = shipped.build_full_cache(geometry, batch=2, tokens=48, num_layers=2, device=CPU)
    if (
        "cudnn" in name
        or name in ("flex", "flashinfer")
        or ("folded" in name and shape != "grouped")
    ):
        with pytest.raises(common.Unavailable):
            baselines.BASELINES[name](cache)
        return
    built = baselines.BASELINES[name](cache)
    q = cache.q[0].unflatten(0, (-1, cache.queries_per_kv))
    assert torch.equal(built.k, cache.k[0, 0]) and torch.equal(built.v, cache.v[0, 0])
    for layer in (0, 1, 2):
        heads = zip(q, cache.k[layer % 2, 0], cache.v[layer % 2, 0], strict=True)
        expected = torch.cat([attend(*head, cache.scale) for head in heads])
        check_outputs(name, built.step(layer)[0].reshape(expected.shape), expected)


class FakeWrapper:
    """FlashInfer's interface, as its documentation describes it, by gathering pages."""

    def __init__(self, workspace, kv_layout, use_tensor_cores):
        assert kv_layout == "HND" and workspace.dtype is torch.uint8

    def plan(self, indptr, indices, last, heads, kv_heads, dim, page, *, sm_scale, **dtypes):
        assert (last == page).all() and set(dtypes.values()) == {variants.DTYPE}
        self.indptr, self.indices, self.scale = indptr, indices, sm_scale

    def run(self, q, cache):
        out = []
        for b in range(len(q)):
            mine = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            k, v = (x[mine].transpose(0, 1).flatten(1, 2) for x in cache)
            heads = zip(q[b].unflatten(0, (len(k), -1)), k, v, strict=True)
            out.append(torch.cat([attend(*head, self.scale) for head in heads]))
        return torch.stack(out).to(q.dtype)


@pytest.fixture
def flashinfer(monkeypatch):
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = FakeWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)


def test_flashinfer_is_timed_where_it_is_installed(flashinfer):
    rows, skipped = measure(job())
    assert "flashinfer" in [row.variant for row in rows]
    _, skipped = measure(job(), tokens=63)
    assert {x.name: x.reason for x in skipped}["flashinfer"].startswith("63 tokens")


# -- a case ----------------------------------------------------------------------------------------


def test_rows_add_up():
    rows, skipped = measure(job())
    names = ["sdpa-flash", "sdpa-flash-folded", "bf16-full", "int4-half"]
    assert [row.variant for row in rows] == names
    theirs = {"sdpa-cudnn", "sdpa-cudnn-folded", "flex", "flashinfer"}
    assert {x.name for x in skipped} == theirs
    theirs = [row for row in rows if row.kind == "baseline"]
    fastest = min(theirs, key=lambda row: row.us)
    for row in rows:
        assert (row.shape, row.batch, row.tokens, row.distinct_layers) == ("tiny", 2, 64, 2)
        assert 0 < row.us_p10 <= row.us <= row.us_p90 and row.repeat_us > 0
        assert row.tb_per_s == pytest.approx(row.bytes / row.us * 1e-6)
        assert (row.fastest_baseline, row.fastest_baseline_us) == (fastest.variant, fastest.us)
        assert row.speedup_vs_fastest == fastest.us / row.us
    assert {row.variant: row.bytes for row in rows} == {
        **dict.fromkeys(names[:3], 2 * 64 * 128),
        "int4-half": 2 * 64 * 24,
    }


def test_rates_of_rebuilt_keys():
    names = ("lean-35", "small-10", "bf16-half")
    rows, skipped = measure(job(variants=names), 2)
    found = {row.variant: row for row in rows}
    assert not {x.name for x in skipped} & set(names)
    for name, rank in zip(names[:2], (7, 6), strict=True):
        assert found[name].rank == rank
        flops = 2 * 16 * rank * 2 * 2 * 64
        assert found[name].tflops == pytest.approx(flops / found[name].us * 1e-6)
    assert found["bf16-half"].tflops is None and found["bf16-half"].rank is None


# -- command ---------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr("kvfold.ops.decode.decode", decode)


def run(*options):
    few = ["--layers", "2", "--rounds", "2", "--variants", "bf16-full,bf16-half-pareto"]
    return run_script(command, ["--shape", "tiny", *few, *map(str, options)])


def test_the_script_writes_shares_of_the_ceiling(kernel, tmp_path, capsys):
    target = tmp_path / "attention.json"
    assert run("--batch", "1,2", "--tokens", "32", "--json", target) == 0
    out = capsys.readouterr().out
    assert "tiny, 2 x 32 tokens" in out and "bf16-half-pareto" in out and "ceiling: " in out
    assert out.count("sdpa-flash *") + out.count("sdpa-flash-folded *") == 2
    assert "flashinfer at 1 x 32, 2 x 32 not timed: flashinfer is not" in out
    report = json.loads(target.read_text())
    assert report["benchmark"] == "attention" and report["settings"]["cases"] == [[1, 32], [2, 32]]
    assert "flashinfer" in report["versions"]
    read = report["ceiling"]["read_tb_per_s"]
    for row in report["rows"]:
        assert row["ceiling_fraction"] == pytest.approx(row["tb_per_s"] / read)


def test_a_terminal_of_80_columns_shows_every_name_and_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows, skipped = measure(job(), 2)
    slow = {"us": 1234567.0, "us_p10": 1123456.0, "us_p90": 1345678.0, "repeat_us": 1256789.0}
    rows = [replace(row, **slow, bytes=987_654_000_000) for row in rows]
    benchmark = LabBenchmark()
    benchmark.ceiling = CEILING
    benchmark.show([benchmark.result(row) for row in rows], skipped)
    out = capsys.readouterr().out
    for row in rows:
        assert f"{row.variant} " in out
    assert out.count(" 1234567  1123456-1345678  1256789  987654 ") == len(rows)
    assert "…" not in out


def test_names_that_are_not_timed_by_default_are_ablations():
    default = LabBenchmark().default(REGISTRY)
    assert "bf16-half-pareto" in default and "int4-half-evict8" in default
    assert not {"bf16-half-whole", "bf16-half-online", "lean-35", "lean-6x"} & {*default}


def test_bad_settings_are_one_line(capsys):
    assert run("--baselines", "eager") == 2
    lines = without_progress(capsys.readouterr().err)
    assert len(lines) == 1 and "legal: sdpa-flash, sdpa-flash-folded, " in lines[0]
