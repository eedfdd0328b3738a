"""The saved form of a folded model: an ordinary Hugging Face directory that transformers loads
after `import kvfold`.

`config.json` carries `quantization_config: {"quant_method": "kvfold", "cache": ..., ...}`; the
weights are plain safetensors. Registered through transformers' public quantizer hooks.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvfold.layout import CacheSpec
from kvfold.models.weights import (
    check_complete,
    check_numbers,
    digests,
    in_layer,
    sample,
    shape,
    stored,
)

FORMAT = 2
# Format 1: its digest covers the first rows of attention tensors only, and it has no guard tensor.
READABLE_FORMATS = (1, FORMAT)
_ATTENTIONS = ("sdpa", "eager")
_MEANING = (  # config settings that change what a model computes, but no shape of its weights
    "activation_function",
    "attn_logit_softcapping",
    "do_layer_norm_before",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "sliding_window",
    "tie_word_embeddings",
    "use_parallel_residual",
)


@register_quantization_config("kvfold")
class KVFoldConfig(QuantizationConfigMixin):
    """cache: a CacheSpec as a dict.
    provenance: recipe, budget and text that the model was made with.
    digest: of `cache` and all weights saved with it; None if weights were offloaded.
    scores: whether attention modules have a learned `score_map`.
    """

    def __init__(
        self,
        cache: dict[str, Any] | None = None,
        provenance: dict[str, Any] | None = None,
        digest: str | None = None,
        scores: bool = False,
        format: int = FORMAT,
        quant_method: str = "kvfold",
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ValueError(
                f"unknown keys in the kvfold section of config.json: {', '.join(sorted(unknown))}; "
                "it was written by another version of kvfold"
            )
        if format not in READABLE_FORMATS:
            raise ValueError(
                f"this checkpoint has kvfold format {format}, this kvfold reads formats "
                f"{' and '.join(map(str, READABLE_FORMATS))}: install the matching kvfold or"
                " compress again"
            )
        for name, value in (("cache", cache), ("provenance", provenance)):
            if not isinstance(value, dict | None):
                raise ValueError(
                    f"{name} in the kvfold section of config.json must be an object; got {value!r}"
                )
        self.quant_method = quant_method  # type: ignore[assignment]  # theirs is an enum
        self.cache = cache or {}
        self.provenance = provenance or {}
        self.digest, self.scores = digest, scores
        self.format = format

    @property
    def spec(self) -> CacheSpec:
        return CacheSpec.from_dict(self.cache)

    def digest_of(self, tensors: Mapping[str, Any], config: Any) -> str:
        """Digest of `cache`, the model's config and tensors (whole, or slices of files). In format
        1: only of `cache` and the tensors of folded attention modules."""
        digest = hashlib.sha256(json.dumps(self.cache, sort_keys=True).encode())
        if self.format > 1:
            digest.update(json.dumps(_meaning(config), sort_keys=True).encode())
        # Tensors that are in no layer have another name in files of some families.
        named = ((name if in_layer(name) else "", x) for name, x in tensors.items())
        for part in sample(tensors) if self.format == 1 else digests(named):
            digest.update(part)
        return digest.hexdigest()


@register_quantizer("kvfold")
class KVFoldQuantizer(HfQuantizer):
    """Replaces attention modules by empty folded ones before transformers loads the weights."""

    requires_calibration = True
    quantization_config: KVFoldConfig

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Collection[str] | None = None, **_: Any
    ) -> None:
        from kvfold.models.families import family_of  # here: transformers is imported completely

        family = family_of(model.config)
        spec = self.quantization_config.spec
        geometry = family.geometry(model.config)
        if geometry != spec.geometry:
            raise ValueError(
                f"config.json describes {geometry} but its cache spec was made for"
                f" {spec.geometry}; the checkpoint's files do not belong together"
            )
        check_attention(model.config)
        with torch.device("meta"):
            for index in range(geometry.num_layers):
                folded = family.swap(model, spec, index)
                if self.quantization_config.scores:
                    folded.add_score_map()
        family.connect(model)
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, re.escape(guard_of(model))}
        if checkpoint_files and all(x.endswith(".safetensors") for x in checkpoint_files):
            self._check_files(model, checkpoint_files)

    def _check_files(self, model: Any, files: Collection[str]) -> None:
        """Raises ValueError for weights that do not belong to this config.json, which transformers
        would replace by random ones."""
        name, config = str(Path(next(iter(files))).parent), self.quantization_config
        wanted, folded = model.state_dict(), folded_tensors(model)
        tied, guard = model.all_tied_weights_keys.keys(), guard_of(model)
        with stored(files) as tensors:
            expected_tensors = {x: y for x, y in tensors.items() if x != guard}
            missing = {x: shape(wanted[x]) for x in wanted.keys() - expected_tensors.keys() - tied}
            unexpected = {
                x: shape(expected_tensors[x]) for x in expected_tensors.keys() - wanted.keys()
            }
            renamed = sorted(missing.values()) == sorted(unexpected.values())
            if renamed and not any(map(in_layer, missing)):  # as GPT-NeoX's lm_head is embed_out
                missing, unexpected = {}, {}
            check_complete(
                name,
                missing=missing,
                unexpected=unexpected,
                mismatched=[
                    x
                    for x in wanted
                    if x in expected_tensors and shape(wanted[x]) != shape(expected_tensors[x])
                ],
                folded=True,
            )
            check_numbers(name, expected_tensors)
            bound = folded if config.format == 1 else tensors.keys() - tied
            if config.digest not in (
                None,
                config.digest_of({x: tensors[x] for x in bound}, model.config),
            ):
                raise ValueError(
                    f"the weights in {name} are not those that its config.json was saved with, or "
                    "one of them was edited: put the files of one compression together"
                )

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Called by `save_pretrained` before it writes config.json, so that the digest is written.

        Adds a guard tensor, named like a tensor of the original attention, with a shape that no
        model has. A program without kvfold then fails to load the weights, instead of drawing
        random ones.
        """
        tensors = model.state_dict()
        config = model.config.quantization_config
        config.format, config.digest = FORMAT, None
        if any(x.is_meta for x in tensors.values()):  # offloaded
            return None, {}
        tensors[guard_of(model)] = torch.ones(1, dtype=model.dtype)
        tied = model.all_tied_weights_keys.keys()
        config.digest = config.digest_of(
            {x: y for x, y in tensors.items() if x not in tied}, model.config
        )
        return tensors, {}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def check_attention(config: Any) -> None:
    """Raises ValueError for an attention implementation that cannot read compressed entries."""
    if config._attn_implementation not in _ATTENTIONS:
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} cannot read a compressed cache; "
            f"legal: {', '.join(_ATTENTIONS)}"
        )


