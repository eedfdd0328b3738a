"""The server as its clients meet it, over HTTP."""

import json
from collections.abc import Iterator

import pytest

from kvfold import SamplingParams
from kvfold.utils.tokens import encode
from serving import HISTOGRAMS, Served, serving, small_llm, text_string_to_metric_families


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serving(small_llm()) as served:
        yield served


def test_a_completion_is_the_engines(small: Served) -> None:
    found = small.ask(prompt="The old house", max_tokens=8, temperature=0)
    (wanted,) = small.llm.generate("The old house", SamplingParams(max_new_tokens=8))
    assert found["object"] == "text_completion" and found["model"] == "small"
    (choice,) = found["choices"]
    assert choice["text"] == wanted.text and choice["finish_reason"] == "length"
    usage, prompt = found["usage"], len(small.llm.encode("The old house"))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 8)


def events(served: Served, path: str = "/v1/completions", **body) -> list[dict]:
    """Of a stream, whose last is [DONE]."""
    with served.client.stream("POST", path, json={"stream": True} | body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


CHAT = "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 8}
ASKED = [{"role": "user", "content": "Who went to sea?"}]


def test_a_stream_is_the_answer_in_pieces(small: Served) -> None:
    whole = small.ask(prompt="The old house", **GREEDY)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(small, prompt="The old house", stream_options=options, **GREEDY)
    assert "".join(x["choices"][0]["text"] for x in chunks) == whole["choices"][0]["text"]
    reasons = [x["choices"][0]["finish_reason"] for x in chunks]
    assert len(reasons) > 2 and set(reasons[:-1]) == {None} and reasons[-1] == "length"
    assert last["choices"] == [] and last["usage"] == whole["usage"] == chunks[-1]["usage"]
    assert len({x["id"] for x in (*chunks, last)}) == 1


def test_a_chat_goes_by_the_template(small: Served) -> None:
    found = small.ask(CHAT, messages=ASKED, **GREEDY)
    wanted = small.llm.chat(ASKED, SamplingParams(max_new_tokens=8))
    (choice,) = found["choices"]
    assert found["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": wanted.text}
    first, *chunks = events(small, CHAT, messages=ASKED, **GREEDY)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(x["choices"][0]["delta"].get("content", "") for x in chunks) == wanted.text
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who went to sea?"}]}]
    again = small.ask(CHAT, messages=parts, max_completion_tokens=8, temperature=0)
    assert again["choices"] == found["choices"] and again["usage"] == found["usage"]


def test_choices_differ_by_their_seeds_and_come_again(small: Served) -> None:
    drawn = {"prompt": ["The old", "A ship"], "n": 2, "seed": 5, "temperature": 1.5}
    first, again = (small.ask(max_tokens=12, **drawn) for _ in range(2))
    texts = [x["text"] for x in first["choices"]]
    assert first["choices"] == again["choices"] and len(set(texts)) == 4
    assert [x["index"] for x in first["choices"]] == [0, 1, 2, 3]
    alone = small.ask(prompt="A ship", seed=6, temperature=1.5, max_tokens=12)
    assert alone["choices"][0]["text"] == texts[3]
    prompts = sum(len(small.llm.encode(x)) for x in drawn["prompt"])
    assert first["usage"]["prompt_tokens"] == prompts  # not one more for each of n
    streamed = events(small, max_tokens=12, **drawn)
    for number, text in enumerate(texts):
        choices = (x["choices"][0] for x in streamed)
        assert "".join(x["text"] for x in choices if x["index"] == number) == text


def test_a_stop_string_ends_the_text_before_it(small: Served) -> None:
    text = small.ask(prompt="The old house", temperature=0, max_tokens=20)["choices"][0]["text"]
    stop = text[9:12]
    found = small.ask(prompt="The old house", temperature=0, max_tokens=20, stop=[stop, "zzz"])
    assert found["choices"][0]["text"] == text[: text.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] < 20


def test_logprobs_of_completions_and_chats(small: Served) -> None:
    wanted = SamplingParams(max_new_tokens=4, logprobs=2)
    (engine,) = small.llm.generate("The old house", wanted)
    asked = {"prompt": "The old house", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    found = small.ask(**asked)["choices"][0]
    logprobs = found["logprobs"]
    assert "".join(logprobs["tokens"]) == found["text"]
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    assert logprobs["token_logprobs"] == pytest.approx([x.chosen for x in engine.logprobs])
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])  # greedy: its own is the first
    chunks = [x["choices"][0]["logprobs"] for x in events(small, **asked)]
    for name in logprobs:
        assert [item for x in chunks for item in x[name]] == logprobs[name]
    chat = small.ask(CHAT, messages=ASKED, logprobs=True, top_logprobs=3, **GREEDY)["choices"][0]
    content = chat["logprobs"]["content"]
    assert "".join(x["token"] for x in content) == chat["message"]["content"]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert [len(x["top_logprobs"]) for x in content] == [3] * 8
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]
    plain = small.ask(CHAT, messages=ASKED, **GREEDY)["choices"][0]
    assert plain["logprobs"] is None


