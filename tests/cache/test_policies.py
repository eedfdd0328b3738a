"""The table of eviction policies: what each row evicts, what its fields are, and its docs page.

KVFOLD_WRITE=1 writes the tables of docs/eviction-policies.md anew.
"""

import os
import re
import subprocess
import sys
from dataclasses import fields
from inspect import getdoc
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.cache.eviction.base import EntriesView, Scorer
from kvfold.cache.eviction.budget import Budget
from kvfold.cache.eviction.policies import POLICIES, get
from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.attention import Attention
from kvfold.cache.eviction.select import scores, select
from kvfold.config import CacheConfig
from models import tiny, tokens

PAGE = Path(__file__).parents[2] / "docs" / "eviction-policies.md"
BEGIN, END = (
    "<!-- policies: written by tests/cache/test_policies.py -->\n",
    "<!-- end of policies -->\n",
)
SMALL = {"max_sequences": 1, "max_tokens": 128, "kv_bytes": 2**22, "page": 4}

# Which of 24 tokens stay in two heads of two layers: the bits of a hexadecimal number per head, the
# first token's first. Recorded before the policies became a table; a new policy needs none.
SURVIVORS = {
    "kv-compress": "00003f 00003f 00ffff 0fffff",
    "kv-compress-full": "000003 40c83f fdfbe7 7adb2f",
    "kvc-w8": "00003f 00003f 00ffff 0fffff",
    "kvc-w32": "00003f 00003f 00ffff 0fffff",
    "kvc-w32-l1": "00003f 00003f 00ffff 0fffff",
    "kvc-full": "000003 40c83f fdfbe7 7adb2f",
    "snapkv": "000fff 01f83f 000fff 03f03f",
    "snapkv-w8": "000fff 01f83f 000fff 03f03f",
    "h2o": "2c05bf 60e83f 1851bf 50993f",
    "h2o-r32": "aca791 60e83f 3c59a5 78990f",
    "keyformer": "ac8597 60e83f 3c5987 78990f",
    "pyramidkv": "0f3fff 03ffff 00003f 00003f",
    "ada-snapkv": "0000ff 03ff3f 0003ff 07f07f",
    "ada-snapkv-w8": "00003f 03ffff 0003ff 07f07f",
    "keydiff": "f32037 f52847 fc300f fe010f",
    "keydiff-all": "f36c77 f12807 fc300f f2010f",
    "knorm": "f8620f f320c7 f019a7 f80b0f",
    "leverage": "ff00c5 ff6009 ff4403 ff2481",
    "compactor": "ff0081 ff701f ff6201 ff0003",
    "kvzip": "f00000 f04824 fd7be5 fadf2f",
    "kvzip-past": "f00000 f04824 fd7be5 fadf2f",
    "kvzip+": "f00000 f04824 fd7be5 fadf2f",
    "kvgrad": "f00000 f04824 fd7be5 fadf2f",
    "kvzip-keys": "f30021 f16805 fc7ba5 fa990f",
    "learned": "f00011 f04805 fc7ba5 fadf2f",
    "expected-attention": "f301d0 fdb80e fd471c f36402",
    "streaming": "f000ff f000ff f000ff f000ff",
    "random": "01f64f d913a3 5a476c 19731e",
}


