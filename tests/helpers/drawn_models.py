"""Random tiny models, and random maps of them, which the differential fuzzer draws."""

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers as hf
from hypothesis import strategies as st
from torch import Tensor

import kvfold
from kvfold.hub.checkpoint import mark
from kvfold.layout import CacheSpec, Latent, LayerSpec, Side
from kvfold.layout.latents import KeyKind, ValueKind, plain_layer
from kvfold.maps.family import attention_family
from kvfold.maps.layer_maps import Maps
from kvfold.maps.layers import attention_layers
from kvfold.maps.rope_maps import RopeMaps
from kvfold.maps.rotation import find_rotations
from kvfold.maps.sidecar import Sidecar, probes_of
from kvfold.models.families import family_of
from kvfold.models.fold import LatentMaps, fold_model
from plain_maps import LayerPlan, Reference, Rope

VOCABULARY = 61
POSITIONS = 256
# Types whose weights can be folded, and others, which maps beside the weights serve alone. None
# with norms behind attention alone, such as olmo2: they amplify rounding where outputs are small.
FOLDED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gpt_neox", "opt")
OTHERS = ("gemma3_text", "gpt_oss", "cohere2", "glm", "smollm3", "stablelm", "gpt2")
SLIDING = ("mistral", "qwen2", "gemma2", "gemma3_text", "gpt_oss", "cohere2")
WHOLE = ("gpt_neox", "opt", "gpt2", "stablelm", "phi3", "qwen2")  # heads fill the width
MHA = ("gpt_neox", "opt", "gpt2")  # as many KV heads as query heads
EAGER = ("gemma2", "gpt_oss")  # sdpa of transformers leaves caps and sinks out
UNROTATED = ("opt", "gpt2")
NEIGHBOURS = ("cohere2", "glm")
PARTIAL = ("phi3", "gpt_neox", "glm", "stablelm")


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A tiny model. window: of its sliding layers, where its type has some; partial: share of a
    head that is rotated, where its type has one; sliding: which layers are, in bits."""

    kind: str
    layers: int
    kv_heads: int
    group: int
    head_dim: int
    theta: float
    window: int
    sliding: int
    partial: float
    bias: bool
    eager: bool
    seed: int

    @property
    def windows(self) -> list[int | None]:
        """Tokens that a query of each layer sees; None: all."""
        if self.kind == "mistral":
            return [self.window if self.sliding & 1 else None] * self.layers
        slides = [self.kind in SLIDING and bool(self.sliding >> i & 1) for i in range(self.layers)]
        return [self.window if x else None for x in slides]

    @property
    def ropes(self) -> list[Rope | None]:
        """How each layer rotates keys."""
        return [self._rope(i) for i in range(self.layers)]

    def _rope(self, layer: int) -> Rope | None:
        slides = self.windows[layer] is not None
        if self.kind in UNROTATED or (self.kind == "cohere2" and not slides):
            return None
        if self.kind == "smollm3" and layer % 2:
            return None
        theta = 500.0 if self.kind == "gemma3_text" and slides else self.theta
        width = int(self.head_dim * (self.partial if self.kind in PARTIAL else 1))
        powers = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        return Rope(1.0 / theta**powers, self.kind in NEIGHBOURS)

    @property
    def has_sinks(self) -> bool:
        return self.kind == "gpt_oss"

    @property
    def hidden(self) -> int:
        """Numbers of a hidden state, which some types take from their heads."""
        return self.head_dim * self.kv_heads * self.group if self.kind in WHOLE else 24

    @property
    def shape(self) -> dict[str, int]:
        """In the names of most configs."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.kv_heads * self.group,
        }

    @property
    def config(self) -> hf.PreTrainedConfig:
        types = ["full_attention" if x is None else "sliding_attention" for x in self.windows]
        rope = {"rope_type": "default", "rope_theta": self.theta}
        if self.kind in PARTIAL:
            rope["partial_rotary_factor"] = self.partial
        about: dict[str, Any] = {
            **self.shape,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": POSITIONS,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            "attn_implementation": "eager" if self.eager or self.kind in EAGER else "sdpa",
        }
        if self.kind == "opt":
            about |= {"ffn_dim": 32, "word_embed_proj_dim": self.hidden}
            return hf.OPTConfig(**about, dropout=0.0)
        if self.kind == "gpt2":
            return hf.GPT2Config(**about)  # which knows these names too
        about |= {
            "intermediate_size": 32,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_parameters": rope,
        }
        if self.kind in SLIDING and self.kind != "mistral":
            about |= {"layer_types": types, "sliding_window": self.window}
        about |= self._special()
        return hf.CONFIG_MAPPING[self.kind](
            **{name: x for name, x in about.items() if x is not None or name == "eos_token_id"}
        )

    def _special(self) -> dict[str, Any]:
        """Arguments of one type alone; None leaves one out."""
        full, near = ({"rope_type": "default", "rope_theta": x} for x in (self.theta, 500.0))
        by_kind: dict[str, dict[str, Any]] = {
            "llama": {"attention_bias": self.bias},
            "mistral": {"sliding_window": self.windows[0]},
            "qwen2": {"head_dim": None, "use_sliding_window": True},
            "qwen3": {"attention_bias": self.bias},
            "phi3": {"head_dim": None, "sliding_window": None},
            "gemma2": {
                "query_pre_attn_scalar": 8,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 5.0,
            },
            "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
            "gemma3_text": {
                "query_pre_attn_scalar": 8,
                "rope_parameters": {"full_attention": full, "sliding_attention": near},
            },
            "gpt_oss": {
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "attention_bias": self.bias,
            },
            "cohere2": {"use_qk_norm": False, "attention_bias": self.bias},
            "smollm3": {
                "no_rope_layers": [1 - i % 2 for i in range(self.layers)],
                "attention_bias": self.bias,
            },
            "stablelm": {"head_dim": None, "qk_layernorm": self.bias},
        }
        return by_kind.get(self.kind, {})

    @cached_property
    def model(self) -> hf.PreTrainedModel:
        """Random weights, with biases and norms that are not trivial. Nobody changes it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = hf.AutoModelForCausalLM.from_config(self.config).eval()
            with torch.no_grad():
                for x in model.parameters():
                    x.add_(torch.randn_like(x) * 0.15)
        model.generation_config.eos_token_id = None
        return model


def attentions(model: Any) -> dict[str, Any]:
    """The modules that call attention, by name."""
    modules = model.named_modules()
    return {name: x for name, x in modules if type(x).__name__.endswith("Attention")}


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """The maps of a layer. keys: a LayerSpec's; joint: one latent of both sides; key_heads,
    value_heads: of each latent; ranks: in eighths of what latents stand for, taken in turn."""

    keys: KeyKind
    values: ValueKind
    joint: bool
    key_heads: int
    value_heads: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SubjectCase:
    """A model with maps: folded into its weights, or attached beside them."""

    model: ModelCase
    folded: bool
    layers: tuple[LayerCase, ...]
    seed: int

    @cached_property
    def plans(self) -> list[LayerPlan]:
        random = torch.Generator().manual_seed(self.seed)
        layers = zip(self.layers, self.model.ropes, self.model.windows, strict=True)
        return [self._plan(*x, random) for x in layers]

    def _plan(
        self, case: LayerCase, rope: Rope | None, window: int | None, random: torch.Generator
    ) -> LayerPlan:
        model, d, heads = self.model, self.model.head_dim, self.model.kv_heads
        if case.keys == "plain":
            return LayerPlan(plain_layer(geometry_of(model)), (), rope, window)
        latents: list[Latent] = []
        maps = []
        for side, size in self._latents(case):
            for i in range(0, heads, size):
                width = size * d * len(side)
                share = case.ranks[len(latents) % len(case.ranks)]
                rank = -(-width * share // 8)
                last = side != "k" and i + size == heads
                if last and not any(x.rank for x in latents):
                    rank = max(1, rank)  # a layer stores something
                about = torch.randn(width, generator=random, dtype=torch.float64)
                capped = model.kind == "gemma2" and case.keys != "pre_rope"
                if (model.has_sinks or capped) and side == "k":
                    about = about * (case.keys == "pre_rope")
                if model.has_sinks and "v" in side:
                    about = about * (torch.arange(width) < width - size * d)
                latents.append(Latent(side=side, heads=tuple(range(i, i + size)), rank=rank))
                maps.append(random_latent(width, rank, about, random))
        spec = LayerSpec(keys=case.keys, values=case.values, latents=tuple(latents))
        return LayerPlan(spec, tuple(maps), rope, window)

    def _latents(self, case: LayerCase) -> list[tuple[Side, int]]:
        """Sides of latents, and of how many heads each is."""
        if case.joint:
            return [("kv", self.model.kv_heads)]
        return [("k", case.key_heads), ("v", case.value_heads)]

    @property
    def reference(self) -> Reference:
        """The original with these maps applied plainly."""
        model = copy.deepcopy(self.model.model)
        return Reference(model, list(attentions(model).values()), self.plans)

    @property
    def original(self) -> Reference:
        """The original as it is, computed as plainly."""
        model = copy.deepcopy(self.model.model)
        plain = plain_layer(geometry_of(self.model))
        plans = [LayerPlan(plain, (), x.rope, x.window) for x in self.plans]
        return Reference(model, list(attentions(model).values()), plans)

    def engine(self, **settings: Any) -> kvfold.LLM:
        """An engine that serves what is tested."""
        model, has_maps = self.model.model, any(x.latents for x in self.plans)
        if self.folded:
            return kvfold.LLM(self.subject, **settings)
        maps = self.sidecar(model) if has_maps else None
        return kvfold.LLM(copy.deepcopy(model), maps=maps, **settings)

    @property
    def subject(self) -> hf.PreTrainedModel:
        """What is tested."""
        model = copy.deepcopy(self.model.model)
        if self.folded:
            spec = CacheSpec(
                geometry=geometry_of(self.model), layers=tuple(x.spec for x in self.plans)
            )
            maps: list[Any] = [list(x.latents) or [None] * len(x.spec.latents) for x in self.plans]
            fold_model(model, family_of(model.config), spec, maps)
            mark(model, spec, {})
        else:
            kvfold.attach(model, self.sidecar(model))
        return model

    def sidecar(self, model: hf.PreTrainedModel) -> Sidecar:
        """The maps of a plain model, in kvfold's form."""
        layers = attention_layers(model)
        rotations = {}
        if any(x.spec.keys == "pre_rope" for x in self.plans):
            names = [
                x.name for x, y in zip(layers, self.plans, strict=True) if "pre" in y.spec.keys
            ]
            rotations = find_rotations(model, layers, names)
        mapped = [(x.name, y) for x, y in zip(layers, self.plans, strict=True) if y.latents]
        geometry = attention_family(layers).geometry(model.config)
        spec = CacheSpec(geometry=geometry, layers=tuple(x.spec for _, x in mapped))
        maps = {name: maps_of(plan, rotations.get(name)) for name, plan in mapped}
        return Sidecar(maps=maps, spec=spec, base=probes_of(layers), provenance={})