def test_tokens_may_be_named(small: Served) -> None:
    """By their ids: to be wanted, shunned, or to end the text."""
    asked = {"prompt": "The old house", "return_token_ids": True, **GREEDY}
    free = small.ask(**asked)["choices"][0]["token_ids"]
    ended = small.ask(**asked, stop_token_ids=[free[3]])["choices"][0]
    assert ended["token_ids"] == free[: free.index(free[3]) + 1]
    assert ended["finish_reason"] == "stop"
    assert ended["text"] == small.llm.tokenizer.decode(free)[: len(ended["text"])]
    late = small.ask(**asked, stop_token_ids=[free[3]], min_tokens=6)["choices"][0]
    assert free[3] not in late["token_ids"][:6]
    wanted = small.ask(**asked, logit_bias={str(free[5]): 100})["choices"][0]
    assert wanted["token_ids"] == [free[5]] * 8
    shunned = small.ask(**asked, logit_bias={str(free[0]): -100})["choices"][0]
    assert free[0] not in shunned["token_ids"]


def test_tokens_and_words_may_be_forbidden(small: Served) -> None:
    asked = {"prompt": "The old house", "return_token_ids": True, **GREEDY}
    free = small.ask(**asked)["choices"][0]
    few = [5, 6, 4095]
    allowed = small.ask(**asked, allowed_token_ids=few)["choices"][0]["token_ids"]
    assert set(allowed) <= set(few) and len(allowed) == 8
    for word in (free["text"].split()[0], " ".join(free["text"].split()[1:3])):
        other = small.ask(**asked, bad_words=[word])["choices"][0]
        assert word in free["text"] and word not in other["text"]
        before = free["text"][: free["text"].index(word)].rstrip()
        assert other["text"].startswith(before)


def test_echo_and_prompts_of_ids(small: Served) -> None:
    ids = small.llm.encode("The old house")
    plain = small.ask(prompt="The old house", **GREEDY)["choices"][0]["text"]
    echoed = small.ask(prompt=[ids, ids], echo=True, **GREEDY)["choices"]
    assert [x["text"] for x in echoed] == [f"The old house{plain}"] * 2
    streamed = events(small, prompt="The old house", echo=True, **GREEDY)
    assert "".join(x["choices"][0]["text"] for x in streamed) == f"The old house{plain}"


def test_a_stream_has_every_token_id(small: Served) -> None:
    """Also of tokens that are no text, or none yet: a special one, and bytes of one character."""
    bytes_of = small.llm.tokenizer.convert_tokens_to_ids(["ä", "½", "ł"])  # a byte each, of no text
    for more in ({}, {"allowed_token_ids": [0, *bytes_of]}, {"stop": ["zz"]}):
        asked = {"max_tokens": 40, "temperature": 1, "seed": 3, "ignore_eos": True}
        asked |= {"return_token_ids": True, **more}
        for path, body in (("/v1/completions", {"prompt": "The"}), (CHAT, {"messages": ASKED})):
            whole = small.ask(path, **asked, **body)["choices"][0]["token_ids"]
            chunks = [x["choices"][0] for x in events(small, path, **asked, **body)]
            assert [id for x in chunks for id in x.get("token_ids", ())] == whole
            assert len(whole) == 40


def test_offsets_of_tokens_are_those_of_the_text(small: Served) -> None:
    """Where the tokenizer puts BOS in front, it is no part of the text that is echoed."""
    from tokenizers.processors import TemplateProcessing

    backend = small.llm.tokenizer.backend_tokenizer
    before, bos = backend.post_processor, "<|endoftext|>"
    text = "The old house by the sea, caf\u00e9 \N{GRINNING FACE}!"
    try:
        for front in (True, False):
            backend.post_processor = before if front else TemplateProcessing(single="$A")
            ids = small.llm.encode(text)
            assert (ids[0] == 0) == front
            for prompt in (text, ids):
                asked = {"prompt": prompt, "echo": True, "logprobs": 1, **GREEDY}
                (choice,) = small.ask(**asked)["choices"]
                logprobs = choice["logprobs"]
                assert choice["text"].startswith(text)
                offsets = logprobs["text_offset"]
                for token, start in zip(logprobs["tokens"], offsets, strict=True):
                    if token != bos and "\ufffd" not in token:
                        assert choice["text"][start:].startswith(token), (token, start)
                assert offsets[0] == offsets[front] == 0
                assert offsets[len(ids)] == len(text)
                chunks = [x["choices"][0]["logprobs"] for x in events(small, **asked)]
                assert [x for chunk in chunks for x in chunk["text_offset"]] == offsets
    finally:
        backend.post_processor = before


