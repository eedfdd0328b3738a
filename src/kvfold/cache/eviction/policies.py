"""The table of eviction policies, for `--evict` and `evict=`: published methods by name.

Importing this module imports neither the scorers nor torch, because the command line's help needs
the names. A policy has the name of a published method if it does what the authors published, except
for the differences listed in docs/eviction-policies.md; other settings of the method have a suffix.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from kvfold.cache.eviction.policy import Policy

EXPERIMENTAL = "experimental."  # a scorer's place, if not `scorers`: kvfold/experimental


@dataclass(frozen=True)
class Preset:
    """A row of the table.

    scorer: "file.Class" in `scorers`, or "experimental.file.Class"; source: of the method and of
    its settings; fields: of `Policy` and of the scorer, where they are not the defaults.
    """

    scorer: str
    source: str
    fields: Mapping[str, Any]

    @property
    def experimental(self) -> bool:
        """Whether kvfold does not recommend the policy."""
        return self.scorer.startswith(EXPERIMENTAL)

    def build(self, name: str) -> Policy:
        """The policy, called `name`."""
        package = "kvfold." if self.experimental else "kvfold.cache.eviction.scorers."
        file, _, scorer = self.scorer.rpartition(".")
        make_scorer = getattr(import_module(package + file), scorer)
        of_policy = {x.name for x in fields(Policy)}
        settings = {key: value for key, value in self.fields.items() if key not in of_policy}
        others = {key: value for key, value in self.fields.items() if key in of_policy}
        return Policy(scorer=make_scorer(**settings), name=name, **others)


def _preset(scorer: str, source: str, **settings: Any) -> Preset:
    return Preset(scorer, source, settings)


# Settings that several rows share.
_SNAPKV: dict[str, Any] = {"pool": 7, "continual": True}
_KVC: dict[str, Any] = {"power": 2, "scope": "all", **_SNAPKV}
_FULL: dict[str, Any] = {"power": 2, "scope": "all", "exclude": 10, "recent": 32, "continual": True}
_ADA: dict[str, Any] = {"scope": "layer", "floor": 0.2}
# Policies that see keys alone also protect recent tokens: the next tokens need them, which keys do
# not show (measured in docs/lab/eviction-repair.md). Of the published methods only Compactor
# protects any.
_KEYS: dict[str, Any] = {"sinks": 4, "recent_share": 0.25}
_COMPACTOR: dict[str, Any] = {"scope": "all", "sinks": 8, "recent_share": 0.125}
_RESCORED: dict[str, Any] = {"scope": "all", "sinks": 4}
_LAST_EIGHTH: dict[str, Any] = _RESCORED | {"recent_share": 0.125}

ATTENTION = "attention.Attention"
POLICIES: dict[str, Preset] = {
    "kv-compress": _preset(
        ATTENTION, "KV-Compress §4.3 (arXiv 2410.00161): KVC-w8-L2, any page size", window=8, **_KVC
    ),
    "kv-compress-full": _preset(ATTENTION, "KV-Compress §4.3: KVC-full-L2, any page size", **_FULL),
    "kvc-w8": _preset(ATTENTION, "KV-Compress §5.1: KVC-w8-L2", window=8, page=16, **_KVC),
    "kvc-w32": _preset(ATTENTION, "KV-Compress §5.2: KVC-w32-L2", window=32, page=16, **_KVC),
    "kvc-w32-l1": _preset(
        ATTENTION, "KV-Compress table 2: KVC-w32-L1", window=32, page=16, scope="all", **_SNAPKV
    ),
    "kvc-full": _preset(ATTENTION, "KV-Compress §5.1: KVC-full-L2", page=16, **_FULL),
    "snapkv": _preset(
        ATTENTION,
        "SnapKV §4 (arXiv 2404.14469): its LongBench runs, `w32_k7_maxpool`",
        window=32,
        **_SNAPKV,
    ),
    "snapkv-w8": _preset(
        ATTENTION, "SnapKV with the window of KV-Compress §5.1", window=8, **_SNAPKV
    ),
    "h2o": _preset(
        ATTENTION,
        "H2O §4 (arXiv 2306.14048): its release, as many recent as heavy tokens",
        continual=True,
        recent_share=0.5,
    ),
    "h2o-r32": _preset(ATTENTION, "H2O with 32 recent tokens", continual=True, recent=32),
    "pyramidkv": _preset(
        ATTENTION,
        "PyramidKV §4 (arXiv 2406.02069): beta 20, window 8, kernel 7",
        window=8,
        scope="pyramid",
        **_SNAPKV,
    ),
    "ada-snapkv": _preset(
        ATTENTION,
        "Ada-KV (arXiv 2407.11550): its LongBench runs, `w32_k7_maxpool`, `floor_alpha` 0.2",
        window=32,
        **_SNAPKV,
        **_ADA,
    ),
    "ada-snapkv-w8": _preset(
        ATTENTION,
        "Ada-KV with the window of KV-Compress §5.1, without a floor",
        window=8,
        scope="layer",
        **_SNAPKV,
    ),
    "keydiff": _preset("keys.KeyDifference", "KeyDiff §3 (arXiv 2504.15364)", **_KEYS),
    "keydiff-all": _preset(
        "keys.KeyDifference", "ours: KeyDiff with one ranking", scope="all", **_KEYS
    ),
    "knorm": _preset("keys.KeyNorm", "Devoto et al. 2024 §3 (arXiv 2406.11430)", **_KEYS),
    "leverage": _preset(
        "keys.Leverage", "Compactor (arXiv 2507.08143) without its attention", **_COMPACTOR
    ),
    "compactor": _preset("compactor.Compactor", "Compactor §4 (arXiv 2507.08143)", **_COMPACTOR),
    "kvzip": _preset("rescoring.Rescoring", "KVzip §3 (arXiv 2505.23416)", **_RESCORED),
    "kvzip-past": _preset(
        "rescoring.Rescoring",
        "ours: KVzip whose passes see nothing after their segment",
        sees_suffix=False,
        **_RESCORED,
    ),
    "kvzip+": _preset(
        "rescoring.Rescoring",
        "KVzip+ of KVzap (arXiv 2601.07891)",
        output_weighted=True,
        **_RESCORED,
    ),
    "kvzip-keys": _preset("rescoring.RescoringAndKeys", "ours: KVzip and KeyDiff", **_LAST_EIGHTH),
    "learned": _preset(
        "simple.Learned", "after the linear variant of KVzap (arXiv 2601.07891)", **_LAST_EIGHTH
    ),
    "expected-attention": _preset(
        "expected.ExpectedAttention",
        "Expected Attention (arXiv 2510.00636), budgets of Ada-KV",
        window=32,
        sinks=4,
        **_ADA,
    ),
    "streaming": _preset("simple.Recency", "StreamingLLM §3 (arXiv 2309.17453)", sinks=4),
    "random": _preset("simple.Random", "the baseline"),
    "keyformer": _preset(
        "experimental.keyformer.Keyformer",
        "Keyformer §3 (arXiv 2403.09054), its release",
        continual=True,
        recent_share=0.3,
    ),
    "kvgrad": _preset(
        "experimental.kvgrad.KVgrad",
        "KVgrad (openreview cg1wTCJjjk), as in KVpress",
        chunk=512,
        **_RESCORED,
    ),
}


def get(policy: str | Policy) -> Policy:
    """The policy of this name; a policy itself is returned as it is. Raises ValueError for an
    unknown name."""
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"unknown eviction policy {policy!r}; policies: {', '.join(POLICIES)}")
    return POLICIES[policy].build(policy)
