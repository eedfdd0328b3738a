"""Attention of layers with learned sinks, capped scores, windows, wide heads and any number of
query heads a KV head: by whatever backend serves them, against the formula.

Without a GPU the kernels run in Triton's interpreter.
"""

import logging
import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

import kvfold
from attended import Attended, Shape, apart
from kvfold.engine.requests.params import SamplingParams
from kvfold.ops.common.attention import LOG2_E, attend_rows, attention
from kvfold.ops.common.parts import plan_parts
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.decode import Limits, numba, triton_split
from kvfold.ops.decode import reference as decode_reference
from kvfold.ops.sinks import reference
from kvfold.ops.sinks import triton as kernel
from kvfold.ops.store import gather
from kvfold.ops.store.reference import read_metrics
from matrix import matrix, slow
from model_types import TYPES, config, tiny
from pages import Case, error, per_head
from sinks_cases import STEPS, expected, far, logits_of, maps_of
from steps import backends
from store_cases import DEVICE
from tolerance import rounding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]

JOINT = {"kv_heads": 4, "group": 1, "joint": True}
TIERS = {"ranks": (16, 32), "joint": True, "tiers": (((8, 8), (8, 4)), ((16, 8), (16, 4)))}
SHAPES = {
    "plain": {},
    "window": {"window": 7},
    "cap": {"softcap": 1.5},
    "cap and window": {"softcap": 1.5, "window": 7},
    "256": {"head_dim": 256, "kv_heads": 1},
    "512": {"head_dim": 512, "kv_heads": 1, "group": 3},
    "five": {"group": 5},
    "six": {"group": 6, "kv_heads": 3},
    "seven": {"group": 7},
    "twelve": {"group": 12, "kv_heads": 1},
    "half": {"ranks": (8, 8)},
    "odd": {"ranks": (9, 5)},
    "joint": JOINT,
    "joint 256": {**JOINT, "kv_heads": 2, "head_dim": 256, "ranks": (128, 320)},
    "two widths": TIERS,
    "codes": {"bits": 4},
    "codes in a window": {"bits": 8, "window": 7},
}
# Where scores are capped, or rows hidden.
LIMITED = {name for name, shape in SHAPES.items() if {"window", "softcap"} & shape.keys()}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


def served(shape: Shape, steps: int = 2) -> tuple[str, str, float]:
    """The backends of decoding and of prefill, and the largest error of a token: of prompts of
    unlike lengths, chunks after them, and steps."""
    layer = Attended(shape)
    counts = [[21, 3, 9], [7, 1, 2], *([[1, 1, 1]] * steps)]
    errors = [apart(*layer.step(x)) for x in counts]
    return layer.backend(decode=True), layer.backend(decode=False), max(errors)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="Numba's kernels run on a CPU")
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("way", ["numba", "reference"])
def test_any_layer_on_a_cpu(way: str, name: str, sinks: bool, backend) -> None:
    backend(way)
    decode, prefill, error = served(Shape(**SHAPES[name], sinks=sinks))
    by_pages = "NumbaDecode"
    if way == "reference":
        others = sinks or name in LIMITED or "joint" in SHAPES[name]
        by_pages = "Fallback" if others else "CpuPaged"
    assert (decode, prefill) == (by_pages, "Fallback")
    assert error < rounding(torch.float32, 1024)


# The interpreter takes seconds for each; groups of 6 and 7 are padded as one of 5 is.
PADDED_ALIKE = [slow(name, sinks) for name in ("six", "seven", "half") for sinks in (True, False)]
OTHERS = [name for name in SHAPES if name not in ("six", "seven", "half")]


@pytest.mark.parametrize(("name", "sinks"), [*matrix(OTHERS, [True, False]), *PADDED_ALIKE])
def test_any_layer_by_kernels(name: str, sinks: bool, backend) -> None:
    backend("triton")
    decode, prefill, error = served(
        Shape(**SHAPES[name], sinks=sinks, dtype=torch.float16), steps=1
    )
    assert decode == "TritonDecode"
    assert prefill == ("Fallback" if name == "512" else "TritonPrefill")
    assert error < 2e-3


