"""Planning dimensions and bits: the budget holds, bits fall, and the artifact keeps the plan."""

import json
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvfold
from kvfold import recipes
from kvfold.cli.main import main
from kvfold.compression.bases import recipes_where
from kvfold.compression.compressor import Compressor
from kvfold.compression.planning import bit_allocation
from kvfold.compression.planning import plan as plan_of
from kvfold.compression.planning.bit_allocation import (
    DISTORTION,
    SCALE_BITS,
    any_tiers,
    cost,
    even_tiers,
    plan_tiers,
    predicted_loss,
    unit,
)
from kvfold.compression.planning.plan import plan_bits
from kvfold.compression.planning.preference import one_pass_tiers
from kvfold.compression.planning.target import Target
from kvfold.compression.ranks import LatentCandidate
from kvfold.config import ALL_LEVELS, LEVELS, Recipe
from kvfold.evaluation import frontier
from kvfold.hub.card import facts
from kvfold.hub.checkpoint import provenance_of, spec_of
from kvfold.layout import CacheSpec
from kvfold.layout.formats.integers import Integers
from kvfold.layout.pages import cache_layout
from models import tiny, tokens
from tiers_cases import statistics_of

SETS = st.lists(st.sampled_from(ALL_LEVELS), min_size=1, unique=True)
LOSS_WEIGHTED = recipes_where(lambda basis: basis.predicts_loss)


