"""A step reads as many tokens of prompts as its time allows, where others decode."""

from kvfold.engine.core.engine import default_step_seconds
from kvfold.engine.core.pace import FIRST, LEAST, PrefillPace
from stub import Bench


def settled(constant: float, each: float, tokens: int = 2048) -> float:
    """Seconds of a step, once enough were taken, where one takes constant + each * tokens."""
    pace = PrefillPace(0.25)
    for _ in range(30):
        step = int(min(pace.max_tokens, tokens))
        pace.record(step, constant + each * step)
    return constant + each * int(min(pace.max_tokens, tokens))


def test_steps_come_near_the_time_they_should_take() -> None:
    assert 0.2 < settled(0.02, 1e-3) <= 0.25
    assert 0.2 < settled(0.1, 1e-3) <= 0.25
    assert settled(0.0, 1e-5) < 0.25  # all that a step may have
    assert settled(0.4, 1e-3) == 0.4 + LEAST * 1e-3  # decoding alone takes longer


def test_the_first_step_is_short_and_one_slow_step_does_not_last() -> None:
    pace = PrefillPace(0.25)
    assert pace.max_tokens == FIRST
    pace.record(100, 30.0)  # something was compiled in it
    assert pace.max_tokens == LEAST
    for _ in range(8):
        pace.record(int(pace.max_tokens), 1e-4 * pace.max_tokens)
    assert pace.max_tokens > 2000


def test_short_ends_of_prompts_say_nothing() -> None:
    pace = PrefillPace(0.25)
    pace.record(3, 0.1)
    pace.record(0, 9.0)
    assert pace.max_tokens == FIRST


def test_a_gpu_is_not_paced() -> None:
    assert default_step_seconds("cuda") is None
    pace = PrefillPace(None)
    pace.record(100, 30.0)
    assert pace.max_tokens == float("inf")


def test_prompts_beside_a_decode_are_read_in_small_chunks() -> None:
    """All of them together; nobody waits where nobody decodes."""

    def prompt_tokens(seconds: float | None, *, decodes: bool) -> int:
        bench = Bench(2000, num_slots=6, chunk=500, max_batch_tokens=2000)
        bench.scheduler.pace = PrefillPace(seconds)
        if decodes:
            bench.add([1], max_new_tokens=50, ignore_eos=True)
            bench.step()
        for _ in range(4):
            bench.add([2] * 300, max_new_tokens=1, ignore_eos=True)
        bench.step()
        batch = bench.runner.batches[-1]
        bench.drain()
        return sum(tokens for _, _, tokens in batch[decodes:])

    assert prompt_tokens(None, decodes=True) == 1200
    assert prompt_tokens(0.25, decodes=True) == FIRST
    assert prompt_tokens(0.25, decodes=False) == 1200
