"""A stream of real vLLM that breaks off continues as one stream; by tokens it is equal to an undisturbed one.

By text it says what vLLM says to a prompt with its beginning.

The model's weights are random, so its text, tokenised again, is not the tokens that it came from: an undisturbed stream may
say something else behind the seam, which a trained model seldom does.
"""

import http.client
import itertools
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from endpoint import SENTENCE, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TOKENS = 32
PROMPT = SENTENCE * 4


class Cutter:
    """Passes everything on to a worker, but cuts the next stream off behind this many events as ``cuts`` say."""

    def __init__(self, url, cuts, seen):
        self._cuts, self._seen = cuts, seen
        self._address = urlsplit(url).netloc
        cutter = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                cutter.forward(self, b"")

            def do_POST(self):
                cutter.forward(self, self.rfile.read(int(self.headers["content-length"])))

            def log_message(self, *_): ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def forward(self, handler, body):
        """Answer one request by the worker's answer."""
        is_stream = handler.command == "POST" and b'"stream":true' in body.replace(b" ", b"")
        cut = self._cuts.pop(0) if is_stream and self._cuts else None
        if is_stream:
            self._seen.append((handler.path, json.loads(body)))
        connection = http.client.HTTPConnection(self._address)
        kept = {key: value for key, value in handler.headers.items() if key.lower() != "host"}
        connection.request(handler.command, handler.path, body or None, kept)
        answer = connection.getresponse()
        handler.send_response(answer.status)
        handler.send_header("content-type", answer.headers.get("content-type", "text/plain"))
        handler.send_header("connection", "close")
        handler.end_headers()
        handler.close_connection = True
        for line in answer:
            if cut is not None and line.startswith(b"data:"):
                if not cut:
                    handler.wfile.write(line[:20])
                    break
                cut -= 1
            handler.wfile.write(line)
            handler.wfile.flush()
        connection.close()

    def close(self):
        """Stop."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def cut(deployment, workers):
    """A router before two ways to the same worker, what is cut by whichever is asked next, and what was asked."""
    cuts, seen = [], []
    cutters = [Cutter(workers["aggregated"].url, cuts, seen) for _ in range(2)]
    more = [word for each in cutters for word in ("--worker", f"aggregated={each.url}")]
    yield deployment.router("router-cut", *more), cuts, seen
    for each in cutters:
        each.close()


def _completion(client):
    return client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )


def _chat(client):
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )


@pytest.mark.parametrize("ask", [_completion, _chat])
def test_a_stream_that_is_cut_goes_on_as_one(cut, workers, ask):
    """At several places: one id, one end, the counts of the whole, and behind the beginning what the worker says to it."""
    router, cuts, seen = cut
    client = router.client()

    def read():
        events = list(ask(client))
        (usage,) = (event.usage for event in events if event.usage)
        reasons = [each.finish_reason for event in events for each in event.choices if each.finish_reason]
        return text_of(events), (len({event.id for event in events}), reasons, usage.completion_tokens)

    whole, shape = read()
    assert shape == (1, ["length"], TOKENS)
    for events in (3, 6, 10):
        cuts[:] = [events]
        seen.clear()
        text, cut_shape = read()
        assert cut_shape == shape, events
        (path, _), (_, rest) = seen
        said = rest["messages"][-1]["content"] if "messages" in rest else rest["prompt"][len(PROMPT) :]
        assert said
        assert whole.startswith(said)
        asked = {key: value for key, value in rest.items() if key not in {"stream", "stream_options"}}
        (choice,) = workers["aggregated"].post(path, **asked)["choices"]
        assert text == said + (choice["text"] if "text" in choice else choice["message"]["content"]), events


STREAMS = 100


@pytest.fixture
def by_tokens(deployment):
    """A router that continues by tokens before two ways to a vLLM of float32, what is cut, and what was asked."""
    router = {"retries": {"continueBy": "tokens"}, "breaker": {"consecutiveFailures": 1000}}
    exact = ("--enforce-eager", "--dtype", "float32")
    manifest = deployment.manifest("tokens", router, "aggregated", args=exact)
    worker = deployment.workers(manifest)["aggregated"]
    cuts, seen = [], []
    cutters = [Cutter(worker.url, cuts, seen) for _ in range(2)]
    more = [word for each in cutters for word in ("--worker", f"aggregated={each.url}")]
    yield deployment.router("router-tokens", "--graph", str(manifest), *more), cuts, seen
    for each in cutters:
        each.close()


def _asked(random_number, path):
    """Return a request of random words, which a model of random weights answers by random tokens."""
    words = SENTENCE.split()
    text = " ".join(random_number.choices(words, k=random_number.randint(5, 60)))
    prompt = (
        {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    )
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    fixed = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {**fixed, "return_token_ids": True, **usage, **prompt}


def _read(events):
    """Return the text, the ids of its tokens, the reasons and the counts of a stream."""
    chunks = [json.loads(each) for each in events if each != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    said = [choice.get("delta", choice) for choice in choices]
    text = "".join(each.get("content") or each.get("text") or "" for each in said)
    (usage,) = (chunk["usage"] for chunk in chunks if chunk.get("usage"))
    counts = [usage[key] for key in ("prompt_tokens", "completion_tokens")]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    ids = [each for choice in choices for each in choice.get("token_ids") or ()]
    return text, ids, reasons, counts, len({chunk["id"] for chunk in chunks}), events[-1]


def test_streams_continue_by_tokens_as_if_undisturbed(by_tokens):
    """A hundred, each cut once or twice at random tokens: text, end and counts are equal to those without a cut."""
    router, cuts, seen = by_tokens
    number = random.Random(7)
    paths = itertools.cycle(["/v1/completions", "/v1/chat/completions"])
    other_tokens, other_text, continued = [], [], 0
    for serial, path in zip(range(STREAMS), paths, strict=False):
        body = _asked(number, path)
        expected = _read(router.stream(path, **body))
        assert expected[2:] == (["length"], [expected[3][0], TOKENS], 1, "[DONE]")
        cuts[:] = [number.randint(2, TOKENS - 6), number.randint(2, TOKENS)][: number.randint(1, 2)]
        seen.clear()
        got = _read(router.stream(path, **body))
        assert got[2:] == expected[2:], serial
        # A cut before any text is a retry; one after the end, where vLLM has joined the tokens of a slow reader, is none.
        rests = [
            rest
            for _, rest in seen[1:]
            if rest.get("prompt", rest.get("messages")) != body.get("prompt", body.get("messages"))
        ]
        assert all("messages" not in rest and isinstance(rest["prompt"], list) for rest in rests)
        continued += bool(rests)
        if got[1] != expected[1]:
            other_tokens.append(serial)
        elif got[0] != expected[0]:
            other_text.append((serial, got[0], expected[0]))

    assert continued >= STREAMS * 3 // 4, continued
    assert other_tokens == []
    assert other_text == []
