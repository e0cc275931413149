"""Clients that stream completions until told to stop, and tell what came of each; every second one keeps its connection.

Proxies and SDKs keep connections, simple programs open one for each request: a test of restarts has to have both. Standard
library alone, so that the product's image can run this file inside a cluster:

    python clients.py URL MODEL CONCURRENCY MAX_TOKENS SILENCE_S

It says when every client has had its first token and prints one JSON object at the end; the file STOP ends it after the
streams under way. A stream that says nothing for SILENCE_S counts as lost.
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


class Settings(NamedTuple):
    """What every client asks, and of which router."""

    url: str
    model: str
    max_tokens: int
    silence_s: float


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


class Client:
    """One client; those with odd numbers keep their connection for as long as the server lets them."""

    def __init__(self, number: int, settings: Settings) -> None:
        where = urlsplit(settings.url)
        self._number = number
        self._settings = settings
        self._keeps = number % 2 == 1
        self._connection = http.client.HTTPConnection(
            where.hostname or "", where.port, timeout=settings.silence_s
        )

    def run(self, results: Results, is_over: Callable[[], bool]) -> None:
        """Ask repeatedly until it is over."""
        turn = 0
        while not is_over():
            turn += 1
            prompt = f"{self._number} {turn} " + "word " * 200
            body = {"model": self._settings.model, "prompt": prompt, "max_tokens": self._settings.max_tokens}
            body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
            began_s = time.time()
            problem, tokens = self._ask(body, lambda: results.streams(self._number))
            results.add(self._number, problem, tokens, began_s)
            if problem is not None or not self._keeps:
                self._connection.close()
            if problem is not None:
                time.sleep(0.5)
        self._connection.close()

    def _ask(self, body: dict[str, object], on_event: Callable[[], None]) -> tuple[str | None, int]:
        """Stream one completion; return its problem, if any, and the tokens that came."""
        tokens, finish = 0, None
        try:
            self._connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            response = self._connection.getresponse()
            if response.status != 200:
                # Routers name no server; a proxy on the way does.
                by = "" if (server := response.getheader("server")) is None else f" by {server}"
                return f"status {response.status}{by}: {response.read(500).decode(errors='replace')}", 0
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
        if finish != "length" or tokens != body["max_tokens"]:
            return f"ended by {finish!r}", tokens
        return None, tokens


def start_clients(
    settings: Settings, concurrency: int, is_over: Callable[[], bool]
) -> tuple[Results, list[threading.Thread]]:
    """Start this many clients; return what comes of their requests, and the threads, which end once it is over."""
    results = Results(concurrency)
    threads = [
        threading.Thread(target=Client(number, settings).run, args=(results, is_over), daemon=True)
        for number in range(concurrency)
    ]
    for thread in threads:
        thread.start()
    return results, threads


def main(settings: Settings, concurrency: int) -> None:
    """Run the clients and print their results."""
    results, threads = start_clients(settings, concurrency, STOP.exists)
    for thread in threads:
        thread.join()
    print(json.dumps({"answered": results.answered, "lost": results.lost}), flush=True)


if __name__ == "__main__":
    url, model, clients, tokens, silence = sys.argv[1:]
    main(Settings(url, model, int(tokens), float(silence)), int(clients))
