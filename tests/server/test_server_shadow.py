"""What a server with shadow scoring reports, and the alerts that read it."""

import re
from pathlib import Path

import yaml

from kvfold.engine.core.shadow import LOSSES
from serving import Served, serving, small_llm, text_string_to_metric_families

ALERTS = Path(__file__).parents[2] / "deploy" / "alerts.yml"
Samples = dict[str, list[tuple[dict[str, str], float]]]


def samples(served: Served) -> Samples:
    by_name: Samples = {}
    for family in text_string_to_metric_families(served.client.get("/metrics").text):
        for x in family.samples:
            by_name.setdefault(x.name, []).append((x.labels, x.value))
    return by_name


def by(found: Samples, name: str, label: str) -> dict[str, float]:
    return {labels[label]: value for labels, value in found[name]}


def test_metrics_and_alerts_agree() -> None:
    """An idle server scores what was drawn, and each metric that a rule reads exists."""
    with serving(small_llm(shadow="100%", bits=2)) as served:
        for prompt in ("The old house", "A ship went to sea"):
            served.ask(prompt=prompt, max_tokens=12, ignore_eos=True)
        found = samples(served)
        while by(found, "kvfold:shadow_requests_total", "outcome")["scored"] < 2:
            found = samples(served)  # the engine's thread works on it
    outcomes = by(found, "kvfold:shadow_requests_total", "outcome")
    assert outcomes == {"scored": 2, "dropped": 0, "skipped": 0, "failed": 0}
    totals = served.llm.engine.shadow.totals
    sums = by(found, "kvfold:shadow_loss_nats_total", "sign")
    assert sums == {"positive": totals.positive, "negative": totals.negative}
    assert sums["positive"] > 0
    for name, value in (("", 24), ("differing_", totals.num_differing)):
        assert [x for _, x in found[f"kvfold:shadow_{name}tokens_total"]] == [value]
    buckets = by(found, "kvfold:shadow_token_loss_nats_bucket", "le")
    assert len(buckets) == len(LOSSES) + 1 and buckets["+Inf"] == 24
    assert [*buckets.values()] == sorted(buckets.values())

    rules = [x for group in yaml.safe_load(ALERTS.read_text())["groups"] for x in group["rules"]]
    recorded = {x["record"] for x in rules if "record" in x}
    for rule in rules:
        expression = rule["expr"]
        names = set(re.findall(r"kvfold:[\w:]+", expression))
        assert names and names <= found.keys() | recorded, expression
        for name, label, value in re.findall(r'(kvfold:\w+)\{(\w+)="(\w+)"\}', expression):
            assert value in by(found, name, label)
        assert expression.count("(") == expression.count(")")


def test_no_metric_without_it() -> None:
    with serving(small_llm()) as served:
        served.ask(prompt="The old house", max_tokens=2)
        assert not [x for x in samples(served) if "shadow" in x]
