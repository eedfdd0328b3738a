"""The saved form: an ordinary Hugging Face directory that transformers loads after `import kvfold`.

`config.json` carries `quantization_config: {"quant_method": "kvfold", "cache": ..., ...}`; the
weights are plain safetensors. Registered through transformers' public quantiser hooks.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvfold.spec import CacheSpec
from kvfold.weights import check_complete, sample, shape, stored

FORMAT = 1
_ATTENTIONS = ("sdpa", "eager")


@register_quantization_config("kvfold")
class KVFoldConfig(QuantizationConfigMixin):
    """cache: a CacheSpec as a dict; provenance: the recipe, budget and text it was made with;
    digest: of `cache` and the weights saved with it, None in earlier checkpoints; scores: whether
    attentions hold a learned `score_map`."""

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
        if format != FORMAT:
            raise ValueError(
                f"this checkpoint has kvfold format {format}, this kvfold reads format {FORMAT}: "
                "install the matching kvfold or compress again"
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

    def digest_of(self, tensors: Mapping[str, Any]) -> str:
        """What ties `cache` to the folded attentions' tensors, whole or as slices of files."""
        made = hashlib.sha256(json.dumps(self.cache, sort_keys=True).encode())
        for part in sample(tensors):
            made.update(part)
        return made.hexdigest()


@register_quantizer("kvfold")
class KVFoldQuantizer(HfQuantizer):
    """Swaps in empty folded attentions before transformers loads the weights."""

    requires_calibration = True
    quantization_config: KVFoldConfig

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Collection[str] | None = None, **_: Any
    ) -> None:
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
                folded = family.swap(model, spec, index)
                if self.quantization_config.scores:
                    folded.add_score_map()
        family.connect(model)
        if checkpoint_files and all(x.endswith(".safetensors") for x in checkpoint_files):
            self._check_files(model, checkpoint_files)

    def _check_files(self, model: Any, files: Collection[str]) -> None:
        """Raises ValueError for weights that are not those of this config.json, where transformers
        would draw random ones."""
        name, config = str(Path(next(iter(files))).parent), self.quantization_config
        wanted, own = model.state_dict(), folded_tensors(model)
        with stored(files) as found:
            tied = model.all_tied_weights_keys.keys()
            missing = {x: shape(wanted[x]) for x in wanted.keys() - found.keys() - tied}
            unexpected = {x: shape(found[x]) for x in found.keys() - wanted.keys()}
            renamed = sorted(missing.values()) == sorted(unexpected.values())
            if renamed and not missing.keys() & own.keys():  # as GPT-NeoX's lm_head is embed_out
                missing, unexpected = {}, {}
            check_complete(
                name,
                missing=missing,
                unexpected=unexpected,
                mismatched=[
                    x for x in wanted if x in found and shape(wanted[x]) != shape(found[x])
                ],
                folded=True,
            )
            if config.digest not in (None, config.digest_of({x: found[x] for x in own})):
                raise ValueError(
                    f"the weights in {name} are not those that its config.json was saved with, or "
                    "one of them was edited: put the files of one compression together"
                )

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, str]]:
        """Called by `save_pretrained` before it writes config.json, which so gets the digest."""
        tensors = folded_tensors(model)
        offloaded = any(x.is_meta for x in tensors.values())
        config = model.config.quantization_config
        config.digest = None if offloaded else config.digest_of(tensors)
        return None, {}

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


def folded_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Tensors of all folded attentions, by their names in the model."""
    from kvfold.models.folded import FoldedAttention

    return {
        f"{name}.{own}": tensor
        for name, module in model.named_modules()
        if isinstance(module, FoldedAttention)
        for own, tensor in module.state_dict().items()
    }


def mark(model: Any, spec: CacheSpec, provenance: dict[str, Any]) -> None:
    """Make a model folded in memory the same as one loaded from disk: `save_pretrained` works."""
    scores = any(name.endswith(".score_map") for name in folded_tensors(model))
    config = KVFoldConfig(cache=spec.to_dict(), provenance=provenance, scores=scores)
    quantizer = KVFoldQuantizer(config)
    model.config.quantization_config = config
    model.hf_quantizer = quantizer
    model.is_quantized = True
    model.quantization_method = config.quant_method
    quantizer.postprocess_model(model)


def spec_of(model: Any) -> CacheSpec | None:
    """The CacheSpec of a folded model, None of a plain one."""
    return saved_spec(model.config)


def saved_spec(config: Any) -> CacheSpec | None:
    """What a checkpoint of this config stores; None of an original model."""
    saved = getattr(config, "quantization_config", None)
    if isinstance(saved, dict) and saved.get("quant_method") == "kvfold":
        saved = KVFoldConfig(**saved)
    return saved.spec if isinstance(saved, KVFoldConfig) else None


def provenance_of(model: Any) -> dict[str, Any]:
    config = getattr(model.config, "quantization_config", None)
    return dict(config.provenance) if isinstance(config, KVFoldConfig) else {}