def _meaning(config: Any) -> dict[str, Any]:
    """Config settings that change what a model computes, but no shape of its weights."""
    settings = {name: getattr(config, name, None) for name in _MEANING}
    rope = getattr(config, "rope_parameters", None) or {}
    return settings | {name: rope.get(name) for name in ("rope_theta", "partial_rotary_factor")}


def guard_of(model: Any) -> str:
    """The name of the guard tensor: one that only the original model has."""
    from kvfold.models.families import family_of
    from kvfold.models.folded import FoldedAttention

    name = next(x for x, module in model.named_modules() if isinstance(module, FoldedAttention))
    return f"{name}.{family_of(model.config).plain_weight}"


def folded_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Tensors of all folded attention modules, by their names in the model."""
    from kvfold.models.folded import FoldedAttention

    return {
        f"{name}.{parameter}": tensor
        for name, module in model.named_modules()
        if isinstance(module, FoldedAttention)
        for parameter, tensor in module.state_dict().items()
    }


def mark(model: Any, spec: CacheSpec, provenance: dict[str, Any]) -> None:
    """Make a model that was folded in memory equal to one loaded from disk, so that
    `save_pretrained` works."""
    scores = any(name.endswith(".score_map") for name in folded_tensors(model))
    config = KVFoldConfig(cache=spec.to_dict(), provenance=provenance, scores=scores)
    quantizer = KVFoldQuantizer(config)
    model.config.quantization_config = config
    model.hf_quantizer = quantizer
    model.is_quantized = True
    model.quantization_method = config.quant_method
    quantizer.postprocess_model(model)


def spec_of(model: Any) -> CacheSpec | None:
    """The CacheSpec of a folded model; None for an original model."""
    return saved_spec(model.config)


def saved_spec(config: Any) -> CacheSpec | None:
    """The CacheSpec in a config; None for an original model."""
    saved = saved_config(config)
    return None if saved is None else saved.spec


def saved_config(config: Any) -> KVFoldConfig | None:
    """The kvfold section of a config; None for an original model, also a quantised one."""
    saved = getattr(config, "quantization_config", None)
    if isinstance(saved, dict) and saved.get("quant_method") == "kvfold":
        saved = KVFoldConfig(**saved)
    return saved if isinstance(saved, KVFoldConfig) else None


def provenance_of(model: Any) -> dict[str, Any]:
    config = getattr(model.config, "quantization_config", None)
    return dict(config.provenance) if isinstance(config, KVFoldConfig) else {}