def test_sinks_matter() -> None:
    """The formula without them is far away."""
    layer = Attended(Shape(sinks=True))
    right, layer.layer = layer.layer, replace(layer.layer, has_sinks=False, sinks=None)
    found, _ = layer.step([21, 3, 9])
    layer = Attended(Shape(sinks=True))
    layer.layer = right
    assert apart(found, layer.step([21, 3, 9])[1]) > 0.05


# -- the step on outputs and log-sum-exps -------------------------------------------------------


def random_attention(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q [3, 6, 8], k and v [3, 2, 11, .], which rows are there, and sinks; one sequence is empty,
    and one's sinks are far above its scores."""
    q, k, v = (torch.randn(3, *x) for x in ((6, 8), (2, 11, 8), (2, 11, 20)))
    valid = torch.arange(11) < torch.tensor([11, 4, 0])[:, None, None]
    sinks = torch.randn(6) * 3
    sinks[1], sinks[2] = 100.0, -100.0
    return *(x.to(dtype) for x in (q, k, v)), valid.expand(3, 2, 11), sinks


@pytest.mark.parametrize("how", [reference, kernel], ids=["reference", "triton"])
def test_outputs_beside_sinks_are_those_of_a_score_more(how) -> None:
    q, k, v, valid, sinks = random_attention(torch.float32)
    out, lse = attend_rows(q, k, v.masked_fill(~valid[..., None], 0.0), valid, 0.5)
    mask = valid[:, :, None].repeat_interleave(3, 1)
    wanted, weights = attention(q[:, :, None], k, v, mask, 0.5, need_weights=True, sinks=sinks)
    place = [x.to(DEVICE) for x in (out[:, :, None], lse[..., None], sinks)]
    found, total = (x.cpu() for x in how.with_sinks(*place))
    assert not found[2].any() and not place[0].cpu()[2].any()
    atol = rounding(torch.float32, 64)
    torch.testing.assert_close(found[:2], wanted[:2], rtol=atol, atol=atol)
    mass = lse[:2].sub(total[:2, :, 0]).exp2()
    torch.testing.assert_close(mass, weights[:2, :, 0].sum(-1), rtol=0, atol=atol)
    torch.testing.assert_close(total[2, :, 0], sinks * LOG2_E)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_chunks_in_16_bits_and_other_strides(dtype: torch.dtype) -> None:
    """As prefill gives them, [B, T, Hq, dv] in memory, with other numbers behind."""
    if DEVICE.type == "cpu" and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter rounds bf16 another way")
    whole = torch.randn(2, 5, 6, 24, device=DEVICE).to(dtype)
    lse, sinks = torch.randn(2, 6, 5, device=DEVICE), torch.randn(6, device=DEVICE)
    wanted, _ = reference.with_sinks(whole.float()[..., :20].transpose(1, 2), lse, sinks)
    behind = whole[..., 20:].clone()
    kernel.with_sinks(whole[..., :20].transpose(1, 2), lse, sinks)
    assert torch.equal(whole[..., :20].transpose(1, 2), wanted.to(dtype))
    assert torch.equal(whole[..., 20:], behind)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="Numba's kernels run on a CPU")
def test_numba_adds_to_metrics_what_is_left_beside_sinks() -> None:
    layout = per_head([(16, 16), (8, 24)], page=16, itemsize=4, tracked=True)
    case = Case.of(layout, [[700, 33], [5, 0]], 2, torch.float32)
    q, pages, slots, scale = case.args
    sinks = torch.tensor([0.5, 3.0, -2.0, 30.0])
    plan = plan_parts(layout.spec.layers[0], layout.groups, 2, torch.float32)
    valid = torch.arange(700) < pages.lengths[slots][..., None]
    before = read_metrics(pages, slots, valid)
    watch = numba.Watch(1, torch.full((2,), 2**30))
    found, _ = numba.decode(q, pages, slots, scale, plan, watch, sinks)
    wanted, total = reference.with_sinks(
        case.out[:, :, None].clone(), case.lse[..., None], sinks.double()
    )
    bound = rounding(torch.float32, 2048)
    torch.testing.assert_close(found.double(), wanted[:, :, 0], rtol=bound, atol=bound)
    added = read_metrics(pages, slots, valid) - before
    share = (case.lse - total[..., 0]).exp2()
    weights = (case.weights * share[..., None]).unflatten(1, (2, 2)).sum(2)
    for g, rows in ((0, 700), (1, 33)):
        torch.testing.assert_close(
            added[0, g, :rows].double(), weights[0, g, :rows], rtol=bound, atol=1e-4
        )


