"""Which `kv_transfer_params` of a request are used. vLLM itself is not needed; `test_vllm_nixl`
sends some of them to an engine."""

import pytest

from kvfold.vllm_plugin.nixl_parameters import DIGEST, EXPIRY, digest, parameters_problem

NOW = 1e9
RIGHT = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": ([1, 2, 3, 4], [0, 7]),
    "remote_engine_id": "other",
    "remote_request_id": "request-1",
    "remote_host": "localhost",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 100,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    EXPIRY: NOW + 20,
}
PROMPT = list(range(100))
RIGHT[DIGEST] = digest(RIGHT, PROMPT)
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}

STRINGS = ("remote_engine_id", "remote_request_id", "remote_host")
SIZES = ("tp_size", "dcp_size", "pp_size")
WRONG_LISTS: tuple = (
    None, 5, "1234", [], [[], []], [1, 2, 3, 4], [[1, 2, 3], [0, 7]], [[1, 2, 3, 4, 5], [0, 7]],
    [[1, 2, 3, 4]], [[1, 2, 3, 4], [0, 7], [1]], ["1234", "07"], {"a": 1},
)  # fmt: skip
OTHER_BLOCKS = ([[1, 2, 3, 5], [0, 7]], [[4, 3, 2, 1], [0, 7]], [[1, 2, 3, 4], [7, 0]])
WRONG_BLOCKS = (-1, 2**31, 2**40, "4", 4.0, None, True)
# What is changed in RIGHT, and what the message says.
WRONG = [
    *(
        ({x: y}, f"`{x}` must be a string; got")
        for x in STRINGS
        for y in (None, 7, ["a"], {"a": 1})
    ),
    *(({"remote_port": x}, "`remote_port` must be an integer; got") for x in (None, "5600", True)),
    ({"remote_engine_id": "own"}, "`remote_engine_id` must be another server's"),
    *(({x: y}, f"`{x}` must be 1, as it is") for x in SIZES for y in (2, 0, -1, "1", None, True)),
    *(({"remote_block_ids": x}, "must be lists of 4, 2 numbers") for x in WRONG_LISTS),
    *(({"remote_block_ids": [[1, 2, 3, x], [0, 7]]}, "numbers of blocks") for x in WRONG_BLOCKS),
    *(({"remote_block_ids": x}, "they are of another prompt") for x in OTHER_BLOCKS),
    ({"remote_request_id": "request-2"}, "they are of another prompt"),
    ({"remote_engine_id": "third"}, "they are of another prompt"),
    *(({DIGEST: x}, "they are of another prompt") for x in ("", "0" * 32, 7)),
    ({EXPIRY: NOW}, "they came too late"),
    ({EXPIRY: NOW - 5.5}, "they came too late"),
    ({"do_remote_prefill": False, "do_remote_decode": True}, "must be left out where this"),
]


def problem(params, prompt: list[int] | None = PROMPT) -> str:
    return parameters_problem(params, prompt, [4, 2], "own", 1, NOW) or ""


def without(*names: str) -> dict:
    return {name: value for name, value in RIGHT.items() if name not in names}


@pytest.mark.parametrize(
    "params",
    [
        RIGHT,
        RIGHT | {"remote_block_ids": [[1, 2, 3, 4], [0, 7]]},  # as JSON brings them
        RIGHT | {"remote_host": "10.0.0.7", "remote_port": 7},  # a proxy knows another way there
        without(EXPIRY, DIGEST, "tp_size", "dcp_size", "pp_size"),  # dropped by a proxy
        RIGHT | {"do_remote_decode": True},
        PREFILL,
        {},
    ],
)
def test_parameters_that_are_used(params) -> None:
    assert not problem(params)


@pytest.mark.parametrize(("change", "text"), WRONG)
def test_parameters_that_are_not_used(change, text: str) -> None:
    assert text in problem(RIGHT | change)


@pytest.mark.parametrize("name", [*STRINGS, "remote_port", "remote_block_ids"])
def test_missing_parameters(name: str) -> None:
    assert f"`{name}` must be" in problem(without(name))


def test_parameters_of_another_type() -> None:
    for params in ("hello", 5, [RIGHT], True):
        assert "must be an object" in problem(params)


def test_parameters_of_another_prompt() -> None:
    for prompt in ([7, *PROMPT[1:]], [*PROMPT[:-1], 7], PROMPT[:-1], []):
        assert "they are of another prompt" in problem(RIGHT, prompt)


def test_parameters_of_a_request_that_gives_blocks_back() -> None:
    """vLLM sends it with another prompt, whose length says nothing about blocks."""
    assert not problem(RIGHT, None)
    assert not problem(RIGHT | {"remote_block_ids": [[1], []], EXPIRY: NOW - 9}, None)
    for name, wrong in (("remote_block_ids", None), ("remote_block_ids", [[]]), ("remote_host", 5)):
        assert f"`{name}` must be" in problem(RIGHT | {name: wrong}, None)


def test_a_message_shows_no_long_value() -> None:
    assert len(problem(RIGHT | {"remote_block_ids": [list(range(9999))]})) < 300
