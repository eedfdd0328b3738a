"""Real checkpoints on a GPU: 200 tokens in 32 slots, in bf16, beside the model they were made of.

Each model is skipped where `make smollm2` or `make qwen` has not brought it. `make test-real`.
"""

import shutil

import pytest
import torch

import kvfold
from kvfold.engine.requests.params import SamplingParams
from kvfold.hub import reference as reference_models

pytestmark = [
    pytest.mark.real,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SLOTS, TOKENS = 32, 200
TOPICS = (
    "a lighthouse",
    "prime numbers",
    "the sea",
    "sorting a list",
    "a letter",
    "bread",
    "rain",
    "law",
)
TASKS = (
    "Write a story about {}.",
    "Explain {} to a child.",
    "List ten facts about {}.",
    "Write a Python function about {}.",
)
SETTINGS = {
    "bits 8": (None, {"bits": 8}),
    "bits 4": (None, {"bits": 4}),
    "swift 4x": ({"recipe": "swift", "factor": 4}, {}),
    "swift 4x for speed": ({"recipe": "swift", "factor": 4, "prefer": "speed"}, {}),
    "small 4x": ({"recipe": "small", "factor": 4}, {}),
    "lean 4x": ({"recipe": "lean", "factor": 4}, {}),
    "lean, 8 bits": ({"recipe": "lean", "keep": 0.75}, {"bits": 8}),
}
# Nats a token by which the original may find an answer less likely than its own.
MOST = 0.15


@pytest.fixture(scope="module", params=["smollm2", "qwen2.5-coder-1.5b"])
def name(request):
    if reference_models.local(request.param) is None:
        pytest.skip(f"reference:{request.param} is not on this machine")
    return f"reference:{request.param}"


@pytest.fixture(scope="module")
def questions():
    return [[{"role": "user", "content": task.format(x)}] for task in TASKS for x in TOPICS]


def answers(model, questions, **settings) -> list[tuple[list[int], list[int]]]:
    """Token ids of every question and of what a model wrote, all of them TOKENS long."""
    llm = kvfold.LLM(model, max_sequences=SLOTS, max_tokens=512, **settings)
    prompts = [llm.encode_chat(x) for x in questions]
    done = llm.generate(prompts, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    assert [x.error for x in done] == [None] * len(prompts)
    return [(list(p), list(x.token_ids)) for p, x in zip(prompts, done, strict=True)]


@pytest.fixture(scope="module")
def original(name):
    return kvfold.load(name, dtype="bfloat16", device="cuda")


@torch.inference_mode()
def nats(model, written) -> float:
    """Nats a token of the model of texts that somebody wrote, one text at a time."""
    total = 0.0
    for prompt, new in written:
        ids = torch.tensor([prompt + new], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :]))
    return total / len(written)


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_written_is_likely(name, original, questions, setting: str, tmp_path) -> None:
    """An answer through the cache is about as likely to the original as the original's own."""
    compressed, cache = SETTINGS[setting]
    model = name
    if compressed is not None:
        model = str(tmp_path / "made")
        kvfold.compress(name, device="cuda", output=model, **compressed, fold=True)
    written = answers(model, questions, **cache)
    shutil.rmtree(tmp_path / "made", ignore_errors=True)  # gigabytes, which pytest would keep
    assert nats(original, written) < nats(original, answers(name, questions)) + MOST
