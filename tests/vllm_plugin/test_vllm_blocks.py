"""Another engine's blocks as pages, and shares of heads: what the plugin for vLLM is made of.
`test_vllm` runs the whole."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvfold import compress, recipes
from kvfold.attention.fallback import Fallback
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.hub.checkpoint import spec_of
from kvfold.layout import Geometry, Latent, LayerSpec
from kvfold.layout.pages import cache_layout
from kvfold.maps.layer_maps import Maps
from kvfold.models.families import family_of
from kvfold.vllm_plugin.blocks import BlockAttention, BlockStep, BlockView, as_arena
from kvfold.vllm_plugin.families import architecture
from kvfold.vllm_plugin.model_cache import ModelCache, parse_settings
from kvfold.vllm_plugin.tensor_parallel import ProcessShare
from kvfold.vllm_plugin.weights import empty_layer, fold_layer
from matrix import matrix
from models import CONFIGS, tiny, tokens
from steps import DEVICE, backends, even, folded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]
BLOCK = 16


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


def compressed(name: str, recipe: str):
    model = tiny(name)
    wanted = Compressor(model, recipes.get(recipe)).needs
    statistics = calibrate(model, family_of(model.config), tokens(8, 64), wanted)
    return compress(model, recipe, statistics=statistics, keep=0.5, align=1, fold=True)


def blocks_of(layout, count: int) -> list[Tensor]:
    """An engine's buffer, full of NaN: block after block, of each all layers."""
    layers = range(len(layout.spec.layers))
    sizes = [sum(group.layout.page_bytes for group in layout.groups_of_layer(i)) for i in layers]
    found, start = torch.full((count, sum(sizes)), -1, dtype=torch.int8, device=DEVICE), 0
    views = []
    for size in sizes:
        views.append(found[:, start : start + size].view(count, 1, BLOCK, -1))
        start += size
    return views


