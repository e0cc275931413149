"""The record of one request on its way through the router; access log and metrics are made from it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.api import Tier
from penstock.core.http.server import Responder
from penstock.router.core.retries import RequestTries
from penstock.router.proxy.completion import CompletionRequest
from penstock.router.proxy.kv_transfer import Prefilled
from penstock.router.proxy.prefix import Keyed

if TYPE_CHECKING:
    from penstock.router.proxy.trace import RequestTrace


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """Who a request is.

    Attributes:
        tier: Its tier.
        tenant: Whose it is; empty: no tenant's.
        asked: The higher tier that it asked for without a key that allows it; None: it did not.
    """

    tier: Tier
    tenant: str = ""
    asked: Tier | None = None


class CompletionCall:
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
        queued_s: Time in the router's queue, simulated seconds, all stays together.
        ttft_s: Arrival to first token, simulated seconds; None for whole answers.
        tries: What its tries have shown so far.
        is_delivered: The complete answer was written; a client that closes then has not left early.
        session: Value of the header that ties requests together; empty without one.
        identity: Its tier and tenant; None where there are no tiers.
        transfer: Its prompt, as a prefill worker keeps it for decode; None: none does.
        keyed: Prefix keys of the prompt; None where the policy reads none.
        prefill_worker: Name of the last prefill worker.
        worker: Name of the last worker of the answering stage.
        error: Reason of the failure, or None.
        trace: Its spans; None: none are made.
    """

    __slots__ = (
        "arrived_real_s",
        "cached_tokens",
        "error",
        "headers",
        "identity",
        "is_delivered",
        "keyed",
        "output_tokens",
        "prefill_worker",
        "prompt_counted",
        "prompt_tokens",
        "queued_s",
        "request",
        "responder",
        "session",
        "trace",
        "transfer",
        "tries",
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
        identity: TierIdentity | None = None,
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
        self.tries = RequestTries()
        self.is_delivered = False
        self.transfer: Prefilled | None = None
        self.keyed: Keyed | None = None
        self.prefill_worker: str | None = None
        self.worker: str | None = None
        self.session = session
        self.identity = identity
        self.error: str | None = None
        self.trace: RequestTrace | None = None

    def take_keys(self, keyed: Keyed) -> None:
        """Keep the prefix keys, and the number of tokens where they show it."""
        self.keyed = keyed
        if keyed.tokens is not None and not self.prompt_counted:
            self.prompt_tokens = keyed.tokens

    @property
    def tier(self) -> Tier:
        """Its tier; standard where there are none."""
        return Tier.STANDARD if self.identity is None else self.identity.tier

    def age_real_s(self) -> float:
        """Return real seconds since arrival."""
        return time.monotonic() - self.arrived_real_s
