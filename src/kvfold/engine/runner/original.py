"""The original model, with its own attention and an uncompressed cache: how likely it finds a text
that the engine has served.

Shapes: n tokens of a chunk, D model width, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from kvfold.engine.requests.request import TokenLogprobs
from kvfold.engine.runner.prompt_logprobs import token_logprobs
from kvfold.hub.checkpoint import saved_spec
from kvfold.models.adapter import Family, decoder_of
from kvfold.utils.errors import SettingError
from kvfold.utils.versions import cache_argument


def check_original(config: Any) -> None:
    """Raises SettingError for the transformers config of a folded model."""
    if saved_spec(config) is not None:
        raise SettingError(
            "`shadow` compares answers with the model's original attention, which a folded"
            " checkpoint no longer has: serve maps (kvfold compress without `fold`), or leave"
            " `shadow` out"
        )


class OriginalPass:
    """One pass of a text through an original model of transformers, in chunks.

    token_ids: the text. first: index of the first token to score, at least 1.
    scores: of the tokens from `first` on that were reached, each with the likeliest token.

    The cache holds keys and values of all tokens in the model's dtype, and is freed with this
    object.
    """

    def __init__(
        self, model: Any, family: type[Family], token_ids: Sequence[int], first: int
    ) -> None:
        assert 0 < first < len(token_ids), f"{first} of {len(token_ids)} tokens"
        self.model, self.token_ids, self.first = model, token_ids, first
        self.logits_of = partial(family.logits, model)
        self.cache = DynamicCache(config=model.config)
        self.num_computed = 0
        self.scores: list[TokenLogprobs] = []

    @property
    def is_done(self) -> bool:
        return len(self.scores) == len(self.token_ids) - self.first

    @torch.inference_mode()
    def advance(self, count: int) -> None:
        """Compute the next tokens, at most `count`. The last token of the text is no input."""
        start, end = self.num_computed, min(self.num_computed + count, len(self.token_ids) - 1)
        ids = torch.tensor([self.token_ids[start:end]], device=self.model.device)
        positions = torch.arange(start, end, device=ids.device)[None]
        out = decoder_of(self.model)(
            input_ids=ids, position_ids=positions, **cache_argument(self.cache), use_cache=True
        )
        self.num_computed = end
        scored_from = max(start, self.first - 1)
        hidden = out.last_hidden_state[0, scored_from - start :]
        targets = self.token_ids[scored_from + 1 : end + 1]
        self.scores += token_logprobs(hidden, targets, 1, self.logits_of)
