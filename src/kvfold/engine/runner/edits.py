"""Logits that are changed before a token is chosen, in rows that ask for it: biases, penalties of
what was said, ends that come too early, words that must not come, and all but some tokens.

Shapes: n rows, V vocabulary, e entries that change, each of another row or token, m masked rows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.engine.requests.request import Request
from kvfold.layout.pages import Ints
from kvfold.ops.common.launch import upload
from kvfold.utils.errors import SettingError

Before = tuple[tuple[Tensor, ...], Tensor]  # where, and what was there


@dataclass(frozen=True, kw_only=True)
class Edits:
    """Entry i is logits[rows[i], tokens[i]], in the order of vLLM: bias[i] is added, then a
    positive one divided by repetition[i] and another multiplied with it, then penalty[i] taken off.
    In row masked[j] every token becomes -inf that bits[j] lack: bit i % 32 of number i // 32 is
    token i's, and tokens behind the last bit are lacking.

    rows, tokens int64 [e]; bias, repetition, penalty fp32 [e]; masked int64 [m], bits int32 [m, b].
    refused: why no token can come in a row, by its settings; such a row's token means nothing.
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
        """Change logits [n, V], in place."""
        device = logits.device
        at = upload(self.rows, device), upload(self.tokens, device)
        bias, repetition, penalty = (
            upload(x, device) for x in (self.bias, self.repetition, self.penalty)
        )
        raw = logits[at]
        found = raw + bias
        found = torch.where(found > 0, found / repetition, found * repetition) - penalty
        logits[at] = found
        applied: list[Before] = [(at, raw)]
        if len(self.masked):
            applied.append(self._mask(logits))
        return Applied(logits, applied)

    def _mask(self, logits: Tensor) -> Before:
        rows = upload(self.masked, logits.device)
        allowed = self._allowed(logits.device)[:, : logits.shape[-1]]
        lacking = F.pad(~allowed, (0, logits.shape[-1] - allowed.shape[-1]), value=True)
        raw = logits[rows]
        logits[rows] = raw.masked_fill(lacking, -torch.inf)
        return (rows,), raw

    def _allowed(self, device: torch.device) -> Tensor:
        """Bits as bool [m, 32 b]: unpacked where they are, or behind the copy, which is then of
        fewer bytes."""
        if device.type == "cpu":
            flags = np.unpackbits(self.bits.astype("<i4").view(np.uint8), axis=1, bitorder="little")
            return torch.from_numpy(flags).view(torch.bool)
        each = upload(self.bits, device)[:, :, None]
        each = each >> torch.arange(32, dtype=torch.int32, device=device)
        return (each & 1).bool().flatten(1)


@dataclass(frozen=True)
class Applied:
    """Edits that are in place in logits [n, V], and what was there before each, in order."""

    logits: Tensor
    before: list[Before]

    @torch.inference_mode()
    def undo(self) -> None:
        for at, raw in reversed(self.before):
            self.logits[at] = raw


def edits_of(requests: Sequence[Request], eos_ids: Collection[int]) -> Edits | None:
    """What the next tokens of requests, one a row, ask for; None: nothing."""
    asked = [(i, x) for i, x in enumerate(requests) if x.sampling.edits]
    guided = [(x.guide, x.outputs) for _, x in asked if x.guide is not None]
    for guide, outputs in guided:
        guide.ask(outputs)
    for guide, _ in guided:
        guide.send()
    entries = [_entries(row, request, eos_ids) for row, request in asked]
    masks: dict[int, np.ndarray] = {}
    refused: dict[int, SettingError] = {}
    for row, request in asked:
        try:
            if (bits := _mask(request, eos_ids)) is not None:
                masks[row] = bits
        except SettingError as error:
            refused[row] = error
    if not masks and not refused and not any(len(x["rows"]) for x in entries):
        return None
    columns = {name: np.concatenate([x[name] for x in entries]) for name in entries[0]}
    masked = np.array(list(masks), dtype=np.int64)
    return Edits(**columns, masked=masked, bits=_stack(masks.values()), refused=refused)


def _entries(row: int, request: Request, eos_ids: Collection[int]) -> dict[str, np.ndarray]:
    """One row's, each token once."""
    wanted, tables = request.sampling, request.sampling.tables
    counts = request.seen() if wanted.penalises else {}
    seen = np.fromiter(counts, np.int64, len(counts))
    forbidden = _forbidden(request, eos_ids)
    tokens = np.unique(np.concatenate([tables.biased, forbidden, seen]))
    bias, said = np.zeros((2, len(tokens)), dtype=np.float32)
    repetition = np.ones(len(tokens), dtype=np.float32)
    bias[np.searchsorted(tokens, tables.biased)] = tables.bias
    bias[np.searchsorted(tokens, forbidden)] = -np.inf
    repeated = np.searchsorted(tokens, seen)
    said[repeated] = np.fromiter(counts.values(), np.float32, len(counts))
    repetition[repeated] = wanted.repetition_penalty
    penalty = wanted.frequency_penalty * said + wanted.presence_penalty * (said > 0)
    return {
        "rows": np.full(len(tokens), row),
        "tokens": tokens,
        "bias": bias,
        "repetition": repetition,
        "penalty": penalty.astype(np.float32),
    }


def _forbidden(request: Request, eos_ids: Collection[int]) -> Ints:
    """Ends that come too early, and the last tokens of bad words whose others are out."""
    wanted, tables = request.sampling, request.sampling.tables
    tokens = tables.ends(request.outputs) if wanted.bad_words else []
    if request.num_outputs < wanted.min_tokens:
        ends = () if wanted.ignore_eos else eos_ids
        tokens += [np.fromiter(ends, np.int64, len(ends)), tables.stop]
    return np.concatenate([np.zeros(0, dtype=np.int64), *tokens])


def _mask(request: Request, eos_ids: Collection[int]) -> np.ndarray | None:
    """Bits of the tokens that may come; None: all may. Raises SettingError for none."""
    masks = [request.guide.allowed(request.outputs)] if request.guide is not None else []
    if request.sampling.tables.allowed_bits is not None:
        masks.append(request.sampling.tables.allowed_bits)
    if not masks:
        return None
    bits: np.ndarray = np.bitwise_and.reduce(_stack(masks))
    if not _cleared(bits, _forbidden(request, eos_ids)).any():
        raise SettingError(_nothing_left(request))
    return bits


def _cleared(bits: np.ndarray, tokens: Ints) -> np.ndarray:
    """Bits without those of some tokens."""
    ids = tokens[tokens < 32 * len(bits)]
    left = bits.view(np.uint32).copy()
    np.bitwise_and.at(left, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    return left


def _nothing_left(request: Request) -> str:
    """Which settings contradict each other."""
    wanted = request.sampling
    names = ("allowed_token_ids", "json_schema", "regex", "min_tokens", "bad_words")
    given = [f"`{name}`" for name in names if getattr(wanted, name)]
    return (
        f"{', '.join(given)}: together they leave no token that may come after "
        f"{request.num_outputs}: allow more, or leave one of them out"
    )


def _stack(masks: Collection[np.ndarray]) -> np.ndarray:
    """Bits of rows, int32 [m, b], where the shorter ones end with zeros."""
    width = max(map(len, masks), default=0)
    padded = [np.pad(bits, (0, width - len(bits))) for bits in masks]
    return np.array(padded, dtype=np.int32).reshape(len(masks), width)