# -- limits of scores in two passes -------------------------------------------------------------

LAYOUTS = {
    "16 bits": {"ranks": [(16, 16), (8, 24)]},
    "codes": {"ranks": [(16, 16), (32, 24)], "bits": 4},
    "wide": {"ranks": [(272, 16)]},
    "wide codes": {"ranks": [(544, 16)], "bits": 8},
}


@pytest.mark.parametrize(
    ("name", "tracked", "limits"),
    matrix(list(LAYOUTS), [False, True], [(None, 9), (1.5, None), (0.8, 60)], diagonals=2),
)
def test_scores_in_two_passes(name: str, tracked: bool, limits) -> None:
    """Of rows in several tiles, of which windows hide whole ones and whole slices."""
    ranks, how = LAYOUTS[name]["ranks"], {k: x for k, x in LAYOUTS[name].items() if k != "ranks"}
    layout = per_head(ranks, page=16, tracked=tracked, **how)
    lengths = [[n] * len(ranks) for n in (150, 1, 0, 64, 65)]
    case = Case.of(layout, lengths, 3, torch.float16, peak=4.0)
    q, pages, slots, scale = case.args
    counts = pages.lengths[slots]
    rows = gather(pages, slots, counts, torch.float16, 150)
    last = rows.positions[:, 0].masked_fill(~rows.valid[:, 0], -1).amax(1)
    bound = Limits(softcap=limits[0], window=limits[1], positions=last)
    cut = Tuning(block=32, stages=1, warps=1, slices=4)
    plan = triton_split.plan_layers([layout.groups], counts, 3, 1000, (cut, cut), limited=True)[0]
    plan = replace(plan, wide="wide" in name)
    out, lse = triton_split.decode(q, pages, slots, scale, plan, bound)
    wanted, wanted_lse = decode_reference.decode(q, pages, slots, scale, None, bound)
    free, _ = decode_reference.decode(q, pages, slots, scale)
    assert error(out, wanted.cpu().double()) < 4e-3
    assert not out[2].any()
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=2e-3)
    assert error(free, wanted.cpu().double()) > 0.02


@pytest.mark.skipif(DEVICE.type != "cpu", reason="Numba's kernels run on a CPU")
@pytest.mark.parametrize("bounds", [(None, 9), (1.5, None), (0.8, 600)], ids=str)
@pytest.mark.parametrize("tracked", [False, True], ids=["indices", "positions"])
def test_scores_by_numba(tracked: bool, bounds) -> None:
    """Of rows in several tasks, of which windows hide whole ones."""
    layout = per_head([(16, 16), (8, 24)], page=16, itemsize=4, tracked=tracked)
    lengths = [[n] * 2 for n in (1200, 1, 0, 511, 513)]
    case = Case.of(layout, lengths, 3, torch.float32, peak=4.0)
    q, pages, slots, scale = case.args
    rows = gather(pages, slots, pages.lengths[slots], torch.float32, 1200)
    last = rows.positions[:, 0].masked_fill(~rows.valid[:, 0], -1).amax(1)
    limits = Limits(softcap=bounds[0], window=bounds[1], positions=last)
    plan = plan_parts(layout.spec.layers[0], layout.groups, 3, torch.float32)
    found, _ = numba.decode(q, pages, slots, scale, plan, None, None, limits)
    wanted, _ = decode_reference.decode(q, pages, slots, scale, None, limits)
    assert error(found, wanted.double()) < rounding(torch.float32, 4096)
    assert error(case.out, wanted.double()) > 0.02 and not found[2].any()


