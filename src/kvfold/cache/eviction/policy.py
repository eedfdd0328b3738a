"""An eviction policy: a scorer, the scope in which its scores compete, and what is protected.

Importing this module imports no torch, because the command line's help needs it.
"""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from kvfold.cache.eviction.base import Scorer

Scope = Literal["head", "layer", "pyramid", "all"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which token entries are evicted first. Lengths are in tokens.

    For example `Policy(scorer=Attention(power=2), scope="layer", window=32)`. The published methods
    are rows of `policies.POLICIES`. Raises ValueError for a field that is not legal.

    scorer: gives every entry a score; the entries with the lowest scores are evicted first.
    scope: which entries compete for the budget. `head`: those of a group, so that all groups keep
        the same number (a group is a KV head, or the heads that share stored numbers); `layer`:
        those of a layer, and all layers have the same average per group (Ada-KV); `pyramid`: those
        of a group, and deeper layers keep fewer (PyramidKV); `all`: those of the whole cache
        (KV-Compress).
    window: how many of the last queries are observed (None: all of the prompt). As many last tokens
        are never evicted, unless the scorer is fair to young tokens.
    sinks, recent: first and last tokens that are never evicted.
    recent_share: share of a sequence's budget that is reserved for its last tokens, in [0, 1)
        (H2O).
    floor: share of an even split that each group is guaranteed, in [0, 1]; the rest is shared by
        competition within a layer or all layers (the safeguard alpha of Ada-KV).
    page: tokens per page with which the method was published; None: any.
    name: for messages and statistics.
    """

    scorer: "Scorer"
    scope: Scope = "head"
    window: int | None = None
    sinks: int = 0
    recent: int = 0
    recent_share: float = 0.0
    floor: float = 0.0
    page: int | None = None
    name: str = "custom"

    def __post_init__(self) -> None:
        if not callable(getattr(self.scorer, "score", None)):
            raise ValueError(
                "scorer must be a Scorer, such as Attention() of kvfold.cache.eviction.scorers."
                f"attention; got {self.scorer!r}"
            )
        if "queries" in self.scorer.needs and self.window is None:
            raise ValueError(f"{self.name!r} needs queries, so window must say how many, got None")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 query, got {self.window}; None is all")
        if self.scope not in get_args(Scope):
            legal = ", ".join(get_args(Scope))
            raise ValueError(f"scope must be one of {legal}; got {self.scope!r}")
        check_tokens(self, "sinks", "recent")
        if not 0 <= self.recent_share < 1:
            raise ValueError(f"recent_share must be in [0, 1), got {self.recent_share}; 0 is off")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be in [0, 1], got {self.floor}; 0 is off")

    def __str__(self) -> str:
        return self.name

    def changed(self, **changes: Any) -> "Policy":
        """The same policy with other values of its fields or of its scorer's. Raises ValueError for
        a field that neither has."""
        scorer = changes.pop("scorer", self.scorer)
        of_policy, of_scorer = ({x.name for x in fields(one)} for one in (self, scorer))
        for name in changes.keys() - of_policy - of_scorer:
            legal = ", ".join(sorted(of_policy | of_scorer))
            raise ValueError(f"{self.name!r} has no field {name!r}; its fields are {legal}")
        settings = {name: value for name, value in changes.items() if name not in of_policy}
        of_self = {name: value for name, value in changes.items() if name in of_policy}
        return replace(self, scorer=replace(scorer, **settings), **of_self)

    def protected_recent(self, tokens: int) -> int:
        """How many of the last tokens are never evicted if a group may keep `tokens` on average:
        the maximum of `recent`, `recent_share` of `tokens`, and the tokens that are too young for a
        fair score."""
        young = self.scorer.num_too_young(self.window)
        return max(self.recent, int(tokens * self.recent_share), young)


def check_tokens(owner: Any, *names: str) -> None:
    """Raises ValueError if one of these fields is less than 0 tokens."""
    for name in names:
        if (value := getattr(owner, name)) < 0:
            raise ValueError(f"{name} must be at least 0 tokens, got {value}; 0 is off")
