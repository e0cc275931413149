"""``/ui``, a page that loads nothing from other sites, and ``/ui/state``, the JSON that it requests every second; read-only.

The page itself contains no data and is served to all clients; its state is only for administrators, like drains.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any, Final

import orjson

from penstock.api import PlannerMode, Role
from penstock.core.findings import slow_worker, worker_fault
from penstock.core.http.messages import Request, Responder
from penstock.core.logs import get_logger
from penstock.core.overload import is_overloaded
from penstock.core.printable import printable
from penstock.router.context import RouterContext
from penstock.router.core.speeds import SpeedMeter, WorkerSpeed, slow_workers
from penstock.router.core.worker import Worker, WorkerState
from penstock.router.proxy.auth import AdminCheck
from penstock.router.proxy.completion import not_served
from penstock.router.ui.graphs import other_graphs
from penstock.router.ui.history import STEP_S, RouterHistory
from penstock.router.ui.planner import ShownPlanner, planner_reader
from penstock.router.ui.pools import local_pool

log = get_logger(__name__)

_REFRESH_REAL_S: Final = 30.0
"""Chosen: interval at which the planner's state is read while no page is open; one call of the API server."""
_MIN_REAL_S: Final = 0.1
"""Minimum interval between two snapshots of the history, in real seconds, for large time factors."""
_SHOWN_WORKERS: Final = 64
"""Chosen: maximum number of workers that fit on the page; workers that are not ready come first, and the others are counted."""
_POLICY: Final = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", _POLICY),
)


