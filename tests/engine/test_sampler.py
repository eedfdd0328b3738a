"""Sampling: distributions, seeds, rows that do not see each other, logprobs, NaN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.engine.requests.request import Request, SamplingParams
from kvfold.engine.runner import sampler
from kvfold.engine.runner.edits import logit_edits
from kvfold.engine.runner.sampler import _likeliest, _limit, _sort, sample
from kvfold.ops import noise

pytestmark = pytest.mark.gpu

VOCAB = 12
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def expected(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, then top-p, token by token."""
    p = (logits.double() / params.temperature).softmax(-1)
    order = sorted(range(len(p)), key=lambda i: -float(p[i]))[: params.top_k]
    total, kept, reached = sum(float(p[i]) for i in order), [], 0.0
    for i in order:
        if params.top_p < 1 and reached >= params.top_p:
            break
        kept.append(i)
        reached += float(p[i]) / total
    out = torch.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


def draws(logits: Tensor, params: SamplingParams, count: int, seed: int = 0) -> Tensor:
    """Of one sequence: at positions 0 to `count`."""
    places = [seed] * count, range(count)
    return sample(logits.expand(count, -1), [params] * count, *places).tokens


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 5, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.05])
def test_distribution(temperature: float, top_k: int | None, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    count = 4000
    wanted = expected(LOGITS, params) * count
    found = draws(LOGITS, params, count).bincount(minlength=VOCAB)
    assert not found[wanted == 0].any()
    often = wanted > 5
    chi_square = ((found - wanted)[often] ** 2 / wanted[often]).sum()
    degrees = max(1, int(often.sum()) - 1)
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_greedy_takes_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [-1.0, -torch.inf, -2.0]])
    params = [SamplingParams(), SamplingParams(temperature=1e-9, top_k=2)]
    assert sample(logits, params, [0, 0], [3, 9]).tokens.tolist() == [1, 0]


def test_ties_at_the_limit_do_not_widen_it() -> None:
    params = SamplingParams(temperature=1.0, top_k=2)
    assert set(draws(torch.zeros(VOCAB), params, 500).tolist()) == {0, 1}


def test_equals_are_ordered_by_id_whoever_sorts_beside() -> None:
    scaled = -torch.randint(0, 4, (3, 500), generator=torch.Generator().manual_seed(0)).float()
    scaled[0, 7], scaled[1, 9] = -torch.inf, 0.0  # beside zeros of the other sign
    wanted = scaled.sort(dim=-1, descending=True, stable=True).indices
    for count in (500, 64):
        assert torch.equal(_likeliest(scaled, count), wanted[:, :count])
    assert torch.equal(_sort(scaled), wanted)  # as a GPU does


def test_limits_that_cut_nothing_change_nothing() -> None:
    free, *limited = (
        draws(LOGITS, SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p), 200).tolist()
        for top_k, top_p in ((None, 1.0), (VOCAB, 1.0), (None, 1 - 1e-12))
    )
    assert limited == [free, free]


def test_a_row_without_limits_loses_nothing_to_rounding() -> None:
    values = torch.tensor([[0.0, -50.0, -80.0]]).expand(2, -1)
    rows = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)]
    assert _limit(values, rows).isfinite().tolist() == [[True] * 3, [True, False, False]]


def test_only_rows_that_limit_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sorts: list[tuple[int, int]] = []

    def likeliest(scaled: Tensor, count: int) -> Tensor:
        sorts.append((len(scaled), count))
        return _likeliest(scaled, count)

    monkeypatch.setattr(sampler, "_likeliest", likeliest)
    settings = [{}, {"top_k": 3}, {}, {"top_p": 0.5}, {"top_k": 4, "top_p": 0.5}, {"top_k": 900}]
    rows = [SamplingParams(), *(SamplingParams(temperature=1.0, **x) for x in settings)]
    sample(LOGITS.repeat(7, 1), rows, range(7), range(7))
    assert sorted(sorts) == [(2, 4), (2, VOCAB)]


def test_greedy_rows_need_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[int], list[int]]] = []

    def keys_of(seeds: list[int], positions: list[int]) -> Tensor:
        asked.append((seeds, positions))
        return noise.keys_of(seeds, positions)

    monkeypatch.setattr(sampler, "keys_of", keys_of)
    greedy, drawn = SamplingParams(), SamplingParams(temperature=1.0)
    sample(LOGITS.repeat(2, 1), [greedy] * 2, [5, 6], [7, 8])
    assert not asked
    sample(LOGITS.repeat(2, 1), [greedy, drawn], [5, 6], [7, 8])
    assert asked == [([6], [8])]


def test_extreme_logits_and_temperatures_stay_finite() -> None:
    logits = torch.tensor([3e38, -3e38, 3e38, -torch.inf])
    for temperature in (2e-5, 1.0, 1e30):
        tokens = draws(logits, SamplingParams(temperature=temperature), 50)
        assert not (tokens == 3).any()


