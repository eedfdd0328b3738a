"""Two vLLM engines on a CPU, one of which copies the other's blocks by NIXL: equal tokens, and no
copy from an engine whose cache differs.

Its own environment (`make test-vllm`), with the package nixl. Tiny random models.
`test_vllm_disk` tests which servers the connector refuses.
"""

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
pytest.importorskip("nixl", reason="NIXL is not installed: make test-vllm")

from forks import forked
from vllm_maps_cases import loaded, sidecar
from vllm_tiers_cases import OPTIONS, Asked, ask, copied, nixl
from vllm_types import build

pytestmark = pytest.mark.vllm
ROLES = ("kv_producer", "kv_consumer")
REFUSED = "the other server's cache differs from this one's, so none of its blocks is copied"


def prompts() -> list[list[int]]:
    """None ends with a whole block of 32. The third shares two blocks with the first; the last is
    the first again."""
    make = torch.Generator().manual_seed(1)
    first, second, end = (
        torch.randint(3, 250, (n,), generator=make).tolist() for n in (105, 70, 9)
    )
    return [first, second, first[:70] + end, first]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build("llama", tmp_path_factory.mktemp("nixl") / "model")


def with_settings(settings: dict | None, **more) -> dict:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    import vllm.v1.worker.cpu_worker  # noqa: F401  before the fork

    return OPTIONS | more | ({"additional_config": {"kvfold": settings}} if settings else {})


def pair(model: str, one: dict, other: dict, **more) -> Asked:
    """What the engine with the settings `other` answers to prompts that the first has computed.
    more: of its connector."""
    options = with_settings(one, **nixl(ROLES[0])), with_settings(other, **nixl(ROLES[1], **more))
    return copied(model, prompts(), options)


@pytest.mark.parametrize("kind", ["bits", "maps", "windows"])
def test_copied_blocks_give_equal_tokens(kind: str, model: str, tmp_path: Path) -> None:
    settings = {"bits": 8}
    if kind == "maps":
        settings = {"maps": sidecar(loaded(model), tmp_path / "maps", half=True)}
    elif kind == "windows":
        model = build("gemma2", tmp_path / "model")
    answers = pair(model, settings, settings)
    assert answers.log == []
    assert answers.cached == [len(x) for x in prompts()]
    assert answers.tokens == forked(ask, model, prompts(), with_settings(settings)).tokens


def test_blocks_of_other_bits_are_not_copied(model: str) -> None:
    answers = pair(model, {"bits": 8}, {"bits": 4})
    assert answers.tokens == [[]] * len(prompts())
    assert any(REFUSED in x for x in answers.log)


def test_blocks_of_other_maps_are_not_copied(model: str, tmp_path: Path) -> None:
    """They have the same sizes. A server may compute such prompts itself."""
    loaded_model = loaded(model)
    maps = []
    for seed in range(2):
        torch.manual_seed(seed)
        maps.append({"maps": sidecar(loaded_model, tmp_path / f"maps{seed}", half=True)})
    one, two = maps
    answers = pair(model, one, two, kv_load_failure_policy="recompute")
    assert any(REFUSED in x for x in answers.log)
    assert answers.tokens == forked(ask, model, prompts(), with_settings(two)).tokens


def test_vllms_own_cache_and_connector_are_refused(model: str) -> None:
    with pytest.raises(RuntimeError, match=r"is not compressed. If none is, use vLLM's Nixl"):
        forked(ask, model, prompts(), with_settings(None, **nixl("kv_consumer")))
    with pytest.raises(RuntimeError, match=r"in place of NixlConnector use KVFoldNixlConnector"):
        plain = nixl("kv_consumer", "NixlConnector")
        forked(ask, model, prompts(), with_settings({"bits": 8}, **plain))
