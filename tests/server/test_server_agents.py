"""Agent loops of pydantic-ai and openai-agents against the server, whole and streamed.

A grammar makes the small model write a script: an answer for each request of the loop.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
openai = pytest.importorskip("openai", reason="the openai package is not installed")
from pydantic import BaseModel, Field  # noqa: E402

from kvfold.server import app, reasoning  # noqa: E402
from serving import Served, serving, small_llm  # noqa: E402

# As in Qwen 3's template, which shows the reasoning of an agent's loop.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{# <tool_call>{'arguments': }</think> #}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{{ '\n' }}{% endfor %}"
)
THOUGHT = "Hm, so."
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
LOOP = [f"<think>\n{THOUGHT}\n</think>\n\n{CALL}", "<think>\nAh.\n</think>\n\nNow -3."]
ASKED = "What is the weather in Oslo?"


class Pair(BaseModel):
    a: int = Field(ge=0, le=99)
    b: bool


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    llm = small_llm(max_tokens=2048, kv_bytes=2**23)
    llm.tokenizer.chat_template = TEMPLATE
    with serving(llm) as served:
        yield served


class Script:
    """Answers that the model writes, one for each request, and the prompts that it got."""

    def __init__(self, small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[str] = []
        self.prompts: list[str] = []
        guide, submit = app.guide_content, app.Service.submit

        def guided(sampling: Any, phase: Any) -> Any:
            if not self.answers:
                return guide(sampling, phase)
            form = {"type": "const_string", "value": self.answers.pop(0)}
            tag = json.dumps({"type": "structural_tag", "format": form})
            return [replace(x, json_schema=None, structural_tag=tag) for x in sampling]

        def submitted(service: Any, specs: Any, *more: Any, **names: Any) -> Any:
            self.prompts.append(small.llm.tokenizer.decode(specs[0][0]))
            return submit(service, specs, *more, **names)

        says = {"type": "const_string", "value": THOUGHT}  # where an answer is not of the script
        monkeypatch.setattr(reasoning, "ANY_REASONING", says)
        monkeypatch.setattr(app, "guide_content", guided)
        monkeypatch.setattr(app.Service, "submit", submitted)


@pytest.fixture
def script(small: Served, monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(small, monkeypatch)


def test_pydantic_ai(small: Served, script: Script) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.vllm import VLLMProvider

    cities: list[str] = []

    def get_weather(city: str) -> str:
        cities.append(city)
        return f"-{len(city) - 1}"

    async def run() -> None:
        provider = VLLMProvider(base_url=f"{small.url}/v1", api_key="none")
        settings = {"temperature": 0, "max_tokens": 200}
        model = OpenAIChatModel("small", provider=provider, settings=settings)
        agent = pydantic_ai.Agent(model, tools=[get_weather])

        script.answers = [*LOOP]
        whole = await agent.run(ASKED)
        assert whole.output == "Now -3." and cities == ["Oslo"]
        assert [x.content for x in parts(whole, "thinking")] == [THOUGHT, "Ah."]
        assert [x.tool_name for x in parts(whole, "tool-call")] == ["get_weather"]

        script.answers = [*LOOP]
        async with agent.run_stream(ASKED) as stream:
            text = [x async for x in stream.stream_text(delta=True)]
        assert "".join(text) == "Now -3." and len(text) > 1
        assert [x.content for x in parts(stream, "thinking")] == [THOUGHT, "Ah."]
        assert cities == ["Oslo", "Oslo"] and not script.answers
        # The second request of a loop has the call, its result and the reasoning before it.
        for prompt in script.prompts[1::2]:
            assert prompt.count(THOUGHT) == 1 and "-3" in prompt and "Oslo" in prompt

        # Structured output: by response_format, then by the call of a function.
        for output in (pydantic_ai.NativeOutput(Pair), Pair):
            kinds = pydantic_ai.Agent(model, output_type=output)
            assert isinstance((await kinds.run(ASKED)).output, Pair)
            async with kinds.run_stream(ASKED) as stream:
                assert isinstance(await stream.get_output(), Pair)

    def parts(result: Any, kind: str) -> list[Any]:
        found = [x for message in result.all_messages() for x in message.parts]
        return [x for x in found if x.part_kind == kind]

    asyncio.run(run())


def test_openai_agents(small: Served, script: Script) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    cities: list[str] = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        cities.append(city)
        return f"-{len(city) - 1}"

    async def run() -> None:
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0)
        settings = {
            "model": agents.OpenAIChatCompletionsModel("small", client),
            "model_settings": agents.ModelSettings(temperature=0, max_tokens=200),
        }
        agent = agents.Agent("Ann", tools=[get_weather], **settings)

        script.answers = [*LOOP]
        whole = await agents.Runner.run(agent, ASKED)
        assert whole.final_output == "Now -3." and cities == ["Oslo"]
        assert texts(whole) == [THOUGHT, "Ah."]

        script.answers = [*LOOP]
        stream, events = agents.Runner.run_streamed(agent, ASKED), []
        async for event in stream.stream_events():
            if event.type == "raw_response_event" and event.data.type.endswith(".delta"):
                events.append((event.data.type, event.data.delta))
        assert stream.final_output == "Now -3." and cities == ["Oslo", "Oslo"]
        assert texts(stream) == [THOUGHT, "Ah."]
        thought = "".join(text for kind, text in events if "reasoning" in kind)
        assert thought == f"{THOUGHT}Ah.", "the reasoning comes once"
        answer = "".join(text for kind, text in events if kind == "response.output_text.delta")
        assert answer == "Now -3."
        for prompt in script.prompts[1::2]:
            assert prompt.count(THOUGHT) == 1 and "-3" in prompt

        kinds = agents.Agent("Bob", output_type=Pair, **settings)
        assert isinstance((await agents.Runner.run(kinds, ASKED)).final_output, Pair)
        stream = agents.Runner.run_streamed(kinds, ASKED)
        async for _ in stream.stream_events():
            pass
        assert isinstance(stream.final_output, Pair)
        await client.close()

    def texts(result: Any) -> list[str]:
        """The reasoning of each answer."""
        items = [x.raw_item for x in result.new_items if x.type == "reasoning_item"]
        return ["".join(x.text for x in [*item.summary, *(item.content or ())]) for item in items]

    asyncio.run(run())
