"""Changes of logits before a token is sampled, in rows whose settings ask for it: biases,
penalties, too early ends, bad words, and allowed tokens or grammars.

Shapes: n rows, V vocabulary, e entries that change, each of another row or token, m masked rows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.engine.requests.params import GRAMMARS
from kvfold.engine.requests.request import Request
from kvfold.layout.pages import Ints
from kvfold.ops.common.launch import upload
from kvfold.utils.errors import SettingError

Before = tuple[tuple[Tensor, ...], Tensor]  # index, and the values before the change


@dataclass(frozen=True, kw_only=True)
class LogitEdits:
    """Changes of logits, in the same order as vLLM. Entry i is logits[rows[i], tokens[i]]: add
    bias[i]; divide positive logits by repetition[i], multiply negative ones with it; subtract
    penalty[i]. In row masked[j], every token whose bit in bits[j] is not set becomes -inf: bit i %
    32 of entry i // 32 is token i's.

    rows, tokens: int64 [e]. bias, repetition, penalty: fp32 [e]. masked: int64 [m]. bits: int32
        [m, b]; tokens after the last bit are not set.
    refused: row -> why its settings allow no token; the token sampled in such a row has no meaning.
    """

    rows: Ints
    tokens: Ints
    bias: np.ndarray
    repetition: np.ndarray
    penalty: np.ndarray
    masked: Ints
    bits: np.ndarray
    refused: Mapping[int, SettingError]

    @torch.inference_mode()  # as logits are
    def apply(self, logits: Tensor) -> "Applied":
        """Change logits [n, V] in place."""
        device = logits.device
        index = upload(self.rows, device), upload(self.tokens, device)
        bias, repetition, penalty = (
            upload(x, device) for x in (self.bias, self.repetition, self.penalty)
        )
        before = logits[index]
        edited = before + bias
        edited = torch.where(edited > 0, edited / repetition, edited * repetition) - penalty
        logits[index] = edited
        done: list[Before] = [(index, before)]
        if len(self.masked):
            done.append(self._mask(logits))
        return Applied(logits, done)

    def _mask(self, logits: Tensor) -> Before:
        rows = upload(self.masked, logits.device)
        allowed = self._allowed(logits.device)[:, : logits.shape[-1]]
        lacking = F.pad(~allowed, (0, logits.shape[-1] - allowed.shape[-1]), value=True)
        raw = logits[rows]
        logits[rows] = raw.masked_fill(lacking, -torch.inf)
        return (rows,), raw

    def _allowed(self, device: torch.device) -> Tensor:
        """The bits as bool [m, 32 b]. For a GPU they are unpacked after the copy, which has fewer
        bytes then."""
        if device.type == "cpu":
            flags = np.unpackbits(self.bits.astype("<i4").view(np.uint8), axis=1, bitorder="little")
            return torch.from_numpy(flags).view(torch.bool)
        shifted = upload(self.bits, device)[:, :, None]
        shifted = shifted >> torch.arange(32, dtype=torch.int32, device=device)
        return (shifted & 1).bool().flatten(1)


@dataclass(frozen=True)
class Applied:
    """Edits that were applied to logits [n, V], and the values before each, in order."""

    logits: Tensor
    before: list[Before]

    @torch.inference_mode()
    def undo(self) -> None:
        for index, raw in reversed(self.before):
            self.logits[index] = raw


def logit_edits(requests: Sequence[Request], eos_ids: Collection[int]) -> LogitEdits | None:
    """The changes of logits for the next tokens of requests, one per row; None: no changes."""
    edited = [(i, x) for i, x in enumerate(requests) if x.sampling.edits]
    guided = [(x.guide, x.outputs) for _, x in edited if x.guide is not None]
    for guide, outputs in guided:
        guide.prepare(outputs)
    for guide, _ in guided:
        guide.flush()
    entries_of_rows = [_entries(row, request, eos_ids) for row, request in edited]
    masks: dict[int, np.ndarray] = {}
    refused: dict[int, SettingError] = {}
    for row, request in edited:
        try:
            if (bits := _mask(request, eos_ids)) is not None:
                masks[row] = bits
        except SettingError as error:
            refused[row] = error
    if not masks and not refused and not any(len(x["rows"]) for x in entries_of_rows):
        return None
    columns = {
        name: np.concatenate([x[name] for x in entries_of_rows]) for name in entries_of_rows[0]
    }
    masked = np.array(list(masks), dtype=np.int64)
    return LogitEdits(**columns, masked=masked, bits=_stack(masks.values()), refused=refused)


def _entries(row: int, request: Request, eos_ids: Collection[int]) -> dict[str, np.ndarray]:
    """The edited entries of one row, each token once."""
    sampling, tables = request.sampling, request.sampling.tables
    counts = request.token_counts() if sampling.penalises else {}
    seen = np.fromiter(counts, np.int64, len(counts))
    forbidden = _forbidden(request, eos_ids)
    tokens = np.unique(np.concatenate([tables.biased, forbidden, seen]))
    bias, occurrences = np.zeros((2, len(tokens)), dtype=np.float32)
    repetition = np.ones(len(tokens), dtype=np.float32)
    bias[np.searchsorted(tokens, tables.biased)] = tables.bias
    bias[np.searchsorted(tokens, forbidden)] = -np.inf
    repeated = np.searchsorted(tokens, seen)
    occurrences[repeated] = np.fromiter(counts.values(), np.float32, len(counts))
    repetition[repeated] = sampling.repetition_penalty
    penalty = sampling.frequency_penalty * occurrences + sampling.presence_penalty * (
        occurrences > 0
    )
    return {
        "rows": np.full(len(tokens), row),
        "tokens": tokens,
        "bias": bias,
        "repetition": repetition,
        "penalty": penalty.astype(np.float32),
    }


def _forbidden(request: Request, eos_ids: Collection[int]) -> Ints:
    """End tokens before `min_tokens` outputs, and the last tokens of bad words that are complete
    otherwise."""
    sampling, tables = request.sampling, request.sampling.tables
    tokens = tables.ends(request.outputs) if sampling.bad_words else []
    if request.num_outputs < sampling.min_tokens:
        ends = () if sampling.ignore_eos else eos_ids
        tokens += [np.fromiter(ends, np.int64, len(ends)), tables.stop]
    return np.concatenate([np.zeros(0, dtype=np.int64), *tokens])


def _mask(request: Request, eos_ids: Collection[int]) -> np.ndarray | None:
    """Bit mask of the allowed tokens; None: all. Raises SettingError if none is allowed."""
    masks = [request.guide.allowed_tokens(request.outputs)] if request.guide is not None else []
    if request.sampling.tables.allowed_bits is not None:
        masks.append(request.sampling.tables.allowed_bits)
    if not masks:
        return None
    bits: np.ndarray = np.bitwise_and.reduce(_stack(masks))
    if not _cleared(bits, _forbidden(request, eos_ids)).any():
        raise SettingError(_nothing_left(request))
    return bits


def _cleared(bits: np.ndarray, tokens: Ints) -> np.ndarray:
    """A mask without some tokens."""
    ids = tokens[tokens < 32 * len(bits)]
    cleared = bits.view(np.uint32).copy()
    np.bitwise_and.at(cleared, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    return cleared


def _nothing_left(request: Request) -> str:
    """Error message for settings that exclude all tokens."""
    names = ("allowed_token_ids", *GRAMMARS, "min_tokens", "bad_words")
    settings = [f"`{name}`" for name in names if getattr(request.sampling, name)]
    return (
        f"{', '.join(settings)}: together they leave no token that may come after "
        f"{request.num_outputs}: allow more, or leave one of them out"
    )


def _stack(masks: Collection[np.ndarray]) -> np.ndarray:
    """Masks of rows, int32 [m, b], padded with zeros."""
    width = max(map(len, masks), default=0)
    padded = [np.pad(bits, (0, width - len(bits))) for bits in masks]
    return np.array(padded, dtype=np.int32).reshape(len(masks), width)