def test_a_last_message_may_be_continued(small: Served) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "It was the"}]
    text = "user: Who went to sea?\nassistant: It was the"
    found = small.ask("/tokenize", messages=begun, continue_final_message=True)
    ids = encode(small.llm.tokenizer, text)
    assert found["tokens"] == ids
    chat = small.ask(CHAT, messages=begun, continue_final_message=True, **GREEDY)["choices"][0]
    plain = small.ask(prompt=ids, **GREEDY)["choices"][0]
    assert chat["message"]["content"] == plain["text"]
    ended = small.ask("/tokenize", messages=begun, add_generation_prompt=False)["tokens"]
    assert ended == encode(small.llm.tokenizer, text + "\n")


@pytest.mark.parametrize("as_variable", [False, True])
def test_reasoning_begins_in_the_message_that_is_continued(
    as_variable: bool, small: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfold.server.service.can_reason", lambda *_: True)
    begun = [*ASKED, {"role": "assistant", "content": "<think>It was"}]
    continues = {"continue_final_message": True}
    more = {"chat_template_kwargs": continues} if as_variable else continues
    message = small.ask(CHAT, messages=begun, **more, **GREEDY)["choices"][0]["message"]
    assert message["reasoning"] and not message["content"]


def test_what_else_clients_ask(small: Served) -> None:
    (card,) = small.client.get("/v1/models").json()["data"]
    assert card["id"] == "small" and card["max_model_len"] == 256
    assert small.client.get("/v1/models/small").json() == card
    assert small.client.get("/health").json() == {"status": "ok"}
    assert small.client.get("/version").json()["version"]
    found = small.ask("/tokenize", prompt="The old house", return_token_strs=True)
    assert found["tokens"] == small.llm.encode("The old house")
    assert found["count"] == len(found["token_strs"]) and found["max_model_len"] == 256
    assert small.ask("/tokenize", messages=ASKED)["tokens"] == small.llm.encode_chat(ASKED)
    assert small.ask("/detokenize", tokens=found["tokens"])["prompt"] == "The old house"
    for path in ("/health", "/v1/models", "/metrics", "/version", "/"):
        head = small.client.head(path)
        assert head.status_code == 200 and not head.content
    assert small.client.head("/v1/completions").status_code == 405
    for n in (1, 2):
        assert len(small.ask(prompt="a", n=n, best_of=n, max_tokens=1)["choices"]) == n


def test_docs_describe_bodies(small: Served) -> None:
    assert "openapi.json" in small.client.get("/docs").text
    paths = small.client.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", CHAT, "/tokenize", "/detokenize"):
        content = paths[path]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"]
        assert "model" in schema["properties"] and "$ref" not in str(schema)


def test_pages_of_named_origins_may_ask() -> None:
    page, other = ({"Origin": f"https://{name}.example"} for name in ("page", "other"))
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    with serving(small_llm(), api_key="k", allow_origins=("https://page.example",)) as served:
        client, name = served.client, "access-control-allow-origin"
        for path in ("/v1/completions", "/v1/models"):
            answer = client.options(path, headers=page | asks)
            assert answer.status_code == 200 and answer.headers[name] == page["Origin"]
            assert name not in client.options(path, headers=other | asks).headers
        refused = client.post("/v1/completions", json={"prompt": "a"}, headers=page)
        assert refused.status_code == 401 and refused.headers[name] == page["Origin"]
    with serving(small_llm()) as served:
        assert (
            "access-control-allow-origin" not in served.client.get("/health", headers=page).headers
        )
        plain = {"Content-Type": "text/plain", **page}  # which a page may send without asking
        answer = served.client.post("/v1/completions", content='{"prompt": "a"}', headers=plain)
        assert answer.status_code == 400 and "application/json" in answer.text


def test_metrics_count_what_was_served(small: Served) -> None:
    def value(name: str, **labels: str) -> float:
        labels = {"model_name": "small"} | labels
        text = small.client.get("/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return 0.0

    names = [f"vllm:{x}" for x in ("prompt_tokens_total", "generation_tokens_total")]
    names += [f"vllm:{x}_count" for x in HISTOGRAMS]
    before = {name: value(name) for name in names}
    ended = value("vllm:request_success_total", finished_reason="length")
    usage = small.ask(prompt="The old house", **GREEDY)["usage"]
    more = {name: value(name) - before[name] for name in names}
    assert more.pop("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert more.pop("vllm:generation_tokens_total") == 8
    assert more.pop("vllm:inter_token_latency_seconds_count") == 7
    assert set(more.values()) == {1}
    assert value("vllm:request_success_total", finished_reason="length") == ended + 1
    found = [value(f"vllm:prefix_cache_{x}_total") for x in ("queries", "hits")]
    assert found[0] >= usage["prompt_tokens"] and 0 <= found[1] < found[0]
    assert value("vllm:num_requests_running") == value("kvfold:pool_bytes", state="used") == 0
    assert value("kvfold:token_bytes", axis="pages") > 0
