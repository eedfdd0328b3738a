"""The plan for many nodes keeps its accounts: what can be worked out by hand comes out."""

import json
from pathlib import Path

import pytest

import fleet

MEASURED = Path(fleet.__file__).parent / "results" / "decode-tiers-8b.json"


def run(variant: str = "bf16-full", nodes: int = 4, **plan):
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    node = fleet.Node.of(variant, measured)
    made = fleet.Fleet(node, fleet.Plan(**{"seconds": 5.0} | plan), nodes)
    return made, made.run()


def test_a_request_alone_takes_what_was_measured() -> None:
    """Its own tokens are read, the whole prompt sent, and every step is a batch of one's."""
    made, found = run(load=0.001, seconds=300.0)
    plan, node = made.plan, made.node
    sent = plan.prompt * node.token / plan.link
    assert found["first_token_s_p50"] == pytest.approx(plan.own / node.prefill + sent, rel=0.01)
    assert found["step_ms"] == pytest.approx(node.steps[0][1], rel=0.01)


def test_a_prefix_that_is_nowhere_is_read_again() -> None:
    made, found = run(load=0.001, seconds=1e5, cache_bytes=1.2e9)
    plan, node = made.plan, made.node
    sent = plan.prompt * node.token / plan.link
    assert found["first_token_s_p95"] == pytest.approx(plan.prompt / node.prefill + sent, rel=0.01)


def test_steps_between_and_beyond_those_measured() -> None:
    node = fleet.Node("x", 1.0, ((10.0, 1.0), (20.0, 2.0), (40.0, 3.0)), 1.0)
    assert [node.step(x) for x in (5, 10, 15, 20, 30, 60)] == [1.0, 1.0, 1.5, 2.0, 2.5, 4.0]


def test_every_request_ends_and_every_byte_is_counted() -> None:
    made, found = run("swift-5x")
    n, plan = found["requests"], made.plan
    assert n == len(made.began) == len(made.first) == len(made.ended) > 50
    assert all(made.began[i] < made.first[i] < made.ended[i] for i in range(n))
    assert not any(x.running or x.waiting for x in made.decoders)
    assert found["all_to_all_bytes_per_s"] * 5 == pytest.approx(n * plan.prompt * made.node.token)
    fetched = found["prefix_fetched"] * n * plan.prefix * made.node.token
    assert found["prefix_bytes_per_s"] * 5 == pytest.approx(fetched)


def test_no_node_holds_more_than_its_memory() -> None:
    made, found = run(cache_bytes=40e9)
    assert found["tokens_per_node"] * made.node.token <= 40e9
    assert max(len(x.kept) for x in made.readers) * made.plan.prefix <= found["tokens_per_node"]
    assert found["batch"] * made.plan.tokens <= found["tokens_per_node"]
    assert found["prefix_found"] + found["prefix_fetched"] < 1, "some are read again"


def test_fewer_bytes_are_sent_and_more_prefixes_found() -> None:
    _, full = run()
    _, small = run("swift-5x")
    assert full["token_bytes"] / small["token_bytes"] == pytest.approx(5.15, abs=0.01)
    assert small["prefix_found"] > full["prefix_found"]
    assert full["cache_bytes_per_request"] == 8192 * 131072