class Engine:
    """Two requests by hand: tokens go where an engine's tables say, and come back in any step."""

    def __init__(self, model, dtype: torch.dtype, bits: int | None = None) -> None:
        spec = spec_of(model)
        self.layers = [x.description for x in family_of(model.config).attentions(model)]
        layout = cache_layout(spec, page=BLOCK, itemsize=dtype.itemsize, bits=bits)
        self.dtype, self.cache = dtype, blocks_of(layout, 12)
        view = BlockView(layout, dtype, torch.device(DEVICE), 96)
        self.attention = BlockAttention(self.layers, view)
        order = torch.randperm(11, generator=torch.Generator().manual_seed(0)) + 1
        self.tables = order[:10].view(2, 5).int().to(DEVICE)
        self.rows: list[list[Tensor]] = [[] for _ in range(2)]  # of request 0 and 1, in layer 0

    def step(self, counts: tuple[int, int], graph: bool = False) -> tuple[Tensor, Tensor]:
        """counts: new tokens of both. What W_O takes [N, W] of the last layer, and what it should
        be."""
        layer, before = self.layers[-1], [sum(map(len, x)) for x in self.rows]
        n, after = sum(counts), [a + b for a, b in zip(before, counts, strict=True)]
        positions = [torch.arange(a, b) for a, b in zip(before, after, strict=True)]
        slots = [
            self.tables[i].cpu()[p // BLOCK].long() * BLOCK + p % BLOCK
            for i, p in enumerate(positions)
        ]
        decodes = next((i for i, x in enumerate(counts) if x != 1), 2)
        step = BlockStep(
            tables=self.tables,
            lengths=torch.tensor(after, dtype=torch.int32, device=DEVICE),
            slots=torch.cat(slots).to(DEVICE),
            num_decodes=decodes,
            starts=[0, counts[0], n],
            max_lengths=None if graph else after,
        )
        make = torch.Generator().manual_seed(sum(before))
        q = torch.randn(layer.geometry.num_query_heads, n, layer.key_width, generator=make)
        ranks = layer.key_columns.head_ranks(layer.geometry.queries_per_kv)
        if not layer.reconstructs_keys:
            inside = torch.arange(q.shape[-1]) < torch.tensor(ranks)[:, None, None]
            q = q.where(inside, 0.0)
        rows = torch.randn(n, layer.spec.row_width, generator=make)
        q, rows = q.to(DEVICE, self.dtype), rows.to(DEVICE, self.dtype)
        context = self.attention.begin(step)
        out = torch.full((n, layer.output.shape[1]), float("nan"), dtype=self.dtype, device=DEVICE)
        for index, cache in zip(self.layers, self.cache, strict=True):
            context.attend(index, cache, q, rows, out)
        for i, part in enumerate(rows.split(counts)):
            self.rows[i].append(part)
        want = [self.dense(layer, i, x) for i, x in enumerate(q.split(counts, 1))]
        return out, torch.cat(want)

    def dense(self, layer, request: int, q: Tensor) -> Tensor:
        rows = torch.cat(self.rows[request])[None].float()
        where, rope = torch.arange(rows.shape[1], device=DEVICE), None
        mask = where <= where[len(where) - q.shape[1] :, None]
        full = replace(layer, **{x: _float(getattr(layer, x)) for x in MAPS})
        if layer.rope is not None:
            cos, sin = layer.rope.tables(rows, where[None], 96)
            rope = cos[:, None], sin[:, None]
        return full.attend(q[None].float(), rows, rope, mask[None, None])[0][0]


MAPS = ("key_up", "key_mean", "value_up")


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


@pytest.mark.parametrize(
    ("recipe", "kernels"),
    matrix(["fast", "swift", "lean", "small"], ["reference", "numba", "triton"], diagonals=2),
)
def test_blocks_of_an_engine_are_pages(recipe: str, kernels: str, backend) -> None:
    """Chunks, then a step that decodes one request beside another's chunk, then both decode."""
    if kernels == "numba":
        pytest.importorskip("numba")
        if DEVICE == "cuda":
            pytest.skip("kernels for CPUs")
    if kernels == "triton":
        pytest.importorskip("triton")
    backend(kernels)
    engine = Engine(folded(even(recipe), layers=2), torch.float16)
    engine.attention.warm_up(3)
    if kernels == "triton":
        assert Fallback not in engine.attention.decode.kinds.values()
    with torch.inference_mode():
        for counts, graph in (((19, 33), False), ((1, 14), False), ((1, 1), False), ((1, 1), True)):
            if graph and kernels == "numba" and recipe in ("lean", "small"):
                continue  # plain PyTorch asks for lengths
            if graph and kernels == "reference":
                continue
            got, want = engine.step(counts, graph)
            torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_blocks_may_move() -> None:
    """An engine that sleeps has its cache elsewhere when it wakes."""
    engine = Engine(folded(even("swift"), layers=2), torch.float16)
    with torch.inference_mode():
        engine.step((19, 33))
        before, engine.cache = engine.cache, [x.clone() for x in engine.cache]
        for x in before:
            x.fill_(-1)  # NaN
        got, want = engine.step((1, 14))
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_a_captured_step_copies_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a first step made is there for the next ones: in a graph no copy may wait."""
    engine = Engine(folded(even("swift"), layers=2), torch.float16)
    with torch.inference_mode():
        engine.step((19, 33))
        unable = SimpleNamespace(**vars(torch) | {"tensor": None})
        monkeypatch.setattr("kvfold.vllm_plugin.blocks.torch", unable)
        engine.step((1, 1))


@pytest.mark.parametrize("recipe", ["fast", "lean"])
def test_torch_compile_traces_what_a_layer_projects(recipe: str) -> None:
    """As vLLM does it, in one piece."""
    model = compressed("llama-gqa", recipe)
    layer, x = next(iter(family_of(model.config).attentions(model))), torch.randn(1, 7, 48)
    tables = layer.rotary.tables(x, torch.arange(7)[None], 7)
    with torch.no_grad():
        got = torch.compile(layer.project, backend="eager", fullgraph=True)(x, tables)
        torch.testing.assert_close(got, layer.project(x, tables))


def test_blocks_that_do_not_follow_one_another() -> None:
    buffer = torch.arange(3 * 256, dtype=torch.int64).to(torch.int8).view(3, 256)
    arena, stride = as_arena(buffer[:, 64:192].view(3, 1, 2, 64))
    assert stride == 4 and arena.dtype is torch.uint8 and len(arena) == 2 * 256 + 128
    assert arena.data_ptr() == buffer.data_ptr() + 64
    with pytest.raises(AssertionError, match="bytes in a row"):
        as_arena(buffer.view(3, 2, 128)[:, :, :64])


RECIPES = [x for x, make in recipes.RECIPES.items() if not (make().codebooks or make().reduce)]


def shares(config, size: int) -> list[ModelCache]:
    cache, dtype = CacheConfig(), torch.float32
    return [
        ModelCache.from_checkpoint(config, cache, dtype, ProcessShare(i, size)) for i in range(size)
    ]


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "opt"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_shares_of_heads_add_up(name: str, recipe: str) -> None:
    """Each computes with its own heads' tensors alone; their outputs add up to the whole layer's,
    and their blocks are of one size."""
    model = compressed(name, recipe)
    family, x = family_of(model.config), torch.randn(1, 7, 48)
    parts = shares(model.config, 2)
    for index, whole in enumerate(family.attentions(model)):
        positions = torch.arange(7)
        tables = whole.rotary.tables(x, positions[None], 7) if whole.rotary else None
        added = torch.zeros(1, 7, 48)
        for stored in parts:
            assert stored.block_bytes(index, 64) == parts[0].block_bytes(index, 64)
            tensors = dict(whole.state_dict())
            part = empty_layer(model.config, stored.local_spec, index)
            part.rotary = whole.rotary
            own = fold_layer(stored, index, tensors)
            part.load_state_dict(stored.share.local_tensors(own, part))
            added += attended(part, x, tables)
        torch.testing.assert_close(added, attended(whole, x, tables), rtol=1e-4, atol=1e-4)


def attended(layer, x: Tensor, tables) -> Tensor:
    with torch.no_grad():
        q, rows = layer.project(x, tables)
        maps, mask = layer.description, torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
        rope = None if maps.rope is None else tuple(t[:, None] for t in tables)
        return layer.o_proj(maps.attend(q, rows, rope, mask)[0])


def test_shares_that_cannot_be_computed_apart() -> None:
    config = compressed("llama-gqa", "fast").config
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3: 4 query and 2 KV heads"):
        shares(config, 3)
    config = compressed("qwen3", "small").config
    with pytest.raises(ValueError, match="mapped together after they are normalised"):
        shares(config, 2)


def test_more_processes_than_kv_heads() -> None:
    """Query heads of one KV head are dealt out, and each process stores it."""
    model = compressed("llama-gqa", "swift")
    assert [list(ProcessShare(i, 4).kv_heads(spec_of(model).geometry)) for i in range(4)] == [
        [0], [0], [1], [1],
    ]  # fmt: skip


@pytest.mark.parametrize("bits", [None, 8])
def test_a_checkpoint_is_rotated_as_by_the_engine(bits: int | None) -> None:
    model = compressed("llama-gqa", "lean")
    saved = [dict(x.state_dict()) for x in family_of(model.config).attentions(model)]
    config = CacheConfig(bits=bits, kv_bytes=2**20, page=16)
    runner = build_runner(model, config, num_slots=1, max_tokens=32)
    stored = ModelCache.from_checkpoint(
        model.config, replace(config, kv_bytes=None), torch.float32, ProcessShare()
    )
    for index, want in enumerate(family_of(model.config).attentions(runner.model)):
        got = fold_layer(stored, index, saved[index]).state_dict()
        torch.testing.assert_close(got, dict(want.state_dict()))


def test_weights_of_another_checkpoint() -> None:
    model = compressed("llama-gqa", "fast")
    stored, tensors = shares(model.config, 1)[0], {"q_proj.weight": torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=r"layer 1: .*down_proj.weight.*copy it again"):
        fold_layer(stored, 1, tensors)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"evict": "random"}, "one block table"),
        ({"format": "kivi"}, "wait in 16 bits"),
        ({"residual": 128}, "wait in 16 bits"),
        ({"kv_bytes": 4}, "--gpu-memory-utilization"),
        ({"page": 4}, "--block-size"),
        ({"bit": 4}, "no such setting"),
        ({"bits": 5}, "5"),
        ({"maps": 5}, "maps must be a folder or a name; got 5"),
        (["bits"], "must be an object"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_settings(given)


def test_models_that_are_not_served() -> None:
    for name, message in (
        ("gemma2", "'gemma2'.*kvfold.LLM"),
        ("gpt-neox", "'gpt_neox'"),
        ("mistral-sliding", "sliding windows"),
    ):
        with pytest.raises(ValueError, match=message):
            architecture(CONFIGS[name]())
    assert architecture(CONFIGS["mistral"]()) == "KVFoldMistralForCausalLM"


@pytest.mark.slow
def test_the_hosts_time_of_a_step() -> None:
    """benchmarks/vllm_host.py, whose kernels are no interpreter's."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from hopper import need_compiler

    need_compiler()
    file = Path(__file__).parents[2] / "benchmarks" / "vllm_host.py"
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = []
    for chunks in ("0", "3"):
        asked = ["int4-full", "--decodes", "2", "--chunks", chunks, "--rounds", "8"]
        command = [sys.executable, str(file), *asked]
        done = subprocess.run(command, env=known, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["us_a_layer"])
    none, three = found
    assert 0 < none < three


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("joint", [False, True])
def test_maps_beside_the_weights_are_cut_by_head(size: int, joint: bool) -> None:
    """Each process stores its heads' keys and the value latents that they read, whole, made from
    the values of all heads; its outputs are those heads'."""
    heads, d, tokens_seen = 2, 8, 5
    geometry = Geometry(
        hidden_size=32, num_query_heads=4, num_kv_heads=heads, head_dim=d, num_layers=1,
        rope=True, key_norm=True, scaling=1.0,
    )  # fmt: skip
    owners = [(0, 1)] if joint else [(0,), (1,)]
    latents = [Latent(side="k", heads=(x,), rank=3) for x in range(heads)]
    latents += [Latent(side="v", heads=own, rank=4) for own in owners]
    layer = LayerSpec(keys="post_rope", values="rebuilt", latents=tuple(latents))
    maps = Maps(
        key_down=torch.randn(heads, d, 3),
        key_up=torch.randn(heads, d, 3),
        key_shift=torch.randn(heads, 3),
        value_down=torch.randn(len(owners), heads * d // len(owners), 4),
        value_up=torch.randn(len(owners), heads * d // len(owners), 4),
        value_shift=torch.randn(len(owners), 4),
        value_mean=torch.randn(heads, d),
    )
    q, k, v = (torch.randn(1, n, tokens_seen, d) for n in (4, heads, heads))

    def attended(maps: Maps, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = maps.keys(k), maps.per_head(maps.values(v))
        each = q.shape[1] // keys.shape[1]
        scores = maps.queries(q) @ keys.repeat_interleave(each, 1).mT
        out = scores.softmax(-1) @ values.repeat_interleave(each, 1)
        return maps.outputs(out.transpose(1, 2))

    parts = []
    for rank in range(size):
        share = ProcessShare(rank, size)
        share.check(geometry, layer, 0)
        own, queries = share.kv_heads(geometry), share.query_heads(geometry)
        gathered = share.gathered_heads(geometry, layer)
        copies = max(1, size // heads)
        given = v.repeat_interleave(copies, 1)[:, gathered] if gathered else v[:, list(own)]
        cut = share.local_maps(maps, geometry, layer)
        parts.append(attended(cut, q[:, list(queries)], k[:, list(own)], given))
    torch.testing.assert_close(torch.cat(parts, 2), attended(maps, q, k, v))
