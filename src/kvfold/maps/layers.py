"""Find the attention layers of a model, and what they pass to attention, by one short forward.

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
_LOOK = "kvfold_look"  # name of the attention function that records its arguments
_PROBE = "_kvfold_probe"  # attribute of a module while a probe records
MASKED_BY_VALUES = ("doge",)  # types that compute masks from the values that the cache returns


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionLayer:
    """A module that calls attention, as recorded by a probe forward in which attention returns
    zeros.

    name: of the module in the model.
    source: name of the module whose keys and values it reads; mostly its own; None if they are not
        those that the cache stores.
    sinks [Hq]: learned sink score per query head, or None.
    window: sliding window in tokens (None: full attention).
    keys [Hk, T, d], values [Hk, T, dv]: of the probe tokens.
    positions int64 [1, T]: of the probe tokens, as passed to attention, or None.
    """

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
        """What layers must share to be planned together."""
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
    """Records one forward: the keys and values that caches returned, which module read each first,
    and the attention layers so far."""

    def __init__(self, model: Any) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.cached: list[tuple[Tensor, Tensor]] = []
        self.readers: dict[int, str] = {}
        self.layers: list[AttentionLayer] = []

    def source(self, name: str, key: Tensor, value: Tensor) -> str | None:
        """The name of the module that read these keys and values first, `name` if none did before;
        None if no cache returned them."""
        for i, (k, v) in reversed(list(enumerate(self.cached))):
            if _same(k, key) and _same(v, value):
                return self.readers.setdefault(i, name)
        return None

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Context manager: caches record what they return, and attention records its arguments."""
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
        """Forward pre-hook: wrap `update` of the caches among a module's arguments, which live as
        long as the probe."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache) and "update" not in value.__dict__:
                value.update = partial(self._updated, value.update)  # type: ignore[method-assign]

    def _updated(self, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        updated = update(*args, **kwargs)
        self.cached.append(updated[:2])
        return updated


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same tensor, or equal views of one."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _look(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function that returns zeros and records its arguments."""
    probe = module.__dict__[_PROBE]
    name = probe.names[module]
    probe.layers.append(
        AttentionLayer(
            name=name,
            source=probe.source(name, key, value),
            module=module,
            num_query_heads=query.shape[1],
            scaling=kwargs.get("scaling"),
            softcap=kwargs.get("softcap"),
            window=kwargs.get("sliding_window"),
            sinks=kwargs.get("s_aux"),
            keys=key[0],
            values=value[0],
            positions=plain_positions(kwargs.get("position_ids")),
        )
    )
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return query.new_zeros(shape), None


def plain_positions(positions: Any) -> Tensor | None:
    """`position_ids` if they give one position per token [B or 1, T], else None."""
    return positions if isinstance(positions, Tensor) and positions.dim() == 2 else None


ALL_ATTENTION_FUNCTIONS.register(_LOOK, _look)
ALL_MASK_ATTENTION_FUNCTIONS.register(_LOOK, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@torch.no_grad()
def attention_layers(model: Any, positions: Tensor | None = None) -> list[AttentionLayer]:
    """The attention layers of a causal LM, in the order of their calls. positions int64 [T]: of the
    probe tokens (None: 0, 1, ..)."""
    probe = _Probe(model)
    count = TOKENS if positions is None else len(positions)
    ids = probe_ids(model.get_input_embeddings().num_embeddings, count)
    device = input_device(model)
    options = {} if positions is None else {"position_ids": positions[None].to(device)}
    with using_attention(model, lambda _: _LOOK), probe.watching(model):
        # The whole model: compressed-tensors unpacks weights in a hook of it.
        model(input_ids=torch.tensor([ids], device=device), use_cache=True, **options)
    return probe.layers


def unwrapped(model: Any) -> Any:
    """The transformers model inside a model wrapped by torch.compile or PEFT."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def learns_prompt(model: Any) -> bool:
    """Whether a PEFT adapter prepends learned tokens or keys to prompts, outside the model."""
    adapters = getattr(model, "peft_config", None)
    return isinstance(adapters, dict) and any(
        getattr(x, "is_prompt_learning", False) for x in adapters.values()
    )


def check_layers(model: Any, layers: Sequence[AttentionLayer]) -> None:
    """Raises SettingError for a model whose layers do not call transformers' attention interface,
    or attend to other keys and values than the cache stores."""
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
    """Whether some layers keep a recurrent state instead of keys and values per token."""
    kinds = [type(layer).__name__ for layer in DynamicCache(config=model.config).layers]
    return bool(model._is_stateful) or any("Linear" in kind for kind in kinds)


@contextmanager
def using_attention(model: Any, name: Callable[[str], str]) -> Iterator[None]:
    """Context manager: replace each attention function in use by the one that `name` returns for
    it."""
    before = set_attention(model, name)
    try:
        yield
    finally:
        for config, previous in before:
            config._attn_implementation = previous


def set_attention(model: Any, name: Callable[[str], str]) -> list[tuple[Any, str]]:
    """Set the attention function of each config of a model to what `name` returns for the current
    one. Returns the configs with their previous functions."""
    configs = {id(x.config): x.config for x in model.modules() if hasattr(x, "config")}
    before = [(x, x._attn_implementation) for x in configs.values()]
    names = [name(previous) for _, previous in before]  # all, before one is changed: it may raise
    for (config, _), chosen in zip(before, names, strict=True):
        config._attn_implementation = chosen
    return before


def eager_attention(module: nn.Module) -> Callable[..., Any]:
    """The eager attention function of a module's file. Raises SettingError if it has none."""
    function = getattr(import_module(type(module).__module__), "eager_attention_forward", None)
    if function is None:
        raise SettingError(
            f"{type(module).__name__} has no eager attention: load the model with"
            " attn_implementation='sdpa'"
        )
    return function
