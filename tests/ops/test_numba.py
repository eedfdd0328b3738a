"""Numba's kernels: decode attention against the formula, stored bytes against the reference's, and
engines that run them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="Numba is not installed")

import kvfold
from decode_cases import LAYOUTS, LENGTHS
from flat_cases import filled
from kvfold import LLM, SamplingParams, recipes
from kvfold.config import CacheConfig
from kvfold.engine.requests.request import CacheParams
from kvfold.engine.runner import cpu_fused
from kvfold.engine.runner.build import build_runner
from kvfold.layout.formats.integers import PLANES, _stored
from kvfold.layout.pages import CacheLayout, Latent
from kvfold.models import pointwise as reference_pointwise
from kvfold.models.families import family_of
from kvfold.ops.backend import no_numba
from kvfold.ops.common import threads
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.common.parts import plan_parts, unsupported_reason
from kvfold.ops.decode.numba import CHUNK, Watch, decode
from kvfold.ops.decode.reference import decode as reference_decode
from kvfold.ops.linear import FEW, reference
from kvfold.ops.linear import numba as linear
from kvfold.ops.pointwise import numba as pointwise
from kvfold.ops.store import numba as store
from kvfold.ops.store.reference import read_metrics
from models import tiny
from pages import Case, per_head
from steps import backends, folded, sequences_of, step, stored_rows
from store_cases import FLOATS, Store, numbers, one_layer, random_layouts, split
from tolerance import assert_same_logits, attention_errors, flipped, model_terms, rounding


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


def plan_of(layout: CacheLayout, queries: int, dtype: torch.dtype):
    return plan_parts(layout.spec.layers[0], layout.groups, queries, dtype)


# -- attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 4, 7])
@pytest.mark.parametrize("name", LAYOUTS)
def test_decode_is_the_formula(name: str, queries: int) -> None:
    layout = per_head(**{"page": 16, "itemsize": 4} | LAYOUTS[name])
    case = Case.of(layout, LENGTHS, queries, torch.float32)
    found, lse = decode(*case.args, plan_of(layout, queries, torch.float32), None)
    assert found.shape == case.out.shape and case.is_near(found).all()
    assert not found[2].any()  # no rows in any group
    _, expected = reference_decode(*case.args)
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["equal", "odd", "zeros", "sub-groups"])
def test_numbers_of_16_bits(name: str, dtype: torch.dtype) -> None:
    layout = per_head(**{"page": 16} | LAYOUTS[name])
    case = Case.of(layout, LENGTHS, 2, dtype, page_offset=3)
    assert case.is_near(decode(*case.args, plan_of(layout, 2, dtype), None)[0]).all()


@pytest.mark.parametrize("peak", [1e-3, 20.0, 400.0])
def test_long_sequences_whatever_the_threads(peak: float, monkeypatch) -> None:
    """Several tasks a group, scores small and large: bit for bit alike by one thread or many."""
    layout = per_head([(16, 16), (8, 24)], page=16, bits=8)
    case = Case.of(layout, [[CHUNK + 1, 3 * CHUNK], [1, CHUNK]], 2, torch.float32, peak=peak)
    found = []
    for number in (1, 3):
        monkeypatch.setattr(threads.torch, "get_num_threads", lambda number=number: number)
        found.append(decode(*case.args, plan_of(layout, 2, torch.float32), None)[0])
    assert torch.equal(*found) and case.is_near(found[0]).all()


@st.composite
def layouts(draw) -> CacheLayout:
    """Keys of each head; values of each, or of all: tiers of any bits, zeros or not."""
    heads = draw(st.integers(1, 3))
    bits = draw(st.lists(st.sampled_from([16, *PLANES]), min_size=1, max_size=4))
    widths = st.sampled_from([0, 1, 5, 8, 16, 33, 48])
    each = [(h,) for h in range(heads)]
    owners = {"k": each, "v": draw(st.sampled_from([each, [tuple(range(heads))]]))}
    latents = [
        Latent(side=side, heads=own, rank=rank, tiers=split(rank, bits))
        for side in "kv"
        for own in owners[side]
        for rank in [draw(widths)]
    ]
    return one_layer(
        latents,
        page=draw(st.sampled_from([1, 16, 32])),
        # Where both occur, `gather` rounds quantised numbers to the dtype of the others.
        itemsize=draw(st.sampled_from([4] if len({x == 16 for x in bits}) > 1 else [2, 4])),
        sub_group=draw(st.sampled_from([None, 8])),
        zeros=draw(st.booleans()),
        tracked=True,
    )


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), seed=st.integers(0, 999), power=st.sampled_from([1, 2]))
def test_shared_latents_tiers_and_metrics(layout: CacheLayout, seed: int, power: int) -> None:
    on, dtype, lengths, each = filled(layout, seed)
    groups, spec, slots = layout.groups, layout.spec.layers[0], torch.tensor([2, 0])
    exact = torch.float32 if all(x.quantized for g in groups for x in g.layout.segments) else dtype
    rows = on.gather(slots, lengths[slots], exact)
    q = numbers(seed + 1, dtype, 2, 2 * len(spec.key_latents), 48)
    pages = LayerPages(on.arena, on.tables, lengths, groups)
    watch = Watch(power, torch.tensor([60, 170]))  # of slots whose positions are 140.. and 0..
    found = decode(q, pages, slots, 0.5, plan_of(layout, 2, dtype), watch)[0].double()
    total = torch.zeros(rows.valid.shape, dtype=torch.float64)
    slack = torch.zeros_like(total)
    for h, key in enumerate(spec.key_latents):
        value = next(x for x in spec.value_latents if h in x.heads)
        g = next(i for i, group in enumerate(groups) if h in group.heads)
        for b, inside in enumerate(rows.valid[:, g]):
            k, v = (rows.rows[b, inside][:, spec.columns(x)].double() for x in (key, value))
            mine = q[b, 2 * h : 2 * h + 2, : key.rank].double()
            dense, own = (mine @ k.mT * 0.5).softmax(-1), found[b, 2 * h : 2 * h + 2]
            sizes = each[slots[b], : len(k)]
            sizes = tuple(sizes[:, spec.columns(x)] for x in (key, value))
            errors = attention_errors(mine, k, v, 0.5, sizes)
            assert ((own[:, : value.rank] - dense @ v).abs() <= errors.out).all()
            assert not own[:, value.rank :].any()
            total[b, g, inside] += (dense**power).sum(0)
            slack[b, g, inside] += (power * dense ** (power - 1) * errors.weights).sum(0)
    seen = rows.positions <= watch.last[:, None, None]
    kept = read_metrics(on.pages, slots, rows.valid).double()
    # Summed over the queries of a group's heads, in float32.
    slack += rounding(torch.float32, q.shape[1]) * total
    assert ((kept - total.where(seen, 0.0)).abs() <= slack).all()
    again = on.gather(slots, lengths[slots], exact)
    assert torch.equal(again.rows, rows.rows) and torch.equal(again.positions, rows.positions)


def test_nan_of_a_stored_row_is_seen() -> None:
    """A number that is not one spoils its own sequence alone."""
    layout = per_head([(8, 8)], page=16, bits=4)
    case = Case.of(layout, [[40], [40]], 1, torch.float32)
    q, pages, slots, scale = case.args
    rows = torch.full((1, 16), torch.nan)
    store.append(pages, rows, slots[:1], torch.tensor([[7]]))
    found, _ = decode(q, pages, slots, scale, plan_of(layout, 1, torch.float32), None)
    assert found[0].isnan().all() and case.is_near(found)[1:].all()


def test_what_is_not_read() -> None:
    kivi = per_head([(16, 16)], page=16, bits=4, format="kivi")
    assert "kivi" in (unsupported_reason(kivi.spec.layers[0], kivi.groups) or "")
    apart = one_layer(
        [Latent(side=x, heads=h, rank=8) for x, h in (("k", (0, 2)), ("k", (1,)), ("v", (0, 1, 2)))]
    )
    assert "not adjacent" in (unsupported_reason(apart.spec.layers[0], apart.groups) or "")


# -- the store ----------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(layout=random_layouts(), seed=st.integers(0, 999), data=st.data())
def test_bytes_equal_the_references(layout: CacheLayout, seed: int, data) -> None:
    dtype = data.draw(st.sampled_from(FLOATS[layout.groups[0].layout.itemsize]))
    size = 10.0 ** data.draw(st.integers(-6, 4 if dtype is torch.float16 else 9))
    want, num = Store.of(layout, 3, 70, seed), len(layout.groups)
    got = want.arena.clone()
    rows = numbers(seed, dtype, 210, want.width) * size
    rows[5], rows[7], rows[9, :1] = 0, 3, torch.inf
    slots = torch.arange(3).repeat_interleave(70)
    index = torch.arange(70).repeat(3)[:, None].expand(-1, num)
    positions = torch.arange(210, dtype=torch.int32)
    want.append(rows, slots, index, positions)
    store.append(want.pages._replace(arena=got), rows, slots, index, positions)
    whole = torch.arange(3), torch.full((3, num), 70), dtype
    found = want.gather(*whole)
    differ = want.arena != got
    want.arena = got
    same = want.gather(*whole)
    close = (found.rows == same.rows) | (found.rows.isnan() & same.rows.isnan())
    assert torch.equal(found.positions, same.positions)
    assert close.all() or differ.any()
    # Of two scales that are as good as each other sums of another order may choose either.
    far = (found.rows.double(), same.rows.double())
    missed = [(x - rows.view_as(x)).norm(dim=-1)[~close.all(-1)] for x in far]
    torch.testing.assert_close(*missed, rtol=1e-3, atol=1e-5 * size, equal_nan=True)


@pytest.mark.parametrize("scale", [1, 2])
def test_scales_are_rounded_as_pytorch_rounds_them(scale: int) -> None:
    x = torch.cat([torch.logspace(-30, 12, 9000, base=2), torch.tensor([0.0, 1e9, torch.nan])])
    x = torch.cat([x, x[:100] * 0 + torch.arange(100) * 2.0**-11])
    want = _stored(x, 0, {1: torch.float8_e4m3fn, 2: torch.float16}[scale])
    rounded = store.fp8_of if scale == 1 else store.half_of
    got = torch.tensor([rounded(y) for y in x.numpy()], dtype=torch.int32)
    assert torch.equal(got, want.view({1: torch.uint8, 2: torch.int16}[scale]).int())


# -- engines ------------------------------------------------------------------------------------


def run(model, **options) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Logits of decode steps of unequal sequences, the metrics that they leave, and the rows of
    each layer as they are stored."""
    cache = CacheConfig(page=8, kv_bytes=2**21, **options)
    runner = build_runner(model, cache, num_slots=3, max_tokens=100)
    work = sequences_of(runner, 5, 40, 1)
    for one in work:
        while one.num_computed < one.num_prefill:
            step(runner, (one, min(one.num_prefill - one.num_computed, 8)))
    if runner.policy is not None:
        work[1].cache = CacheParams(max_cache_tokens=20, protected=4)
        runner.compress([work[1]])
    logits = torch.cat([step(runner, *((one, 1) for one in work)) for _ in range(4)])
    watched = work if runner.policy is not None else []
    metrics = [runner.eviction.tracked(one.open_slot)[0] for one in watched]
    return logits, metrics, stored_rows(runner, work)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "opt", "fast", "swift"])