def geometry_of(case: ModelCase) -> Any:
    """Of a type that has no family, as far as plain layers need it."""
    if case.kind in FOLDED:
        return family_of(case.config).geometry(case.config)
    layers = attention_layers(case.model)
    return attention_family(layers).geometry(case.config)


def maps_of(plan: LayerPlan, rotation: Any) -> Maps:
    keys, values = (
        [x for latent, x in zip(plan.spec.latents, plan.latents, strict=True) if s in latent.side]
        for s in "kv"
    )
    if plan.spec.keys == "pre_rope":
        return RopeMaps.before_rope(plan.spec, plan.latents, rotation)
    return Maps.of(keys, values)


def random_latent(width: int, rank: int, mean: Tensor, random: torch.Generator) -> LatentMaps:
    """Oblique maps of a latent, whose condition is at most 3."""
    down = torch.randn(width, width, generator=random, dtype=torch.float64)
    scale = torch.rand(width, generator=random, dtype=torch.float64) + 0.5
    down = torch.linalg.qr(down)[0] * scale
    up = torch.linalg.inv(down).mT
    return LatentMaps(down[:, :rank], up[:, :rank], mean)


# -- what hypothesis draws --------------------------------------------------------------------

seeds = st.integers(0, 2**16)
ranks = st.sampled_from([4, 1, 2, 3, 5, 6, 7, 8, 0])