class Stored:
    """Keys, values and queries of two layers with two KV heads, four query heads, 24 tokens."""

    def __init__(self, window: int) -> None:
        numbers = torch.Generator().manual_seed(1)
        shape = 2, 2, 1, 2, 24, 8
        self.vectors = torch.randn(shape, generator=numbers)
        self.query_vectors = torch.randn(2, 1, 4, window, 8, generator=numbers)

    def keys(self, layer: int) -> Tensor:
        return self.vectors[0, layer]

    def values(self, layer: int) -> Tensor:
        return self.vectors[1, layer]

    def queries(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.query_vectors[layer], torch.arange(24)[None, -self.query_vectors.shape[3] :]


def survivors(policy: Policy) -> str:
    """What stays of 4 x 24 tokens under a budget of half of them, as SURVIVORS has it."""
    policy = policy.changed(window=policy.window and min(policy.window, 6), recent=0)
    if isinstance(policy.scorer, Attention) and policy.scorer.exclude:
        policy = policy.changed(exclude=2)
    numbers = torch.Generator().manual_seed(2)
    view = EntriesView(
        positions=torch.arange(24).expand(1, 4, 24).int(),
        valid=torch.ones(1, 4, 24, dtype=torch.bool),
        raw_metrics=torch.rand(1, 4, 24, generator=numbers) * torch.tensor([1, 2, 3, 4])[:, None],
        sizes=[24],
        in_order=True,
        layers=[((0,), (1,))] * 2,
        needs=policy.scorer.needs,
        source=Stored(policy.window or 1),
        generator=numbers,
        sinks=policy.sinks,
    )
    recent = torch.tensor([policy.protected_recent(12)])
    lengths, units = torch.full((1, 4), 24), torch.ones(4, dtype=torch.int32)
    about = scores(policy, view, recent), lengths, 2, units, torch.tensor([0, 0, 1, 1])
    evicted, _ = select(*about, policy, [Budget(pages=24)])
    bits = ["".join("01"[not x] for x in head) for head in evicted[0].tolist()]
    return " ".join(f"{int(x, 2):06x}" for x in bits)


@pytest.mark.parametrize("name", SURVIVORS)
def test_rows_evict_what_they_did(name: str) -> None:
    assert survivors(get(name)) == SURVIVORS[name]


@pytest.mark.parametrize("name", POLICIES)
def test_rows_set_fields_that_matter(name: str) -> None:
    """A row has the fields that differ from the defaults, and no others."""
    policy, preset = get(name), POLICIES[name]
    defaults = {x.name: x.default for y in (policy, policy.scorer) for x in fields(y)}
    for field, value in preset.fields.items():
        assert value != defaults[field], field
    assert preset.source and getdoc(type(policy.scorer))


def test_a_row_is_not_there_twice() -> None:
    rows = [(x.scorer, sorted(x.fields.items())) for x in POLICIES.values()]
    assert all(rows.count(row) == 1 for row in rows)


def test_a_name_and_a_policy_are_both_legal() -> None:
    policy = Policy(scorer=Attention(power=2), scope="layer", window=4)
    assert get(policy) is policy
    assert CacheConfig(evict=policy, keep_tokens=0.5).evict is policy
    assert str(policy) == "custom"
    changed = get("snapkv").changed(window=8, name="snapkv-w8")
    assert changed == get("snapkv-w8")
    assert get("snapkv").changed(scorer=Attention(), pool=3).scorer == Attention(pool=3)


def test_an_engine_evicts_by_a_policy_of_its_caller() -> None:
    """The same tokens as by the row with the same fields."""
    fields = {"scorer": Attention(pool=7, continual=True), "window": 8}
    prompt, sampling = tokens(1, 60)[0].tolist(), kvfold.SamplingParams(max_new_tokens=8)
    outputs = []
    for evict in ("snapkv-w8", kvfold.Policy(**fields), kvfold.Policy(**fields, scope="all")):
        llm = kvfold.LLM(tiny("llama-gqa"), evict=evict, max_cache_tokens=16, **SMALL)
        outputs.append(llm.generate([prompt], sampling)[0].token_ids)
        assert llm.engine.scheduler.compressions.num_evicted > 0
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]


def test_a_packed_context_needs_a_name() -> None:
    llm = kvfold.LLM(
        tiny("llama-gqa"), evict=Policy(scorer=Attention(), window=4), keep_tokens=1.0, **SMALL
    )
    with pytest.raises(ValueError, match="stores its policy by name, and this one is an object"):
        llm.pack(tokens(1, 60)[0].tolist())


