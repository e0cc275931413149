"""The record of one request on its way through the router; access log and metrics are made from it."""

from __future__ import annotations

import itertools
import os
import re
import time

from penstock_router.proxy.completion import CompletionRequest
from penstock_router.proxy.prefix import ExactKeys, Keyed, read_prompt
from penstock_wire.server import Responder

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")
_PREFIX = os.urandom(8).hex()
_NUMBERS = itertools.count(1)


def request_id(sent: bytes | None) -> bytes:
    """Return the client's request id if it is one, else a new one.

    Accepted: 1 to 128 of ``A-Z a-z 0-9 . _ : + / = -``; anything else could break logs or headers.
    """
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent
    return f"{_PREFIX}-{next(_NUMBERS):x}".encode()


class Call:
    """One completion request.

    Attributes:
        request: What was asked.
        responder: Writes the answer.
        headers: Headers of the answer.
        upstream_headers: Headers for the workers.
        arrived_real_s: ``time.monotonic()`` at arrival.
        prompt_tokens: Estimated, then as counted by a worker.
        prompt_counted: Whether ``prompt_tokens`` is a worker's count.
        cached_tokens: Prompt tokens that prefill found in its cache; None: not known.
        output_tokens: Tokens sent.
        queued_s: Time in the router's queue, modelled seconds, all stays together.
        ttft_s: Arrival to first token, modelled seconds; None for whole answers.
        retries: Retries so far.
        timeouts: Time-outs among the failures so far.
        avoid: Workers that have failed it.
        session: Value of the header that ties requests together; empty without one.
        keyed: Prefix keys of the prompt; None until a policy asks for them.
        prefill_worker: Name of the last prefill worker.
        worker: Name of the last worker of the answering stage.
        error: Reason of the failure, or None.
    """

    __slots__ = (
        "arrived_real_s",
        "avoid",
        "cached_tokens",
        "error",
        "headers",
        "keyed",
        "output_tokens",
        "prefill_worker",
        "prompt_counted",
        "prompt_tokens",
        "queued_s",
        "request",
        "responder",
        "retries",
        "session",
        "timeouts",
        "ttft_s",
        "upstream_headers",
        "worker",
    )

    def __init__(
        self,
        request: CompletionRequest,
        responder: Responder,
        *,
        arrived_real_s: float,
        prompt_tokens: int,
        headers: tuple[tuple[bytes, bytes], ...],
        upstream_headers: tuple[tuple[bytes, bytes], ...],
        session: str = "",
    ) -> None:
        self.request = request
        self.responder = responder
        self.headers = headers
        self.upstream_headers = upstream_headers
        self.arrived_real_s = arrived_real_s
        self.prompt_tokens = prompt_tokens
        self.prompt_counted = False
        self.cached_tokens: int | None = None
        self.output_tokens = 0
        self.queued_s = 0.0
        self.ttft_s: float | None = None
        self.retries = 0
        self.timeouts = 0
        self.avoid: frozenset[str] = frozenset()
        self.keyed: Keyed | None = None
        self.prefill_worker: str | None = None
        self.worker: str | None = None
        self.session = session
        self.error: str | None = None

    def prefix(self, exact: ExactKeys | None) -> Keyed:
        """Return the prefix keys of the prompt, computed once."""
        if self.keyed is None:
            self.keyed = read_prompt(self.request, exact)
            if self.keyed.tokens is not None and not self.prompt_counted:
                self.prompt_tokens = self.keyed.tokens
        return self.keyed

    def age_real_s(self) -> float:
        """Return real seconds since arrival."""
        return time.monotonic() - self.arrived_real_s