@st.composite
def spectra(draw: st.DrawFn) -> list[Tensor]:
    """Latents of several widths whose singular values fall at several rates, some to zero."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        width = draw(st.integers(0, 70) | st.sampled_from([64, 128, 256, 288]))
        top, decay = draw(st.floats(1e-3, 1e3)), draw(st.floats(0.0, 3.0))
        s = top * torch.arange(1, width + 1, dtype=torch.float64).pow(-decay)
        s[draw(st.integers(0, width)) :] = 0
        found.append(s)
    return found


def plan(found: list[Tensor], budget: int, levels, sets=None) -> list:
    return plan_tiers(found, budget, [any_tiers(len(s), levels) for s in found], sets)


def falling(width: int = 128, decay: float = 1.0, top: float = 1.0) -> Tensor:
    return top * torch.arange(1, width + 1, dtype=torch.float64).pow(-decay)


def total_loss(found: list[Tensor], planned: list) -> float:
    return sum(predicted_loss(s, tiers) for s, tiers in zip(found, planned, strict=True))


@settings(max_examples=30, deadline=None)
@given(spectra(), st.integers(0, 3000), SETS)
def test_plans_keep_to_the_budget_and_the_rules(
    found: list[Tensor], budget: int, levels: list[int]
):
    planned = plan(found, budget, levels)
    assert sum(map(cost, planned)) <= budget
    for s, tiers in zip(found, planned, strict=True):
        bits = [b for _, b in tiers]
        assert all(more > fewer for more, fewer in pairwise(bits)) and set(bits) <= set(levels)
        assert sum(w for w, _ in tiers) <= len(s)
        if tiers:  # a tier begins at a dimension that holds something
            assert s[sum(w for w, _ in tiers[:-1])] > 0


@settings(max_examples=30, deadline=None)
@given(spectra(), st.integers(0, 9000), SETS)
def test_rows_of_codes_are_whole_units(found: list[Tensor], budget: int, levels: list[int]):
    """16 bytes in latents of 256 numbers or more, else 4; where the latent ends between, a word."""
    for s, tiers in zip(found, plan(found, budget, levels), strict=True):
        size, end = 16 if len(s) >= 256 else 4, 0
        for width, bits in tiers:
            end, row = end + width, Integers(bits=bits).row_bytes(width)
            forced = end == len(s) and len(s) % unit(len(s), bits)
            assert row * 8 == width * bits and row % (2 if forced else size) == 0


@settings(max_examples=30, deadline=None)
@given(spectra(), st.sampled_from([64, 256, 640, 768, 1024]), st.integers(500, 20000))
def test_plans_for_speed_are_runs_that_one_pass_reads(found: list[Tensor], width: int, budget: int):
    """Whole 4 bytes of keys, 16 of values, oddly many of wide ones, which twelve warps weigh."""
    keys = [s for s in found if len(s) % 16 == 0 and len(s) and s[0] > 0]
    every, sides = [*keys, falling(width)], ["k"] * len(keys) + ["v"]
    rules = [one_pass_tiers(side, len(s)) for side, s in zip(sides, every, strict=True)]
    planned = plan_tiers(every, budget, rules)
    spent = sum(map(cost, planned))
    assert spent <= budget
    if budget >= sum(rule.min_bits for rule in rules):
        assert all(planned)
    for side, s, tiers in zip(sides, every, planned, strict=True):
        rows = [Integers(bits=bits).row_bytes(numbers) for numbers, bits in tiers]
        unit, rest = (4, 0) if side == "k" else (32, 16) if len(s) >= 512 else (16, 0)
        assert all(row % unit == rest for row in rows)
        assert sum(numbers for numbers, _ in tiers) <= len(s)
        if side == "v":
            assert sum(-(-n // (64 * k)) * k for n, b in tiers for k in [1 + (b == 2)]) <= 12


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 8), st.floats(0.01, 0.2), st.integers(100, 1200))
def test_keys_that_are_rebuilt_load_at_most_so_much(loads: int, fall: float, budget: int):
    """16 numbers a load, in whole 16 bytes of a run; as many tiers as plans without a limit, where
    these fit, and no plan loses less than one that may load more."""
    s, lost = [falling(128, fall)], []
    for most in (loads, loads + 1, 0):
        (tiers,) = plan_tiers(s, budget, [one_pass_tiers("k", 128, loads=most)])
        taken = sum(-(-n * bits // 128) * (8 // bits) for n, bits in tiers)
        assert tiers and (taken <= most or not most) and cost(tiers) <= budget
        lost.append(predicted_loss(s[0], tiers))
        if not most and taken <= loads:
            assert lost[0] == pytest.approx(lost[-1])


def test_no_width_of_values_is_more_than_the_warps_weigh():
    """Even where every bit is free: whole items, or so few numbers that parts of items do."""
    for width in range(64, 2049, 32):
        (tiers,) = plan_tiers([falling(width, 0.1)], 10**6, [one_pass_tiers("v", width)])
        assert sum(-(-n // (64 * k)) * k for n, b in tiers for k in [1 + (b == 2)]) <= 12


@pytest.mark.parametrize(
    ("width", "bits", "numbers"),
    [(64, 2, 16), (64, 4, 8), (64, 8, 4), (256, 2, 64), (256, 4, 32), (256, 8, 16), (255, 6, 16)],
)
def test_a_unit_is_what_a_kernel_reads_at_once(width: int, bits: int, numbers: int):
    assert unit(width, bits) == numbers


def test_a_width_of_no_whole_units_is_kept_to_its_end():
    everything = [torch.ones(40, dtype=torch.double)]  # 16 numbers of 2 bits are a unit
    assert plan(everything, 10**6, [2]) == [((40, 2),)]
    assert plan([torch.ones(39)], 10**6, [2]) == [((32, 2),)]  # 78 bits are no words


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.2, 2.0), min_size=1, max_size=4), st.integers(200, 4000), SETS)
def test_what_rounding_leaves_is_small(decays: list[float], budget: int, levels: list[int]):
    found = [falling(128, decay, 1 + i / 7) for i, decay in enumerate(decays)]
    planned = plan(found, budget, levels)
    most = sum(len(s) * max(levels) + SCALE_BITS for s in found)
    # Between two prices that differ by nothing, one latent gains a unit or two: 32 numbers at most.
    assert sum(map(cost, planned)) >= min(budget, most) - 2 * 32 * max(levels)


@settings(max_examples=20, deadline=None)
@given(spectra(), st.integers(0, 3000), SETS)
def test_more_bits_predict_less_loss(found: list[Tensor], budget: int, levels: list[int]):
    """Budgets apart by more than what rounding leaves."""
    budgets = [budget, budget + sum(len(s) * max(levels) + SCALE_BITS for s in found)]
    little, much = (total_loss(found, plan(found, b, levels)) for b in budgets)
    nothing = total_loss(found, [()] * len(found))
    assert much <= little * (1 + 1e-9) and little <= nothing * (1 + 1e-9)


def test_what_one_price_leaves_is_spent_where_it_fits(monkeypatch):
    found, budget = [falling(128, 0.5 + i / 8) for i in range(6)], 900
    spent = plan(found, budget, LEVELS)
    monkeypatch.setattr(bit_allocation, "MAX_REFINE_STEPS", 0)
    before = plan(found, budget, LEVELS)
    assert sum(map(cost, before)) < sum(map(cost, spent)) <= budget
    assert total_loss(found, spent) < total_loss(found, before)


def legal_tiers(width: int, levels: tuple[int, ...]):
    """All that a latent of this width may become."""
    for count in range(len(levels) + 1):
        for ends in combinations(range(4, width + 1, 4), count):
            for bits in combinations(levels, count):
                widths = [b - a for a, b in pairwise((0, *ends))]
                if all(w % unit(width, b) == 0 for w, b in zip(widths, bits, strict=True)):
                    yield tuple(zip(widths, bits, strict=True))


@pytest.mark.parametrize("levels", [LEVELS, (8, 4), (6, 3, 1)])
@pytest.mark.parametrize("decay", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("budget", [60, 130, 190])
def test_no_other_tiers_of_as_many_bits_lose_less(levels, decay: float, budget: int):
    s = falling(32, decay)
    (found,) = plan([s], budget, levels)
    others = [x for x in legal_tiers(32, levels) if cost(x) <= cost(found)]
    assert found in others
    best = min(predicted_loss(s, x) for x in others)
    assert predicted_loss(s, found) == pytest.approx(best, rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(spectra(), st.integers(0, 3000), SETS)
def test_members_of_a_set_get_the_same_tiers(found: list[Tensor], budget: int, levels: list[int]):
    """Of each width; a set of one is a latent."""
    sets = [len(s) for s in found]
    planned = plan(found, budget, levels, sets)
    assert sum(map(cost, planned)) <= budget
    assert all(a == b for a, x in zip(planned, sets, strict=True) for b, y in
               zip(planned, sets, strict=True) if x == y)  # fmt: skip
    alone = plan(found, budget, levels, list(range(len(found))))
    assert alone == plan(found, budget, levels)


@pytest.mark.parametrize("budget", [120, 260, 380])
def test_no_other_tiers_of_a_whole_set_lose_less(budget: int):
    heads = [falling(32, 0.3), falling(32, 1.5, 4.0)]
    first, second = plan(heads, budget, LEVELS, ["layer"] * 2)
    others = [x for x in legal_tiers(32, LEVELS) if cost(x) <= cost(first)]
    best = min(total_loss(heads, [x, x]) for x in others)
    assert first == second and total_loss(heads, [first] * 2) == pytest.approx(best, rel=1e-9)
    apart = plan(heads, budget, LEVELS)
    assert apart[0] != apart[1] and total_loss(heads, apart) < best


def test_a_set_pays_for_every_member():
    """Beside a latent of its own, members that are equal get what they would get apart."""
    found = [falling(128, 0.7)] * 8 + [falling(128, 0.5)]
    together, apart = (plan(found, 2400, LEVELS, x) for x in ([0] * 8 + [1], None))
    assert total_loss(found, together) <= 1.02 * total_loss(found, apart)


def test_even_tiers_are_whole_units_of_every_level():
    assert even_tiers(384, (4, 8, 2)) == ((128, 8), (128, 4), (128, 2))
    assert even_tiers(64, LEVELS) == ((20, 8), (16, 4), (16, 2))
    assert even_tiers(9, LEVELS) == () and even_tiers(13, LEVELS) == ((4, 8),)


@pytest.mark.parametrize("decay", [0.3, 0.7, 1.2, 2.0])
@pytest.mark.parametrize("share", [0.2, 0.4, 0.8])
def test_tiers_beat_uniform_bits_and_dimensions_alone(decay: float, share: float):
    """At the same cost, each alternative with its best choice of dimensions over both latents."""
    found = [falling(256, decay), falling(256, decay, 3.0)]
    budget = int(share * 16 * 512)
    ours = total_loss(found, plan(found, budget, ALL_LEVELS))
    squares = torch.cat(found).square().sort(descending=True).values / 2
    dims_only = float(squares[budget // 16 :].sum())
    four = (budget - 2 * SCALE_BITS) // 4
    uniform = float(DISTORTION[4] * squares[:four].sum() + squares[four:].sum())
    # 16 bits leave no error and 8 bits 4e-5 of it: the one thing that a plan cannot reach.
    assert ours <= 1.001 * uniform
    assert ours <= 1.001 * dims_only + DISTORTION[8] * float(squares.sum())


@pytest.mark.parametrize("found", [[], [torch.zeros(16)], [torch.zeros(0)], [torch.zeros(0)] * 3])
def test_nothing_is_stored_for_nothing(found: list[Tensor]):
    assert plan(found, 1000, LEVELS) == [()] * len(found)


def test_a_latent_of_zeros_leaves_the_budget_to_others():
    alone, *_ = plan([falling()], 400, LEVELS)
    others = [torch.zeros(64), falling(), torch.zeros(0)]
    assert plan(others, 400, LEVELS) == [(), alone, ()]


def test_one_giant_direction_leaves_no_bits_unspent():
    """A saturated head's may hold 10^10 times what others do."""
    s = torch.ones(64, dtype=torch.float64)
    giant = s.clone()
    giant[0] = 1e8
    assert sum(map(cost, plan([s, giant], 800, LEVELS))) > 0.95 * 800


