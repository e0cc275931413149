"""A stream whose worker breaks off continues on another one, and the client gets what it would have got.

The workers answer by the simulated engine's own parser and formats, whose text continues where a prompt ends in it.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial

import orjson
import pytest

from penstock.core.errors import StreamBroken
from penstock.core.http.sse import EventSplitter, payload
from penstock.core.simulated_tokens import token_ids
from penstock.engine.core.requests import FinishReason
from penstock.engine.serve.answers import CompletionFormat, Finished
from penstock.engine.serve.protocol import Api, parse
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.router.proxy import handler

SETTINGS = resolve(ServeFlags("llama", served_names=("llama",)))
APIS = {"/v1/completions": Api.COMPLETIONS, "/v1/chat/completions": Api.CHAT}
ASKED = {
    "/v1/completions": {"prompt": "Tell me of the sea. ", "max_tokens": 24},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Tell me of the sea."}],
        "max_completion_tokens": 24,
    },
}
STREAMED = {
    "model": "llama",
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
    "ignore_eos": True,
}


def answer_to(path: str, body: bytes, serial: int) -> bytes:
    """Return the whole stream that a worker answers, under an id of its own."""
    call = parse(body, SETTINGS, api=APIS[path])[0]
    made = CompletionFormat(call, f"answer-{serial}", 1_700_000_000 + serial)
    reason = FinishReason.STOP if call.ends_by_stop else FinishReason.LENGTH
    texts = call.texts(0, call.output_tokens)
    done = Finished(call.output_tokens, reason, 0)
    return made.opening() + made.events(0, texts, reason) + made.closing(done)


class Speakers:
    """Both workers: they answer in full, except for breaks that are set, which meet whichever is asked next."""

    def __init__(self, *workers, answer=None):
        self._answer = answer or answer_to
        self.breaks: list[tuple[int, bytes]] = []
        self.seen: list[dict] = []
        for serial, worker in enumerate(workers):
            worker.otherwise = partial(self._speak, serial)

    async def _speak(self, serial, request, responder):
        self.seen.append(orjson.loads(request.body))
        whole = self._answer(request.path, request.body, serial)
        responder.start(200)
        if not self.breaks:
            responder.write(whole)
            responder.end()
            return
        until, error = self.breaks.pop(0)
        responder.write(whole[:until] + error)
        await asyncio.sleep(0)
        if error:
            responder.end()
        else:
            responder.break_off()


@pytest.fixture
async def served(harness):
    """Two workers and a router that gives no worker up."""
    *workers, router = await harness.served("aggregated", "aggregated", config=PATIENT)
    return Speakers(*workers), router


PATIENT = {
    "breaker": {"consecutiveFailures": 100},
    "retries": {"minPerSecond": 1000},
    "policy": "round-robin",
}


async def asked(router, path: str, **more) -> bytes:
    """Return a stream's bytes."""
    body = orjson.dumps(STREAMED | ASKED[path] | more)
    headers = ((b"content-type", b"application/json"),)
    response = await router.client.stream("POST", router.url + path, body=body, headers=headers)
    return b"".join([piece async for piece in response])


