"""Decode kernels compiled for sm_90a: nothing spills, loads are asynchronous, products as counted.

What is compiled is what a launch would be: its arguments are recorded. All of it happens in a
process of its own, since kernels of the tests' process may belong to Triton's interpreter.
"""

import json
import re
import sys
from typing import Any
from unittest import mock

import pytest
import torch

from decode_compile_cases import SHARED, Recorder, one_sequence, operations, recorders
from hopper import need_compiler, registers, run_alone
from kvfold.layout import (
    CacheSpec,
    Geometry,
    KeyKind,
    Latent,
    LayerSpec,
    Tiers,
)
from kvfold.layout.pages import cache_layout
from kvfold.ops.common import combine, plan_triton, values_triton
from kvfold.ops.common.plan import padded_queries
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.decode import triton as decode_triton
from kvfold.ops.decode import triton_split
from kvfold.ops.decode.triton import plan_layers
from kvfold.ops.decode.tuning import Shape, table
from kvfold.ops.latent_decode import (
    KeyMaps,
    rope_table,
    scores_gluon,
    triton_pieces,
)
from kvfold.ops.latent_decode import plan as latent_plan
from kvfold.ops.latent_decode import triton as latent_triton
from pages import per_head

SPILLS = {"score_kernel": 8, "value_kernel": 8}  # a few registers, once an item, in no loop
# Once a tile, in no loop over pieces: with twice the warps, which spill nothing, twice as slow.
SPILLS |= {"piece_score_kernel": 64}
SHORT = {  # pages shorter than a tile
    Shape(bits=(4, 4), widths=(64, 64), page=16, queries=4): Tuning(block=64, stages=3, warps=1),
}
# Keys, heads of a latent and ranks; products of both passes. Keys that a warp holds: 4 x 16 rows by
# 8 x 16 numbers; others: 2 x 16 rows a warp, or 2 x 64 a warp group, by 4 x 16; rebuilt ones: both
# halves of pairs by 4 x 16. Values: 64 of them by 4 x 16 rows, and as many to sum the weights.
SHARED_LATENTS: dict[tuple[KeyKind, int, int, int], tuple[dict[str, int], dict[str, int]]] = {
    ("absorbed", 4, 128, 384): ({"HMMA": 32}, {"HMMA": 8}),
    ("absorbed", 4, 256, 256): ({"HMMA": 8}, {"HMMA": 8}),
    ("absorbed", 32, 1024, 3072): ({"HGMMA": 8}, {"HGMMA": 4, "HMMA": 4}),
    ("pre_rope", 32, 1024, 3072): ({"HGMMA": 8}, {"HGMMA": 4, "HMMA": 4}),
}


