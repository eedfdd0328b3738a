"""Exact windows (`window=N`): every query sees its last N tokens as the model computed them, and
the tokens before these as compressed entries."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import LLM, SamplingParams
from kvfold.attention import window as attention_window
from kvfold.config import CacheConfig
from kvfold.engine.requests.request import Request
from kvfold.engine.runner import metadata
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.runner import ModelRunner
from kvfold.engine.runner.trial import run_tokens
from kvfold.maps.sidecar import Sidecar
from kvfold.ops.prefill import KVView, Seen
from kvfold.ops.prefill.plan import NEVER
from kvfold.utils.errors import SettingError
from maps_engine_cases import apart
from model_types import tiny
from sidecar_cases import bytes_tokenizer
from steps import step
from windowed import Window, windowed

TOKENS, STEPS = 60, 45
OUTPUTS = SamplingParams(max_new_tokens=60, ignore_eos=True)
CLOSE = 5e-5  # of the logits' norm


def ids_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 127, (count,), generator=torch.manual_seed(seed)).tolist()


IDS = ids_of(TOKENS)


class Compressed:
    """Tiny models and maps that keep half of all numbers, unquantised, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, dict[tuple[str, str], tuple[Any, Sidecar]]()

    def __call__(self, name: str, recipe: str) -> tuple[Any, Sidecar]:
        if (name, recipe) not in self.made:
            model, tokenizer = tiny(name), bytes_tokenizer(self.folder)
            settings = {"recipe": recipe, "keep": 0.5, "align": 1, "max_tokens": 1024}
            made = kvfold.compress(model, tokenizer=tokenizer, **settings)
            self.made[name, recipe] = model, made
        return self.made[name, recipe]


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Compressed:
    return Compressed(tmp_path_factory.mktemp("maps"))


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts take several blocks of queries."""
    monkeypatch.setattr(attention_window, "BLOCK", 4)


def runner_of(model: Any, window: int, slots: int = 3, **settings: Any) -> ModelRunner:
    maps = settings.pop("maps", None)
    config = CacheConfig(window=window, kv_bytes=2**22, page=8, **settings)
    return build_runner(model, config, num_slots=slots, max_tokens=96, maps=maps)


def decoded(runner: ModelRunner, *prompts: list[int], rest: list[int] = IDS[-STEPS:]) -> Tensor:
    """Logits [B, steps, V] after each prompt, and after each token of `rest`."""
    with torch.inference_mode():
        return torch.stack(list(run_tokens(runner, prompts, [rest] * len(prompts))), 1)


def emulated(
    model: Any, maps: Sidecar | None, window: Window, ids: list[int], bits: int | None = None
) -> Tensor:
    """Logits [T, V] of an attention that computes all scores both ways, and masks them."""
    with windowed(model, maps, bits, window) as read:
        return read(ids)


def whole(tokens: int) -> Window:
    return Window(kind="whole", tokens=tokens)


@pytest.mark.parametrize("window", [1, 7, 100])
@pytest.mark.parametrize(
    ("name", "recipe"), [("llama", "swift"), ("llama", "small"), ("qwen3_moe", "swift")]
)
def test_each_query_sees_its_window_exactly(
    compressed: Compressed, name: str, recipe: str, window: int
) -> None:
    """In prefill and in decoding, which crosses a ring of 7 tokens several times."""
    model, maps = compressed(name, recipe)
    prompt = IDS[:-STEPS]
    (found,) = decoded(runner_of(model, window, maps=maps), prompt)
    wanted = emulated(model, maps, whole(window), IDS)[len(prompt) - 1 :]
    assert apart(found, wanted) < CLOSE
    assert apart(found, emulated(model, maps, whole(window + 1), IDS)[len(prompt) - 1 :]) > (
        20 * CLOSE if window < TOKENS else -1
    )


def test_a_window_of_all_tokens_is_the_original(compressed: Compressed) -> None:
    model, maps = compressed("llama", "small")
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0, -STEPS - 1 :]
    (found,) = decoded(runner_of(model, TOKENS, maps=maps), IDS[:-STEPS])
    assert apart(found, wanted) < CLOSE
    (found,) = decoded(runner_of(model, TOKENS, bits=2), IDS[:-STEPS])
    assert apart(found, wanted) < CLOSE


def test_entries_before_the_window_have_few_bits(compressed: Compressed) -> None:
    """A few codes may be rounded otherwise."""
    model, _ = compressed("llama", "swift")
    with torch.no_grad():
        exact = model(torch.tensor([IDS])).logits[0, -STEPS - 1 :]
    (found,) = decoded(runner_of(model, 16, bits=4), IDS[:-STEPS])
    wanted = emulated(model, None, whole(16), IDS, bits=4)[-STEPS - 1 :]
    (without,) = decoded(runner_of(model, 0, bits=4), IDS[:-STEPS])
    assert apart(found, wanted) < 0.1 * apart(found, exact)
    assert apart(found, exact) < 0.8 * apart(without, exact)


@pytest.mark.parametrize(("recipe", "padded"), [("swift", False), ("swift", True), ("small", True)])
def test_sequences_of_a_batch_have_windows_of_their_own(
    compressed: Compressed, recipe: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are shorter than the window; chunks of prompts stand beside decodes, and in one call
    with others if they are padded, as on a GPU."""
    if padded:
        monkeypatch.setattr(metadata, "BATCHED_DEVICES", {"cpu"})
    model, maps = compressed("llama", recipe)
    runner, window = runner_of(model, 9, maps=maps), whole(9)
    requests = []
    for i, length in enumerate((30, 2, 14)):
        ids = ids_of(length + 10, seed=i)
        requests.append(Request(id=i, token_ids=ids, num_prompt=length, sampling=SamplingParams()))
        requests[-1].slot, requests[-1].num_prefill = runner.pool.allocate_slot(), length
    first, second, third = requests
    found = {x.id: list[Tensor]() for x in requests}

    def run(*work: tuple[Request, int]) -> None:
        for (request, _), logits in zip(work, step(runner, *work), strict=True):
            found[request.id].append(logits)

    run((first, 25), (second, 2))
    run((second, 1), (first, 5), (third, 3))  # of similar length
    run((first, 1), (second, 1), (third, 11))
    for _ in range(8):
        run((first, 1), (second, 1), (third, 1))
    ends = {0: [25, 30, *range(31, 40)], 1: [2, *range(3, 13)][:11], 2: [3, 14, *range(15, 23)]}
    for x in requests:
        wanted = emulated(model, maps, window, x.token_ids)
        wanted = wanted[[end - 1 for end in ends[x.id][: len(found[x.id])]]]
        assert apart(torch.stack(found[x.id]), wanted) < CLOSE