row_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([None, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    seed=st.integers(0, 99),
    logprobs=st.sampled_from([None, 0, 2, 50]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(row_params, min_size=1, max_size=5), st.integers(0, 1000))
def test_a_row_does_not_depend_on_the_others(rows: list[SamplingParams], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    places = [p.seed for p in rows], range(len(rows))
    together = sample(logits, rows, *places).on_host(rows)
    for i, p in enumerate(rows):
        assert sample(logits[i : i + 1], [p], [p.seed], [i]).on_host([p]) == [together[i]]


def test_other_rounding_rarely_changes_a_token() -> None:
    """Logits in fp16 differ by some 0.004 beside other requests. One number a row, compared with a
    running sum of probabilities, would take another token in every seventh draw."""
    count, source = 500, torch.Generator().manual_seed(0)
    rank = torch.randperm(49152, generator=source) + 1.0
    logits = torch.randn(count, 49152, generator=source) - 1.33 * rank.log()
    noisy = logits + 0.004 * torch.randn(count, 49152, generator=source)
    rows, places = [SamplingParams(temperature=1.0)] * count, ([0] * count, range(count))
    uniform = torch.rand(count, 1, generator=source)
    ours = [sample(x, rows, *places).tokens for x in (logits, noisy)]
    summed = [torch.searchsorted(x.softmax(-1).cumsum(-1), uniform) for x in (logits, noisy)]
    changed, would_change = ((a != b).float().mean() for a, b in (ours, summed))
    assert changed < 0.006 < 0.1 < would_change


def test_seeds() -> None:
    params = SamplingParams(temperature=2.0)
    first, same, other = (draws(LOGITS, params, 50, seed).tolist() for seed in (1, 1, 2))
    assert first == same != other
    rows = [params] * 50
    backwards = sample(LOGITS.expand(50, -1), rows, [1] * 50, range(49, -1, -1)).tokens.tolist()
    assert backwards[::-1] == first
    given, *unseeded = (
        Request(id=0, token_ids=[], num_prompt=0, sampling=SamplingParams(seed=seed)).seed
        for seed in (7, None, None)
    )
    assert given == 7
    assert unseeded[0] != unseeded[1] and max(unseeded) < 2**63


def test_logprobs_come_from_the_unmodified_distribution() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [
        SamplingParams(temperature=0.2, top_k=2, logprobs=3, seed=0),
        SamplingParams(),
        SamplingParams(logprobs=0),
    ]
    first, second, third = sample(logits, rows, [0] * 3, [5] * 3).on_host(rows)
    logs = logits.log_softmax(-1)
    assert second.logprobs is None
    assert third.logprobs.top == ()
    assert third.logprobs.chosen == pytest.approx(float(logs[2].max()))
    assert first.logprobs.chosen == pytest.approx(float(logs[0, first.token]))
    values, ids = logs[0].topk(3)
    assert [i for i, _ in first.logprobs.top] == ids.tolist()
    assert [x for _, x in first.logprobs.top] == pytest.approx(values.tolist())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_is_flagged_alone(value: float, temperature: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = value
    rows = [
        SamplingParams(temperature=temperature, top_p=0.9, seed=i, logprobs=1) for i in (0, 1, 2)
    ]
    sampled = sample(logits, rows, range(3), range(3))
    assert sampled.bad.tolist() == [False, True, False]
    clean = sample(LOGITS.repeat(3, 1), rows, range(3), range(3)).on_host(rows)
    found = sampled.on_host(rows)
    assert found[1].token is None
    assert (found[0], found[2]) == (clean[0], clean[2])


def test_a_row_without_any_legal_token_is_bad() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    params = [SamplingParams(temperature=1.0, top_k=3, seed=0)]
    assert sample(logits, params, [0], [0]).bad.tolist() == [True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("stop", ("a", "")),
        ("logprobs", -1),
    ],
)
def test_settings_are_checked(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sampling_never_waits_for_the_device() -> None:
    logits = torch.randn(6, 5000, device="cuda")
    limits = ({}, {"top_k": 5}, {"top_p": 0.5}, {"logprobs": 3}, {"top_p": 0.5, "top_k": 40})
    params = [SamplingParams(), *(SamplingParams(temperature=1.0, **x) for x in limits)]
    found = [sample(logits, params, range(6), range(6))]  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        found.append(sample(logits, params, range(6), range(6)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    first, again = (x.on_host(params) for x in found)
    assert first == again


def edited(logits: Tensor, prompt: list[int], outputs: list[int], **settings) -> Tensor:
    """The logits that a request's next token is chosen from."""
    params = SamplingParams(**settings)
    request = Request(id=0, token_ids=prompt + outputs, num_prompt=len(prompt), sampling=params)
    out = logits[None].clone()
    if edits := logit_edits([request], [EOS]):
        applied = edits.apply(out)
        changed = out[0].clone()
        applied.undo()
        assert torch.equal(out[0], logits)
        return changed
    return out[0]


EOS = 7


@pytest.mark.parametrize("repetition", [1.0, 1.7])
@pytest.mark.parametrize(("presence", "frequency"), [(0, 0), (0.5, 0), (-1.0, 0.3)])
def test_penalties_are_of_what_was_said(repetition, presence, frequency) -> None:
    prompt, outputs = [1, 2, 2], [2, 5, 5, 5]
    wanted = LOGITS.clone()
    for token in {*prompt, *outputs}:
        value = float(LOGITS[token]) + (token == 5)  # with its bias
        wanted[token] = value / repetition if value > 0 else value * repetition
        count = outputs.count(token)
        wanted[token] -= frequency * count + presence * (count > 0)
    asked = {"repetition_penalty": repetition, "presence_penalty": presence}
    asked |= {"frequency_penalty": frequency, "logit_bias": {5: 1.0}}
    torch.testing.assert_close(edited(LOGITS, prompt, outputs, **asked), wanted)


def test_no_end_comes_before_its_time() -> None:
    asked = {"min_tokens": 2, "stop_token_ids": [3]}
    early = edited(LOGITS, [1], [2], **asked)
    assert early.isinf().nonzero()[:, 0].tolist() == [3, EOS]
    assert torch.equal(edited(LOGITS, [1], [2, 2], **asked), LOGITS)
    going = edited(LOGITS, [1], [2], ignore_eos=True, **asked)
    assert going.isinf().nonzero()[:, 0].tolist() == [3]


def test_only_allowed_tokens_are_left() -> None:
    left = edited(LOGITS, [1], [2], allowed_token_ids=[2, 9], logit_bias={9: 1.0})
    assert left.isfinite().nonzero()[:, 0].tolist() == [2, 9]
    assert left[2] == LOGITS[2] and left[9] == LOGITS[9] + 1
    wide = torch.zeros(100)
    left = edited(wide, [1], [2], allowed_token_ids=[31, 32])
    assert left.isfinite().nonzero()[:, 0].tolist() == [31, 32]


def test_a_bad_word_lacks_its_last_token() -> None:
    """Once its others are out; those of the prompt are not."""
    asked = {"bad_words": [(4,), (2, 5, 6)]}
    for outputs, wanted in (
        ([], [4]),
        ([2], [4]),
        ([5], [4]),
        ([2, 5], [4, 6]),
        ([9, 2, 5], [4, 6]),
    ):
        found = edited(LOGITS, [2, 5], outputs, **asked)
        assert found.isinf().nonzero()[:, 0].tolist() == wanted


def test_edits_of_a_row_leave_the_others_and_logprobs_alone() -> None:
    rows = [SamplingParams(logprobs=1), SamplingParams(logprobs=1, logit_bias={4: 100})]
    requests = [Request(id=0, token_ids=[1], num_prompt=1, sampling=x) for x in rows]
    logits = LOGITS.repeat(2, 1)
    found = sample(logits, rows, [0, 0], [1, 1], logit_edits(requests, [])).on_host(rows)
    assert [x.token for x in found] == [int(LOGITS.argmax()), 4]
    assert torch.equal(logits, LOGITS.repeat(2, 1))
    assert found[1].logprobs.chosen == pytest.approx(float(LOGITS.log_softmax(-1)[4]))
    assert found[0].logprobs.top == found[1].logprobs.top


@pytest.mark.parametrize(
    "asked",
    [{}, {"temperature": 0.9}, {"temperature": 1.0, "top_p": 0.8}, {"logit_bias": {4: 0.001}}],
)
def test_logits_of_16_bits_are_what_they_are_in_fp32(asked: dict) -> None:
    """Nothing is rounded once more: not draws, logprobs, or a bias that 16 bits do not show."""
    logits = LOGITS.repeat(50, 1).bfloat16()
    logits[:, 4] = logits[:, :4].amax(-1) + 0  # a tie, which the bias breaks
    logits[:, 5:] = logits[:, 5:].clamp(max=logits[0, 4].item())
    rows = [SamplingParams(logprobs=2, **asked)] * 50
    requests = [Request(id=0, token_ids=[1], num_prompt=1, sampling=x) for x in rows]
    place = [3] * 50, range(50)
    found, wanted = (
        sample(x, rows, *place, logit_edits(requests, [])).on_host(rows)
        for x in (logits, logits.float())
    )
    assert found == wanted
    if "logit_bias" in asked:
        assert {x.token for x in found} == {4}


@pytest.mark.parametrize("top_k", [None, 5])
def test_min_p_is_a_share_of_the_likeliest(top_k: int | None) -> None:
    params = SamplingParams(temperature=1.5, min_p=0.2, top_k=top_k)
    p = (LOGITS / 1.5).softmax(-1)
    likeliest = p.argsort(descending=True)[:top_k].tolist()
    allowed = {i for i in likeliest if p[i] >= 0.2 * p.max()}
    assert set(draws(LOGITS, params, 2000).tolist()) == allowed and 1 < len(allowed) < VOCAB
