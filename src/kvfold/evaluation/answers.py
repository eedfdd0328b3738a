"""Does a compressed model answer as its original does? A last check before it is saved.

The original's greedy tokens are read again by the compressed model, one by one through an engine's
cache, in the dtype that the checkpoint will have. What counts is the divergence KL(original ||
compressed) in nats a token, which is what plans predict. Shapes: N tokens, V tokens of the
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.trial import feed, not_finite
from kvfold.evaluation.dense import DenseSession, inference
from kvfold.evaluation.perplexity import max_positions
from kvfold.hub.checkpoint import spec_of
from kvfold.models.finite import check_outputs, probe_ids, rows_are_finite
from kvfold.models.rotary import fixed_rope
from kvfold.models.weights import rounded
from kvfold.ops.backend import use_triton
from kvfold.utils.chat import encode_chat
from kvfold.utils.errors import SettingError
from kvfold.utils.text import packaged
from kvfold.utils.tokens import check_ids, encode_start

TOKENS = 64  # of an answer
TOY, FEW = 2**25, 8  # parameters of a model that is for tests, and tokens of its answer
PROMPT = 32  # tokens of a prompt that is not a chat
LONGEST = 1024  # tokens that a cache has room for
PLAN = 10.0  # so many times the predicted loss is lost at most: small models are far from it
ENGINE = 4.0  # the same of what transformers loses, whose cache rounds no numbers to few bits
BITS = 0.25  # nats a token of a prediction that few bits may lose: it counts a first token too much
FLOOR = 0.25  # nats a token beyond that, for few tokens and numbers of 16 bits


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What an original model answered to a prompt: tokens [N], and the logits [N, V] that each was
    the largest of, fp32 on the host. dtype: of the weights of what is checked against it; None: in
    the dtype that it has."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logits: Tensor
    dtype: torch.dtype | None

    @classmethod
    def of(cls, model: Any, tokenizer: Any, dtype: torch.dtype | None = None) -> "Answer":
        """The greedy answer of a model to a short packaged prompt, in its chat template if it has
        one. Tokens that end a text end nothing here. Raises ValueError for a model that overflows
        in `dtype`, naming the layer."""
        use_triton(model.device.type)
        if dtype not in (None, model.dtype):
            with rounded(model, dtype):
                check_outputs(model)
        count = FEW if model.num_parameters() < TOY else TOKENS
        most = max_positions(model) or LONGEST
        prompt = _prompt(model, tokenizer)[-(most - count) :]
        tokens, found = list[int](), list[Tensor]()
        with inference(model), DenseSession(model) as session:
            logits = session.read(prompt)
            for _ in range(count):
                found.append(logits.float().cpu())
                tokens.append(int(logits.argmax()))
                if len(tokens) < count:
                    logits = session.read(tokens[-1:])
        return cls(prompt=prompt, tokens=tokens, logits=torch.stack(found), dtype=dtype)

    @property
    def read(self) -> list[int]:
        """All tokens that something else is read behind."""
        return [*self.prompt, *self.tokens[:-1]]

    def divergence(self, logits: Tensor) -> float:
        """Mean KL(original || other) of other logits [N, V], nats a token."""
        own, other = (x.double().log_softmax(-1) for x in (self.logits, logits.cpu()))
        # Tokens that can never come have -inf in both.
        terms = own.exp() * (own - other)
        return float(terms.where(own > -torch.inf, 0.0).sum(-1).mean())


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


def check_answer(model: Any, answer: Answer, predicted: float | None) -> float:
    """The divergence of a folded model's answer from the original's, nats a token. The model stays
    as it is.

    predicted: nats a token that its plan expects, None where it has no prediction. Raises
    ValueError where the divergence exceeds FLOOR by more than PLAN times the prediction, or ENGINE
    times what the same model loses in transformers' cache, or where logits are not finite. A model
    whose rows have two widths has neither bound, and must be better than a guess.
    """
    with rounded(model, answer.dtype), inference(model):
        found = answer.divergence(_through_cache(model, answer))
        limit = _limit(model, answer, predicted)
    if found <= limit:
        return found
    raise SettingError(
        f"the compressed model answers otherwise than the original: {found:.2f} nats a token over "
        f"{len(answer.tokens)} tokens, where its recipe and size explain {limit:.2f} at most; "
        "nothing was saved. Try a larger cache, another recipe or another dtype; `check=False` "
        "saves it all the same"
    )


def _limit(model: Any, answer: Answer, predicted: float | None) -> float:
    spec = spec_of(model)
    if spec is not None and spec.hybrid is not None:
        return log(answer.logits.shape[1])
    dense = answer.divergence(_dense(model, answer))
    if predicted is None:
        return FLOOR + ENGINE * dense
    return FLOOR + min(PLAN * predicted, ENGINE * max(dense, min(predicted, BITS)))


def _dense(model: Any, answer: Answer) -> Tensor:
    """Logits [N, V] of a model in transformers."""
    ids = torch.tensor([answer.read], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0, -len(answer.tokens) :].float()


def _through_cache(model: Any, answer: Answer) -> Tensor:
    """The same of an engine, token by token; in transformers for a model that no engine serves.
    Raises ValueError naming the first part whose outputs are not finite."""
    if not fixed_rope(model.config):
        return _dense(model, answer)
    most = min(LONGEST, max_positions(model) or LONGEST)
    runner = build_runner(model, CacheConfig(), num_slots=1, max_tokens=most)
    fed = [answer.prompt], [answer.tokens[:-1]]
    logits = torch.cat([x.float() for x in feed(runner, *fed)])
    if not bool(rows_are_finite(logits).all()):
        why = not_finite(runner, *fed)
        raise ValueError(f"nothing was saved, as the compressed model gives no answer: {why}")
    return logits
