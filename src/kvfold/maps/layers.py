"""Which modules of a model call attention, and with what: found by one short forward.

Shapes: T probe tokens; Hq / Hk query / KV heads, d, dv head dims of keys and values.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.models.devices import input_device
from kvfold.models.finite import probe_ids
from kvfold.utils.errors import SettingError

TOKENS = 16
_LOOK = "kvfold_look"
_PROBE = "_kvfold_probe"  # of a module, in its __dict__, while a probe looks
MASKED_BY_VALUES = ("doge",)  # masks are computed from the values that the cache gives back


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionLayer:
    """A module that calls attention. name: in the model; source: of the module whose keys and
    values it reads, its own name in most models, None where they are not as a cache stores them;
    sinks [Hq]: scores of its own that stand beside all others, or None; window: tokens that a query
    sees (None: all). keys [Hk, T, d], values [Hk, T, dv]: of the probe, where attention gives
    nothing in any layer. positions int64 [1, T]: where attention was told the probe's tokens are,
    or None."""

    name: str
    source: str | None
    module: nn.Module
    num_query_heads: int
    scaling: float | None
    softcap: float | None
    window: int | None
    sinks: Tensor | None
    keys: Tensor
    values: Tensor
    positions: Tensor | None

    @property
    def shape(self) -> tuple[int, int, int, int, float | None]:
        """What layers have to share to be planned together."""
        heads = self.num_query_heads, self.num_kv_heads
        return (*heads, self.head_dim, self.value_dim, self.softcap)

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[2]

    @property
    def value_dim(self) -> int:
        return self.values.shape[2]


class _Probe:
    """A forward that is looked at: what caches gave back, by whom it was first read, and the layers
    so far."""

    def __init__(self, model: Any) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.cached: list[tuple[Tensor, Tensor]] = []
        self.readers: dict[int, str] = {}
        self.layers: list[AttentionLayer] = []

    def source(self, name: str, key: Tensor, value: Tensor) -> str | None:
        """Who read these keys and values first, this one if nobody did; None for other ones."""
        for i, (k, v) in reversed(list(enumerate(self.cached))):
            if _same(k, key) and _same(v, value):
                return self.readers.setdefault(i, name)
        return None

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Caches that pass through modules write down what they give back, and the model's
        attention writes down what it is asked."""
        modules = [(x, x.training) for x in model.modules()]
        hooks = []
        try:
            for module, _ in modules:
                module.__dict__[_PROBE] = self
                module.training = False  # no dropout, no layer left out
                hooks.append(module.register_forward_pre_hook(self._watch, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, training in modules:
                module.training = training
                module.__dict__.pop(_PROBE, None)

    def _watch(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Watch the caches among a module's arguments, which live as long as the probe."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache) and "update" not in value.__dict__:
                value.update = partial(self._updated, value.update)  # type: ignore[method-assign]

    def _updated(self, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = update(*args, **kwargs)
        self.cached.append(found[:2])
        return found


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one, or views alike."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _look(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attention that gives nothing, and writes down what it was asked."""
    probe = module.__dict__[_PROBE]
    name = probe.names[module]
    probe.layers.append(
        AttentionLayer(
            name=name,
            source=probe.source(name, key, value),
            module=module,
            num_query_heads=query.shape[1],
            scaling=asked.get("scaling"),
            softcap=asked.get("softcap"),
            window=asked.get("sliding_window"),
            sinks=asked.get("s_aux"),
            keys=key[0],
            values=value[0],
            positions=plain_positions(asked.get("position_ids")),
        )
    )
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return query.new_zeros(shape), None


def plain_positions(positions: Any) -> Tensor | None:
    """`position_ids` where they say one place a token, [B or 1, T], else None."""
    return positions if isinstance(positions, Tensor) and positions.dim() == 2 else None


ALL_ATTENTION_FUNCTIONS.register(_LOOK, _look)
ALL_MASK_ATTENTION_FUNCTIONS.register(_LOOK, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@torch.no_grad()
def attention_layers(model: Any, positions: Tensor | None = None) -> list[AttentionLayer]:
    """The layers of a causal LM that call transformers' attention, in order. positions int64 [T]:
    of the probe's tokens (None: the first ones)."""
    probe = _Probe(model)
    count = TOKENS if positions is None else len(positions)
    ids = probe_ids(model.get_input_embeddings().num_embeddings, count)
    device = input_device(model)
    more = {} if positions is None else {"position_ids": positions[None].to(device)}
    with using_attention(model, lambda _: _LOOK), probe.watching(model):
        # The whole model: compressed-tensors unpacks weights in a hook of it.
        model(input_ids=torch.tensor([ids], device=device), use_cache=True, **more)
    return probe.layers


def unwrapped(model: Any) -> Any:
    """The model of transformers inside what torch.compile or PEFT made of it."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def learns_prompt(model: Any) -> bool:
    """Whether PEFT puts learned tokens or keys before a model's prompts, outside of the model."""
    adapters = getattr(model, "peft_config", None)
    return isinstance(adapters, dict) and any(
        getattr(x, "is_prompt_learning", False) for x in adapters.values()
    )


def check_layers(model: Any, layers: Sequence[AttentionLayer]) -> None:
    """Raises SettingError for a model whose layers do not call transformers' attention interface,
    or with other keys and values than their cache stores."""
    kind = model.config.model_type
    if not layers or not model._can_set_attn_implementation():
        raise SettingError(
            f"no layer of model type {kind!r} calls transformers' attention interface, so no map"
            " of keys and values can act there"
        )
    for layer in layers:
        if kind in MASKED_BY_VALUES or hasattr(layer.module, "indexer"):
            raise SettingError(
                f"{layer.name} of model type {kind!r} chooses the keys that it sees by what it"
                " stores, which maps would change"
            )
    if wrong := next((x for x in layers if x.source is None), None):
        raise SettingError(
            f"{wrong.name} of model type {kind!r} attends to other keys and values than"
            " transformers' cache stores for it (a latent that it expands, or a cache of its own),"
            " so no map of what is stored can act there"
        )


def is_recurrent(model: Any) -> bool:
    """Whether some layers keep a state that is no keys and values of tokens."""
    kinds = [type(layer).__name__ for layer in DynamicCache(config=model.config).layers]
    return bool(model._is_stateful) or any("Linear" in kind for kind in kinds)


@contextmanager
def using_attention(model: Any, name: Callable[[str], str]) -> Iterator[None]:
    """The model with the attention function that `name` gives for each one in use, until the block
    ends."""
    before = set_attention(model, name)
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation = own


def set_attention(model: Any, name: Callable[[str], str]) -> list[tuple[Any, str]]:
    """Put another attention function into all configs of a model; returns what they had."""
    configs = {id(x.config): x.config for x in model.modules() if hasattr(x, "config")}
    before = [(x, x._attn_implementation) for x in configs.values()]
    names = [name(own) for _, own in before]  # all, before one is changed: it may raise
    for (config, _), other in zip(before, names, strict=True):
        config._attn_implementation = other
    return before


def eager_attention(module: nn.Module) -> Callable[..., Any]:
    """The attention that a module's file falls back to. Raises SettingError where it has none."""
    found = getattr(import_module(type(module).__module__), "eager_attention_forward", None)
    if found is None:
        raise SettingError(
            f"{type(module).__name__} has no eager attention: load the model with"
            " attn_implementation='sdpa'"
        )
    return found
