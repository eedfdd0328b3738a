"""Two vLLM engines on a CPU, one of which copies the other's blocks by NIXL: equal tokens, and no
copy from an engine whose cache differs, that is dead, or whose blocks a request names wrongly.

Its own environment (`make test-vllm`), with the package nixl. Tiny random models.
`test_vllm_disk` tests which servers the connector refuses.
"""

import os
import time
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
pytest.importorskip("nixl", reason="NIXL is not installed: make test-vllm")

from forks import forked
from kvfold.vllm_plugin.nixl_parameters import EXPIRY
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
    assert answers.held == 0
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


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_dead_server_ends_no_request_but_those_with_its_blocks(policy: str, model: str) -> None:
    asked = prompts()[:2] * 2
    roles = nixl(ROLES[0]), nixl(ROLES[1], kv_load_failure_policy=policy)
    options = [with_settings({"bits": 8}, **x) for x in roles]
    answers = copied(model, asked, options, lambda x: [*x[:2], None, None], killed=True)
    alone = forked(ask, model, asked[:2], with_settings({"bits": 8})).tokens
    assert answers.tokens == ([[], []] if policy == "fail" else alone) + alone
    assert answers.log
    assert answers.held == 0


# What a request says instead of what the first engine returned, and what the log says.
WRONG = [
    (lambda x: {"do_remote_prefill": True}, "`remote_engine_id` must be a string; got None"),
    (lambda x: x | {"remote_host": None}, "`remote_host` must be a string; got None"),
    (lambda x: x | {"tp_size": 2}, "`tp_size` must be 1, as it is here; got 2"),
    (lambda x: x | {"remote_block_ids": [x["remote_block_ids"][0][1:]]}, "must be lists of 3 numb"),
    (lambda x: x | {"remote_block_ids": [[*x["remote_block_ids"][0], 1]]}, "must be lists of 3 n"),
    (lambda x: x | {"remote_block_ids": [[*x["remote_block_ids"][0][:2], 1]]}, "another prompt"),
    (lambda x: x | {"do_remote_prefill": False, "do_remote_decode": True}, "must be left out"),
    (lambda x: x | {EXPIRY: min(x[EXPIRY], time.time())}, "they came too late"),
]


def test_requests_with_wrong_parameters_are_computed(model: str) -> None:
    """The last but one's are right: the engine goes on, and still copies. Its prompt fills its
    blocks, which are then as many as without its first new token. The last one sends them again."""
    make = torch.Generator().manual_seed(2)
    asked = [torch.randint(3, 250, (n,), generator=make).tolist() for n in [70] * len(WRONG) + [96]]
    asked.append(asked[-1])

    def change(parameters: list[dict]) -> list[dict]:
        changed = [make(x) for (make, _), x in zip(WRONG, parameters, strict=False)]
        return [*changed, parameters[-2], dict(parameters[-2])]

    options = [with_settings({"bits": 8}, **nixl(role)) for role in ROLES]
    answers = copied(model, asked, options, change)
    texts = [text for _, text in WRONG] + ["their blocks were asked for before"]
    assert len(answers.log) == len(texts)
    for line, text in zip(answers.log, texts, strict=True):
        assert "is computed here" in line and text in line
    assert answers.cached[:-1] == [0] * len(WRONG) + [96]
    assert answers.held == 0
    assert answers.tokens == forked(ask, model, asked, with_settings({"bits": 8})).tokens


def test_blocks_whose_copy_failed_are_known_to_old_versions_of_vllm() -> None:
    from kvfold.vllm_plugin.nixl_connector import mark_failed_blocks

    handled, marked = [], Queue()
    worker = SimpleNamespace(
        _recving_metadata={
            "a": SimpleNamespace(local_block_ids=([4, 5],)),
            "all in this server": SimpleNamespace(local_block_ids=[]),
        },
        _invalid_block_ids=marked,
        _handle_failed_transfer=lambda *args: handled.append(args),
    )
    mark_failed_blocks(worker, 1)
    for name in ("a", "all in this server", "unknown"):
        worker._handle_failed_transfer(name, 7)
    assert handled == [("a", 7), ("all in this server", 7), ("unknown", 7)]
    assert marked.get_nowait() == {4, 5} and marked.empty()
    with pytest.raises(ValueError, match=r"wrong tokens for models with windows: use vLLM 0.32"):
        mark_failed_blocks(worker, 2)


def test_vllms_own_cache_and_connector_are_refused(model: str) -> None:
    with pytest.raises(RuntimeError, match=r"is not compressed. If none is, use vLLM's Nixl"):
        forked(ask, model, prompts(), with_settings(None, **nixl("kv_consumer")))
    with pytest.raises(RuntimeError, match=r"in place of NixlConnector use KVFoldNixlConnector"):
        plain = nixl("kv_consumer", "NixlConnector")
        forked(ask, model, prompts(), with_settings({"bits": 8}, **plain))