def test_padding_of_a_call_is_no_output(
    compressed: Compressed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long padding stands in blocks of queries that see no token. A GPU writes what it is told to
    write twice in any order."""
    monkeypatch.setattr(metadata, "BATCHED_DEVICES", {"cpu"})
    copy = Tensor.index_copy_

    def backwards(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        return copy(x, dim, index.flip(0), source.flip(0))

    monkeypatch.setattr(Tensor, "index_copy_", backwards)
    model, maps = compressed("llama", "swift")
    runner, prompts = runner_of(model, 3, maps=maps), (ids_of(40), ids_of(21, seed=1))
    requests = [
        Request(id=i, token_ids=ids, num_prompt=len(ids), sampling=SamplingParams())
        for i, ids in enumerate(prompts)
    ]
    for request in requests:
        request.slot, request.num_prefill = runner.pool.allocate_slot(), request.num_prompt
    found = step(runner, *((x, x.num_prompt) for x in requests))
    for ids, logits in zip(prompts, found, strict=True):
        assert apart(logits, emulated(model, maps, whole(3), ids)[-1]) < CLOSE


def test_padding_of_a_block_comes_before_tokens_that_do_not_exist(
    compressed: Compressed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a kernel takes these for visible, and reads on behind the last."""
    last, inner = list[int](), attention_window.prefill

    def prefill(q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float) -> Any:
        last.append(int(seen.queries.max()))
        return inner(q, keys, values, seen, scale)

    monkeypatch.setattr(attention_window, "prefill", prefill)
    model, maps = compressed("llama", "swift")
    decoded(runner_of(model, 3, maps=maps), ids_of(21), rest=[])
    assert 21 < max(last) < NEVER


class Since(Window):
    """A window that begins at token FIRST at the earliest."""

    FIRST = 16

    def near(self, new: int, count: int) -> Tensor:
        return super().near(new, count) & (torch.arange(count) >= self.FIRST)


def test_after_a_shared_prefix_the_window_has_what_was_computed(compressed: Compressed) -> None:
    """At least the last N tokens of the prompt, so that decoding has a whole window."""
    model, maps = compressed("llama", "swift")
    llm = LLM(model, maps=maps, window=7, page=8, max_sequences=2, max_tokens=96)
    assert llm.shares_no_prefix is None
    prompt, hits = IDS[:23], llm.engine.scheduler.prefix_cache
    llm.generate([prompt], SamplingParams(max_new_tokens=1))
    assert hits.num_hits == 0
    wanted = SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=1)
    (again,) = llm.generate([prompt], wanted)
    assert hits.num_hits == Since.FIRST
    tokens = list(again.token_ids)
    with windowed(model, maps, None, whole(7)) as read:
        read.remember(prompt[: Since.FIRST])
        for layer in read.layers:
            layer.window = Since(kind="whole", tokens=7)
        logits = read([*prompt[Since.FIRST :], *tokens])[-len(tokens) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens
    chosen = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
    found = [x.chosen for x in again.logprobs or ()]
    torch.testing.assert_close(torch.tensor(found), chosen, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("limit", ["chunk", "kv_bytes"])
def test_chunks_and_preemption_change_nothing(compressed: Compressed, limit: str) -> None:
    model, maps = compressed("llama", "swift")
    settings: dict[str, Any] = {"maps": maps, "window": 7, "page": 8, "prefix_caching": False}
    settings |= {"max_sequences": 3, "max_tokens": 96}
    prompts = [ids_of(20 + i, seed=i) for i in range(3)]
    llm = LLM(model, **settings)
    wanted, pool = llm.generate(prompts, OUTPUTS), llm.runner.pool
    few = {"chunk": 5, "kv_bytes": pool.window_bytes + 20 * pool.layout.page_bytes}
    llm = LLM(model, **settings, **{limit: few[limit]})
    found = llm.generate(prompts, OUTPUTS)
    assert [x.token_ids for x in found] == [x.token_ids for x in wanted]
    assert bool(llm.engine.scheduler.num_preemptions) is (limit == "kv_bytes")
    llm.runner.pool.check_integrity()


def test_choices_of_one_prompt_have_windows_of_their_own(compressed: Compressed) -> None:
    model, maps = compressed("llama", "small")
    llm = LLM(model, maps=maps, window=8, page=8, max_sequences=3, max_tokens=96)
    several = [
        SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1, seed=i) for i in (1, 2)
    ]
    together = llm.generate([IDS[:20]] * 2, several)
    alone = [llm.generate([IDS[:20]], x)[0] for x in several]
    assert [x.token_ids for x in together] == [x.token_ids for x in alone]
    assert together[0].token_ids != together[1].token_ids


def test_a_slot_keeps_nothing_of_the_request_before(compressed: Compressed) -> None:
    model, maps = compressed("llama", "swift")
    runner = runner_of(model, 7, slots=1, maps=maps)
    pool = runner.pool
    assert pool.window is not None
    pool.window.arena.fill_(255)  # NaN
    first = decoded(runner, IDS[:3])
    decoded(runner, IDS[10:40], rest=IDS[:20])
    assert torch.equal(decoded(runner, IDS[:3]), first)


def test_bytes_of_windows_are_counted(compressed: Compressed) -> None:
    model, maps = compressed("llama", "swift")
    kv_bytes = 2**22
    without, runner = (runner_of(model, x, maps=maps).pool for x in (0, 40))
    geometry = runner.layout.spec.geometry
    exact = 64 * geometry.full_numbers * 4  # two pages of 32 tokens, in fp32
    assert runner.layout.window_bytes == exact
    assert runner.window is not None
    assert runner.window_bytes == runner.window.arena.numel() == 4 * exact  # and the padding slot
    assert runner.num_bytes + runner.window_bytes == without.num_bytes == kv_bytes
    slot = runner.allocate_slot()
    runner.extend([slot], [5])
    other = without.allocate_slot()
    without.extend([other], [5])
    sizes = [x.stats().sequence_bytes[y] for x, y in ((runner, slot), (without, other))]
    assert sizes[0] - sizes[1] == exact
    needed = [x.layout.bytes_for(3, 96) for x in (runner, without)]
    assert needed[0] - needed[1] == runner.window_bytes
    assert runner.layout.sequence_bytes(5) - without.layout.sequence_bytes(5) == exact


def test_the_default_pool_holds_a_short_request_beside_a_long_window() -> None:
    llm = LLM(tiny("llama"), bits=4, window=4096, max_sequences=1, max_tokens=64)
    pool = llm.runner.pool
    assert pool.layout.window_bytes > 2**20  # more than the margin of a pool
    assert pool.capacity() >= 64
    (completion,) = llm.generate([IDS[:4]], OUTPUTS)
    assert len(completion.token_ids) == 60


def test_the_bytes_that_an_error_names_are_enough() -> None:
    lengths = {"max_sequences": 4, "max_tokens": 96, "page": 8}
    settings: dict[str, Any] = {"bits": 4, "window": 32} | lengths
    windows = LLM(tiny("llama"), **settings).runner.pool.window_bytes
    llm = LLM(tiny("llama"), **settings, kv_bytes=windows + 2**12)
    with pytest.raises(SettingError, match=f"pool of {windows + 2**12} bytes") as error:
        llm.generate([IDS], OUTPUTS)
    (enough,) = re.findall(r"use (\d+) bytes", str(error.value))
    (completion,) = LLM(tiny("llama"), **settings, kv_bytes=int(enough)).generate([IDS], OUTPUTS)
    assert len(completion.token_ids) == 37


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("llama", {"bits": None}, "all numbers in 16 bits"),
        ("gemma3_text", {}, "a sliding window"),
        ("llama", {"kv_bytes": 1000}, "takes .* bytes for 2 sequences"),
        ("llama", {"evict": "kvzip", "keep_tokens": 0.5}, "leave one of them out"),
        ("llama", {"residual": 32}, "packed one by one"),
        ("llama", {"bits": 8, "when_full": "demote"}, "two places"),
    ],
)
def test_what_windows_do_not_support_is_refused(name: str, settings: dict, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        LLM(tiny(name), **{"bits": 4, "window": 8, "max_sequences": 2, "max_tokens": 64} | settings)


def test_a_folded_model_and_a_packed_context_are_refused(compressed: Compressed) -> None:
    model, maps = compressed("llama", "swift")
    llm = LLM(model, maps=maps, window=8, max_sequences=1, max_tokens=64)
    with pytest.raises(SettingError, match="cannot be packed with window=8"):
        llm.pack(IDS)
    folded = kvfold.compress(
        tiny("llama"), tokenizer=bytes_tokenizer(compressed.folder), recipe="swift", keep=0.5,
        max_tokens=1024, fold=True,
    )  # fmt: skip
    with pytest.raises(SettingError, match="without fold"):
        LLM(folded, window=8, max_sequences=1, max_tokens=64)
