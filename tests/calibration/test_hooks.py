"""Every recipe as dense projections in plain PyTorch hooks, against the folded model.

A second implementation that shares nothing with folding but the bases: hooks on the outputs of
k_proj and v_proj replace c by mean + up down^T (c - mean); bases after RoPE see turned keys.
Shapes: B windows, T tokens, Hk KV heads, d head dim, K = Hk * d, c = (keys, values) [B, T, 2K].
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from kvfold import recipes
from kvfold.calibration.calibrate import calibrate
from kvfold.calibration.statistics import Statistics
from kvfold.calibration.text import calibration_windows
from kvfold.compression.basis import Basis
from kvfold.compression.compressor import Compressor
from kvfold.hub.loading import load, load_tokenizer
from kvfold.layout import CacheSpec, Geometry, Latent
from kvfold.models.families import family_of

KEEP = 0.25  # at 0.5 `small` loses nothing of reference:gqa, whose W_K and W_V span that much
TOLERANCE = 1e-3  # nats between hooks and folded model
SINKS = 4  # first tokens, on which much attention rests
MODELS = ["reference:gqa", pytest.param("reference:smollm2", marks=pytest.mark.real)]
Read = tuple[nn.Module, Statistics, Tensor]


@pytest.fixture(scope="module", params=MODELS)
def read(request) -> Read:
    """A model, what every recipe needs to know of six windows, and two windows beside them."""
    try:
        model = load(request.param, dtype=torch.float32, device="cpu")
    except ValueError as error:
        pytest.skip(str(error))
    rows = calibration_windows(load_tokenizer(request.param), model.config, None, 8192)[:, :128]
    makers = recipes.RECIPES.values()
    wanted = set().union(*(Compressor(model, made()).needs for made in makers))
    return model, calibrate(model, family_of(model.config), rows[:6], wanted), rows[6:8]


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_hooks_and_folded_model_lose_the_same(read: Read, recipe: str) -> None:
    model, statistics, windows = read
    prepared = Compressor(copy.deepcopy(model), recipes.get(recipe)).prepare(statistics)
    spec = prepared.plan(KEEP)
    bases = [[candidate.basis for candidate in own] for own in prepared.layers]
    whole = loss(model, windows)
    with hooked(model, spec, bases):
        wanted = loss(model, windows)
    with hooked(model, spec, bases, exact=SINKS):
        sinks = loss(model, windows)
    prepared.fold(spec, {})
    got = loss(prepared.compressor.model, windows)
    print(
        f"{recipe}: {whole:.4f} whole, hooks +{wanted - whole:.4f}, folded +{got - whole:.4f}, "
        f"first {SINKS} tokens exact +{sinks - whole:.4f}"
    )
    assert abs(got - wanted) <= TOLERANCE
    assert abs(wanted - whole) > TOLERANCE  # the hooks did something
    assert sinks <= wanted + 0.05


def loss(model: nn.Module, windows: Tensor) -> float:
    """Nats per token of windows [B, T], each read in one forward."""
    with torch.no_grad():
        logits = model(windows, use_cache=False).logits[:, :-1].flatten(0, 1)
    return float(nn.functional.cross_entropy(logits, windows[:, 1:].flatten()))


@contextmanager
def hooked(
    model: nn.Module, spec: CacheSpec, bases: list[list[Basis]], exact: int = 0
) -> Iterator[None]:
    """A Llama whose keys and values are projected to `spec`, but for the first `exact` tokens."""
    handles = []
    try:
        for layer, planned, own in zip(model.model.layers, spec.layers, bases, strict=True):
            attention = layer.self_attn
            if sum(x.rank for x in planned.latents) == 2 * spec.geometry.kv_width:
                continue  # the layer stays whole
            project = projection(planned.latents, own, spec.geometry)
            turn = (
                turning(model.model.rotary_emb, spec.geometry)
                if planned.keys == "post_rope"
                else None
            )
            for linear, keys in ((attention.k_proj, True), (attention.v_proj, False)):
                hook = replacing(attention, project, turn, keys, exact)
                handles.append(linear.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def replacing(
    attention: nn.Module, project: Callable, turn: Callable | None, keys: bool, exact: int
) -> Callable:
    """A hook that replaces what k_proj (or v_proj) makes of x by its half of the projected c."""

    def hook(_module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
        k, v = (
            nn.functional.linear(args[0], linear.weight, linear.bias)
            for linear in (attention.k_proj, attention.v_proj)
        )
        c = project(torch.cat((turn(k) if turn else k, v), -1))
        k, v = c.chunk(2, -1)
        new = (turn(k, back=True) if turn else k) if keys else v
        return torch.cat((out[:, :exact], new[:, exact:]), 1)

    return hook


def projection(latents: tuple[Latent, ...], bases: list[Basis], geometry: Geometry) -> Callable:
    """c [.., 2K] -> mean + up down^T (c - mean), all latents of a layer in one dense matrix."""
    width, d = geometry.kv_width, geometry.head_dim
    matrix = torch.zeros(2 * width, 2 * width, dtype=torch.double)
    mean = torch.zeros(2 * width, dtype=torch.double)
    for latent, basis in zip(latents, bases, strict=True):
        starts = [
            (0 if side == "k" else width) + head * d
            for side in latent.side
            for head in latent.heads
        ]
        where = torch.cat([torch.arange(start, start + d) for start in starts])
        product = basis.up[:, : latent.rank] @ basis.down[:, : latent.rank].mT
        matrix[where[:, None], where] = product
        mean[where] = basis.mean
    return lambda c: (mean + (c.double() - mean) @ matrix.mT).to(c.dtype)


def turning(rotary: nn.Module, geometry: Geometry) -> Callable:
    """RoPE of keys [B, T, K] at positions 0 to T - 1, and its inverse."""

    def turn(k: Tensor, back: bool = False) -> Tensor:
        cos, sin = (x[:, :, None] for x in rotary(k, torch.arange(k.shape[1])[None]))
        heads = k.unflatten(-1, (geometry.num_kv_heads, geometry.head_dim))
        first, second = heads.chunk(2, -1)
        half = torch.cat((-second, first), -1)
        return (heads * cos + (-half if back else half) * sin).flatten(2)

    return turn
