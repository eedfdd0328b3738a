"""Layers whose launches are recorded once and repeated give what each gives by itself."""

import ctypes
import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flash_attention import flash_attn_varlen_func
from kvfold.attention.window import ExactTokens
from kvfold.hub.checkpoint import spec_of
from kvfold.layout import Geometry
from kvfold.layout.pages import cache_layout, with_window
from kvfold.maps.engine_model import LayerProjections, served_layer
from kvfold.maps.layer_maps import Maps
from kvfold.maps.plain import full_spec
from kvfold.models.families import family_of
from kvfold.ops.common.recording import Recording, Weights, copy, launch_cuda
from kvfold.vllm_plugin import flash
from kvfold.vllm_plugin.blocks import BlockAttention, BlockStep, BlockView
from kvfold.vllm_plugin.flash_window import FlashChunk
from kvfold.vllm_plugin.trial import check_attention
from steps import DEVICE, backends, even, folded

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]
BLOCK, LAYERS, DTYPE = 16, 2, torch.float16
# (tokens stored before, new tokens) of the requests of a step; decoding ones first.
STEPS = {
    "chunks": ((0, 5), (0, 17)),
    "decodes": ((5, 1), (17, 1)),
    "mixed": ((5, 1), (17, 1), (3, 5), (0, 2)),
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


def folded_layers(recipe: str):
    model = folded(even(recipe), layers=2)
    return spec_of(model), [x.description for x in family_of(model.config).attentions(model)]


def mapped_layers(
    window: int | None = None, sinks: bool = False, softcap: float | None = None,
    number: int = LAYERS,
):  # fmt: skip
    """Layers with random maps."""
    geometry = Geometry(
        hidden_size=64, num_query_heads=4, num_kv_heads=2, head_dim=16, num_layers=number,
        rope=True, key_norm=False, scaling=0.25, softcap=softcap,
    )  # fmt: skip
    spec = full_spec(geometry, number)
    layers = []
    for i in range(number):
        make = torch.Generator().manual_seed(i)

        def random(*shape: int, make=make) -> Tensor:
            return torch.randn(shape, generator=make) / 4

        shift = not (sinks or softcap)
        maps = Maps(
            key_down=random(2, 16, 16), key_up=random(2, 16, 16), key_shift=random(2, 16) * shift,
            value_down=random(2, 16, 16), value_up=random(2, 16, 16),
            value_shift=random(2, 16) * shift, value_mean=random(2, 16) * (not sinks),
        ).to(DEVICE, DTYPE)  # fmt: skip
        sink = torch.randn(4, generator=make).to(DEVICE) if sinks else None
        layers.append(served_layer(i, spec, maps, window, sink, {}))
    return spec, layers


class Blocks:
    """Layers over blocks in one buffer: block after block, in each all layers. window: of exact
    tokens, which are in other blocks of the buffer."""

    def __init__(self, spec, layers, bits: int | None, window: int = 0) -> None:
        self.projections = [x if isinstance(x, LayerProjections) else None for x in layers]
        layers = [x.layer if isinstance(x, LayerProjections) else x for x in layers]
        self.layers = layers
        self.layout = cache_layout(spec, page=BLOCK, itemsize=DTYPE.itemsize, bits=bits)
        if window:
            self.layout = with_window(self.layout, window, DTYPE.itemsize, BLOCK)
        self.sizes, *exact_sizes = (
            [sum(y.layout.page_bytes for y in x.groups_of_layer(i)) for i in range(len(layers))]
            for x in (self.layout, self.layout.exact)
            if x is not None
        )
        self.exact_sizes = exact_sizes[0] if exact_sizes else []
        view = BlockView(self.layout, DTYPE, torch.device(DEVICE), 96)
        self.attention = BlockAttention(layers, view)

    def run(self, requests) -> tuple[list[Tensor], Tensor]:
        """The outputs of all layers in a step, and the buffer after it."""
        most = max(sum(self.sizes), sum(self.exact_sizes))
        buffer = torch.zeros(64, most, dtype=torch.uint8, device=DEVICE)
        caches, exact_caches = (
            [x.view(64, 1, BLOCK, -1) for x in buffer[:, : sum(sizes)].split(sizes, 1)]
            for sizes in (self.sizes, self.exact_sizes)
        )
        before = [(0, stored) for stored, _ in requests if stored]
        if before:  # another step stores what comes before this one
            self._step(before, caches, exact_caches, seed=1)
        return self._step(requests, caches, exact_caches, seed=2), buffer

    def _step(self, requests, caches, exact_caches, seed: int) -> list[Tensor]:
        make = torch.Generator().manual_seed(seed)
        tables = (torch.arange(len(requests) * 6).view(-1, 6) + 1).int()
        slots, starts, decodes = [], [0], 0
        for i, (stored, new) in enumerate(requests):
            positions = torch.arange(stored, stored + new)
            slots.append(tables[i][positions // BLOCK].long() * BLOCK + positions % BLOCK)
            starts.append(starts[-1] + new)
            decodes += new == 1 and stored > 0
        lengths = [sum(x) for x in requests]
        step = BlockStep(
            tables=tables.to(DEVICE),
            lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            slots=torch.cat(slots).to(DEVICE),
            num_decodes=decodes, starts=starts, max_lengths=lengths,
        )  # fmt: skip
        if exact_caches:  # behind the blocks of entries
            more = tables.numel()
            exact = replace(step, tables=step.tables + more, slots=step.slots + more * BLOCK)
            step = replace(step, exact=exact)
        context, outputs = self.attention.begin(step), []
        n = starts[-1]

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make).to(DEVICE, DTYPE)

        for i, layer in enumerate(self.layers):
            projections, cache = self.projections[i], caches[i]
            heads, kv_heads, head_dim = layer.geometry.num_query_heads, 2, layer.geometry.head_dim
            out = torch.full((n, layer.output_width), torch.nan, dtype=DTYPE, device=DEVICE)
            if projections is None:
                q, entries = random(heads, n, layer.key_width), random(n, layer.spec.row_width)
                context.attend(layer, cache, q, entries, out)
            else:
                both = random(n, heads + 2 * kv_heads, head_dim)  # one tensor, as vLLM has
                inputs = both.split((heads, kv_heads, kv_heads), 1)
                exact = ExactTokens(*(x.transpose(0, 1) for x in inputs))
                context.project_and_attend(
                    layer,
                    cache,
                    lambda x=projections, inputs=inputs: x.score_space(*inputs),
                    [*inputs],
                    projections.weights,
                    out,
                    *((exact, exact_caches[i]) if exact_caches else ()),
                )
            outputs.append(out)
        return outputs


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The result of every replay."""
    results: list[bool] = []

    def replay(self, inputs, weights, *, own=Recording.replay) -> bool:
        results.append(own(self, inputs, weights))
        return results[-1]

    monkeypatch.setattr(Recording, "replay", replay)
    return results


def check(blocks: Blocks, requests, replays: list[bool]) -> None:
    with torch.inference_mode():
        got, got_bytes = blocks.run(requests)
        assert replays and all(replays)
        blocks.attention.kinds = {}
        want, want_bytes = blocks.run(requests)
    for layer, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.isfinite().all()
        assert torch.equal(a, b), f"layer {layer}"
    assert torch.equal(got_bytes, want_bytes)


@pytest.mark.parametrize("recipe", [pytest.param("fast", marks=pytest.mark.slow), "swift"])
def test_folded_layers(recipe: str, replays, backend) -> None:
    backend("triton")
    check(Blocks(*folded_layers(recipe), None), STEPS["mixed"], replays)


@pytest.mark.parametrize(
    ("bits", "requests", "few"),
    [
        (4, "mixed", 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((4, "mixed", 256), (None, "chunks", 4), (8, "decodes", 256))
        ),
    ],
)
def test_layers_with_maps(
    bits: int | None, requests: str, few: int, replays, backend, monkeypatch
) -> None:
    """few: tokens up to which a kernel applies maps."""
    backend("triton")
    monkeypatch.setattr("kvfold.ops.maps.triton.FEW", few)
    check(Blocks(*mapped_layers(), bits), STEPS[requests], replays)


@pytest.mark.parametrize(
    "kind",
    [
        {"sinks": True},
        pytest.param({"window": 9}, marks=pytest.mark.slow),
        pytest.param({"softcap": 5.0}, marks=pytest.mark.slow),
    ],
)
def test_layers_with_limits_and_sinks(kind, replays, backend) -> None:
    backend("triton")
    check(Blocks(*mapped_layers(**kind), 8), STEPS["mixed"], replays)


@pytest.mark.parametrize(
    ("requests", "sinks"),
    [("mixed", True), pytest.param("decodes", False, marks=pytest.mark.slow)],
)
def test_layers_with_an_exact_window(
    requests: str, sinks: bool, replays, backend, monkeypatch
) -> None:
    """Of the first layer blocks of both kinds begin at the same byte, of the others they do not."""
    backend("auto" if DEVICE == "cuda" else "triton")
    if DEVICE == "cpu":
        monkeypatch.setattr(flash, "_function", lambda: flash_attn_varlen_func)
    elif reason := flash.why_not():
        pytest.skip(reason)
    monkeypatch.setattr(FlashChunk, "serves", lambda *_: True)
    blocks = Blocks(*mapped_layers(sinks=sinks, number=4), 4, window=9)
    assert len(set(blocks.attention.kinds.values())) == 1
    with torch.inference_mode():
        got, got_bytes = blocks.run(STEPS[requests])
        assert replays == [False, True, True] * 2, "of two steps"
        blocks.attention.kinds = {}
        want, want_bytes = blocks.run(STEPS[requests])
    for layer, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.isfinite().all()
        assert torch.equal(a, b), f"layer {layer}"
    assert torch.equal(got_bytes, want_bytes)


def test_chunks_are_not_repeated_without_flash_attention(replays, backend) -> None:
    backend("triton")
    blocks = Blocks(*mapped_layers(number=4), 4, window=9)
    with torch.inference_mode():
        blocks.run(STEPS["chunks"])
        assert not replays
        blocks.run(STEPS["decodes"])
    assert replays == [False, True, True]


def test_another_shape_is_not_replayed() -> None:
    a, b = torch.zeros(4, 8), torch.zeros(4, 8)
    with Recording([a], Weights([a])) as recording:
        pass
    assert recording.replay([b], Weights([b]))
    for other in (torch.zeros(4, 4), torch.zeros(8, 4).T, torch.zeros(33)[1:].view(4, 8)):
        assert not recording.replay([other], Weights([other]))
    assert not recording.replay([b, b], Weights([b]))
    assert not recording.replay([b], Weights([torch.zeros(4, 4)]))


def test_inputs_in_one_memory_move_together() -> None:
    both, other = torch.zeros(8, 8), torch.zeros(8, 8)
    with Recording([both[:4], both[4:]], Weights([])) as recording:
        pass
    assert recording.replay([other[:4], other[4:]], Weights([]))
    assert not recording.replay([other[:4], both[4:]], Weights([]))


def test_inputs_that_move_apart_are_known_by_their_first_bytes() -> None:
    """Unless both begin there, and then they must move alike."""
    memory, other = torch.zeros(8, 8), torch.zeros(8, 8)
    for first, second, is_apart in ((memory[:4], memory[4:], True), (memory, memory[:4], False)):
        with Recording([first, second], Weights([]), apart=range(2)) as recording:
            copy(first[:], second.new_ones(first.shape))
            copy(second[:], second.new_full(second.shape, 2))
        assert recording.replay([other[1:], other[4:]], Weights([])) is False, "another shape"
        moved = [other[2 : 2 + len(first)], other[-len(second) :]]
        other.zero_()
        assert recording.replay(moved, Weights([])) is is_apart
        assert other.sum(1).tolist() == ([0, 0, 8, 8, 16, 16, 16, 16] if is_apart else [0] * 8)


def test_a_cuda_kernel_gets_the_pointers_of_another_layer(monkeypatch) -> None:
    launches = []

    def launch(function, *sizes_and_arguments) -> int:
        *sizes, _stream, parameters, _extra = sizes_and_arguments
        kinds = ctypes.c_void_p, ctypes.c_int, ctypes.c_double, ctypes.c_void_p
        values = [
            ctypes.cast(at, ctypes.POINTER(kind)).contents.value
            for at, kind in zip(parameters, kinds, strict=True)
        ]
        launches.append((function, sizes, values))
        return 0

    library = SimpleNamespace(cuLaunchKernel=launch)
    monkeypatch.setattr(torch.cuda._utils, "_get_gpu_runtime_library", lambda: library)
    a, b, step = torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(3)
    with Recording([a], Weights([])) as recording:
        launch_cuda(lambda: SimpleNamespace(func=5), 7, 32, [a[1:], 3, 0.5, step], 100)
    assert recording.replay([b], Weights([]))
    sizes = [7, 1, 1, 32, 1, 1, 100]
    first, second = ([x[1:].data_ptr(), 3, 0.5, step.data_ptr()] for x in (a, b))
    assert launches == [(5, sizes, first), (5, sizes, second)]


def test_the_trial_finds_a_wrong_repetition(replays, backend, monkeypatch, caplog) -> None:
    """Then launches are not repeated."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM sets it to False
    backend("triton")
    monkeypatch.setattr("kvfold.vllm_plugin.trial.CHUNK", 6)
    blocks = Blocks(*mapped_layers(), 8)
    layers = [
        SimpleNamespace(
            maps=x.layer, project_output=lambda out: out, sample_inputs=partial(drawn, x)
        )
        for x in blocks.projections
    ]
    check_attention(blocks.attention, layers)
    assert blocks.attention.kinds and replays and not caplog.messages
    monkeypatch.setattr(Recording, "replay", lambda *_: True)  # launches nothing
    check_attention(blocks.attention, layers)
    assert not blocks.attention.kinds
    assert "not repeated" in caplog.messages[0]


def drawn(projections: LayerProjections, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Sample inputs of a layer."""
    make = torch.Generator().manual_seed(projections.layer.index)
    both = torch.randn(len(positions), 8, 16, generator=make).to(DEVICE, DTYPE)
    return projections.score_space(*both.split((4, 2, 2), 1))
