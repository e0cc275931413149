"""Runs inside the cluster: streams completions from a router until told to stop, and tells what came of each.

Standard library alone, so that the product's image can run it. Says when every client has had its first token and
prints one JSON object at the end; the file STOP ends it after the streams under way.

    python client.py URL MODEL CONCURRENCY MAX_TOKENS SILENCE_S

A stream that says nothing for SILENCE_S counts as lost.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

STOP = Path("/tmp/stop")


class Results:
    """What came of all requests."""

    def __init__(self, clients: int) -> None:
        self.lock = threading.Lock()
        self.silent = set(range(clients))
        self.answered = 0
        self.lost: list[dict[str, object]] = []

    def streams(self, number: int) -> None:
        """Note a token of one client."""
        if number not in self.silent:
            return
        with self.lock:
            self.silent.discard(number)
            if not self.silent:
                print("every client streams", file=sys.stderr, flush=True)

    def add(self, number: int, problem: str | None, tokens: int, began_s: float) -> None:
        """Note one request of a client; a problem makes it a lost one."""
        with self.lock:
            if problem is None:
                self.answered += 1
            else:
                at = time.strftime("%H:%M:%S", time.gmtime(began_s))
                self.lost.append({"client": number, "problem": problem, "tokens": tokens, "began": at})
                print(f"lost: {problem} after {tokens} tokens, began {at}", file=sys.stderr, flush=True)


def ask(
    url: str, body: dict[str, object], silence_s: float, on_event: Callable[[], None]
) -> tuple[str | None, int]:
    """Stream one completion; return its problem, if any, and the tokens that came."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=silence_s)
    tokens, finish = 0, None
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            return f"status {response.status}: {response.read(500).decode(errors='replace')}", 0
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return f"error event: {event['error']}", tokens
            for choice in event.get("choices", []):
                on_event()
                finish = choice.get("finish_reason") or finish
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    except (OSError, http.client.HTTPException, ValueError) as exc:
        return f"{type(exc).__name__}: {exc}", tokens
    finally:
        connection.close()
    if finish != "length" or tokens != body["max_tokens"]:
        return f"ended by {finish!r}", tokens
    return None, tokens


class Settings(NamedTuple):
    """What every client asks, and of which router."""

    url: str
    model: str
    max_tokens: int
    silence_s: float


def work(number: int, settings: Settings, results: Results) -> None:
    """Ask again and again until the file STOP is there."""
    turn = 0
    while not STOP.exists():
        turn += 1
        prompt = f"{number} {turn} " + "word " * 200
        body = {"model": settings.model, "prompt": prompt, "max_tokens": settings.max_tokens, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        began_s = time.time()
        problem, tokens = ask(settings.url, body, settings.silence_s, lambda: results.streams(number))
        results.add(number, problem, tokens, began_s)
        if problem is not None:
            time.sleep(0.5)


def main(settings: Settings, concurrency: int) -> None:
    """Run the clients and print their results."""
    results = Results(concurrency)
    threads = [
        threading.Thread(target=work, args=(number, settings, results)) for number in range(concurrency)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"answered": results.answered, "lost": results.lost}), flush=True)


if __name__ == "__main__":
    url, model, clients, tokens, silence = sys.argv[1:]
    main(Settings(url, model, int(tokens), float(silence)), int(clients))
