"""The backend of every layer, by what it stores; no device is touched, so any can be asked for."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvfold import LLM
from kvfold.attention.backend import Task
from kvfold.attention.base import Columns, LayerMaps
from kvfold.attention.selector import DECODE, PREFILL, Choice, select, warn_of_fallback
from kvfold.spec import CacheSpec, Geometry, KeyKind, Latent, LayerSpec, ValueKind
from kvfold.spec.layout import Group, cache_layout
from models import tiny
from steps import backends

pytest.importorskip("triton", reason="Triton is not installed")

GEOMETRY = Geometry(
    hidden_size=32,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_layers=1,
    rope=True,
    key_norm=False,
    scaling=0.25,
)
Layer = tuple[LayerMaps, tuple[Group, ...]]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


def layer_of(
    keys: KeyKind = "post_rope",
    values: ValueKind = "fused",
    *,
    shared: bool = False,
    tiers=None,
    window: int | None = None,
    softcap: float | None = None,
    fixed: bool = True,
    **layout,
) -> Layer:
    """A layer of 16 numbers a head and side, or of 16 for all of them."""
    heads = [(0, 1)] if shared else [(0,), (1,)]
    latents = tuple(
        Latent(side=side, heads=own, rank=16, tiers=tiers) for side in "kv" for own in heads
    )
    spec = LayerSpec(keys=keys, values=values, latents=latents)
    geometry = replace(GEOMETRY, softcap=softcap)
    found = cache_layout(CacheSpec(geometry=geometry, layers=(spec,)), **layout)
    up = torch.zeros(len(heads), 16 * len(heads[0]), 16)
    rope = SimpleNamespace(inv_freq=torch.ones(8), scaling=1.0, fixed=fixed)
    maps = LayerMaps(
        index=0,
        spec=spec,
        geometry=geometry,
        window=window,
        key_columns=Columns(spec, spec.key_latents),
        value_columns=Columns(spec, spec.value_latents),
        key_up=up if keys == "pre_rope" else None,
        key_mean=torch.zeros(2, 16) if keys == "pre_rope" else None,
        value_up=up if values == "rebuilt" else None,
        rope=rope if keys == "pre_rope" else None,
    )
    return maps, found.groups


def task_of(device: str = "cuda", *, decode: bool = True, observed: bool = False) -> Task:
    return Task(
        decode=decode,
        observed=observed,
        device_type=device,
        dtype=torch.bfloat16,
    )


def warned(layer: Layer, choice: Choice, task: Task) -> str:
    """The one warning of a layer that decodes in plain PyTorch."""
    maps, groups = layer
    with pytest.warns(UserWarning, match="decode in plain PyTorch") as caught:
        warn_of_fallback([maps] * 3, [groups] * 3, [choice] * 3, task)
    assert len(caught) == 1
    return str(caught[0].message)


@pytest.mark.parametrize(
    ("layer", "observed", "wanted"),
    [
        (layer_of("plain", "plain"), False, "TritonDecode"),
        (layer_of(bits=4), False, "TritonDecode"),
        (layer_of(bits=8, tracked=True), True, "TritonDecode"),
        (layer_of("pre_rope"), False, "LatentDecode"),
        (layer_of("pre_rope", shared=True, bits=4), False, "LatentDecode"),
    ],
)
def test_kernels_decode_on_a_gpu(layer: Layer, observed: bool, wanted: str) -> None:
    task = task_of(observed=observed)
    choice = select(*layer, task)
    assert choice.backend.__name__ == wanted and choice.backend.captures
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_fallback([layer[0]], [layer[1]], [choice], task)


@pytest.mark.parametrize(
    ("layer", "observed", "reason", "setting"),
    [
        (layer_of(tiers=((8, 4), (8, 2))), False, "", "bits=4 or bits=8 has kernels"),
        (layer_of("pre_rope", tiers=((8, 8), (8, 4))), False, "", "bits=4 or bits=8 has kernels"),
        (layer_of(bits=3), False, "", "bits=4 or bits=8 has kernels"),
        (layer_of(bits=4, residual=32), False, "residual", "leave residual and KIVI out"),
        (layer_of(bits=4, sub_group=8), False, "", "leave sub_group out"),
        (layer_of(itemsize=4), False, "", "load the model as bfloat16"),
        (layer_of(shared=True), False, "", "a recipe that keeps"),
        (layer_of(window=64, tracked=True), False, "window of 64 tokens", "no setting avoids it"),
        (layer_of(softcap=30.0), False, "scores are capped", "no setting avoids it"),
        (layer_of(softcap=30.0, window=64), False, "scores are capped", "no setting avoids it"),
        (
            layer_of("pre_rope", tracked=True),
            True,
            "adds to no metric",
            "does not observe decoding",
        ),
    ],
)
def test_a_fallback_on_a_gpu_says_why_and_what_to_set(
    layer: Layer, observed: bool, reason: str, setting: str
) -> None:
    task = task_of(observed=observed)
    choice = select(*layer, task)
    assert choice.backend is DECODE[-1] and not choice.backend.captures
    message = warned(layer, choice, task)
    assert message.startswith("3 of 3 layers") and reason in message
    assert message.endswith(setting) or setting in message


def test_cpus_read_pages_and_warn_of_nothing() -> None:
    task = task_of("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options, wanted in (({}, "CpuPaged"), ({"shared": True}, "Fallback")):
            layer = layer_of(**options)
            choice = select(*layer, task)
            assert choice.backend.__name__ == wanted
            warn_of_fallback([layer[0]], [layer[1]], [choice], task)


def test_without_triton_a_gpu_is_told_so(backend: Callable[[str], None]) -> None:
    backend("reference")
    layer, task = layer_of(), task_of()
    message = warned(layer, select(*layer, task), task)
    assert "KVFOLD_BACKEND is reference" in message and "install triton" in message


@pytest.mark.parametrize(
    ("layer", "observed", "wanted"),
    [
        (layer_of(window=64), False, "TritonPrefill"),
        (layer_of("pre_rope", "rebuilt", shared=True), False, "TritonPrefill"),
        (layer_of(tracked=True), True, "TritonPrefill"),
        (layer_of("pre_rope", tracked=True), True, "Fallback"),
        (layer_of(softcap=30.0), False, "Fallback"),
    ],
)
def test_prefill_has_its_own(layer: Layer, observed: bool, wanted: str) -> None:
    choice = select(*layer, task_of(decode=False, observed=observed))
    assert choice.backend.__name__ == wanted and choice.backend in PREFILL


def test_angles_that_depend_on_lengths_have_no_kernel() -> None:
    choice = select(*layer_of("pre_rope", fixed=False), task_of())
    assert choice.backend is DECODE[-1] and "length" in choice.passed["LatentDecode"]


def test_every_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvfold.attention"):
        LLM(tiny("llama-gqa"), kv_bytes=2**20, max_sequences=2, max_tokens=64)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == 4  # two layers that decode and prefill
    assert found[0].startswith("layer 0, decode: CpuPaged; not TritonDecode: ")
    assert found[3].startswith("layer 1, prefill: Fallback; not TritonPrefill: ")
