"""What tests of prefix share with others."""

import random

from kvfold.engine.requests.request import SamplingParams
from stub import VOCAB


def shared_prompts(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that often begin alike."""
    rng = random.Random(0)
    stems = [[rng.randrange(1, VOCAB) for _ in range(24)] for _ in range(4)]
    return [
        (
            rng.choice(stems)[: rng.choice([8, 16, 21, 24])]
            + [rng.randrange(1, VOCAB) for _ in range(rng.choice([0, 1, 5, 8]))],
            SamplingParams(
                max_new_tokens=rng.choice([1, 5, 30]),
                temperature=rng.choice([0.0, 0.0, 1.5]),
                seed=i,
                ignore_eos=rng.random() < 0.7,
            ),
        )
        for i in range(count)
    ]