@st.composite
def model_cases(draw: Any, kinds: tuple[str, ...] = (*FOLDED, *OTHERS)) -> ModelCase:
    kind = draw(st.sampled_from(kinds))
    return ModelCase(
        kind=kind,
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        group=1 if kind in MHA else draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([8, 4, 12, 16])),
        theta=draw(st.sampled_from([10000.0, 50.0, 1e6])),
        window=draw(st.sampled_from([8, 3, 5, 16])),
        sliding=draw(st.integers(0, 7)),
        partial=draw(st.sampled_from([0.5, 1.0])),
        bias=draw(st.booleans()),
        eager=draw(st.booleans()),
        seed=draw(seeds),
    )


@st.composite
def subject_cases(draw: Any, **more: Any) -> SubjectCase:
    model = draw(model_cases(**more))
    folded = model.kind in FOLDED and draw(st.booleans())
    return SubjectCase(
        model=model,
        folded=folded,
        layers=tuple(draw(layer_cases(model, folded)) for _ in range(model.layers)),
        seed=draw(seeds),
    )


@st.composite
def layer_cases(draw: Any, model: ModelCase, folded: bool) -> LayerCase:
    kinds = ["pre_rope", "pre_rope", "post_rope", "post_rope", "plain"]
    if folded and model.kind in UNROTATED:
        kinds = ["absorbed", "plain"]
    keys = draw(st.sampled_from(kinds))
    sizes = [x for x in (1, 2, 4) if model.kv_heads % x == 0]
    joint = keys == "pre_rope" and draw(st.booleans())
    values: ValueKind = "rebuilt"
    if folded:
        values = draw(st.sampled_from(["rebuilt", "fused"]))
    return LayerCase(
        keys=keys,
        values="plain" if keys == "plain" else values,
        joint=joint,
        key_heads=1 if keys == "post_rope" else draw(st.sampled_from(sizes)),
        value_heads=draw(st.sampled_from(sizes)),
        ranks=tuple(draw(st.lists(ranks, min_size=1, max_size=3))),
    )
