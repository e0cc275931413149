"""Sends a completion, and waits as the router asks while it rejects requests.

    python docs/examples/backoff_client.py http://127.0.0.1:8000 --model llama --prompt "Hello"

A router that rejects answers 503 with Retry-After, from the rate at which its workers get free. Clients that all came back
just then would meet again, so each adds a random part. Without the header the pause doubles from try to try.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

OVERLOADED = frozenset({429, 503})
LONGEST_PAUSE_S = 60.0


class OverloadedError(Exception):
    """The router rejected every try."""


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        status: HTTP status.
        body: As it came.
        retry_after_s: What the router asks to wait, seconds; None: it does not say.
    """

    status: int
    body: bytes
    retry_after_s: float | None = None


def pause_s(tries: int, retry_after_s: float | None, rng: random.Random) -> float:
    """Return how long to wait before the next try.

    Args:
        tries: Failed so far, >= 1.
        retry_after_s: From the newest answer; None: it did not say.
        rng: Source of the random part.

    Returns:
        Seconds: never less than was asked for, and up to half as much more, at least a second's range.
    """
    least_s = min(LONGEST_PAUSE_S, 2.0 ** (tries - 1)) if retry_after_s is None else retry_after_s
    return least_s + rng.uniform(0.0, max(1.0, least_s / 2))


def send_with_retry(
    send: Callable[[], Answer],
    *,
    max_tries: int = 6,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
) -> Answer:
    """Send until the answer is another than "overloaded".

    Args:
        send: Sends the request once.
        max_tries: Most tries, >= 1.
        sleep: Waits.
        rng: Source of the random parts; None: one of its own.

    Raises:
        OverloadedError: the last try was rejected as well.
    """
    chance = rng or random.Random()
    for tries in range(1, max_tries + 1):
        answer = send()
        if answer.status not in OVERLOADED:
            return answer
        if tries < max_tries:
            sleep(pause_s(tries, answer.retry_after_s, chance))
    raise OverloadedError(f"rejected {max_tries} times")


def post(url: str, body: dict[str, object], *, timeout_s: float = 600.0) -> Answer:
    """Send one JSON request."""
    request = urllib.request.Request(  # noqa: S310 - the caller's own router
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310 - as above
            return Answer(response.status, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read(), _seconds(error.headers.get("retry-after")))


def _seconds(header: str | None) -> float | None:
    """Return a Retry-After in seconds; its other form, a date, is not what routers send."""
    return float(header) if header is not None and header.isdecimal() else None


def main() -> None:
    """Send one completion."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the router, such as http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", default="Hello")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    body: dict[str, object] = {
        "model": options.model,
        "prompt": options.prompt,
        "max_tokens": options.max_tokens,
    }
    answer = send_with_retry(lambda: post(f"{options.url}/v1/completions", body))
    print(answer.status, answer.body.decode())


if __name__ == "__main__":
    main()
