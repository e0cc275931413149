"""LiteLLM, unchanged, against a router and simulated workers: the APIs that its proxies speak, with tools.

Skipped without `pip install litellm`.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from patience import LIMIT_S

# Otherwise it downloads its price list when it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
litellm = pytest.importorskip("litellm", reason="pip install litellm")

sys.path.append(str(Path(__file__).parent))
from simulated_graph import KEY  # noqa: E402 - after what skips the file

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": SCHEMA}}


@pytest.fixture(params=["hosted_vllm", "openai", "anthropic"])
def complete(url, request):
    """LiteLLM's completion by one of its providers, each of which speaks its own API."""
    base = url if request.param == "anthropic" else f"{url}/v1"
    common = {"model": f"{request.param}/llama", "api_base": base, "api_key": KEY, "max_tokens": 100}

    async def run(**fields):
        given = {"messages": MESSAGES, **common, **fields}
        return await litellm.acompletion(**given, num_retries=0, timeout=LIMIT_S)

    return run


async def test_a_stream_says_what_the_complete_answer_does(complete):
    """Text and token counts."""
    whole = await complete()
    chunks = [chunk async for chunk in await complete(stream=True)]
    said = litellm.stream_chunk_builder(chunks)
    assert said.choices[0].message.content == whole.choices[0].message.content != ""
    assert whole.usage.completion_tokens > 0


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_tools_are_called(complete, choice):
    """With arguments of their schema, streamed alike; the result is answered with text."""
    whole = await complete(tools=[TOOL], tool_choice=choice)
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    chunks = [chunk async for chunk in await complete(tools=[TOOL], tool_choice=choice, stream=True)]
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    said = [*MESSAGES, whole.choices[0].message.model_dump(exclude_none=True)]
    said.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert (await complete(messages=said, tools=[TOOL])).choices[0].message.content


async def test_structured_output_satisfies_its_schema(complete):
    """LiteLLM turns it into a call of a tool where the API has no format of its own."""
    shape = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answer = await complete(response_format=shape)
    assert isinstance(json.loads(answer.choices[0].message.content)["city"], str)