def test_nothing_but_its_name_loads_what_is_experimental() -> None:
    code = (
        "import sys, kvfold.engine.api.llm\n"
        "from kvfold.cache.eviction.policies import POLICIES, get\n"
        "for name in POLICIES:\n"
        "    new = POLICIES[name].experimental and 'kvfold.experimental' not in sys.modules\n"
        "    get(name)\n"
        "    assert ('kvfold.experimental' in sys.modules) == POLICIES[name].experimental, name\n"
        "    [sys.modules.pop(x) for x in list(sys.modules) if x.startswith('kvfold.experimental')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- docs ------------------------------------------------------------------------------------------


def protects(policy: Policy) -> str:
    """Which tokens are never evicted, in words."""
    words = [f"first {policy.sinks}"] if policy.sinks else []
    if last := policy.protected_recent(0):
        words.append(f"last {last}")
    if policy.recent_share:
        words.append(f"last {100 * policy.recent_share:.3g} % of the budget")
    return ", ".join(words)


def settings_of(policy: Policy) -> str:
    """Other fields that are not the defaults."""
    of_policy = [(policy, field) for field in fields(policy) if field.name in ("floor", "page")]
    of_scorer = [(policy.scorer, field) for field in fields(policy.scorer)]
    pairs = {f.name: getattr(x, f.name) for x, f in of_scorer + of_policy}
    defaults = {f.name: f.default for _, f in of_scorer + of_policy}
    return ", ".join(f"`{k}={v!r}`" for k, v in pairs.items() if v != defaults[k])


def row(name: str) -> str:
    policy = get(name)
    observes = policy.scorer.needs & {"attention", "queries"}
    window = (policy.window or "all") if observes else ""
    cells = (f"`{name}`", POLICIES[name].source, f"`{type(policy.scorer).__name__}`")
    cells += (policy.scope, str(window), protects(policy), settings_of(policy))
    return f"| {' | '.join(cells)} |"


def scorer_row(scorer: Scorer) -> str:
    score = " ".join((getdoc(type(scorer)) or "").split("\n\n")[0].split())
    reads = ", ".join(sorted(scorer.needs))
    escaped = score.replace("|", r"\|")
    return f"| `{type(scorer).__name__}` | {reads} | {escaped} |"


def table(*columns: str, rows: list[str]) -> str:
    return "\n".join((f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *rows))


def tables() -> str:
    columns = "`--evict`", "source", "scorer", "scope", "window", "never evicted", "other settings"
    usual = [row(name) for name, preset in POLICIES.items() if not preset.experimental]
    others = [row(name) for name, preset in POLICIES.items() if preset.experimental]
    scorers = {type(x): scorer_row(x) for x in (get(name).scorer for name in POLICIES)}
    parts = [table(*columns, rows=usual)]
    parts += ["Experimental, in `kvfold.experimental`:", table(*columns, rows=others)]
    parts += ["The scorers:", table("scorer", "reads", "score", rows=list(scorers.values()))]
    return "\n\n".join(parts) + "\n"


def test_tables_of_the_docs_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, "docs/eviction-policies.md has lost its markers"
    wanted = f"{before}{BEGIN}\n{tables()}\n{END}{after}"
    if os.environ.get("KVFOLD_WRITE"):
        PAGE.write_text(wanted, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == wanted, "KVFOLD_WRITE=1 writes it anew"


def test_no_line_cuts_a_table_of_the_docs() -> None:
    """Rows of a table without its head are shown as text."""
    for page in PAGE.parent.rglob("*.md"):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for block in re.split(r"\n\s*\n", text):
            lines = [x for x in block.splitlines() if x.startswith("|")]
            assert len(lines) != 1 and (not lines or re.match(r"\|[ :|-]+\|$", lines[1])), (
                f"{page.name}: {lines[0]}"
            )
