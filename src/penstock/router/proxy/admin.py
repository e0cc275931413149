"""What operators and the supervisor ask: health, readiness, the workers, their drain, recent traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from penstock.core.clock import SimulatedClock
from penstock.router.admission import Admission
from penstock.router.core.worker import Worker
from penstock.router.metrics import RouterMetrics


class Admin:
    """Answers from the workers' states at the moment of asking."""

    def __init__(
        self,
        admission: Admission,
        metrics: RouterMetrics,
        traffic: Callable[[float], dict[str, Any]],
        *,
        clock: SimulatedClock,
        discovery_problem: Callable[[], str | None],
    ) -> None:
        self._admission = admission
        self._pool = admission.core.pool
        self._metrics = metrics
        self._traffic = traffic
        self._clock = clock
        self._now_s = clock.now_s
        self._discovery_problem = discovery_problem
        self.stopping = False

    def health(self) -> tuple[int, bytes]:
        """Return 200: the process is alive, whatever its workers do."""
        return 200, b'{"status":"ok"}'

    def ready(self) -> tuple[int, bytes]:
        """Return 200 if a request would be served now, else 503 with the reasons."""
        reasons = self._admission.problems()
        if self.stopping:
            reasons.append("the router is stopping")
        discovery = self._discovery_problem()
        if discovery is not None and reasons:
            reasons.append(f"discovery: {discovery}")
        if reasons:
            return 503, orjson.dumps({"status": "not ready", "reasons": reasons})
        return 200, b'{"status":"ready","reasons":[]}'

    def workers(self, *, shows_urls: bool) -> bytes:
        """Return ``{"workers", "prefill_queue", "traffic", "discovery_problem", "lag_p99_s", "speed"}``."""
        now_s = self._now_s()
        queue = self._admission.core.entry_queue
        return orjson.dumps(
            {
                "workers": [self._shown(worker, now_s, shows_url=shows_urls) for worker in self._pool],
                "prefill_queue": {
                    "requests": len(queue),
                    "tokens": queue.tokens,
                    "oldest_s": round(queue.oldest_s(now_s), 6),
                },
                "traffic": self._traffic(now_s),
                "discovery_problem": self._discovery_problem(),
                "lag_p99_s": self._metrics.lag.p99_s(),
                "speed": self._clock.speed,
            }
        )

    def drain(self, name: str, *, drained: bool) -> bytes:
        """Stop (or allow again) new requests to a worker; done when this returns.

        Raises:
            NotFoundError: no worker has that name.
        """
        self._admission.set_drained(name, drained=drained)
        return orjson.dumps({"name": name, "inflight_requests": self._pool.inflight_requests(name)})

    def _shown(self, worker: Worker, now_s: float, *, shows_url: bool) -> dict[str, Any]:
        state, reason = worker.state(now_s)
        return {
            "name": worker.name,
            "role": worker.spec.role.value,
            **({"url": worker.spec.url} if shows_url else {}),
            "state": state.value,
            "inflight_requests": self._pool.inflight_requests(worker.name),
            "inflight_tokens": worker.inflight_tokens,
            "kv_usage_fraction": worker.kv_usage_fraction,
            "reason": reason,
        }
