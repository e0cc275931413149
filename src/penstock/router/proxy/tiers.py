"""The tiers of a live router: determines a request's tier and tenant from header, model name and key, and counts its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.api import Tier, TiersConfig
from penstock.router.admission import Admission
from penstock.router.core.request import QUEUE_TIMEOUT
from penstock.router.policy.slo_monitor import EndedRequest
from penstock.router.policy.tiers import PRIORITIES
from penstock.router.proxy.auth import TierIdentity, TierKeys, credentials
from penstock.router.proxy.call import CompletionCall
from penstock.router.proxy.completion import CompletionRequest, RequestRefused, changed_body
from penstock.router.proxy.failures import SHED

_SHOWN_CHARACTERS: Final = 64
"""Maximum number of characters of a client's value that an error message repeats."""
_COUNTED_BY_CORE: Final = (QUEUE_TIMEOUT, SHED)
_OVERLOADED: Final = (429, 503)


class LiveTiers:
    """Determines the tier (priority class) of each request of one router by the API key, a header or the model name.

    It also reports the ends of requests to the router core, which counts the requests and their latencies by tier, and it
    counts the requests whose tier was lowered. ``workers`` passes the reports on to the core; ``model`` is the name of the
    served model.

    Attributes:
        config: Tiers section of the graph; replaced by `configure`.
        keys: API keys that select a tier.
        downgraded: Cumulative number of requests that requested a higher tier than their key allows, by requested tier.
    """

    def __init__(self, config: TiersConfig, keys: TierKeys, workers: Admission, *, model: str) -> None:
        self.config = config
        self.keys = keys
        self.downgraded = dict.fromkeys(Tier, 0)
        self._model = model
        self._workers = workers

    def identify(self, headers: Mapping[bytes, bytes], model: object) -> TierIdentity:
        """Return the tier (priority class) and tenant of a request, by its headers and the model name that it requests.

        ``headers`` can contain an API key that selects a tier, and a header that names one; some model names select a
        tier as well. If the request names no tier, or a higher one than it may have, it gets its key's tier, or the
        default tier if it has no key. A tier that is too high is counted as a downgrade.

        Raises:
            RequestRefused: 400, the header contains an unknown tier.
        """
        key = self.keys.of(credentials(headers))
        own = TierIdentity(self.config.default) if key is None else key
        asked = self._asked(headers, model)
        if asked is None:
            return own
        highest = own.tier
        if key is None and not self.keys.keys:
            highest = min(highest, Tier.PREMIUM, key=PRIORITIES.__getitem__)
        if PRIORITIES[asked] < PRIORITIES[highest]:
            self.downgraded[asked] += 1
            return own
        return TierIdentity(asked, own.tenant)

    def _asked(self, headers: Mapping[bytes, bytes], model: object) -> Tier | None:
        sent = headers.get(self.config.header.lower().encode())
        if sent is None:
            return self.config.models.get(model) if isinstance(model, str) else None
        name = sent.decode("latin-1").strip().lower()
        try:
            return Tier(name)
        except ValueError:
            raise RequestRefused(
                400,
                f"{self.config.header}: {name[:_SHOWN_CHARACTERS]!r} is not a tier; send one of {', '.join(Tier)}, or "
                "leave the header out",
                code="unknown_tier",
            ) from None

    def for_worker(self, request: CompletionRequest, tier: Tier) -> CompletionRequest:
        """Return ``request`` as it is sent to workers: with the tier's number as ``priority`` (the lower is served first).

        A model name that only selects a tier is replaced by the model's own name.

        Raises:
            RequestRefused: 400, the body cannot be encoded again.
        """
        priority, body = PRIORITIES[tier], request.body
        changes: dict[str, Any] = {}
        if body.get("model") in self.config.models:
            changes["model"] = self._model
        if priority != body.get("priority", 0) or isinstance(body.get("priority"), bool):
            changes["priority"] = priority
        if not changes:
            return request
        return request._replace(raw=changed_body(request, changes), body={**body, **changes})

    def ended(self, call: CompletionCall, status: int, e2e_s: float) -> None:
        """Report the end of a request of the tier of ``call`` to the router core, with its latencies.

        A request does not count if its client disconnected early or was at fault.

        Args:
            call: The request.
            status: HTTP status of the response.
            e2e_s: Simulated seconds since its arrival.
        """
        if not (call.worker or call.prefill_worker):
            if status in _OVERLOADED and call.error not in _COUNTED_BY_CORE:
                self._workers.record_tier_event(call.tier)
            return
        is_complete = status == 200 and call.error is None
        if not is_complete and (
            call.error in {None, "client_left", "shutdown"} or (status < 500 and status != 200)
        ):
            return
        ended = EndedRequest.after(call.ttft_s, e2e_s, call.output_tokens, is_failed=not is_complete)
        self._workers.record_tier_event(call.tier, ended=ended)

    def configure(self, config: TiersConfig) -> None:
        """Replace the tiers section of the graph while requests are in flight: header, names, shares, targets and shedding."""
        self.config = config
        core = self._workers.core
        if core.tiers is not None:
            core.tiers.monitor.configure(config)
        for queue in core.queues.values():
            queue.set_tiers(config)
