"""The saved form: an ordinary Hugging Face directory that transformers loads after `import kvfold`.

`config.json` carries `quantization_config: {"quant_method": "kvfold", "cache": ..., ...}`; the
weights are plain safetensors. Registered through transformers' public quantiser hooks.
"""

from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvfold.spec import CacheSpec

FORMAT = 1
_ATTENTIONS = ("sdpa", "eager")


@register_quantization_config("kvfold")
class KVFoldConfig(QuantizationConfigMixin):
    """cache: a CacheSpec as a dict; provenance: the recipe, budget and text it was made with."""

    def __init__(
        self,
        cache: dict[str, Any] | None = None,
        provenance: dict[str, Any] | None = None,
        format: int = FORMAT,
        quant_method: str = "kvfold",
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ValueError(
                f"unknown keys in the kvfold section of config.json: {', '.join(sorted(unknown))}; "
                "it was written by another version of kvfold"
            )
        if format != FORMAT:
            raise ValueError(
                f"this checkpoint has kvfold format {format}, this kvfold reads format {FORMAT}: "
                "install the matching kvfold or compress again"
            )
        self.quant_method = quant_method  # type: ignore[assignment]  # theirs is an enum
        self.cache = cache or {}
        self.provenance = provenance or {}
        self.format = format

    @property
    def spec(self) -> CacheSpec:
        return CacheSpec.from_dict(self.cache)


@register_quantizer("kvfold")
class KVFoldQuantizer(HfQuantizer):
    """Swaps in empty folded attentions before transformers loads the weights."""

    requires_calibration = True
    quantization_config: KVFoldConfig

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        from kvfold.models.families import family_of  # not before transformers is whole

        family = family_of(model.config)
        spec = self.quantization_config.spec
        found = family.geometry(model.config)
        if found != spec.geometry:
            raise ValueError(
                f"config.json describes {found} but its cache spec was made for {spec.geometry}; "
                "the checkpoint's files do not belong together"
            )
        check_attention(model.config)
        with torch.device("meta"):
            for index in range(found.num_layers):
                family.swap(model, spec, index)
        family.connect(model)

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def check_attention(config: Any) -> None:
    """Raises ValueError where transformers was asked for an attention that cannot read rows."""
    if config._attn_implementation not in _ATTENTIONS:
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} cannot read a compressed cache; "
            f"legal: {', '.join(_ATTENTIONS)}"
        )


def mark(model: Any, spec: CacheSpec, provenance: dict[str, Any]) -> None:
    """Make a model folded in memory the same as one loaded from disk: `save_pretrained` works."""
    config = KVFoldConfig(cache=spec.to_dict(), provenance=provenance)
    quantizer = KVFoldQuantizer(config)
    model.config.quantization_config = config
    model.hf_quantizer = quantizer
    model.is_quantized = True
    model.quantization_method = config.quant_method
    quantizer.postprocess_model(model)


def spec_of(model: Any) -> CacheSpec | None:
    """The CacheSpec of a folded model, None of a plain one."""
    config = getattr(model.config, "quantization_config", None)
    return config.spec if isinstance(config, KVFoldConfig) else None


def provenance_of(model: Any) -> dict[str, Any]:
    config = getattr(model.config, "quantization_config", None)
    return dict(config.provenance) if isinstance(config, KVFoldConfig) else {}
