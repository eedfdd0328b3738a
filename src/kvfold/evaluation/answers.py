"""Checks, before a compressed model is saved, that it answers like the original.

The compressed model reads the original's greedy tokens one by one through the engine's cache, in
the dtype of the checkpoint. What is compared is the divergence KL(original || compressed) in nats
per token, which is what plans predict. Shapes: N tokens, V tokens of the
vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from kvfold.compression.work import CheckWork
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.trial import not_finite, run_tokens
from kvfold.evaluation.dense import DenseSession, inference
from kvfold.evaluation.perplexity import max_positions
from kvfold.hub.checkpoint import spec_of
from kvfold.models.finite import check_outputs, probe_ids, rows_are_finite
from kvfold.models.rotary import fixed_rope
from kvfold.models.weights import rounded
from kvfold.ops.backend import use_triton
from kvfold.utils.chat import encode_chat
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Progress, counter
from kvfold.utils.text import packaged
from kvfold.utils.tokens import check_ids, encode_start

TOKENS = 64  # of an answer
TOY, FEW = 2**25, 8  # smaller models are for tests: tokens of their answer
PROMPT = 32  # tokens of a prompt that is not a chat
LONGEST = 1024  # most tokens of the cache
PLAN = 10.0  # most divergence over the predicted loss: small models differ much
ENGINE = 4.0  # the same over the divergence in transformers, whose cache does not quantise
BITS = 0.25  # most nats/token of a prediction to allow for: it overrates first tokens
CHECK_ANSWER = "check answer"  # the stage of progress
FLOOR = 0.25  # nats/token beyond that, for few tokens and 16-bit rounding


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceAnswer:
    """The original model's greedy answer to a prompt: N tokens, and the logits [N, V] before each,
    fp32 on the CPU. dtype: of the weights of the compressed model that is compared; None: its
    own."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logits: Tensor
    dtype: torch.dtype | None

    @classmethod
    def of(
        cls,
        model: Any,
        tokenizer: Any,
        dtype: torch.dtype | None = None,
        *,
        step: Callable[[], object] = lambda: None,
    ) -> "ReferenceAnswer":
        """Generate a model's answer to a short packaged prompt, in its chat template if it has one.
        End-of-text tokens do not end it. step: is called after each token. Raises ValueError that
        names the layer if the model overflows in `dtype`."""
        use_triton(model.device.type)
        if dtype not in (None, model.dtype):
            with rounded(model, dtype):
                check_outputs(model)
        count = num_tokens(model)
        most = max_positions(model) or LONGEST
        prompt = _prompt(model, tokenizer)[-(most - count) :]
        tokens, steps = list[int](), list[Tensor]()
        with inference(model), DenseSession(model) as session:
            logits = session.read(prompt)
            for _ in range(count):
                steps.append(logits.float().cpu())
                tokens.append(int(logits.argmax()))
                step()
                if len(tokens) < count:
                    logits = session.read(tokens[-1:])
        return cls(prompt=prompt, tokens=tokens, logits=torch.stack(steps), dtype=dtype)

    @property
    def read(self) -> list[int]:
        """The tokens to feed: all but the last."""
        return [*self.prompt, *self.tokens[:-1]]

    def divergence(self, logits: Tensor) -> float:
        """Mean KL(original || other) of another model's logits [N, V], in nats per token."""
        original, other = (x.double().log_softmax(-1) for x in (self.logits, logits.cpu()))
        # Impossible tokens have -inf in both.
        terms = original.exp() * (original - other)
        return float(terms.where(original > -torch.inf, 0.0).sum(-1).mean())


def num_tokens(model: Any) -> int:
    """Tokens of a model's reference answer."""
    return FEW if model.num_parameters() < TOY else TOKENS


def check_work(model: Any) -> CheckWork:
    """What `ReferenceAnswer.of` and `check_answer` compute."""
    return CheckWork(steps=2 * num_tokens(model))


def _prompt(model: Any, tokenizer: Any) -> list[int]:
    vocabulary = model.get_input_embeddings().num_embeddings
    if tokenizer is None:
        return probe_ids(vocabulary, PROMPT)
    if getattr(tokenizer, "chat_template", None):
        ids = encode_chat(tokenizer, packaged("calibration/prompts.txt").partition("\n")[0])
    else:
        ids = encode_start(tokenizer, packaged("filler.txt")[: 16 * PROMPT])[:PROMPT]
    check_ids(ids, vocabulary)
    return ids


def check_answer(
    model: Any,
    answer: ReferenceAnswer,
    predicted: float | None,
    progress: Progress | None = None,
) -> float:
    """Return the divergence of a folded model from the original's answer, in nats per token. The
    model is not changed.

    predicted: nats per token that its plan expects; None if it has no prediction. Raises ValueError
    if the divergence exceeds FLOOR by more than PLAN times the prediction, or ENGINE times the
    divergence of the same model in transformers' cache, or if logits are not finite. A model with
    low-rank entries has neither bound, and must be better than a random guess.
    """
    with rounded(model, answer.dtype), inference(model):
        divergence = answer.divergence(_through_cache(model, answer, progress))
        limit = _limit(model, answer, predicted)
    if divergence <= limit:
        return divergence
    raise SettingError(
        f"the compressed model answers otherwise than the original: {divergence:.2f} nats a token"
        f" over {len(answer.tokens)} tokens, where its recipe and size explain {limit:.2f} at most;"
        " nothing was saved. Try a larger cache, another recipe or another dtype; `check=False` "
        "saves it all the same"
    )


def _limit(model: Any, answer: ReferenceAnswer, predicted: float | None) -> float:
    spec = spec_of(model)
    if spec is not None and spec.hybrid is not None:
        return log(answer.logits.shape[1])
    dense = answer.divergence(_dense(model, answer))
    if predicted is None:
        return FLOOR + ENGINE * dense
    return FLOOR + min(PLAN * predicted, ENGINE * max(dense, min(predicted, BITS)))


def _dense(model: Any, answer: ReferenceAnswer) -> Tensor:
    """Compute logits [N, V] in transformers without a cache."""
    ids = torch.tensor([answer.read], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0, -len(answer.tokens) :].float()


def _through_cache(model: Any, answer: ReferenceAnswer, progress: Progress | None = None) -> Tensor:
    """Compute logits [N, V] token by token in the engine; in transformers if the engine does not
    serve the model. Raises ValueError that names the first module whose outputs are not finite."""
    if not fixed_rope(model.config):
        return _dense(model, answer)
    most = min(LONGEST, max_positions(model) or LONGEST)
    runner = build_runner(model, CacheConfig(), num_slots=1, max_tokens=most)
    fed = [answer.prompt], [answer.tokens[:-1]]
    step = counter(progress, CHECK_ANSWER, len(answer.tokens))
    steps = list[Tensor]()
    for step_logits in run_tokens(runner, *fed):
        steps.append(step_logits.float())
        step()
    logits = torch.cat(steps)
    if not bool(rows_are_finite(logits).all()):
        why = not_finite(runner, *fed)
        raise ValueError(f"nothing was saved, as the compressed model gives no answer: {why}")
    return logits