def read(stream: bytes) -> dict:
    """Return what a client makes of a stream: its text, its one id, how it ends, and its counts."""
    datas = [payload(event) for event in EventSplitter().feed(stream)]
    assert datas.count(b"[DONE]") == 1
    assert datas[-1] == b"[DONE]"
    chunks = [orjson.loads(data) for data in datas[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (usage,) = (chunk["usage"] for chunk in chunks if chunk.get("usage"))
    (identity,) = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}
    said = [choice.get("delta", choice) for choice in choices]
    return {
        "text": "".join(each.get("content") or each.get("text") or "" for each in said),
        "roles": [each["role"] for each in said if "role" in each],
        "reasons": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "counts": {key: usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "identity": identity,
    }


def text_of(stream: bytes) -> str:
    """Return the text of a stream, complete or not."""
    datas = [payload(event) for event in EventSplitter().feed(stream)]
    chunks = [orjson.loads(data) for data in datas if data is not None and data.startswith(b"{")]
    said = [choice.get("delta", choice) for chunk in chunks for choice in chunk["choices"]]
    return "".join(each.get("content") or each.get("text") or "" for each in said)


def positions(path: str, body: bytes) -> range:
    """Return the bytes of a stream at which it may break: behind its first token, before its last one is whole."""
    whole = answer_to(path, body, 0)
    first = re.search(rb'"(text|content)":"[^"]', whole).start()
    return range(whole.index(b"\n\n", first) + 2, whole.index(b'data: {"id"', whole.rindex(b"finish_reason")))


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("has_stop", [False, True])
async def test_a_stream_is_the_same_wherever_its_worker_breaks_off(served, path, has_stop):
    """Every position, in the middle of events too: text, end, counts, one id and one role; nothing twice, nothing lost."""
    speakers, router = served
    more = {}
    if has_stop:
        whole = parse(orjson.dumps(STREAMED | ASKED[path]), SETTINGS, api=APIS[path])[0].text(24)
        more = {"stop": [whole[49:57]]}
    expected = read(await asked(router, path, **more))
    assert expected["reasons"] == ["stop" if has_stop else "length"]
    places = positions(path, orjson.dumps(STREAMED | ASKED[path] | more))[::53]
    for place in places:
        speakers.breaks = [(place, b"")]
        got = read(await asked(router, path, **more))
        assert got | {"identity": expected["identity"]} == expected, place
    continued = await router.metric("penstock_router_stream_continuations_total", reason="upstream_broken")
    assert continued == len(places)


@pytest.mark.parametrize("path", APIS)
async def test_a_stream_that_lacks_only_its_end_gets_it_from_the_router(served, path):
    """All is said, or the limit is reached: nobody is asked. Counts need a worker that has counted the prompt."""
    speakers, router = served
    whole = answer_to(path, orjson.dumps(STREAMED | ASKED[path]), 0)
    for place in (whole.rindex(b'data: {"id"'), whole.rindex(b"data: [DONE]")):
        speakers.seen.clear()
        speakers.breaks = [(place, b"")]
        got = await asked(router, path)
        assert len(speakers.seen) == 1
        assert text_of(got) == text_of(whole)
        reasons = [line for line in got.split(b"\n\n") if b'"finish_reason":"length"' in line]
        assert len(reasons) == 1
        assert got.endswith(b"data: [DONE]\n\n")


async def test_retries_before_the_first_token_leave_a_stream_its_rest(served):
    """Both that a request has by default are used up when its stream begins."""
    error = b'data: {"error":{"message":"no memory","code":502}}\n\n'
    speakers, router = served
    expected = read(await asked(router, "/v1/completions"))
    speakers.breaks = [(0, error), (0, error), (1500, b"")]
    got = read(await asked(router, "/v1/completions"))
    assert got | {"identity": expected["identity"]} == expected


@pytest.mark.parametrize("path", APIS)
async def test_an_event_of_an_error_is_a_break(served, path):
    """As of an engine that has died behind its server: the client does not see it."""
    speakers, router = served
    expected = read(await asked(router, path))
    error = b'data: {"error":{"message":"EngineCore died","code":500}}\n\ndata: [DONE]\n\n'
    whole = answer_to(path, orjson.dumps(STREAMED | ASKED[path]), 0)
    speakers.breaks = [(whole.index(b"data: ", 2000), error)]
    got = read(await asked(router, path))
    assert got | {"identity": expected["identity"]} == expected


def _dies_third(router, speakers, monkeypatch):
    """Have the third worker that breaks off be seen to be gone, as a dead process is."""
    monkeypatch.setattr(handler, "_ASKED_REAL_S", 0.0517)

    async def sleep(pause_s, *, then=asyncio.sleep):
        if pause_s == handler._ASKED_REAL_S:
            assert len(speakers.seen) == 3
            for worker in router.server.core.pool:
                worker.outages += 1
        await then(pause_s)

    monkeypatch.setattr(handler.asyncio, "sleep", sleep)


async def test_what_kills_a_worker_alone_ends_and_is_refused_for_a_while(served, monkeypatch):
    """A request that kills engines takes three, however often a client repeats it; the log and the answer name it."""
    speakers, router = served
    await asked(router, "/v1/completions")
    speakers.seen.clear()
    _dies_third(router, speakers, monkeypatch)
    speakers.breaks = [(1500, b"")] * 3
    with pytest.raises(StreamBroken):
        await asked(router, "/v1/completions")
    assert len(speakers.seen) == 3
    assert router.server.metrics.lost_streams == {"query_of_death": 1}
    answer = await router.post(raw=orjson.dumps(STREAMED | ASKED["/v1/completions"]))
    assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (422, "query_of_death")
    assert "then alone on" in orjson.loads(answer.body)["error"]["message"]
    assert len(speakers.seen) == 3
    assert await router.metric("penstock_router_errors_total", reason="query_of_death") == 1
    other = read(await asked(router, "/v1/completions", max_tokens=4))
    assert other["reasons"] == ["length"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_kills_a_worker_alone_before_its_first_token_is_refused_for_a_while(
    served, monkeypatch, stream
):
    """Complete answers as well; the workers have answered others before, and a fourth is not tried."""
    speakers, router = served
    for _ in range(2):
        await asked(router, "/v1/completions")
    speakers.seen.clear()
    _dies_third(router, speakers, monkeypatch)
    speakers.breaks = [(0, b"")] * 3
    answers = [await router.post(prompt="kill", stream=stream) for _ in range(2)]
    assert [each.status for each in answers] == [502, 422]
    assert orjson.loads(answers[1].body)["error"]["code"] == "query_of_death"
    assert len(speakers.seen) == 3
    assert await router.metric("penstock_router_errors_total", reason="query_of_death") == 1


async def test_a_stream_that_is_broken_off_three_times_on_workers_that_live_is_not_refused(
    served, monkeypatch
):
    """It has killed none: it continues, and its body is taken again."""
    speakers, router = served
    monkeypatch.setattr(handler, "_OUTAGE_REAL_S", 0.0517)
    speakers.breaks = [(700, b"")] * 3
    assert read(await asked(router, "/v1/completions"))
    assert read(await asked(router, "/v1/completions"))


async def test_a_second_worker_gets_what_was_said_and_the_rest_of_the_limits(served):
    """A completion's prompt continues; a chat's last message is open, and limits count what is left."""
    speakers, router = served
    whole = answer_to("/v1/completions", orjson.dumps(STREAMED | ASKED["/v1/completions"]), 0)
    at = [found.start() for found in re.finditer(b"data: ", whole)][10]
    speakers.breaks = [(at, b"")]
    await asked(router, "/v1/completions", min_tokens=12)
    first, second = speakers.seen
    assert second["prompt"].startswith(first["prompt"])
    assert len(second["prompt"]) == len(first["prompt"]) + 40
    assert (second["max_tokens"], second["min_tokens"]) == (14, 2)
    speakers.seen.clear()
    speakers.breaks = [(2000, b"")]
    await asked(router, "/v1/chat/completions")
    second = speakers.seen[1]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant"]
    assert (second["continue_final_message"], second["add_generation_prompt"]) == (True, False)


async def test_a_tool_call_that_has_begun_is_not_taken_up(served):
    """Half of its arguments are said; another worker would begin the call again."""
    speakers, router = served
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a'}}
    chunk = {"id": "x", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}
    speakers.breaks = [(0, b"data: " + orjson.dumps(chunk) + b"\n\n")]
    with pytest.raises(StreamBroken):
        await asked(router, "/v1/chat/completions")
    assert await router.metric("penstock_router_lost_streams_total", why="response") == 1


def with_ids(path: str, body: bytes, serial: int) -> bytes:
    """Return a stream as of vLLM under ``return_token_ids``; each fourth token shows nothing before the next, as half a character."""
    prompt, held, shown = parse(without_ids(body), SETTINGS, api=APIS[path])[0].prompt, "", []
    for number, event in enumerate(EventSplitter().feed(answer_to(path, without_ids(body), serial))):
        data = payload(event)
        chunk = orjson.loads(data) if data.startswith(b"{") else {"choices": []}
        for choice in chunk["choices"]:
            if not number:
                choice["prompt_token_ids"] = list(token_ids(prompt))
            choice["token_ids"] = list(token_ids(choice["text"].encode()))
            text, held = held + choice["text"], ""
            if number % 4 == 3 and choice["finish_reason"] is None:
                text, held = text[:-2], text[-2:]
            choice["text"] = text
        shown.append(b"data: " + orjson.dumps(chunk) + b"\n\n" if data.startswith(b"{") else event)
    return b"".join(shown)


def without_ids(body: bytes) -> bytes:
    """Return a body without a field that simulated workers refuse."""
    return orjson.dumps(
        {key: value for key, value in orjson.loads(body).items() if key != "return_token_ids"}
    )


def ids(stream: bytes) -> list[int]:
    """Return the token ids of a stream's events."""
    datas = [payload(event) for event in EventSplitter().feed(stream)]
    chunks = [orjson.loads(data) for data in datas if data is not None and data.startswith(b"{")]
    return [each for chunk in chunks for choice in chunk["choices"] for each in choice["token_ids"]]


@pytest.mark.parametrize("prompt", ["Tell me of the sea. ", [1, 2, 3]])
async def test_a_stream_with_token_ids_goes_on_by_them_wherever_it_breaks_off(harness, prompt):
    """Ids are exact where text is not: the next worker gets them as the prompt, and the prompt's come once."""
    *workers, router = await harness.served("aggregated", "aggregated", config=PATIENT)
    speakers = Speakers(*workers, answer=with_ids)
    more = {"return_token_ids": True, "prompt": prompt}
    whole = await asked(router, "/v1/completions", **more)
    expected, said = read(whole), ids(whole)
    for place in range(whole.index(b"\n\n") + 2, whole.rindex(b'data: {"id"'), 97):
        speakers.breaks = [(place, b"")]
        speakers.seen.clear()
        got = await asked(router, "/v1/completions", **more)
        assert ids(got) == said, place
        assert read(got)["counts"] == expected["counts"], place
        assert got.count(b"prompt_token_ids") == 1
        if len(speakers.seen) > 1:
            first, second = (each["prompt"] for each in speakers.seen)
            known = first if isinstance(first, list) else list(token_ids(first.encode()))
            assert second[: len(known)] == known
            assert second[len(known) :] == said[: len(second) - len(known)]
            assert speakers.seen[1]["max_tokens"] == 24 - len(second) + len(known)


async def test_a_stream_whose_worker_gives_no_ids_is_not_taken_up_by_text(harness):
    """A worker that does not know the field ignores it; its stream ends, as the client would get ids of another text."""
    *workers, router = await harness.served("aggregated", "aggregated", config=PATIENT)
    speakers = Speakers(
        *workers, answer=lambda path, body, serial: answer_to(path, without_ids(body), serial)
    )
    speakers.breaks = [(1500, b"")]
    with pytest.raises(StreamBroken):
        await asked(router, "/v1/completions", return_token_ids=True)
    assert await router.metric("penstock_router_lost_streams_total", why="response") == 1


async def test_zero_continuations_end_a_stream_in_an_error(harness):
    """``retries.maxContinuations: 0`` is the former behaviour."""
    config = {**PATIENT, "retries": {"maxContinuations": 0}}
    *workers, router = await harness.served("aggregated", "aggregated", config=config)
    speakers = Speakers(*workers)
    speakers.breaks = [(1500, b"")]
    with pytest.raises(StreamBroken):
        await asked(router, "/v1/completions")
    assert len(speakers.seen) == 1