# -- models -------------------------------------------------------------------------------------

WITH_SINKS = [x for x in ("gpt_oss", "granite_swa", "granitemoe_swa") if x in TYPES]


@pytest.fixture
def ids() -> list[list[int]]:
    return [torch.randint(3, 127, (n + STEPS,)).tolist() for n in (21, 9, 2)]


@pytest.mark.parametrize("keep", [1.0, 0.5])
@pytest.mark.parametrize("name", WITH_SINKS)
def test_the_engine_is_transformers(name: str, keep: float, ids, tmp_path, backend) -> None:
    """Layers with windows and without take turns, all have sinks."""
    model = tiny(name)
    made = maps_of(model, keep, tmp_path)
    wanted = expected(model, made, ids)
    for way in ("numba", "reference"):
        backend(way)
        found = logits_of(model, made, ids)
        assert far(found, wanted) < 1e-5
    assert far(found.flip(0), wanted) > 0.05


def test_sinks_are_what_the_model_says(ids, tmp_path, backend) -> None:
    backend("numba")
    model = tiny("gpt_oss")
    made = maps_of(model, 0.5, tmp_path)
    before = logits_of(model, made, ids)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.add_(4.0)
    after = logits_of(model, made, ids)
    assert far(after, expected(model, made, ids)) < 1e-5 and far(after, before) > 0.02


def test_means_are_kept_in_what_is_stored(tmp_path) -> None:
    """Weights add up to less than one, so that none may be added behind attention."""
    made = maps_of(tiny("gpt_oss"), 0.5, tmp_path)
    for maps in made.maps.values():
        assert not maps.value_mean.any() and not maps.value_shift.any() and not maps.key_shift.any()


@pytest.mark.parametrize("bits", [8, 4])
def test_codes(bits: int, ids, tmp_path, backend) -> None:
    model = tiny("granite_swa")  # a router of experts would answer small errors with large ones
    made = maps_of(model, 1.0, tmp_path)
    wanted = expected(model, made, ids)
    found = []
    for way in ("numba", "reference"):
        backend(way)
        found.append(logits_of(model, made, ids, bits=bits))
    assert far(*found) < 0.02  # a number halfway between two codes may take either
    assert far(found[0], wanted) < {8: 0.05, 4: 0.3}[bits]


def test_prompts_in_chunks_beside_steps(tmp_path, backend) -> None:
    backend("numba")
    model = tiny("gpt_oss")
    made = maps_of(model, 0.5, tmp_path)
    prompts = [torch.randint(3, 127, (n,)).tolist() for n in (60, 17, 3)]
    wanted = SamplingParams(max_new_tokens=8, ignore_eos=True)
    llm = kvfold.LLM(model, maps=made, max_sequences=3, max_tokens=96, chunk=8)
    found = [list(x.token_ids) for x in llm.generate(prompts, wanted)]
    undo = kvfold.attach(model, made)
    for prompt, tokens in zip(prompts, found, strict=True):
        whole = torch.tensor([prompt + tokens])
        with torch.no_grad():
            logits = model(whole).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (best - chosen).max() < 1e-4 * best.abs().max()  # up to ties
    undo()


@pytest.mark.filterwarnings("ignore:CUDA graphs of the model could not be captured")  # experts
def test_kernels_serve_a_model_with_sinks(ids, tmp_path, backend, caplog) -> None:
    model, ids = tiny("gpt_oss"), ids[1:]
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    made = maps_of(model, 0.5, tmp_path)
    model = model.half().to(DEVICE)
    backend("reference")
    wanted = logits_of(model, made, ids)
    backend("triton")
    with caplog.at_level(logging.INFO, "kvfold.attention"):
        found = logits_of(model, made, ids)
    said = [x.getMessage() for x in caplog.records]
    full = config("gpt_oss").layer_types.index("full_attention")
    assert any(x.startswith(f"layer {full}, decode: TritonDecode") for x in said)
    assert sum("prefill: TritonPrefill" in x for x in said) == len(made.maps)
    assert far(found, wanted) < 1e-2 and far(found.flip(0), wanted) > 0.05
