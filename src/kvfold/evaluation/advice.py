"""Which settings fit a model on a GPU, what each loses, and which one to take.

Losses are those measured on two real models, data/measured_losses.json; a test compares the file
with benchmarks/results. They are other models' figures for every model but these two.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import expm1, log
from typing import Any

from kvfold.compression.compressor import check_config
from kvfold.compression.planning.default import choose_for_maps
from kvfold.compression.planning.target import Target
from kvfold.compression.planning.typical import typical_spec
from kvfold.config import CacheConfig
from kvfold.evaluation.gpu_memory import GPUMemory, Room
from kvfold.hub import reference
from kvfold.layout.pages import plain_spec
from kvfold.models.families import family_of
from kvfold.models.size import DTYPE, weight_bytes
from kvfold.utils.errors import SettingError, renamed
from kvfold.utils.search import parse_ratio
from kvfold.utils.text import packaged

_PERCENT = re.compile(r"(\d{0,3}\.?\d{1,6}) ?%")
ORIGINAL = "original"
BITS = (8, 4)  # of all numbers, without maps
PLANS = {"swift": (4, 5), "lean": (4, 6), "small": (4, 6, 8)}  # factors, by recipe
GOALS = {"swift": None, "lean": "balanced", "small": "memory"}  # of `kvfold compress`


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """A model on which settings were measured.

    key: its name after `reference:`. short: for the head of a table. parameters: how many. nats:
    by setting, the increases in cross-entropy (nats/token) on Wikipedia and on Python source.
    """

    key: str
    short: str
    parameters: int
    nats: dict[str, dict[str, float]]

    @property
    def hub(self) -> str:
        """Its id on the hub."""
        return reference.MODELS[self.key].hub

    def is_model(self, name: str) -> bool:
        """Whether `name` names this model."""
        return name in (self.hub, reference.PREFIX + self.key)

    def rises(self, setting: str) -> tuple[float, float] | None:
        """The lower and the higher increase in perplexity, in per cent; None for a setting that was
        not measured."""
        if (nats := self.nats.get(setting)) is None:
            return None
        rises = [100 * expm1(x) for x in nats.values()]
        return min(rises), max(rises)


@lru_cache
def measured_models() -> list[MeasuredModel]:
    """All models that were measured."""
    table = json.loads(packaged("measured_losses.json"))
    return [MeasuredModel(key=key, **values) for key, values in table.items()]


def nearest_models(name: str, config: Any) -> list[MeasuredModel]:
    """The measured models, the one nearest in size to this model first; only the model itself if it
    was measured."""
    models = measured_models()
    if itself := [x for x in models if x.is_model(name)]:
        return itself
    spec = plain_spec(family_of(config).geometry(config))
    parameters = weight_bytes(config, spec) / DTYPE.itemsize
    return sorted(models, key=lambda x: abs(log(x.parameters / parameters)))


@dataclass(frozen=True, kw_only=True)
class Option:
    """A setting, and what fits with it.

    name: such as "--bits 8" or "swift 4x". flags: of `kvfold compress`, None if it is not needed.
    smaller: how many times smaller a request is than with the original cache. slow: KV heads whose
    keys every step reconstructs from one latent; 0 where it reconstructs none.
    """

    name: str
    flags: tuple[str, ...] | None
    memory: GPUMemory
    room: Room
    smaller: float
    slow: int


def options_of(
    original: GPUMemory, context: int, sequences: int | None, *, timed: bool, plans: bool
) -> list[Option]:
    """The settings that a user may choose from, for requests of `context` tokens: the original
    cache, fewer bits, and plans of recipes. Plans that the model cannot have are left out.

    sequences, timed: as in `GPUMemory.room`. plans: whether to make plans.
    """
    config = original.config
    memory = {"gpu_bytes": original.gpu_bytes, "share": original.share, "config": config}
    estimates: dict[str, tuple[tuple[str, ...] | None, GPUMemory]] = {ORIGINAL: (None, original)}
    for bits in BITS:
        cache = CacheConfig(bits=bits)
        estimates[f"--bits {bits}"] = None, GPUMemory(spec=None, cache=cache, **memory)
    family = family_of(config)
    geometry = family.geometry(config)
    for name, factors in PLANS.items() if plans else ():
        for factor in factors:
            target, goal = Target(factor=factor), GOALS[name]
            try:
                named = None if goal is None else name
                recipe, target, _ = choose_for_maps(named, family, config, target)
                check_config(config, recipe, None, target, None)
                spec = typical_spec(recipe, geometry, target)
                estimate = GPUMemory.of_plan(spec, cache=CacheConfig(), **memory)
            except ValueError:
                continue
            flags = () if goal is None else (f"--goal {goal}",)
            estimates[f"{name} {factor}x"] = (*flags, f"--factor {factor}"), estimate
    return [
        option(name, original, estimate, context, sequences, timed=timed, flags=flags)
        for name, (flags, estimate) in estimates.items()
    ]


def option(
    name: str,
    original: GPUMemory,
    estimate: GPUMemory,
    context: int,
    sequences: int | None,
    *,
    timed: bool,
    flags: tuple[str, ...] | None = None,
) -> Option:
    """The option of a setting. flags: those of the plan that `kvfold compress` would make; if its
    steps reconstruct keys, no time is predicted, which depends too much on the plan."""
    layers = estimate.spec.layers if estimate.spec is not None else ()
    rebuilt = (x for layer in layers if layer.keys == "pre_rope" for x in layer.key_latents)
    slow = max((len(x.heads) for x in rebuilt), default=0)
    room = estimate.room(context, sequences, timed and not (slow and flags))
    return Option(
        name=name,
        flags=flags,
        memory=estimate,
        room=room,
        smaller=original.request_bytes(context) / room.request_bytes,
        slow=slow,
    )


def choose(
    options: Sequence[Option], measured: MeasuredModel, limit: float, sequences: int | None
) -> Option | None:
    """The option to take; None if none holds so many sequences within a loss.

    Those that reconstruct no keys come first, then those that do so head by head. Of them it is
    the one with the least loss that holds all sequences, or, without a number of sequences, the
    one that holds most, of several the one with the least loss.

    limit: of the higher increase in perplexity of `measured`, in per cent.
    """
    fitting = [
        x for x in options if x.room.requests >= (sequences or 1) and loss(x, measured) <= limit
    ]

    def badness(x: Option) -> tuple[float, ...]:
        most = -x.room.requests if sequences is None else 0
        return x.slow, most, loss(x, measured)

    return min(fitting, key=badness, default=None)


def loss(option: Option, measured: MeasuredModel) -> float:
    """The higher increase in perplexity, in per cent, of a setting on a measured model."""
    if option.name == ORIGINAL:
        return 0.0
    rises = measured.rises(option.name)
    return float("inf") if rises is None else rises[1]


def parse_loss(text: str) -> float:
    """Per cent, of a text such as 1% or ppl<=1.01. Raises SettingError."""
    if "<=" in text:
        with renamed(budget="loss"):
            return round(100 * (parse_ratio(text) - 1), 6)
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        raise SettingError(
            "`loss` must be the most perplexity to add, such as 1% or 0.5%, or the same as"
            f' "ppl<=1.01"; got {text!r:.100}'
        )
    return float(match[1])