def test_a_plan_does_not_depend_on_the_scale_of_the_loss():
    found = [falling(), falling(64, 0.5)]
    assert plan(found, 700, LEVELS) == plan([1e-6 * s for s in found], 700, LEVELS)


# -- the artifact -------------------------------------------------------------------------------


def planned_model(recipe: str = "small", factor: float = 6.0, **options):
    model = tiny("llama-gqa")
    made = statistics_of(model, recipe)
    return kvfold.compress(model, recipe, factor=factor, statistics=made, **options, fold=True)


@pytest.mark.parametrize("recipe", ["fast", "swift", "lean", "small"])
@pytest.mark.parametrize("factor", [2.0, 6.0])
def test_factor_is_met_in_bits_that_a_token_stores(recipe: str, factor: float):
    spec = spec_of(planned_model(recipe, factor))
    bits = cache_layout(spec).bits_per_token
    assert spec.planned
    assert bits == sum(cost(x.tiers) for layer in spec.layers for x in layer.latents)
    assert bits <= 16 * spec.geometry.full_numbers / factor


@pytest.mark.parametrize("levels", [(8, 4, 2), (4,), [2, 3, 6]])
def test_a_model_is_planned_in_the_levels_that_were_asked_for(levels):
    model = planned_model("lean", levels=levels)
    used = {bits for x in spec_of(model).layers for y in x.latents for _, bits in y.tiers}
    assert used <= set(levels)
    assert provenance_of(model)["levels"] == tuple(sorted(levels, reverse=True))
    shown = ", ".join(map(str, sorted(used, reverse=True)))
    assert f"with the planned bits ({shown}) and scales" in "".join(
        facts(spec_of(model), provenance_of(model))
    )


