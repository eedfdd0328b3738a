"""Exact windows over another engine's blocks, which the plugin for vLLM is made of.
`test_vllm_window` runs the whole.

Without a GPU kernels run in Triton's interpreter.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from flash_attention import flash_attn_varlen_func
from kvfold.attention import window as attention_window
from kvfold.attention.backend import AttentionBackend
from kvfold.attention.fallback import Fallback
from kvfold.attention.triton_decode import LatentDecode, TritonDecode
from kvfold.attention.window import ExactTokens
from kvfold.layout.pages import cache_layout, with_window
from kvfold.maps.engine_model import LayerProjections, served_layer, served_spec
from kvfold.maps.plain import measured_means
from kvfold.ops.store import gather
from kvfold.vllm_plugin import flash
from kvfold.vllm_plugin.block_window import decoders_of
from kvfold.vllm_plugin.blocks import BlockAttention, BlockStep, BlockView
from kvfold.vllm_plugin.flash_window import FlashChunk
from kvfold.vllm_plugin.trial import check_attention
from matrix import slow
from model_types import tiny
from sidecar_cases import bytes_tokenizer
from steps import DEVICE, backends
from windowed import Layer, Window, mixed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]
BLOCK, EXACT, MOST = 32, 16, 128  # tokens of a block of entries and of exact ones; of a request
HALF = {"keep": 0.5, "align": 8, "max_tokens": 1024}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts take several blocks of queries."""
    monkeypatch.setattr(attention_window, "BLOCK", 4)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory):
    """By recipe: a spec, and maps and mean keys of two layers."""
    model: Any = tiny("llama")
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    tokenizer = bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    means = [x.keys for x in measured_means(model)]
    made = {
        x: kvfold.compress(model, recipe=x, tokenizer=tokenizer, **HALF) for x in ("swift", "small")
    }
    return {
        name: (served_spec(x.spec), [x.maps[y.name] for y in x.layers_of(model)], means)
        for name, x in made.items()
    }


def blocks_of(sizes: list[int], count: int) -> list[Tensor]:
    """An engine's buffer, full of NaN: block after block, of each all layers."""
    whole = torch.full((count, sum(sizes)), -1, dtype=torch.int8, device=DEVICE)
    return list(whole.split(sizes, 1))


