"""The official OpenAI client, unchanged, against a real router process and real simulated workers."""

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest

from penstock.api import Role, RouterConfig
from penstock.core.http.server import HttpServer
from penstock.router.core.worker_spec import WorkerSpec
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings

pytestmark = pytest.mark.slow

SPEED = "20"
PROMPT = "The gate lets through what the turbine can use. " * 8


def _start(log_dir, name, *arguments):
    """Start a `penstock` process that chooses its own port; return it and its log file."""
    log = log_dir / f"{name}.log"
    command = [sys.executable, "-m", "penstock.cli", *arguments, "--port", "0", "--speed", SPEED]
    with log.open("wb") as file:
        env = {**os.environ, "PENSTOCK_API_KEYS": "sk-test"}
        return subprocess.Popen(command, stdout=file, stderr=file, env=env), log


def _port(log, event):
    """Wait for the line that tells the port."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        for line in log.read_text().splitlines():
            if event in line:
                found = line.split("port=")[1] if "port=" in line else line.split("127.0.0.1:")[1]
                return int("".join(c for c in found.split()[0] if c.isdigit()))
        time.sleep(0.05)
    raise AssertionError(f"{log}: no {event!r} in:\n{log.read_text()}")


@pytest.fixture(scope="module")
def base_url(tmp_path_factory):
    """Prefill, decode and router as processes; SIGTERM ends each with 0."""
    log_dir = tmp_path_factory.mktemp("logs")
    processes, urls = [], []
    try:
        for role in ("prefill", "decode"):
            arguments = ("engine", "serve", "m", "--role", role, "--served-model-name", "llama")
            process, log = _start(log_dir, role, *arguments)
            processes.append(process)
            urls.append(f"{role}=http://127.0.0.1:{_port(log, 'worker ready')}")
        flags = [flag for url in urls for flag in ("--worker", url)]
        process, log = _start(log_dir, "router", "router", "serve", "--model", "llama", *flags)
        processes.append(process)
        url = f"http://127.0.0.1:{_port(log, 'router listening')}"
        _wait_ready(url)
        yield url + "/v1"
    finally:
        for process in reversed(processes):
            process.terminate()
        codes = [process.wait(timeout=20) for process in processes]
    assert codes == [0] * len(processes), [path.read_text() for path in Path(log_dir).iterdir()]


def _wait_ready(url):
    deadline_s = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(url + "/ready", timeout=1):
                return
        except OSError:
            assert time.monotonic() < deadline_s, "router not ready"
            time.sleep(0.05)


@pytest.fixture
def client(base_url):
    """The synchronous client; no retries, so that errors show at once."""
    with openai.OpenAI(base_url=base_url, api_key="sk-test", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def async_client(base_url):
    """The asynchronous client."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="sk-test", max_retries=0, timeout=20) as client:
        yield client


def test_completions(client):
    """A whole answer with usage: prompt tokens by the simulated tokenizer, 4 bytes each."""
    answer = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=6, extra_body={"ignore_eos": True}
    )

    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT) // 4, 6)


def test_the_prefills_cache_shows_in_usage(client):
    """The second time all full blocks but the last computed one come from prefill's cache."""
    prompt = "A prompt that comes twice, and is found in the cache the second time. " * 8
    first, second = (
        client.completions.create(model="llama", prompt=prompt, max_tokens=2, extra_body={"ignore_eos": True})
        for _ in range(2)
    )

    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens


def test_streamed_completions(client):
    """One event a token, and usage in the last one."""
    events = list(
        client.completions.create(
            model="llama",
            prompt=PROMPT,
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )

    texts = [event.choices[0].text for event in events if event.choices]
    assert len([text for text in texts if text]) == 6
    assert events[-1].usage.completion_tokens == 6


def test_chat(client):
    """A whole chat answer."""
    answer = client.chat.completions.create(
        model="llama",
        messages=[{"role": "user", "content": PROMPT}],
        max_completion_tokens=5,
        extra_body={"ignore_eos": True},
    )

    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 5


async def test_streamed_chat_asynchronously(async_client):
    """Role first, then text, then usage."""
    stream = await async_client.chat.completions.create(
        model="llama",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    events = [event async for event in stream]

    assert events[0].choices[0].delta.role == "assistant"
    assert len([e for e in events if e.choices and e.choices[0].delta.content]) == 5
    assert events[-1].usage.completion_tokens == 5


async def test_completions_asynchronously(async_client):
    """The asynchronous client gets the same."""
    answer = await async_client.completions.create(model="llama", prompt=PROMPT, max_tokens=3)

    assert answer.usage.prompt_tokens == len(PROMPT) // 4


def test_models(client):
    """Listed and retrieved."""
    assert [model.id for model in client.models.list()] == ["llama"]
    assert client.models.retrieve("llama").id == "llama"


def test_request_ids_are_the_clients_own(client):
    """As its raw responses show them."""
    raw = client.completions.with_raw_response.create(
        model="llama", prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine-7"}
    )

    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse().id.endswith("mine-7")


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found"),
        ({"prompt": None}, openai.BadRequestError, "invalid_request"),
        ({"extra_headers": {"content-type": "text/plain"}}, openai.APIStatusError, "unsupported_media_type"),
    ],
)
def test_errors_are_the_clients_own_types(client, changes, error, code):
    """Each status becomes the exception that the client has for it, with code and message."""
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": "llama", "prompt": "x", "max_tokens": 1, **changes})

    assert caught.value.body["code"] == code
    assert caught.value.body["message"]


def test_a_workers_refusal_is_a_bad_request(client):
    """What the worker's validation says arrives as the client's own type too."""
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="llama", prompt="x", max_tokens=-5)


def test_a_wrong_key_is_an_authentication_error(base_url):
    """401, for completions and models."""
    with openai.OpenAI(base_url=base_url, api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.completions.create(model="llama", prompt="x")
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


async def _serve(handler, **config):
    """Start a router in this process in front of one fake aggregated worker."""
    worker = HttpServer(handler)
    await worker.start("127.0.0.1", 0)
    spec = WorkerSpec("w", Role.AGGREGATED, f"http://127.0.0.1:{worker.port}", supervised=True)
    config = RouterConfig.model_validate(config)
    router = RouterServer(RouterSettings(model="llama", disaggregated=False, workers=(spec,), config=config))
    await router.start()
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="any", max_retries=0)

    async def stop():
        await client.close()
        await router.close()
        await worker.close(grace_s=0)

    return client, stop


async def test_a_stream_that_breaks_raises():
    """The error event in mid-stream is an APIError of the client, not a stream that looks complete."""

    async def break_off(request, responder):
        responder.start(200)
        responder.write(b'data: {"id":"1","object":"text_completion","created":1,"model":"llama",')
        responder.write(b'"choices":[{"index":0,"text":"x","finish_reason":null,"logprobs":null}]}\n\n')
        await asyncio.sleep(0.05)
        responder.abort()

    client, stop = await _serve(break_off)
    stream = await client.completions.create(model="llama", prompt="x", stream=True)

    assert (await anext(stream)).choices[0].text == "x"
    with pytest.raises(openai.APIError, match="broke off"):
        await anext(stream)
    await stop()


async def test_an_overloaded_worker_is_an_internal_server_error():
    """503 from the only worker, after the router's own retries."""

    async def refuse(request, responder):
        responder.send(503, b'{"error":{"message":"leaving","type":"server_error","code":null}}')

    client, stop = await _serve(refuse)
    with pytest.raises(openai.InternalServerError, match="leaving"):
        await client.completions.create(model="llama", prompt="x")
    await stop()
