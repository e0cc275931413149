"""LangChain, unchanged, against a router and simulated workers: tools, structured output and an agent's loop.

Skipped without `pip install langchain langchain-openai langchain-anthropic`.
"""

import sys
from pathlib import Path
from typing import Literal

import pytest
from patience import LIMIT_S
from pydantic import BaseModel

pytest.importorskip("langchain", reason="pip install langchain langchain-openai langchain-anthropic")
agents = pytest.importorskip("langchain.agents")
tools = pytest.importorskip("langchain_core.tools")
openai = pytest.importorskip("langchain_openai")
anthropic = pytest.importorskip("langchain_anthropic")

sys.path.append(str(Path(__file__).parent))
from simulated_graph import KEY  # noqa: E402 - after what skips the file

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]
QUESTION = "What is the weather in Paris?"


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    unit: Literal["C", "F"]
    degrees: int


@tools.tool
def weather(city: str, days: int) -> str:
    """Return the weather of a city for some days."""
    return f"sunny in {city} for {days} days"


@pytest.fixture(params=["chat", "responses", "messages"])
def model(url, request):
    """A chat model that speaks one of the three APIs."""
    common = {"model": "llama", "api_key": KEY, "max_retries": 0, "timeout": LIMIT_S}
    if request.param == "messages":
        return anthropic.ChatAnthropic(base_url=url, max_tokens=200, **common)
    uses_responses = request.param == "responses"
    return openai.ChatOpenAI(
        base_url=f"{url}/v1", use_responses_api=uses_responses, max_tokens=200, stream_usage=True, **common
    )


async def test_a_stream_says_what_the_complete_answer_does(model):
    """Text and token counts."""
    whole = await model.ainvoke(QUESTION)
    parts = [part async for part in model.astream(QUESTION)]
    said = parts[0]
    for part in parts[1:]:
        said += part
    assert said.text == whole.text != ""
    assert said.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] > 0


async def test_bound_tools_are_called(model):
    """With arguments that the tool takes, streamed alike."""
    bound = model.bind_tools([weather])
    (call,) = (await bound.ainvoke(QUESTION)).tool_calls
    assert weather.invoke(call["args"]).startswith("sunny in ")
    parts = [part async for part in bound.astream(QUESTION)]
    said = parts[0]
    for part in parts[1:]:
        said += part
    assert said.tool_calls[0]["args"] == call["args"]


async def test_structured_output_is_an_object_of_the_schema(model):
    """By the method that LangChain prefers for the API, and by a call of a function."""
    methods = [{}] if isinstance(model, anthropic.ChatAnthropic) else [{}, {"method": "function_calling"}]
    for method in methods:
        assert isinstance(await model.with_structured_output(Weather, **method).ainvoke(QUESTION), Weather)


async def test_an_agents_loop_ends(model):
    """The question, the call, its result, the answer."""
    agent = agents.create_agent(model, [weather])
    said = (await agent.ainvoke({"messages": [{"role": "user", "content": QUESTION}]}))["messages"]
    assert [each.type for each in said] == ["human", "ai", "tool", "ai"]
    assert said[2].content.startswith("sunny in ")
    assert said[3].text
