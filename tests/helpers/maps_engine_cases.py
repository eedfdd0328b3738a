"""What tests of maps engine share with others."""

import torch

from kvfold.engine.runner.trial import run_tokens

PROMPT, STEPS = 21, 4


# Types that the engine refuses by name, and why: in these words.
RECURRENT, UNLIKE, SHARED, CHUNKED = (
    "recurrent layers",
    "has attention of another shape",
    "reads the keys and values of",
    "see their own chunk",
)


UNSERVED = {
    **dict.fromkeys(
        (
            *("bamba", "falcon_h1", "granitemoehybrid", "inkling_text", "jamba", "lfm2"),
            *("lfm2_moe", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"),
            *("qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba2", "zaya"),
        ),
        RECURRENT,
    ),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text", "laguna", "mimo_v2_flash"), UNLIKE),
    "gemma3n_text": SHARED,
    "llama4_text": CHUNKED,
}


def engine_logits(llm, ids: list[int]) -> torch.Tensor:
    """Logits after a prompt and after each token that follows."""
    with torch.inference_mode():
        found = [x[0].clone() for x in run_tokens(llm.runner, [ids[:PROMPT]], [ids[PROMPT:]])]
    return torch.stack(found)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