def test_a_plan_for_speed_is_alike_in_all_heads_of_a_layer():
    model = tiny("llama-gqa")
    prepared = Compressor(model, recipes.get("swift")).prepare(statistics_of(model, "swift"))

    def kinds(prefer: str) -> list[set]:
        """Tiers of the keys of every layer."""
        spec = prepared.plan_factor(4.0, prefer=prefer)
        assert cache_layout(spec).kept_fraction <= 1 / 4
        return [{x.tiers for x in layer.key_latents} for layer in spec.layers]

    assert all(len(own) == 1 for own in kinds("speed"))
    assert any(len(own) > 1 for own in kinds("balanced"))


@pytest.mark.parametrize(("factor", "wanted"), [(4, {8, 4}), (6, {8, 4, 2})])
def test_keys_have_two_bits_where_plans_without_lose_much_more(
    factor: int, wanted: set, monkeypatch
):
    def latent(side: str, heads: tuple[int, ...], width: int) -> LatentCandidate:
        own = SimpleNamespace(singular=falling(width), mean=range(width), width=width)
        return LatentCandidate(layer=0, side=side, heads=heads, basis=own)

    latents = [latent("k", (head,), 128) for head in range(4)] + [latent("v", (0, 1, 2, 3), 512)]

    def levels() -> set[int]:
        sizes = plan_bits(latents, 16 * 1024 // factor, LEVELS, "speed")
        return {bits for _, tiers in sizes[:4] for _, bits in tiers}

    assert levels() == wanted
    monkeypatch.setattr(plan_of, "MAX_EXTRA_LOSS", 10.0)
    assert levels() == {8, 4}


def test_plans_for_speed_are_tried_where_a_gpu_reads_them_in_one_pass(monkeypatch):
    model = tiny("llama-gqa")

    def tried(recipe: str, **options) -> list[str]:
        prepared = Compressor(model, recipes.get(recipe)).prepare(statistics_of(model, recipe))
        return [prefer for prefer, _ in frontier.plans(prepared, 3.0, **options)]

    assert tried("swift") == ["balanced"]  # two query heads a KV head
    monkeypatch.setattr(frontier, "fastest_layout", lambda config, spec: object())
    assert tried("swift") == tried("lean") == ["balanced", "speed"]
    assert tried("small") == ["balanced"]
    assert tried("swift", levels=(8, 4)) == ["balanced"]


def test_inspect_shows_planned_bytes_and_levels(tmp_path, capsys):
    spec = spec_of(planned_model("lean", 3.0, levels=(8, 4), output=tmp_path / "planned"))
    assert main(["inspect", str(tmp_path / "planned")]) == 0
    shown = capsys.readouterr().out
    assert "with the planned bits (8, 4) and scales" in shown and "levels: 8, 4" in shown
    full, layout = 2 * spec.geometry.full_numbers, cache_layout(spec)
    stored = layout.bits_per_token / 8
    assert f"a token takes {stored:.0f} bytes in place of {full} in " in shown
    assert f": {full / stored:.2f}x smaller" in shown and "16-bit bytes  stored bytes" in shown
    rows = [x.split() for x in shown.splitlines() if x[:2] in ("0 ", "1 ")]
    assert [int(x[-1]) for x in rows] == [round(x / 8) for x in layout.layer_bits]


def test_levels_are_those_with_kernels_unless_others_are_asked_for():
    assert Target(factor=4).levels == Target(bytes_per_token=9).levels == LEVELS == (8, 4, 2)
    assert Target(factor=4, levels=(2, 8, 8)).levels == (8, 2)
    assert Target(keep=0.5).levels is None
    assert {*ALL_LEVELS} == {*Integers.widths} == {*DISTORTION}


@pytest.mark.parametrize(("basis", "name"), [("zack", "values"), ("post_rope", "keys")])
def test_a_basis_per_head_cannot_be_shared(basis: str, name: str):
    message = f"basis '{basis}' has {name} per head, got {name}='joint'"
    with pytest.raises(ValueError, match=message):
        kvfold.compress(
            tiny("llama-gqa"), Recipe(name="mine", basis=basis, **{name: "joint"}), fold=True
        )


def test_a_layer_that_is_worth_no_bits_is_refused():
    of = [torch.full((8,), x) for x in (100.0, 1e-3)]
    bases = [SimpleNamespace(singular=x, mean=range(8), width=8) for x in of]
    latents = [LatentCandidate(layer=i, side="k", heads=(0,), basis=x) for i, x in enumerate(bases)]
    with pytest.raises(ValueError, match=r"leave layers \[1\] with nothing; ask for a smaller fac"):
        plan_bits(latents, 2 * (32 + SCALE_BITS), LEVELS)


def test_a_skipped_layer_is_paid_for_and_moves_no_plan():
    model = tiny("llama-gqa")
    made = statistics_of(model, "small")
    prepared = Compressor(model, replace(recipes.get("small"), skip_layers=(0,))).prepare(made)
    spec = prepared.plan_factor(1.5)
    assert spec.layers[0].keys == "plain" and not any(x.tiers for x in spec.layers[0].latents)
    full = spec.geometry.full_numbers
    left = int(16 * full / 1.5) - 16 * full // spec.geometry.num_layers
    wanted = plan([c.singular for c in prepared.candidates if c.layer > 0], left, LEVELS)
    assert [x.tiers for layer in spec.layers[1:] for x in layer.latents] == wanted
    assert cache_layout(spec).bits_per_token <= 16 * full / 1.5


def test_tiers_survive_json_and_disk(tmp_path):
    model = planned_model(output=tmp_path / "planned")
    spec = spec_of(model)
    assert CacheSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    again = kvfold.load(str(tmp_path / "planned"))
    assert spec_of(again) == spec and spec.planned
    ids = tokens(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(again.cpu()(ids).logits, model(ids).logits)


def test_artifacts_without_tiers_still_load():
    spec = spec_of(planned_model())
    data = json.loads(json.dumps(spec.to_dict()))
    for layer in data["layers"]:
        for latent in layer["latents"]:
            del latent["tiers"]
    assert not CacheSpec.from_dict(data).planned


def test_artifacts_with_earlier_names_of_keys_still_load():
    spec = spec_of(planned_model())
    assert {layer.keys for layer in spec.layers} == {"pre_rope"}
    data = json.loads(json.dumps(spec.to_dict()).replace("pre_rope", "pre"))
    assert CacheSpec.from_dict(data) == spec


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factor": 4, "keep": 0.5}, "keep=0.5 and factor=4 exclude each other"),
        ({"factor": 0.5}, "factor must be at least 1 and below 1000, got 0.5"),
        ({"factor": float("nan")}, "factor must be at least 1"),
        (
            {"factor": 4, "recipe": "zack"},
            f"use {LOSS_WEIGHTED}",
        ),
        ({"factor": 4, "align": 0}, "align must be at least 1"),
        ({"factor": 4, "align": 8}, "align is of ranks whose bits are not planned"),
        ({"factor": 900}, "ask for a larger cache"),
    ],
)
def test_compress_refuses(settings: dict, message: str):
    model = tiny("llama-gqa")
    made = statistics_of(model, "small")
    with pytest.raises(ValueError, match=message):
        kvfold.compress(model, **{"recipe": "small", "statistics": made, **settings}, fold=True)


@pytest.mark.parametrize(
    ("recipe", "planned", "kept"), [("small", True, 1 / 4), ("zack", False, 1 / 2)]
)
def test_without_a_size_it_is_a_quarter_where_bits_are_planned_and_else_a_half(
    recipe, planned, kept
):
    model = tiny("llama-gqa")
    how = {} if planned else {"align": 1}
    spec = spec_of(
        kvfold.compress(model, recipe, statistics=statistics_of(model, recipe), **how, fold=True)
    )
    assert spec.planned is planned
    assert cache_layout(spec).kept_fraction == pytest.approx(kept, rel=0.1)
