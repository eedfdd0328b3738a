"""Eviction: metrics, budgets and moves, for every policy, against plain loops."""

from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction import compact
from kvfold.cache.eviction import select as evict
from kvfold.cache.eviction.base import EntriesView, Scorer
from kvfold.cache.eviction.budget import Budget
from kvfold.cache.eviction.compact import sequences_within
from kvfold.cache.eviction.policies import POLICIES, get
from kvfold.cache.eviction.policy import Policy, Scope
from kvfold.cache.eviction.scorers.attention import Attention, as_observation
from kvfold.cache.eviction.scorers.attention import attention_scores as scores_of
from kvfold.layout.pages import UNIT

INF = float("inf")
ALL = Policy(scorer=Attention(), name="all", scope="all")
PLAIN = Policy(scorer=Attention(), name="plain")


def rows(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Metrics, positions (no order, gaps), valid, lengths; slots without a row are poisoned."""
    generator = torch.Generator().manual_seed(seed)
    slots = max(lengths) + 3
    metrics = torch.rand(len(lengths), slots, generator=generator)
    positions = torch.stack(
        [torch.randperm(slots + 5, generator=generator)[:slots] for _ in lengths]
    ).int()
    held = torch.tensor(lengths)
    valid = torch.arange(slots) < held[:, None]
    metrics[~valid] = float("nan")
    positions[~valid] = 10**9
    return metrics, positions, valid, held


@dataclass(frozen=True)
class Stored:
    """Keys, values and queries of one layer, a head a group, which follow from the metrics; as a
    pool's, they are zero where no row is valid."""

    metrics: Tensor
    valid: Tensor
    window: int

    def keys(self, layer: int) -> Tensor:
        assert layer == 0
        found = torch.stack((self.metrics, self.metrics.cos(), 1 - self.metrics), -1)
        return found.where(self.valid[..., None], 0.0)

    def values(self, layer: int) -> Tensor:
        return 1 - self.keys(layer)

    def queries(self, layer: int) -> tuple[Tensor, Tensor]:
        assert layer == 0
        batch, groups, _ = self.metrics.shape
        where = torch.arange(self.window).expand(batch, -1)
        return torch.ones(batch, 2 * groups, self.window, 3), where


def view_of(
    policy: Policy,
    metrics: Tensor,
    positions: Tensor,
    valid: Tensor,
    sizes: list[int],
    generator: torch.Generator | None = None,
    in_order: bool = False,
) -> EntriesView:
    return EntriesView(
        positions=positions,
        valid=valid,
        raw_metrics=metrics,
        sizes=sizes,
        in_order=in_order,
        layers=[tuple((head,) for head in range(metrics.shape[1]))],
        needs=policy.scorer.needs,
        source=Stored(metrics, valid, policy.window or 1),
        generator=generator,
        sinks=policy.sinks,
    )


# -- one sequence through what takes several ------------------------------------------------------


def scores(
    metrics: Tensor,
    positions: Tensor,
    valid: Tensor,
    policy: Policy,
    generator: torch.Generator | None = None,
    in_order: bool = False,
    tokens: int = 0,
) -> Tensor:
    each = metrics[None], positions[None], valid[None], [metrics.shape[1]]
    recent = torch.tensor([policy.protected_recent(tokens)])
    return evict.scores(policy, view_of(policy, *each, generator, in_order), recent)[0]


def select(
    metric: Tensor,
    held: Tensor,
    page: int,
    units: Tensor,
    layer_of_group: Tensor,
    policy: Policy,
    budget: Budget,
) -> tuple[Tensor, int]:
    about = page, units, layer_of_group, policy, [budget]
    evicted, kept = evict.select(metric[None], held[None], *about)
    return evicted[0], kept[0]


def compaction(evicted: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (sequence, *moves), lengths = compact.compaction(evicted[None], held[None])
    assert not sequence.any()
    return *moves, lengths[0]


def plain_units(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.int32)


def run(
    metric: Tensor, held: Tensor, page: int, budget: Budget, policy: Policy, layers: int = 1
) -> tuple[Tensor, int]:
    layer_of_group = torch.arange(len(held)) * layers // len(held)
    return select(metric, held, page, plain_units(len(held)), layer_of_group, policy, budget)


def test_figure_five() -> None:
    """KV-Compress §4.2.2: two heads of five and two KVs, block size two, two blocks must go: both
    come from the first head; a third would be the lone block of the second."""
    metric = torch.tensor([[0.1, 0.6, 0.2, 0.9, 0.3], [0.5, 0.4, INF, INF, INF]])
    held = torch.tensor([5, 2])
    evicted, kept = run(metric, held, 2, Budget(pages=2), ALL)
    assert evicted.int().tolist() == [[1, 0, 1, 0, 1], [0, 0, 0, 0, 0]]
    assert kept == 2
    group, source, target, lengths = compaction(evicted, held)
    assert (group.tolist(), source.tolist(), target.tolist()) == ([0], [3], [0])
    assert lengths.tolist() == [2, 2]
    evicted, kept = run(metric, held, 2, Budget(pages=1), ALL)
    assert evicted.int().tolist() == [[1, 0, 1, 0, 1], [1, 1, 0, 0, 0]]
    assert kept == 1


Shares = list[float]


def shares(policy: Policy, layer_of_group: list[int]) -> Shares:
    """PyramidKV: 2 - 1/20 down to 1/20 of the average, in a straight line."""
    if policy.scope != "pyramid":
        return [1.0] * len(layer_of_group)
    last = max(*layer_of_group, 1)
    return [1.95 - 1.9 * layer / last for layer in layer_of_group]


def naive_select(
    metric: Tensor, held: list[int], page: int, budget: int, policy: Policy, layers: list[int]
) -> Tensor:
    """One block at a time: the unit that keeps most for its share loses its cheapest block. With a
    floor, every group is then a unit whose share is part what it kept so, part an even one."""
    each = list(range(len(held)))
    unit_of = {"all": [0] * len(held), "layer": layers}.get(policy.scope, each)
    evicted = naive_rounds(metric, held, page, budget, unit_of, shares(policy, layers))
    if not policy.floor:
        return evicted
    kept = [-(-(n - int(evicted[g].sum())) // page) for g, n in enumerate(held)]
    units = [[kept[h] for h in each if unit_of[h] == unit_of[g]] for g in each]
    even = [sum(unit) / len(unit) for unit in units]
    share = [policy.floor * e + (1 - policy.floor) * k for e, k in zip(even, kept, strict=True)]
    return naive_rounds(metric, held, page, budget, each, share)


def naive_rounds(
    metric: Tensor, held: list[int], page: int, budget: int, unit_of: list[int], share: Shares
) -> Tensor:
    left = [sorted((float(metric[g, t]), t) for t in range(n)) for g, n in enumerate(held)]

    def num_pages(g: int) -> int:
        return -(-len(left[g]) // page)

    def block(g: int) -> float:
        size = (len(left[g]) - 1) % page + 1
        return left[g][size - 1][0] if left[g] else INF

    def urgency(g: int) -> tuple[float, float]:
        members = [h for h in range(len(held)) if unit_of[h] == unit_of[g]]
        total = sum(share[h] for h in members)
        excess = sum(map(num_pages, members)) - 0.5
        return excess / total if total else INF, -block(g)

    evicted = torch.zeros_like(metric, dtype=torch.bool)
    while sum(map(num_pages, range(len(held)))) > budget:
        able = [g for g in range(len(held)) if block(g) < INF]
        if not able:
            break
        g = max(able, key=urgency)
        size = (len(left[g]) - 1) % page + 1
        evicted[g, [t for _, t in left[g][:size]]] = True
        left[g] = left[g][size:]
    return evicted


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(any),
    page=st.sampled_from([1, 4, 16]),
    keep=st.floats(0.05, 1.2),
    coarse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_conformance(
    name: str, lengths: list[int], page: int, keep: float, coarse: bool, seed: int
) -> None:
    """Every policy: exact budget, the first of equal rows first, protected rows stay, and moves
    preserve position -> row."""
    policy = get(name)
    metrics, positions, valid, held = rows(lengths, seed)
    metrics = (metrics * 4).floor() if coarse else metrics
    present = sum(-(-n // page) for n in lengths)
    budget = Budget(pages=int(keep * present))
    generator, tokens = torch.Generator().manual_seed(seed), budget.limit // len(lengths) * page
    metric = scores(metrics, positions, valid, policy, generator, tokens=tokens)
    assert not metric.isnan().any()
    assert metric[~valid].isinf().all()
    layers = [i * 3 // len(lengths) for i in range(len(lengths))]
    evicted, kept = select(
        metric, held, page, plain_units(len(lengths)), torch.tensor(layers), policy, budget
    )

    assert torch.equal(evicted, naive_select(metric, lengths, page, budget.pages, policy, layers))
    least = int((-(-(metric.isinf() & valid).sum(1) // page)).sum())
    assert kept == max(min(present, budget.pages), least)
    assert not (evicted & ~valid).any()
    assert not (evicted & metric.isinf()).any()

    group, source, target, new_lengths = compaction(evicted, held)
    assert int((-(-new_lengths // page)).sum()) == kept
    assert ((new_lengths % page == 0) | (new_lengths == held)).all()
    assert (target < new_lengths[group]).all()
    assert (source >= new_lengths[group]).all()
    store = positions.clone()
    store[group, target] = store[group, source]
    for g, n in enumerate(new_lengths.tolist()):
        survivors = positions[g, valid[g] & ~evicted[g]]
        assert sorted(store[g, :n].tolist()) == sorted(survivors.tolist())
        stayed = ~evicted[g, :n]
        assert torch.equal(store[g, :n][stayed], positions[g, :n][stayed])


@pytest.mark.parametrize("name", POLICIES)
def test_sequences_are_compressed_as_if_alone(name: str) -> None:
    """Lengths, budgets and protected rows differ; what is drawn at random is drawn in turn."""
    policy, lengths = get(name), ([70, 9, 44], [5, 0, 12], [40, 64, 64], [1, 1, 1])
    recents, layers = [0, 3, 33, 1], torch.tensor([0, 0, 4])
    budgets = [Budget(pages=count) for count in (9, 2, 30, 0)]
    alone = [rows(list(x), seed) for seed, x in enumerate(lengths)]
    most = max(len(x[0][0]) for x in alone)
    padded = [[F.pad(y, (0, most - y.shape[1]), value=1) for y in x[:2]] for x in alone]
    metrics, positions = (torch.stack(x) for x in zip(*padded, strict=True))
    held = torch.tensor(lengths)
    valid = torch.arange(most) < held[..., None]
    each, generators = [], [torch.Generator().manual_seed(0) for _ in range(2)]
    policies = [policy.changed(recent=x) for x in recents]
    sizes = [len(x[0][0]) for x in alone]
    view = view_of(policy, metrics, positions, valid, sizes, generators[0])
    recent = torch.tensor([x.protected_recent(0) for x in policies])
    together = evict.scores(policy, view, recent)
    about = 4, plain_units(3), layers
    evicted, kept = evict.select(together, held, *about, policy, budgets)
    moves, left = compact.compaction(evicted, held)
    for i, (own, one, budget) in enumerate(zip(alone, policies, budgets, strict=True)):
        metric = scores(*own[:3], one, generators[1])
        assert torch.equal(together[i, :, : sizes[i]], metric)
        chosen, count = select(metric, own[3], *about, one, budget)
        assert torch.equal(evicted[i, :, : sizes[i]], chosen)
        assert kept[i] == count
        *wanted, lengths_left = compaction(chosen, own[3])
        for found, expected in zip(moves[1:], wanted, strict=True):
            assert torch.equal(found[moves[0] == i], expected)
        assert torch.equal(left[i], lengths_left)
        each.append(count)
    assert each != [x.limit for x in budgets]  # of some, protected rows need more


def test_budgets_are_of_one_kind() -> None:
    about = torch.rand(2, 1, 4), torch.full((2, 1), 4), 4, plain_units(1), torch.zeros(1)
    with pytest.raises(AssertionError, match="of two kinds"):
        evict.select(*about, ALL, [Budget(pages=1), Budget(bytes=64)])


@pytest.mark.parametrize("scope", get_args(Scope))
def test_smaller_budget_evicts_a_superset(scope: str) -> None:
    metrics, positions, valid, held = rows([33, 64, 5, 40, 0, 12])
    policy = PLAIN.changed(scope=scope, recent=3)
    metric = scores(metrics, positions, valid, policy)
    before = torch.zeros_like(valid)
    for pages in reversed(range(24)):
        evicted, _ = run(metric, held, 8, Budget(pages=pages), policy, layers=3)
        assert not (before & ~evicted).any()
        before = evicted


def test_what_is_padded_does_not_matter() -> None:
    metrics, _, _, held = rows([33, 64, 5])
    wider = torch.cat([metrics, torch.zeros(3, 50)], 1)
    for scope in get_args(Scope):
        policy = PLAIN.changed(scope=scope)
        evicted, _ = run(metrics, held, 8, Budget(pages=7), policy, layers=3)
        padded, _ = run(wider, held, 8, Budget(pages=7), policy, layers=3)
        assert torch.equal(padded[:, : metrics.shape[1]], evicted)


def kept_pages(evicted: Tensor, held: Tensor, page: int) -> list[int]:
    return (-(-(held - evicted.sum(1)) // page)).tolist()


def test_scopes_share_the_budget() -> None:
    """Four groups of two layers, 16 pages each; the first group's rows are worth most."""
    metric = torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
    metric = metric * torch.tensor([[8.0], [1.0], [4.0], [2.0]])
    held = torch.full((4,), 64)
    kept = {
        scope: kept_pages(
            run(metric, held, 4, Budget(pages=32), PLAIN.changed(scope=scope), layers=2)[0],
            held,
            4,
        )
        for scope in get_args(Scope)
    }
    assert kept["head"] == [8, 8, 8, 8]
    assert sum(kept["layer"][:2]) == sum(kept["layer"][2:]) == 16
    assert kept["layer"][0] > kept["layer"][1]
    assert kept["layer"][2] > kept["layer"][3]
    assert kept["pyramid"] == [16, 16, 0, 0]  # shares 1.95 and 0.05, and there are 16 at most
    assert kept["all"][0] > kept["all"][2] > kept["all"][3] > kept["all"][1]


def test_head_scope_keeps_what_short_groups_have() -> None:
    held = torch.tensor([20, 3, 20], dtype=torch.int32)
    metric = torch.rand(3, 20, generator=torch.Generator().manual_seed(0))
    evicted, kept = run(metric, held, 4, Budget(pages=9), PLAIN)
    assert kept_pages(evicted, held, 4) == [4, 1, 4]
    assert kept == 9


def test_layers_count_by_their_groups() -> None:
    """A layer of three groups keeps three times the pages of a layer of one."""
    held = torch.full((4,), 32)
    metric = torch.rand(4, 32, generator=torch.Generator().manual_seed(0))
    layers = torch.tensor([2, 7, 7, 7])
    policy = PLAIN.changed(scope="layer")
    evicted, _ = select(metric, held, 4, plain_units(4), layers, policy, Budget(pages=16))
    assert kept_pages(evicted, held, 4)[0] == 4


def test_protected_rows_can_make_a_budget_impossible() -> None:
    metrics, positions, valid, held = rows([40, 40])
    policy = ALL.changed(sinks=10**6)
    metric = scores(metrics, positions, valid, policy)
    evicted, kept = run(metric, held, 8, Budget(pages=1), policy)
    assert kept == 10
    assert not evicted.any()
    metric = torch.rand(2, 40)
    metric[0, 5] = INF
    evicted, kept = run(metric, held, 8, Budget(pages=0), policy)
    assert kept == 1
    assert (held - evicted.sum(1)).tolist() == [8, 0]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=3, max_size=3),
    keep=st.floats(0, 1.1),
    scope=st.sampled_from(get_args(Scope)),
    seed=st.integers(0, 1000),
)
def test_byte_budgets(lengths: list[int], keep: float, scope: str, seed: int) -> None:
    """Kept bytes are within the budget, and by less than one page."""
    metrics, _, _, held = rows(lengths, seed)
    units = torch.tensor([1, 3, 8], dtype=torch.int32)
    policy = PLAIN.changed(scope=scope)
    present = sum(-(-n // 4) * u * UNIT for n, u in zip(lengths, (1, 3, 8), strict=True))
    budget = Budget(bytes=int(keep * present))
    evicted, kept = select(metrics, held, 4, units, torch.tensor([0, 1, 1]), policy, budget)
    pages = torch.tensor(kept_pages(evicted, held, 4))
    kept_bytes = int((pages * units).sum()) * UNIT
    assert kept == pages.sum()
    assert kept_bytes <= budget.bytes
    assert kept_bytes > min(budget.bytes, present) - 8 * UNIT


def test_cost_is_per_page_or_byte_as_the_budget_counts() -> None:
    """A page of twice the bytes goes first until its rows are worth twice as much, where bytes are
    counted; where pages are, worth alone says."""
    held, units = torch.tensor([4, 4]), torch.tensor([1, 2])
    layers = torch.zeros(2, dtype=torch.int64)
    for worth, budget, first in (
        (1.9, Budget(bytes=2 * UNIT), 1),
        (2.1, Budget(bytes=2 * UNIT), 0),
        (1.1, Budget(pages=1), 0),
        (0.9, Budget(pages=1), 1),
    ):
        metric = torch.tensor([[1.0] * 4, [worth] * 4])
        evicted, _ = select(metric, held, 4, units, layers, ALL, budget)
        assert evicted.any(1).nonzero().tolist()[0] == [first]


def attention_scores(weights: Tensor, *positions: Tensor, policy: Policy, groups: list) -> Tensor:
    return scores_of(weights, *positions, as_observation(policy), groups)


def naive_mass(
    weights: Tensor, keys: Tensor, queries: Tensor, prompts: Tensor, policy: Policy, groups: list
) -> Tensor:
    batch, query_heads, num_queries, slots = weights.shape
    per_kv = query_heads // keys.shape[1]
    mass = torch.zeros(batch, len(groups), slots)
    for b in range(batch):
        for i in range(num_queries):
            q, prompt = int(queries[b, i]), int(prompts[b])
            first = 0 if policy.window is None else prompt - policy.window
            if q < 0 or q < first or (q >= prompt and not policy.scorer.continual):
                continue
            for g, heads in enumerate(groups):
                for h in (h for head in heads for h in range(head * per_kv, (head + 1) * per_kv)):
                    far = q - keys[b, h // per_kv] >= policy.scorer.exclude
                    mass[b, g] += weights[b, h, i] ** policy.scorer.power * far
    return mass


@pytest.mark.parametrize("groups", [[(0,), (1,), (2,), (3,)], [(0, 3), (1,), (2,)], [(0, 1, 2, 3)]])
@pytest.mark.parametrize("continual", [False, True])
@pytest.mark.parametrize(
    "window, exclude, power", [(None, 0, 1), (None, 3, 2), (4, 0, 2), (99, 0, 1)]
)
def test_attention_scores_equal_loops(groups, continual, window, exclude, power) -> None:
    """Against loops; rows are not in order, the second sequence's queries are partly padding."""
    generator = torch.Generator().manual_seed(0)
    policy = PLAIN.changed(window=window, exclude=exclude, power=power, continual=continual)
    weights = torch.rand(2, 8, 9, 12, generator=generator)
    keys = torch.stack([torch.randperm(12, generator=generator) for _ in range(8)]).view(2, 4, 12)
    queries = torch.stack([torch.arange(3, 12), torch.arange(-2, 7)])
    prompts = torch.tensor([9, 5])
    causal = queries[:, None, :, None] >= keys[:, :, None]
    weights = weights * causal.repeat_interleave(2, 1)
    weights[1, :, :2] = float("nan")
    mass = attention_scores(weights, keys.int(), queries, prompts, policy=policy, groups=groups)
    expected = naive_mass(weights, keys, queries, prompts, policy, groups)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass, expected)
    for b in range(2):
        one = slice(b, b + 1)
        inputs = (x[one] for x in (weights, keys, queries, prompts))
        alone = attention_scores(*inputs, policy=policy, groups=groups)
        assert torch.equal(alone[0], mass[b])


def test_excluded_window() -> None:
    """Eq. 19 with v = 2: a key's own query and the next do not count, the one after does."""
    policy = PLAIN.changed(exclude=2)
    keys, queries = torch.arange(4).view(1, 1, 4), torch.arange(4)[None]
    weights = torch.full((1, 1, 4, 4), 0.5).tril()
    mass = attention_scores(weights, keys, queries, torch.tensor([4]), policy=policy, groups=[(0,)])
    assert mass.tolist() == [[[1.0, 0.5, 0.0, 0.0]]]


def test_squares_prefer_a_single_strong_query() -> None:
    weights = torch.tensor([[0.4, 0.1], [0.4, 0.7]]).view(1, 1, 2, 2)
    where = torch.zeros(1, 1, 2), torch.tensor([[0, 1]]), torch.tensor([2])
    even, peaked = attention_scores(weights, *where, policy=PLAIN, groups=[(0,)])[0, 0]
    torch.testing.assert_close(even, peaked)
    squares = PLAIN.changed(power=2)
    even, peaked = attention_scores(weights, *where, policy=squares, groups=[(0,)])[0, 0]
    torch.testing.assert_close(torch.stack([even, peaked]), torch.tensor([0.32, 0.50]))


def test_half_precision_is_summed_in_fp32() -> None:
    weights = torch.full((1, 1, 4096, 1), 1e-4, dtype=torch.float16)
    where = torch.zeros(1, 1, 1), torch.arange(4096)[None], torch.tensor([4096])
    mass = attention_scores(weights, *where, policy=PLAIN.changed(power=2), groups=[(0,)])
    torch.testing.assert_close(mass.item(), 4096 * float(weights[0, 0, 0, 0]) ** 2)


def test_pool_follows_positions() -> None:
    """Neighbours are those in order of position, over gaps, and never a slot without a row."""
    positions = torch.tensor([[7, 0, 30, 2, 9]], dtype=torch.int32)
    metrics = torch.tensor([[1.0, 0.0, 5.0, 9.0, 99.0]])
    valid = torch.tensor([[True, True, True, True, False]])
    pooled = scores(metrics, positions, valid, PLAIN.changed(pool=3))
    assert pooled.tolist() == [[9.0, 9.0, 5.0, 9.0, INF]]
    assert metrics.tolist() == [[1.0, 0.0, 5.0, 9.0, 99.0]]


def test_rows_in_order_need_no_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = torch.arange(9, dtype=torch.int32).repeat(2, 1)
    valid = positions < torch.tensor([[9], [6]])
    about = torch.rand(2, 9), positions, valid, PLAIN.changed(pool=3)
    wanted = scores(*about)
    monkeypatch.setattr(torch.Tensor, "argsort", None, raising=False)
    assert torch.equal(scores(*about, in_order=True), wanted)


@pytest.mark.parametrize(
    "policy, stays",
    [
        (PLAIN, []),
        (PLAIN.changed(sinks=2), [0, 1]),
        (PLAIN.changed(recent=3), [7, 8, 9]),
        (PLAIN.changed(window=2, recent=1), [8, 9]),
        (PLAIN.changed(exclude=1), [9]),
        (get("streaming"), [0, 1, 2, 3]),
    ],
)
def test_protected_rows(policy: Policy, stays: list[int]) -> None:
    """The last token is the sequence's: a group that lost it protects fewer rows."""
    positions = torch.stack([torch.arange(10).flip(0), torch.arange(10) - 1]).int()
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[1, 0] = False
    found = scores(torch.zeros(2, 10), positions, valid, policy).isinf() & valid
    assert sorted(positions[0][found[0]].tolist()) == stays
    assert positions[1][found[1]].tolist() == [t for t in stays if t < 9]


def test_half_of_what_h2o_keeps_is_recent() -> None:
    """64 rows a group, of which 32 stay: the last 16, and the 16 of largest sum before them."""
    metrics, positions, valid, held = rows([64, 64])
    metric = scores(metrics, positions, valid, get("h2o"), tokens=32)
    evicted, kept = run(metric, held, 4, Budget(pages=16), get("h2o"))
    last = int(positions[valid].max())
    for g in range(2):
        where, stays = positions[g, :64], ~evicted[g, :64]
        recent = where > last - 16
        assert stays[recent].all() and int(stays.sum()) == 32
        hitters = metrics[g, :64][~recent].sort(descending=True).values[: 32 - int(recent.sum())]
        assert metrics[g, :64][stays & ~recent].min() == hitters.min()
    assert kept == 16
    assert get("h2o-r32").protected_recent(10**6) == 32


@pytest.mark.parametrize("lengths", [[64] * 4, [64, 64, 20, 64]])
def test_a_floor_is_an_even_share(lengths: list[int]) -> None:
    """Two layers of two groups; one of each is worth nothing. 0.2 of an even share of 8 pages is
    1.6, and 0.8 of what each of them kept by competing is the rest. What a short group cannot take
    goes to those that are furthest below their share, in whatever layer."""
    metric = torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
    metric = metric * torch.tensor([[8.0], [1e-6], [8.0], [1e-6]])
    held, policy = torch.tensor(lengths), PLAIN.changed(scope="layer")
    kept = {
        floor: kept_pages(
            run(metric, held, 4, Budget(pages=32), policy.changed(floor=floor), layers=2)[0],
            held,
            4,
        )
        for floor in (0.0, 0.2, 1.0)
    }
    short = lengths[2] < 64
    assert kept[0.0] == ([16, 0, 5, 11] if short else [16, 0, 16, 0])
    assert kept[0.2] == ([15, 2, 5, 10] if short else [14, 2, 14, 2])
    assert kept[1.0] == ([9, 9, 5, 9] if short else [8, 8, 8, 8])


def test_published_settings() -> None:
    """Windows, pools, powers and pages of the papers and their released scripts."""
    found = {
        x.name: (x.window, y.pool, y.power, x.scope, x.page, x.protected_recent(128), x.floor)
        for x in map(get, POLICIES)
        if isinstance(y := x.scorer, Attention)
    }
    assert found["kvc-w8"] == (8, 7, 2, "all", 16, 8, 0)
    assert found["kvc-w32"] == (32, 7, 2, "all", 16, 32, 0)
    assert found["kvc-w32-l1"] == (32, 7, 1, "all", 16, 32, 0)
    assert found["kvc-full"] == (None, 1, 2, "all", 16, 32, 0)
    assert found["snapkv"] == (32, 7, 1, "head", None, 32, 0)
    assert found["ada-snapkv"] == (32, 7, 1, "layer", None, 32, 0.2)
    assert found["h2o"] == (None, 1, 1, "head", None, 64, 0)
    assert found["kv-compress"] == (8, 7, 2, "all", None, 8, 0)


def test_recency_and_random() -> None:
    metrics, positions, valid, held = rows([20, 20])
    metric = scores(metrics, positions, valid, get("streaming"))
    evicted, _ = run(metric, held, 4, Budget(pages=4), get("streaming"))
    for g in range(2):
        old = positions[g][valid[g] & ~metric[g].isinf()].sort().values
        assert positions[g][evicted[g]].sort().values.tolist() == old[:12].tolist()
    draws = [
        scores(metrics, positions, valid, get("random"), torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_user_facing_budgets() -> None:
    assert Budget.max_cache_tokens(65, 32, 8) == Budget(pages=24)
    assert Budget.keep_tokens(1.0, [33, 1, 0], 32) == Budget(pages=3)
    assert Budget.keep_tokens(0.5, torch.tensor([128, 130]), 32) == Budget(pages=5)
    assert Budget.keep_tokens(0.07, [3200], 32) == Budget(pages=7)


class Undeclared(Scorer):
    """Reads metrics, which it did not declare."""

    def score(self, view: EntriesView) -> Tensor:
        return view.metrics


class Norms(Undeclared):
    needs = frozenset({"norm"})


class Queries(Undeclared):
    needs = frozenset({"queries"})


class Claimed(Undeclared):
    needs = frozenset({"attention"})


def test_what_is_not_declared_is_not_there() -> None:
    metrics, positions, valid, _ = rows([4])
    view = view_of(Policy(scorer=Claimed()), metrics, positions, valid, [4])
    assert view.metrics is metrics
    for read in (view.keys, view.values, view.queries):
        with pytest.raises(AssertionError, match=r"reads \w+, but its needs are {'attention'}"):
            read(0)
    with pytest.raises(AssertionError, match="reads attention, but its needs are"):
        scores(metrics, positions, valid, Policy(scorer=Undeclared()))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: PLAIN.changed(window=0), "window .* got 0"),
        (lambda: PLAIN.changed(power=3), "power .* got 3"),
        (lambda: PLAIN.changed(pool=4), "pool must be odd .* got 4"),
        (lambda: PLAIN.changed(scope="uniform"), "head, layer, pyramid, all; got 'uniform'"),
        (
            lambda: Norms(),
            "attention, keys, learned, local, queries, rescoring, values; got 'norm'",
        ),
        (lambda: Policy(scorer=Queries()), "'custom' needs queries, so window .* got None"),
        (lambda: Policy(scorer="keys"), r"must be a Scorer, such as Attention\(\) .*got 'keys'"),
        (lambda: as_observation(Policy(scorer=Claimed())), "needs attention.* a Claimed: derive"),
        (lambda: PLAIN.changed(chunk=8), "'plain' has no field 'chunk'; its fields are continual"),
        (lambda: PLAIN.changed(exclude=-1), "exclude .* got -1"),
        (lambda: PLAIN.changed(sinks=-1), "sinks .* got -1"),
        (lambda: PLAIN.changed(recent=-1), "recent .* got -1"),
        (lambda: PLAIN.changed(recent_share=1.0), "recent_share .* got 1.0"),
        (lambda: PLAIN.changed(floor=1.1), "floor .* got 1.1"),
        (lambda: get("snap"), "'snap'; policies: kv-compress, .*random"),
        (lambda: Budget(), "pages=None and bytes=None"),
        (lambda: Budget(pages=1, bytes=64), "pages=1 and bytes=64"),
        (lambda: Budget(pages=-1), "pages .* got -1"),
        (lambda: Budget.max_cache_tokens(0, 32, 8), "max_cache_tokens .* got 0"),
        (lambda: Budget.keep_tokens(0.0, [1], 32), "keep_tokens .* got 0.0"),
        (lambda: Budget.keep_tokens(1.5, [1], 32), "keep_tokens .* got 1.5"),
    ],
)
def test_mistakes_are_explained(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("name", POLICIES)
def test_names(name: str) -> None:
    assert get(name).name == name


def test_sequences_within() -> None:
    order = [("a", 40), ("b", 50), ("c", 20), ("d", 5)]
    assert sequences_within(order, 1000) == ["a", "b", "c", "d"]
    assert sequences_within(order, 90) == ["a", "b"]
    assert sequences_within(order, 95) == [
        "a",
        "b",
    ]  # c does not fit, and d waits with it
    assert sequences_within(order, 39) == []