class LivePage:
    """Serves the live page of a graph (``/ui``), and collects the state that the page shows (``/ui/state``).

    Attributes:
        history: Traffic, fleet and latencies of the router's last quarter of an hour.
    """

    def __init__(self, context: RouterContext) -> None:
        core, settings = context.admission.core, context.settings
        self._context = context
        self._settings = settings
        self._pool = core.pool
        self._queue = core.entry_queue
        self._tiers = core.tiers
        self._planner = planner_reader(settings, context.discovery)
        self._began_s = context.clock.now_s()
        self._gpus: Mapping[str, int] | None = None
        slo = settings.slo
        self.history = RouterHistory(context.metrics, core.tiers, self._gauges, slo.ttft_seconds)
        self.history.itl_target_s = slo.itl_seconds
        self.history.tick(self._began_s)
        self._speeds = SpeedMeter()
        self._page = resources.files(__package__).joinpath("page.html").read_bytes()

    async def follow(self) -> None:
        """Record the history, and refresh the planner's state while no page is open; runs until cancelled."""
        clock, due_real_s = self._context.clock, 0.0
        while True:
            try:
                self.history.tick(clock.now_s())
                self._speeds.tick({each.name: each.speed for each in self._pool}, clock.now_s())
                if time.monotonic() >= due_real_s:
                    due_real_s = time.monotonic() + _REFRESH_REAL_S
                    await self._refresh()
            except Exception:  # root of the task: one bad mark must not be the last
                log.exception("live page not kept current")
            await asyncio.sleep(max(_MIN_REAL_S, clock.to_real_s(STEP_S)))

    def speeds(self, now_s: float) -> tuple[dict[str, WorkerSpeed], dict[str, str]]:
        """Return each worker's speed over the last simulated minute, and a text about each slow worker; both by worker name.

        A worker is slow if it is at least 3 times slower than the median of the others of its role.
        """
        counts = {each.name: each.speed for each in self._pool}
        found = self._speeds.read(counts, {each.name: each.spec.role.value for each in self._pool}, now_s)
        return found, slow_workers(found)

    async def _refresh(self) -> ShownPlanner:
        """Return the planner's state; GPUs and targets of the history are updated from it."""
        planner = await self._planner.read()
        self._gpus = planner.gpus_per_replica
        rules = planner.rules or {}
        slo = self._settings.slo
        self.history.ttft_target_s = rules.get("ttft_s") or slo.ttft_seconds
        self.history.itl_target_s = rules.get("itl_s") or slo.itl_seconds
        return planner

    async def answer(self, request: Request, responder: Responder, check: AdminCheck) -> None:
        """Answer a GET request for the page (``/ui``) or its state as JSON (``/ui/state``).

        Args:
            request: The request.
            responder: Writes the response.
            check: Decides whether the client may see the state; the page itself contains nothing secret.

        Raises:
            RequestRefused: 401 or 403, as for all administration; 404 for a path other than ``/ui`` and ``/ui/state``.
        """
        if request.path in {"/ui", "/ui/"}:
            if check.is_off:
                check.check(request.headers)
            responder.send(200, self._page, content_type="text/html; charset=utf-8", headers=_HEADERS)
            return
        if request.path != "/ui/state":
            raise not_served(request.path)
        # Requests of the page itself are same-origin and allowed; those of other sites are rejected as usual.
        own = (b"sec-fetch-site", b"same-origin")
        check.check(dict(each for each in request.headers.items() if each != own))
        responder.send(200, orjson.dumps(await self._state()), headers=_HEADERS)

    async def _state(self) -> dict[str, Any]:
        planner = await self._refresh()
        context, queue, now_s = self._context, self._queue, self._context.clock.now_s()
        minute = self.history.minute(now_s)
        workers = self._worker_rows(now_s)
        broken = [
            worker_fault(each["name"], each["reason"])
            for each in workers
            if each["reason"] and each["state"] != WorkerState.DRAINING
        ]
        slow = [slow_worker(each["name"], each["slow"]) for each in workers if each["slow"]]
        return {
            "model": self._settings.model,
            "at_s": now_s - self._began_s,
            "wall_s": time.time(),
            "speed": self._settings.speed,
            "step_s": STEP_S,
            "routers": len(context.discovery.routers or ()),
            "lag_p99_s": context.metrics.lag.p99_s(),
            "discovery_problem": context.discovery.problem,
            "pools": [self._pool_row(role, planner.desired, now_s) for role in self._settings.roles],
            "workers": workers,
            "worker_count": sum(1 for _ in self._pool),
            "gpus": {"used": self._gpus_held(), "budget": planner.budget},
            "queue": {"requests": len(queue), "tokens": queue.tokens, "oldest_s": queue.oldest_s(now_s)},
            "minute": minute,
            "tiers": self._tier_rows(minute.pop("tiers"), now_s),
            "signals": self._signals(minute, planner.rules or {}),
            "cost": self.history.cost.to_json(planner.budget),
            "planner": asdict(planner),
            "graphs": other_graphs(self._settings.statefile),
            "pool": planner.pool or local_pool(self._settings.statefile),
            "series": [
                {**point, "at_s": point["at_s"] - self._began_s}
                for point in self.history.series(now_s, minute)
            ],
            "is_overloaded": is_overloaded(
                arrivals=minute["arrivals"],
                rejected=minute["refused"] + minute["timed_out"],
                oldest_wait_s=queue.oldest_s(now_s),
                ttft_slo_s=self.history.ttft_target_s,
            ),
            "problems": [*planner.problems, *broken, *slow],
        }

    # ------------------------------------------------------------------ parts

    def _gauges(self) -> dict[str, Any]:
        now_s, ready = self._context.clock.now_s(), {role.value: 0 for role in self._settings.roles}
        for worker in self._pool:
            role = worker.spec.role.value
            ready[role] = ready.get(role, 0) + (worker.state(now_s)[0] is WorkerState.READY)
        return {
            "ready": ready,
            "gpus": self._gpus_held(),
            "queued": len(self._queue),
            "kv_usage_fraction": self._kv_mean(),
        }

    def _gpus_held(self) -> int | None:
        gpus = self._gpus
        return None if gpus is None else sum(gpus[worker.spec.role] for worker in self._pool)

    def _kv_mean(self) -> float | None:
        role = self._settings.roles[-1]
        known = [
            each.kv_usage_fraction
            for each in self._pool
            if each.spec.role is role and each.spec.ready and each.kv_usage_fraction is not None
        ]
        return math.fsum(known) / len(known) if known else None

    def _pool_row(self, role: Role, desired: Mapping[str, int], now_s: float) -> dict[str, Any]:
        states = Counter(_shown_state(each, now_s)[0] for each in self._pool if each.spec.role is role)
        return {
            "role": role.value,
            "ready": states.pop("ready", 0),
            "desired": desired.get(role.value),
            "others": dict(states),
            "gpus_per_replica": None if self._gpus is None else self._gpus[role],
        }

    def _worker_rows(self, now_s: float) -> list[dict[str, Any]]:
        rows = []
        speeds, slow = self.speeds(now_s)
        for worker in self._pool:
            state, reason = _shown_state(worker, now_s)
            rows.append(
                {
                    "name": worker.name,
                    "role": worker.spec.role.value,
                    "state": state,
                    "reason": reason,
                    "requests": self._pool.inflight_requests(worker.name),
                    "kv_usage_fraction": worker.kv_usage_fraction,
                    "slow": slow.get(worker.name),
                    **_figures(speeds[worker.name]),
                }
            )
        rows.sort(key=lambda row: (row["state"] == "ready", row["slow"] is None))
        return printable(rows[:_SHOWN_WORKERS])

    def _tier_rows(self, minute: dict[str, dict[str, int]], now_s: float) -> list[dict[str, Any]]:
        control = self._tiers
        if control is None:
            return []
        return [
            {
                "tier": tier.value,
                "waiting": self._queue.occupancy.tiers.get(tier, 0),
                **minute.get(tier.value, {}),
                "shed_fraction": control.monitor.shed_fraction(tier),
                "compliance": control.monitor.compliance(tier, now_s),
            }
            for tier in control.counts
        ]

    def _signals(self, minute: Mapping[str, Any], rules: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the signals that the planner reads, with this router's values, and the thresholds if its mode has any."""
        is_load = rules.get("mode") == PlannerMode.LOAD
        kv, waiting = (rules["kv"], rules["queue"]) if is_load else ((None, None), (None, None))
        requests: float = len(self._queue)
        is_per_worker = is_load and rules["is_queue_per_worker"]
        if is_per_worker:
            requests /= max(1, self._gauges()["ready"].get(Role.PREFILL.value, 0))
        role, itl = self._settings.roles[-1].value, minute["itl"]
        found: list[tuple[str, str, float | None, Sequence[float | None]]] = [
            ("queue per prefill worker" if is_per_worker else "queue", "", requests, waiting),
            (f"KV usage of {role}", "%", self._kv_mean(), kv),
            ("TTFT p99", "s", minute["ttft"]["p99_s"], (None, minute["ttft"]["target_s"])),
        ]
        if itl["target_s"] is not None:
            found.append(("ITL p99", "s", itl["p99_s"], (None, itl["target_s"])))
        return [
            {"name": name, "unit": unit, "value": value, "down": down, "up": up}
            for name, unit, value, (down, up) in found
        ]


def _figures(speed: WorkerSpeed) -> dict[str, float | None]:
    """Return the values of a worker's speed that are shown."""
    return {
        "itl_s": speed.itl_s,
        "output_tokens_per_s": speed.output_tokens_per_s,
        "prompt_tokens_per_s": speed.prompt_tokens_per_s,
    }


def _shown_state(worker: Worker, now_s: float) -> tuple[str, str]:
    """Return a worker's state in one word, and the reason; a worker that its supervisor reports as starting has no fault."""
    state, reason = worker.state(now_s)
    is_starting = not worker.spec.ready and worker.spec.reason in {"requested", "starting"}
    return ("starting", "") if is_starting else (state.value, reason)