class Engine:
    """Requests by hand. Blocks of exact tokens are taken away as soon as vLLM may do so, filled
    with NaN, and their numbers in the tables become 0. sinks [Hq]: of all layers, whose maps then
    have no means."""

    def __init__(
        self, made, window: int, bits: int | None = None, count: int = 2,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        spec, maps, means = made
        self.dtype = torch.float16
        layout = cache_layout(spec, page=BLOCK, itemsize=2, bits=bits)
        self.layout = layout = with_window(layout, window, 2, EXACT)
        assert layout.exact is not None
        self.layers, self.wanted = [], []
        self.sinks = sinks
        for i, (x, mean) in enumerate(zip(maps, means, strict=True)):
            if sinks is not None:
                zero = {y: getattr(x, y) * 0 for y in ("key_shift", "value_shift", "value_mean")}
                x, mean = replace(x, **zero), mean * 0
            pair = [
                served_layer(i, spec, x.to(*to), None, sinks)
                for to in ((DEVICE, self.dtype), ("cpu", torch.float32))
            ]
            for projections in pair:
                projections.lack_constant_of(mean)
            self.layers.append(pair[0])
            self.wanted.append(
                Layer(i, spec.layers[i], 16, Window(kind="whole"), pair[1], torch.zeros(1), None)
            )
        view = BlockView(layout, self.dtype, torch.device(DEVICE), MOST)
        self.attention = BlockAttention([x.layer for x in self.layers], view)
        layers, blocks = range(len(maps)), count * MOST // BLOCK
        groups = [[x.groups_of_layer(i) for i in layers] for x in (layout, layout.exact)]
        sizes = [[sum(y.layout.page_bytes for y in x) for x in side] for side in groups]
        self.caches = blocks_of(sizes[0], 1 + blocks)
        self.exact = blocks_of(sizes[1], 1 + count * MOST // EXACT)
        make = torch.Generator().manual_seed(0)

        def tables(blocks: int) -> Tensor:
            order = torch.randperm(count * blocks, generator=make) + 1
            return order.view(count, blocks).int()

        self.tables, self.exact_tables = tables(MOST // BLOCK), tables(MOST // EXACT)
        self.window, self.count = window, count
        self.inputs: list[list[list[Tensor]]] = [
            [[torch.empty(heads, 0, self.head_dim) for heads in self.heads] for _ in layers]
            for _ in range(count)
        ]

    @property
    def heads(self) -> tuple[int, int, int]:
        g = self.layout.spec.geometry
        return g.num_query_heads, g.num_kv_heads, g.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layout.spec.geometry.head_dim

    def free(self, before: list[int]) -> None:
        """Exact blocks that no query after so many tokens sees."""
        for request, length in enumerate(before):
            for column in range(max(0, length - self.window + 1) // EXACT):
                if block := int(self.exact_tables[request, column]):
                    for x in self.exact:
                        x[block] = -1
                    self.exact_tables[request, column] = 0

    def step(self, counts: list[int], graph: bool = False, padding: int = 0) -> None:
        """counts: new tokens of each request, decoding ones first; padding: requests of a captured
        step that do not exist. Compares outputs of all layers with a dense attention."""
        before = [x[0][0].shape[1] for x in self.inputs]
        after = [a + b for a, b in zip(before, counts, strict=True)]
        self.free(before)
        slots, exact_slots = (
            torch.cat(
                [
                    table[i, p // page].long() * page + p % page
                    for i, p in enumerate(map(torch.arange, before, after))
                ]
                + [torch.full((padding,), -1)]
            )
            for table, page in ((self.tables, BLOCK), (self.exact_tables, EXACT))
        )
        tables, exact_tables = (
            torch.cat((x, x[:1].expand(padding, -1))).to(DEVICE)
            for x in (self.tables, self.exact_tables)
        )
        lengths = torch.tensor(after + [0] * padding, dtype=torch.int32, device=DEVICE)
        decodes = next((i for i, x in enumerate(counts) if x != 1), len(counts) + padding)
        starts = [0]
        for count in [*counts, *[1] * padding]:
            starts.append(starts[-1] + count)
        step = BlockStep(
            tables=tables, lengths=lengths, slots=slots.to(DEVICE), num_decodes=decodes,
            starts=starts, max_lengths=None if graph else after,
        )  # fmt: skip
        exact = replace(step, tables=exact_tables, slots=exact_slots.to(DEVICE), max_lengths=None)
        context = self.attention.begin(replace(step, exact=exact))
        for index, projections in enumerate(self.layers):
            self.attend(context, index, projections, counts, before, padding)

    def attend(
        self, context, index: int, projections: LayerProjections, counts: list[int],
        before: list[int], padding: int,
    ) -> None:  # fmt: skip
        total = sum(counts)
        make = torch.Generator().manual_seed(1000 * index + sum(before))
        drawn = [torch.randn(x, total + padding, self.head_dim, generator=make) for x in self.heads]
        drawn = [x.to(self.dtype) for x in drawn]
        q, k, v = (x.to(DEVICE) for x in drawn)
        positions = [torch.arange(a, a + b) for a, b in zip(before, counts, strict=True)]
        positions = torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)]).to(DEVICE)
        queries, entries = projections.score_space(
            *(x.transpose(0, 1) for x in (q, k, v)), positions
        )
        constant = projections.key_constant
        keys = k if constant is None else k - constant[:, None]
        layer = projections.layer
        out = torch.full((total + padding, layer.output_width), torch.nan, device=DEVICE)
        out = out.to(self.dtype)
        caches = self.caches[index], self.exact[index]
        context.attend_in_window(layer, caches, queries, entries, ExactTokens(q, keys, v), out)
        assert out.isfinite().all(), "padding is finite, too"
        for side, x in enumerate(drawn):
            for request, part in enumerate(x[:, :total].split(counts, 1)):
                held = self.inputs[request][index]
                held[side] = torch.cat((held[side], part.float()), 1)
        first = 0
        for request, count in enumerate(counts):
            found = out[first : first + count].float().cpu()
            wanted = self.dense(context, index, request, count)
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
            first += count

    def dense(self, context, index: int, request: int, count: int) -> Tensor:
        """The output [T, W] of a request's last tokens, from its entries as they are stored."""
        layer = self.wanted[index]
        q, k, v = self.inputs[request][index]
        assert layer.maps is not None
        parts = q[:, -count:], k[:, -count:], v[:, -count:]
        queries, _ = layer.entries(*parts, k.shape[1] - count)
        pages = context.pages[index]
        slots = torch.tensor([request], device=DEVICE)
        rows = gather(pages, slots, pages.lengths[slots], self.dtype, k.shape[1]).rows[0]
        constant = layer.maps.key_constant
        exact = q[:, -count:], k if constant is None else k - constant[:, None], v
        near = Window(kind="whole", tokens=self.window).near(count, k.shape[1])
        coarse = layer.read(queries, rows.float().cpu())
        out = mixed(exact, coarse, near, self.layout.spec.geometry.scaling, self.sinks)
        return out.transpose(0, 1).flatten(1)


PLAIN = {"flash": "reference"}  # what decodes beside it on a CPU
CASES = [
    *(
        (recipe, None, "reference", window)
        for recipe in ("swift", "small")
        for window in (1, 20, 100)
    ),
    *((recipe, None, "flash", window) for recipe in ("swift", "small") for window in (1, 20, 100)),
    ("swift", 4, "triton", 20),
    slow("swift", None, "triton", 1),
    slow("swift", None, "triton", 100),
    slow("small", 8, "triton", 20),
]


def use(kernels: str, backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `kernels` attend. On a GPU these are chosen there, and what is expected, on a CPU, needs
    none."""
    served = kernels == "flash"
    if kernels == "triton":
        pytest.importorskip("triton")
    if served and DEVICE == "cpu":
        monkeypatch.setattr(flash, "_function", lambda: flash_attn_varlen_func)
    elif served and (reason := flash.why_not()):
        pytest.skip(reason)
    monkeypatch.setattr(FlashChunk, "serves", lambda *_: served)
    backend("auto" if DEVICE == "cuda" and kernels != "reference" else PLAIN.get(kernels, kernels))


@pytest.mark.parametrize(("recipe", "bits", "kernels", "window"), CASES)
def test_each_query_sees_its_window_exactly(
    recipe: str, bits: int | None, kernels: str, window: int, backend, compressed, monkeypatch
) -> None:
    """Chunks, a step that decodes one request beside another's chunk, and decodes, alone and padded
    as in a CUDA graph."""
    use(kernels, backend, monkeypatch)
    engine = Engine(compressed[recipe], window, bits)
    if kernels == "triton":
        shared = engine.attention.window
        assert shared is not None
        assert shared.older.supports_graphs and shared.recent.supports_graphs
        decoder = LatentDecode if recipe == "small" else TritonDecode
        assert set(shared.older.kinds.values()) == {decoder}
        assert set(shared.recent.kinds.values()) == {TritonDecode}
    with torch.inference_mode():
        for counts in ([19, 45], [1, 14], *([[1, 1]] * (1 if kernels == "triton" else 20))):
            engine.step(counts)
        if kernels == "triton":
            engine.step([1, 1], graph=True, padding=2)


@pytest.mark.parametrize("kernels", ["triton", "flash"])
def test_sinks_count_once(kernels: str, backend, compressed, monkeypatch) -> None:
    use(kernels, backend, monkeypatch)
    sinks = torch.tensor([3.0, -1.0, 0.0, 2.0])
    engine = Engine(compressed["swift"], 20, sinks=sinks)
    with torch.inference_mode():
        for counts in ([19, 45], [1, 14]):
            engine.step(counts)
        if kernels == "triton":
            engine.step([1, 1], graph=True, padding=2)


def test_a_captured_step_copies_nothing_from_the_host(
    backend, compressed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a first step made is there for the next ones: in a graph no copy may wait."""
    use("triton", backend, monkeypatch)
    engine = Engine(compressed["swift"], 20)
    unable = SimpleNamespace(**vars(torch) | {"tensor": None})
    with torch.inference_mode():
        engine.step([3, 22])
        for name in ("blocks", "block_window"):
            monkeypatch.setattr(f"kvfold.vllm_plugin.{name}.torch", unable)
        engine.step([1, 1], graph=True)


def sampled(
    projections: LayerProjections, positions: Tensor, key: float = 1.0, entry: float = 1.0
) -> tuple[Tensor, Tensor, ExactTokens]:
    """Sample inputs of a layer. key, entry: factors of what is stored."""
    geometry = projections.layer.geometry
    heads = geometry.num_query_heads, *[geometry.num_kv_heads] * 2
    both = torch.randn(len(positions), sum(heads), geometry.head_dim)
    q, k, v = both.to(DEVICE, torch.float16).split(heads, 1)
    queries, entries = projections.score_space(q, k, v, positions)
    assert entries is not None
    exact = ExactTokens(*(x.transpose(0, 1) for x in (q, k * key, v)))
    return queries, entries * entry, exact


@pytest.mark.parametrize("window", [20, 100])
@pytest.mark.parametrize("broken", ["key", "entry"])
def test_the_trial_reads_exact_tokens_and_entries(
    broken: str, window: int, backend, compressed
) -> None:
    backend("reference")
    engine = Engine(compressed["swift"], window)
    layers = [
        SimpleNamespace(
            maps=x.layer, project_output=lambda out: out, sample_inputs=partial(sampled, x)
        )
        for x in engine.layers
    ]
    check_attention(engine.attention, layers)
    assert not engine.attention.locations
    layers[1].sample_inputs = partial(sampled, engine.layers[1], **{broken: torch.nan})
    with pytest.raises(ValueError, match=r"attention of layer 1 gives numbers .* float16"):
        check_attention(engine.attention, layers)


@pytest.mark.parametrize(("counts", "number"), [([1, 1], 2), ([1, 14], 2), ([9, 14], 0)])
def test_a_step_makes_the_backends_that_it_uses(
    counts: list[int], number: int, backend, compressed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests that decode: for entries, and for exact tokens."""
    backend("reference")
    engine, made = Engine(compressed["swift"], 20), []
    make = AttentionBackend.__init__
    with torch.inference_mode():
        engine.step([19, 45])
        monkeypatch.setattr(
            AttentionBackend, "__init__", lambda self, view: make(self, made.append(view) or view)
        )
        engine.step(counts)
    assert len(made) == number


def test_a_gpu_that_decodes_exact_tokens_in_plain_pytorch_warns(compressed) -> None:
    pytest.importorskip("triton")
    spec, maps, _ = compressed["swift"]
    layout = cache_layout(spec, page=BLOCK, itemsize=4, bits=8)
    layer = served_layer(0, spec, maps[0], None).layer
    assert decoders_of(layer, layout, "cuda", torch.float32) == {TritonDecode}
    layout = with_window(layout, 20, 4, EXACT)
    with pytest.warns(UserWarning, match="plain PyTorch.*load the model as bfloat16"):
        assert decoders_of(layer, layout, "cuda", torch.float32) == {TritonDecode, Fallback}
