"""Prefill attention by vLLM's FlashAttention, played by PyTorch on a CPU."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flash_attention import flash_attn_varlen_func
from kvfold.attention.backend import Task
from kvfold.ops.common.compile_ahead import CompileAhead
from kvfold.ops.prefill import KVView, Seen, reference
from kvfold.vllm_plugin import flash


@pytest.mark.parametrize("window, softcap", [(None, None), (6, None), (None, 3.0)])
@pytest.mark.parametrize("ranks", [(120, 128), (128, 128), (64, 40)])
def test_attends_like_the_reference(monkeypatch, ranks, window, softcap) -> None:
    monkeypatch.setattr(flash, "_function", lambda: flash_attn_varlen_func)
    (key_rank, value_rank), heads, size, count = ranks, 2, 40, 33
    rows = torch.randn(1, size, heads * sum(ranks) + 96).half()
    keys = KVView(rows, (0, key_rank), (key_rank,) * heads)
    first = heads * key_rank
    values = KVView(rows, (first, first + value_rank), (value_rank,) * heads)
    visible = Seen(
        counts=torch.full((1, 1), count, dtype=torch.int32), owner=(0, 0), positions=None,
        queries=torch.arange(count - 7, count)[None], window=window,
    )  # fmt: skip
    q = torch.randn(1, 2 * heads, 7, key_rank).half()
    width = flash.shared_width(keys, values)
    assert width == max(ranks)
    out = flash.attended(q, keys, values, width, visible, 0.1, softcap)
    expected, _ = reference.prefill(q, keys, values, visible, 0.1, softcap)
    assert out.shape == (1, 2 * heads, 7, value_rank)
    torch.testing.assert_close(out, expected.to(out.dtype), atol=2e-3, rtol=1e-2)


def test_nothing_runs_while_kernels_are_compiled(monkeypatch) -> None:
    def fails(*_: object, **__: object) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(flash, "_function", lambda: fails)
    q = torch.ones(3, 2, 8)
    with CompileAhead(torch.device("cpu")):
        out = flash._flash(q, q[None], q[None], torch.tensor([3]), (1.0, None, None))
    assert not out.any() and out.shape == q.shape


def test_another_version_with_other_rules_is_not_used(monkeypatch, caplog) -> None:
    def raises() -> bool:
        raise TypeError("unexpected keyword")

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash, "_function", lambda: object())
    for works, reason in ((lambda: True, None), (lambda: False, "unexpected"), (raises, "called")):
        monkeypatch.setattr(flash, "_is_right", works)
        flash.why_not.cache_clear()
        found = flash.why_not()
        assert found is None if reason is None else reason in (found or "")
    flash.why_not.cache_clear()
    assert "unexpected keyword" in caplog.text and len(caplog.messages) == 2


@pytest.mark.parametrize(
    "starts, ranks, row, width",
    [
        ((0, 64), (64, 64), 128, 64),
        ((0, 60), (60, 60), 128, None),  # heads are not 16 bytes apart
        ((0, 64), (64, 32), 128, None),  # heads differ
        ((0, 64, 192), (64,) * 3, 256, None),  # at different distances
        ((0, 320), (320, 320), 640, None),  # too wide
        ((8, 72), (64, 60), 130, None),  # rows are not 16 bytes apart
    ],
)
def test_shared_width(starts, ranks, row, width) -> None:
    view = KVView(torch.zeros(1, 4, row), starts, ranks)
    assert flash.shared_width(view, view) == width


def test_a_narrower_last_head_must_not_reach_beyond_its_row() -> None:
    rows = torch.zeros(1, 4, 256)
    keys, values = KVView(rows, (0, 128), (120, 120)), KVView(rows, (0, 128), (128, 128))
    assert flash.shared_width(keys, values) == 128
    assert flash.shared_width(KVView(rows, (0, 136), (120, 120)), values) is None


def test_says_why_it_is_not_used(monkeypatch) -> None:
    plain = SimpleNamespace(layout=SimpleNamespace(tracked=False))
    task = Task(decode=False, observed=False, device_type="cuda", dtype=torch.bfloat16)

    def reason(has_sinks: bool = False, groups=(plain,), task: Task = task) -> str:
        layer = SimpleNamespace(has_sinks=has_sinks)
        return flash.FlashPrefill.unsupported_reason(layer, groups, task) or ""

    on_cpu = Task(decode=False, observed=False, device_type="cpu", dtype=torch.bfloat16)
    assert "runs on cuda" in reason(task=on_cpu)
    assert "sinks" in reason(has_sinks=True)
    monkeypatch.setenv("KVFOLD_BACKEND", "triton")
    assert reason() == "KVFOLD_BACKEND is triton"
    monkeypatch.delenv("KVFOLD_BACKEND")
    assert "eviction" in reason(groups=(SimpleNamespace(layout=SimpleNamespace(tracked=True)),))


@pytest.mark.gpu
@pytest.mark.vllm
def test_is_right_on_hopper() -> None:
    if (
        not torch.cuda.is_available()
        or torch.cuda.get_device_capability()[0] != 9
        or flash._function() is None
    ):
        pytest.skip("vLLM has no FlashAttention 3 here")
    assert flash._is_right()
