"""The engine on kernels: which queries they may answer, and with whose plan."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

from kvfold.config import CacheConfig
from kvfold.engine import paged
from kvfold.engine.build import build_runner
from kvfold.engine.sequence import Batch, Piece, SamplingParams, Sequence
from kvfold.ops import decode
from models import tiny, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("settings", [{}, {"evict": "kv-compress", "keep_tokens": 0.9}])
def test_prefills_of_one_token_beside_decodes(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token may be a prompt's only quiet one, with later rows stored already, and sequences of
    a step differ in length: the kernel's logits are the reference's."""
    found = {}
    for kernels in (False, True):
        for module in (paged, decode):
            monkeypatch.setattr(module, "use_triton", lambda _, on=kernels: on)
        model = tiny("llama-gqa", dtype=torch.float16).to(DEVICE)
        cache = CacheConfig(page=16, **settings)
        runner = build_runner(model, cache, num_slots=3, max_tokens=64)
        assert runner.kernels.decode is kernels
        found[kernels] = logits(runner)
    assert (found[True] - found[False]).abs().max() < 2e-2 * found[False].abs().max()


def logits(runner) -> torch.Tensor:
    """Of a step in which one sequence decodes and two prompts go on, by one token and by nine."""
    sequences = []
    for i, length in enumerate((4, 40, 12)):
        ids = tokens(1, length, seed=i)[0].tolist()
        one = Sequence(id=i, token_ids=ids, num_prompt=length, sampling=SamplingParams())
        one.slot = runner.pool.open()
        sequences.append(one)
    step(runner, sequences, (3, 39, 3))
    sequences[0].num_prefill = 3  # so that its last token decodes
    return step(runner, sequences, (1, 1, 9))


def step(runner, sequences, counts) -> torch.Tensor:
    runner.pool.extend([x.open_slot for x in sequences], list(counts))
    pieces = []
    for x, count in zip(sequences, counts, strict=True):
        part = tuple(x.token_ids[x.num_computed : x.num_computed + count])
        pieces.append(Piece(sequence=x, start=x.num_computed, tokens=part, wants_logits=True))
        x.num_computed += count
    return runner.run(Batch(pieces=tuple(pieces)))