@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"evict": "kv-compress", "bits": 8}])
def test_steps_equal_the_references(name: str, options: dict, backend) -> None:
    found = []
    for kind in ("reference", "numba"):
        backend(kind)
        made = (
            torch.nn.Module.float(folded(recipes.get(name)))
            if name in recipes.RECIPES
            else tiny(name)
        )
        found.append(run(made, **options))
    (wanted, metrics, rows), (logits, ours, stored) = found
    codes = flipped(stored, rows) if options else 0.0
    assert_same_logits(logits, wanted, made.config, 60, codes)
    for x, y in zip(ours, metrics, strict=True):
        least = rounding(torch.float32, model_terms(made.config, 60)) + codes
        assert ((x - y).abs() <= least * y.clamp(min=1)).all()


# -- products, and what lies between them -----------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, FEW])
@pytest.mark.parametrize("outputs", [2, 14, 64, 1030])
def test_products_of_few_tokens(tokens: int, outputs: int, monkeypatch) -> None:
    """As PyTorch's; bit for bit alike by one thread or many, and beside any other tokens."""
    x, weight = torch.randn(1, tokens, 131), torch.randn(outputs, 131) / 12
    bias = torch.randn(outputs)
    found = []
    for number in (1, 3):
        monkeypatch.setattr(threads.torch, "get_num_threads", lambda number=number: number)
        found.append((linear.linear(x, weight, bias), linear.gated(x, weight)))
    size = x.abs() @ weight.abs().mT
    gate, up = reference.linear(x, weight, None).chunk(2, -1)
    gate_size, up_size = size.chunk(2, -1)
    # The slope of silu is at most 1.1; its own operations are eight.
    moved = 1.1 * gate_size * up.abs() + F.silu(gate).abs() * up_size
    gated = (
        rounding(torch.float32, 131) * moved + rounding(torch.float32, 8) * gate.abs() * up.abs()
    )
    allowed = rounding(torch.float32, 132) * (size + bias.abs()), gated
    wanted = reference.linear(x, weight, bias), reference.gated(x, weight)
    for one, many, exact, most in zip(*found, wanted, allowed, strict=True):
        assert torch.equal(one, many)
        assert ((one - exact).abs() <= most).all()
    assert torch.equal(linear.linear(x[:, -1:], weight, bias), found[0][0][:, -1:])