def direct(known: Shape, tuning: Tuning, queries: int, hard: bool) -> dict[str, Recorder]:
    """The kernels for one entry of the table. hard: with groups of several widths, with zeros."""
    bits = None if known.bits == (16, 16) else known.bits[0]
    narrow = (known.widths[0] // 2, known.widths[1] // 4) if hard else known.widths
    ranks = [known.widths, narrow] * 4
    groups = per_head(ranks, page=known.page, bits=bits, zeros=hard).groups
    q, pages = one_sequence(groups, queries * len(groups), known.widths[0])
    slots = torch.zeros(1, dtype=torch.int64)
    kernels, merged = (
        recorders(decode_triton, "decode_kernel"),
        recorders(combine, "combine_kernel"),
    )
    planned = recorders(plan_triton, "plan_kernel")
    early = {"launch_options": lambda _: {"PDL": True, "launch_pdl": True}}
    with (
        mock.patch.multiple(decode_triton, **kernels, **early),
        mock.patch.multiple(combine, **merged, **early),
        mock.patch.multiple(plan_triton, **planned, **early),
    ):
        plan = plan_layers(
            [groups], pages.lengths, queries, tuning=tuning, num_slices=1, slots=slots
        )[0]
        decode_triton.decode(q, pages, slots, 0.1, plan)
    return kernels | merged | planned


def rebuilt(
    keys: int, values: int, heads: int = 0, bits: int | None = None
) -> tuple[Recorder, Recorder]:
    """Scores and values of a layer of Llama-3.1-8B's shape: `lean`, or where keys is 0 `small`;
    heads: KV heads of a program of the scores for Hopper, 0: the other kernel's."""
    every = tuple(range(8))
    latents = tuple(Latent(side="k", heads=(head,), rank=keys) for head in every if keys)
    latents += (Latent(side="v" if keys else "kv", heads=every, rank=values),)
    layer = LayerSpec(keys="pre_rope", values="fused", latents=latents)
    geometry = Geometry(
        hidden_size=8, num_query_heads=32, num_kv_heads=8, head_dim=128, num_layers=1, rope=True,
        key_norm=False, scaling=0.1,
    )  # fmt: skip
    spec = CacheSpec(geometry=geometry, layers=(layer,))
    groups = cache_layout(spec, page=64, bits=bits).groups
    angles = 5e5 ** (-torch.arange(64) / 64)
    rope = rope_table(angles, 64, 128)
    maps = KeyMaps(layer, torch.zeros(8, 128, keys or values), torch.zeros(8, 128), angles, rope)
    place = (*one_sequence(groups, 32, 128), torch.zeros(1, dtype=torch.int64))
    names = "fold_kernel", "score_kernel", "value_kernel"
    kernels, planned = recorders(latent_triton, *names), recorders(plan_triton, "plan_kernel")
    hopper = recorders(scores_gluon, "score_kernel")
    with (
        mock.patch.multiple(latent_triton, **kernels),
        mock.patch.multiple(combine, **recorders(combine, "combine_kernel")),
        mock.patch.multiple(scores_gluon, **hopper),
        mock.patch.multiple(plan_triton, **planned),
        mock.patch.object(latent_plan, "hopper_heads", lambda *_: heads),
    ):
        latent_triton.latent_decode(*place, 0.1, maps)
    return (hopper if heads else kernels)["score_kernel"], kernels["value_kernel"]


def in_pieces(keys: KeyKind, *runs: Tiers) -> tuple[Recorder, Recorder]:
    """Scores and values of a layer of Llama-3.1-8B's shape, piece by piece: runs of keys a head and
    of values of all, or of one latent of both."""
    every = tuple(range(8))
    ranks = [sum(width for width, _ in x) for x in runs]
    latents = tuple(
        Latent(side="k", heads=(head,), rank=ranks[0], tiers=runs[0])
        for head in every if len(runs) > 1
    )  # fmt: skip
    side = "v" if len(runs) > 1 else "kv"
    latents += (Latent(side=side, heads=every, rank=ranks[-1], tiers=runs[-1]),)
    return both_passes(keys, latents, 8)


def shared(keys: KeyKind, heads: int, *ranks: int) -> tuple[Recorder, Recorder]:
    """The same of Llama-2-7B's shape: a key and a value latent of so many of its 32 heads."""
    latents = tuple(
        Latent(side=side, heads=tuple(range(first, first + heads)), rank=rank)
        for side, rank in zip("kv", ranks, strict=True)
        for first in range(0, 32, heads)
    )
    return both_passes(keys, latents, 32)


def both_passes(
    keys: KeyKind, latents: tuple[Latent, ...], heads: int
) -> tuple[Recorder, Recorder]:
    """Scores and values of a layer of 32 query heads."""
    layer = LayerSpec(keys=keys, values="rebuilt", latents=latents)
    geometry = Geometry(
        hidden_size=8, num_query_heads=32, num_kv_heads=heads, head_dim=128, num_layers=1,
        rope=True, key_norm=False, scaling=0.1,
    )  # fmt: skip
    groups = cache_layout(CacheSpec(geometry=geometry, layers=(layer,)), page=64).groups
    rebuilds, rank = keys == "pre_rope", max(x.rank for x in layer.key_latents)
    width = 128 if rebuilds else rank
    place = (*one_sequence(groups, 32, width), torch.zeros(1, dtype=torch.int64), 0.1)
    module, names = (
        (triton_pieces, ("piece_score_kernel",))
        if rebuilds
        else (triton_split, ("stored_score_kernel", "wide_score_kernel"))
    )
    scores, planned = recorders(module, *names), recorders(plan_triton, "plan_kernel")
    values = recorders(values_triton, "value_kernel")
    with (
        mock.patch.multiple(module, **scores),
        mock.patch.multiple(combine, **recorders(combine, "combine_kernel")),
        mock.patch.multiple(values_triton, **values),
        mock.patch.multiple(plan_triton, **planned),
    ):
        if rebuilds:
            angles = 5e5 ** (-torch.arange(64) / 64)
            maps = torch.zeros(heads, 128, rank), torch.zeros(heads, 128)
            rope = rope_table(angles, 64, 128)
            triton_pieces.latent_decode(*place, KeyMaps(layer, *maps, angles, rope))
        else:
            triton_split.decode(*place)
    (used,) = (x for x in scores.values() if hasattr(x, "source"))
    return used, values["value_kernel"]


def hot_loop(names: list[str], labels: dict[str, int]) -> list[str]:
    """The shortest loop that multiplies matrices and copies ahead of itself."""
    loops = []
    for end, name in enumerate(names):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", name)
        if target and labels.get(target[1], end + 1) <= end:
            body = [re.split(r"[. ]", x)[0] for x in names[labels[target[1]] : end]]
            if "LDGSTS" in body and {"HMMA", "HGMMA"} & set(body):
                loops.append(body)
    return min(loops, key=len, default=[])


def products(known: Shape, tuning: Tuning) -> int:
    """Matrix products of 16 x 8 x 16 that a warp has to do for a tile: scores, outputs and, for
    codes, the sums of the weights."""
    each = sum(known.widths) // 16 // tuning.warps + (known.bits[1] < 16)
    return tuning.block // 16 * each * (padded_queries(known.queries) // 8)


def print_report(what: str, recorder: Recorder, wanted: dict[str, int], **more: Any) -> None:
    listing, shared = recorder.compiled()
    names, labels = operations(listing)
    body = hot_loop(names, labels)
    report = {"what": what, "kernel": recorder.kernel.__name__, "instructions": len(body)}
    report |= {"early": sum(name.startswith(("ACQBULK", "PREEXIT")) for name in names)}
    report |= {"spills": sum(name.startswith(("STL", "LDL")) for name in names)}
    report |= {"in_loop": body.count("STL") + body.count("LDL")}
    report |= {"copies": body.count("LDGSTS"), "products": {x: body.count(x) for x in wanted}}
    report |= {"registers": registers(listing)}
    print(json.dumps(report | {"wanted": wanted, "shared": shared} | more), flush=True)


def compile_all() -> None:
    """Every entry of the table as it was measured; those with few registers also as they are
    hardest. Short pages, and what is launched beside. Keys rebuilt from latents: both passes."""
    for known, tuning in (table() | SHORT).items():
        for hard in (False, True) if tuning.registers else (False,):
            queries = padded_queries(known.queries) if hard else max(1, known.queries // 2)
            kernels = direct(known, tuning, queries, hard)
            wanted = {"HMMA": products(known, tuning)}
            print_report(f"{known} {tuning} {hard}", kernels["decode_kernel"], wanted)
    print_report("planned", kernels["plan_kernel"], {})
    print_report("merged", kernels["combine_kernel"], {})
    # 2 x 16 rows by 3 x 16 numbers: 4 products for each half of 32 pairs, 2 for the others'
    # queries; 2 x 4 for all queries. 4 x 64 values by 2 x 16 rows, and 2 that sum the weights.
    for kernel, wanted in zip(rebuilt(48, 256), ((0, 68), (8, 2)), strict=True):
        print_report("rebuilt", kernel, dict(zip(("HGMMA", "HMMA"), wanted, strict=True)))
    # A product per 16 numbers of both heads' latents, or of the one they share, for pairs and for
    # folded queries; 2 heads by 4 products with keys and 4 with means.
    for ranks, each in (((48, 256), 2 * 3), ((56, 256), 2 * 4), ((0, 192), 12)):
        wanted = {"HGMMA": 2 * each, "HMMA": 16}
        print_report("rebuilt", rebuilt(*ranks, heads=2)[0], wanted)
    print_report("rebuilt", rebuilt(0, 512, heads=1)[0], {"HGMMA": 64, "HMMA": 8})
    for bits in (8, 4):
        kernel = rebuilt(0, 192, heads=2, bits=bits)[0]
        print_report("rebuilt", kernel, {"HGMMA": 24, "HMMA": 16})
    # 4 x 16 rows by 8 x 16 numbers; 64 words by 4 x 16 rows, four times.
    scores, values = in_pieces("post_rope", ((128, 4),), ((512, 4),))
    print_report("in pieces", scores, {"HMMA": 32})
    print_report("in pieces", values, {"HGMMA": 16})
    three = ((32, 8), (64, 4), (32, 2))
    for keys, runs in (
        ("post_rope", (three, three)),
        ("pre_rope", (three,)),
        ("pre_rope", (((1024, 4), (384, 2)),)),
    ):
        for kernel in in_pieces(keys, *runs):
            print_report("in pieces", kernel, {})
    for of, both in SHARED_LATENTS.items():
        for kernel, wanted in zip(shared(*of), both, strict=True):
            print_report("in pieces", kernel, wanted, latents=of)


def compile_few() -> None:
    """A case of each kernel."""
    for known, tuning in SHORT.items():
        kernels = direct(known, tuning, known.queries, False)
        wanted = {"HMMA": products(known, tuning)}
        print_report(f"{known} {tuning}", kernels["decode_kernel"], wanted)
    print_report("planned", kernels["plan_kernel"], {})
    print_report("merged", kernels["combine_kernel"], {})
    for kernel, wanted in zip(rebuilt(48, 256), ((0, 68), (8, 2)), strict=True):
        print_report("rebuilt", kernel, dict(zip(("HGMMA", "HMMA"), wanted, strict=True)))
    print_report("rebuilt", rebuilt(48, 256, heads=2)[0], {"HGMMA": 12, "HMMA": 16})
    for kernel in in_pieces("pre_rope", ((32, 8), (64, 4), (32, 2))):
        print_report("in pieces", kernel, {})
    print_report("in pieces", in_pieces("post_rope", ((128, 4),), ((512, 4),))[0], {"HMMA": 32})
    of = ("absorbed", 32, 1024, 3072)
    print_report("in pieces", shared(*of)[0], SHARED_LATENTS[of][0])


@pytest.mark.slow
def test_a_case_of_each_kernel_compiles_well_for_hopper() -> None:
    need_compiler()
    reports = [json.loads(line) for line in run_alone(__file__, "few")]
    assert len({x["kernel"] for x in reports}) == 8 and len(reports) == 10
    check(reports)


@pytest.mark.slow
def test_kernels_compile_well_for_hopper() -> None:
    need_compiler()
    reports = [json.loads(line) for line in run_alone(__file__)]
    cuts = (table() | SHORT).values()
    limited = sum(tuning.registers is not None for tuning in cuts)
    assert len(reports) == len(cuts) + limited + 18 + 2 * len(SHARED_LATENTS)
    check(reports)


def check(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["spills"] <= SPILLS.get(report["kernel"], 0) and not report["in_loop"], report
        assert report["shared"] <= SHARED, report
        assert report["products"] == report["wanted"], report
        assert report["copies"] or not report["wanted"], report
        alone = report["what"] in ("rebuilt", "in pieces")
        assert report["early"] == (0 if alone else 2), report


if __name__ == "__main__":
    compile_few() if "few" in sys.argv else compile_all()