def test_a_gate_of_any_size() -> None:
    gate = torch.tensor([-200.0, -88.0, -1.0, -0.0, 1e-30, 3.0, 88.0, 1e30, torch.inf, torch.nan])
    weight = torch.cat((gate, torch.ones(len(gate))))[:, None]
    found, wanted = (x.gated(torch.ones(1, 1, 1), weight) for x in (linear, reference))
    close = rounding(torch.float32, 8)  # two of each exponential's
    torch.testing.assert_close(found, wanted, rtol=close, atol=1e-30, equal_nan=True)


def test_many_tokens_and_other_numbers_are_left_to_pytorch() -> None:
    x, weight = torch.randn(1, FEW + 1, 8), torch.randn(4, 8)
    assert not linear.serves(x, weight) and linear.serves(x[:, 1:], weight)
    assert not linear.serves(x[:, 1:].bfloat16(), weight.bfloat16())
    assert not linear.serves(x[:, 1:], weight[:, ::2])


@pytest.mark.parametrize("rotary", [None, 12, 20])
@pytest.mark.parametrize("latents", [1, 2, 4])
def test_queries_and_keys_are_the_formulas(rotary: int | None, latents: int) -> None:
    """One KV head a latent, two, or all; all numbers turned, some, or none."""
    tokens, dim, rank = 3, 20, 13
    q, k = torch.randn(1, tokens, 8, dim), torch.randn(1, tokens, 4, dim)
    tables = None if rotary is None else tuple(torch.randn(2, 1, tokens, rotary))
    up, down = torch.randn(4, dim, rank), torch.randn(latents, 4 * dim // latents, rank)
    turned = 1.0 if tables is None else 2 * max(float(x.abs().max()) for x in tables)
    for numba, formula, x, maps in (
        (pointwise.queries, reference_pointwise.queries, q, up),
        (pointwise.keys, reference_pointwise.keys, k, down),
    ):
        # Turning adds two products; the sum over a map's rows is at most both norms' product.
        size = turned * float(x.flatten(2).norm(dim=-1).max() * maps.norm(dim=1).max())
        close = rounding(torch.float32, maps.shape[1] + 3) * size
        torch.testing.assert_close(
            numba(x, tables, maps), formula(x, tables, maps), rtol=0, atol=close
        )


def test_norms_are_those_of_the_model() -> None:
    norm = tiny("llama-gqa").model.norm
    norm.weight.data.uniform_(0.5, 2)
    x = torch.randn(1, 5, len(norm.weight))
    found = pointwise.rms_norm(x, norm.weight, norm.variance_epsilon)
    close = rounding(torch.float32, x.shape[-1] + 6)  # of squares, which are all positive
    torch.testing.assert_close(found, norm(x), rtol=close, atol=0)


def test_a_forward_of_someone_else_stays() -> None:
    model = tiny("llama-gqa")
    own = vars(model.model.norm)["forward"] = type(model.model.norm).forward.__get__(
        model.model.norm
    )
    cpu_fused.install(model, family_of(model.config))
    assert vars(model.model.norm)["forward"] is own
    assert "forward" in vars(model.model.layers[0].input_layernorm)


def test_a_reason_for_the_backend(backend) -> None:
    backend("reference")
    assert no_numba("cpu") == "KVFOLD_BACKEND is reference"
    backend("numba")
    assert no_numba("cpu") is None and "not on cuda" in (no_numba("cuda") or "")


def test_tokens_equal_the_references(backend) -> None:
    found = []
    for kind in ("reference", "numba"):
        backend(kind)
        llm = LLM(kvfold.reference("gqa"), max_sequences=2, max_tokens=160)
        prompts = [list(range(5, 90)), [7, 8, 9]]
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=32, ignore_eos=True))
        found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("team", [True, False])
def test_work_is_shared_and_its_errors_are_raised(team: bool, monkeypatch) -> None:
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 3)
    if not team:
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    parts: list[range] = []
    threads.share(lambda begin, end: parts.append(range(begin, end)), 7)
    assert len(parts) == 3 and sorted(i for part in parts for i in part) == list(range(7))
    threads.share(lambda begin, end: parts.append(range(begin, end)), 0)
    assert parts[3:] == [range(0)]
    with pytest.raises(ZeroDivisionError):
        threads.share(lambda begin, end: 1 // begin, 7)
    with pytest.raises(IndexError):
        threads.share(lambda begin, end: parts[100], 7)


def test_products_of_nothing_are_pytorch_s() -> None:
    """A layer whose values keep no number has an output layer of none."""
    from kvfold.ops.linear import linear as product

    assert torch.equal(product(torch.zeros(1, 3, 0), torch.zeros(5, 0)), torch.zeros(1, 3, 5))
