"""Puts one router process together and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

from penstock_core.clock import ModelClock
from penstock_core.errors import ConfigError
from penstock_core.logs import get_logger
from penstock_graph.models import Role
from penstock_router.access_log import AccessLog
from penstock_router.discovery.base import Discovery
from penstock_router.discovery.statefile import StatefileDiscovery
from penstock_router.discovery.watch import FleetWatch
from penstock_router.fleet import Fleet
from penstock_router.gate import Entrance, Gate, Picker, Stages, Stay
from penstock_router.kv_listener import UNIT_TOKENS, KvListener
from penstock_router.metrics import MetricsPage, RouterCollector, RouterMetrics
from penstock_router.placed_gate import PlacedGate, make_placed_gate
from penstock_router.policy.prefill_queue import PrefillQueue
from penstock_router.policy.registry import POLICIES, make_policy, second_stage_policy
from penstock_router.policy.retry_budget import RetryBudget
from penstock_router.policy.token_estimate import TokenEstimator
from penstock_router.proxy.admin import Admin
from penstock_router.proxy.app import RouterApp
from penstock_router.proxy.auth import KeyCheck
from penstock_router.proxy.dispatch import Dispatcher
from penstock_router.proxy.lease_guard import LeaseGuard
from penstock_router.proxy.prefix import ExactKeys
from penstock_router.proxy.upstream import Exchanger
from penstock_router.settings import RouterSettings
from penstock_router.tokenizer import load_tokenizer
from penstock_wire.client import ConnectionPool
from penstock_wire.server import HttpServer

log = get_logger(__name__)

TICK_REAL_S = 0.1
"""Discovery poll, queue time-outs and lag measurement; real seconds."""


class RouterServer:
    """One router: ``start``, then ``close``; ``serve`` does both around a stop event."""

    def __init__(self, settings: RouterSettings) -> None:
        """Build all parts; nothing runs and nothing listens yet.

        Raises:
            ConfigError: the settings cannot work.
        """
        settings.check()
        self._settings = settings
        self._clock = ModelClock(settings.speed)
        self.metrics = RouterMetrics()
        self.fleet = Fleet(settings.config.breaker, is_supervised=settings.kubernetes is not None)
        self._pool = ConnectionPool()
        self._probe_pool = ConnectionPool()
        self._discovery = _make_discovery(settings)
        self._watch = FleetWatch(self.fleet, self._probe_pool, settings.config.health, self._clock)
        self.gate = self._make_gate()
        self._admin = Admin(
            self.fleet,
            self.gate,
            self.metrics,
            clock=self._clock,
            discovery_problem=self._discovery_problem,
        )
        self._exact = self._make_exact()
        self._kv_events = self._make_listener()
        self._access_log = AccessLog.open(settings.access_log) if settings.access_log else None
        self._http = HttpServer(self._make_app().handle, limits=settings.server_limits())
        self._ticker: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port listened on."""
        return self._http.port

    async def start(self) -> None:
        """Learn the workers, then listen.

        Raises:
            PortInUseError: the port is taken.
            ConfigError: discovery cannot begin, for want of credentials.
        """
        try:
            if self._discovery is not None:
                await self._discovery.start()
                self._watch.follow(self._discovery)
            else:
                self.fleet.apply(self._settings.workers)
                self._watch.sync()
            if self._kv_events is not None:
                self._kv_events.start()
            await self._http.start(self._settings.host, self._settings.port)
        except BaseException:
            await self._stop_background()
            raise
        self._ticker = asyncio.create_task(self._tick(), name="router tick")
        log.info("router listening", host=self._settings.host, port=self.port, **self._settings.shown())

    async def close(self) -> None:
        """Stop accepting, let requests under way finish within the grace time, stop the rest."""
        self._admin.stopping = True
        grace_real_s = self._clock.to_real_s(self._settings.shutdown_grace_s)
        log.info("router stopping", connections=self._http.connections, grace_real_s=grace_real_s)
        await self._http.close(grace_s=grace_real_s)
        await self._stop_background()
        if self._access_log is not None:
            self._access_log.close()
        log.info("router stopped")

    async def serve(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set."""
        await self.start()
        # What was built so far lives as long as the process; walking it in every full collection would
        # only hold streams up, by some ten milliseconds each time.
        gc.collect()
        gc.freeze()
        try:
            await stop.wait()
        finally:
            await self.close()

    async def _stop_background(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker])
            self._ticker = None
        if self._discovery is not None:
            await self._discovery.close()
        if self._kv_events is not None:
            await self._kv_events.close()
        await self._watch.close()
        await self._probe_pool.close()
        await self._pool.close()

    async def _tick(self) -> None:
        # The loop's own clock is coarse and cached; lateness is measured with the real one.
        due_s = time.monotonic()
        while True:
            due_s += TICK_REAL_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            late_s = time.monotonic() - due_s
            self.metrics.lag.record(self._clock.to_model_s(late_s))
            if late_s > TICK_REAL_S:
                due_s = time.monotonic()
            try:
                if self._discovery is not None:
                    self._watch.follow(self._discovery)
                self.gate.tick()
                if self._access_log is not None:
                    self._access_log.flush()
            except Exception:  # root of the task: the queue's bounds must hold after one bad tick too
                log.exception("tick failed")

    def _make_gate(self) -> Entrance:
        settings = self._settings
        config, queue_config = settings.config, settings.config.prefill_queue
        then = Role.DECODE if settings.disaggregated else None
        if config.policy not in POLICIES:
            return make_placed_gate(
                config, Stages(self.fleet, settings.first_role, then), self.fleet, now_s=self._clock.now_s
            )
        queue: PrefillQueue[asyncio.Future[Stay]] = PrefillQueue(
            max_requests=queue_config.max_requests, max_wait_s=queue_config.max_wait_seconds
        )
        picker = Picker(
            self.fleet,
            settings.first_role,
            make_policy(config.policy),
            slot_tokens=queue_config.worker_tokens if settings.disaggregated else None,
        )
        return Gate(self.fleet, picker, queue, then=then, now_s=self._clock.now_s)

    def _make_exact(self) -> ExactKeys | None:
        settings, config = self._settings, self._settings.config
        if config.tokenizer is None and config.kv_events_port is None:
            return None
        unit = None if config.kv_events_port is None else settings.kv_block_tokens or UNIT_TOKENS
        return ExactKeys(None if config.tokenizer is None else load_tokenizer(config.tokenizer), unit)

    def _make_listener(self) -> KvListener | None:
        settings, port = self._settings, self._settings.config.kv_events_port
        if port is None or not isinstance(self.gate, PlacedGate):
            return None
        return KvListener(
            self.fleet,
            settings.first_role,
            self.gate.index_of,
            port=port,
            unit_tokens=settings.kv_block_tokens or UNIT_TOKENS,
        )

    def _make_app(self) -> RouterApp:
        settings, config, clock = self._settings, self._settings.config, self._clock
        estimator = TokenEstimator()
        decode = (
            Picker(self.fleet, Role.DECODE, second_stage_policy(config.policy))
            if settings.disaggregated
            else None
        )
        dispatcher = Dispatcher(
            exchanger=Exchanger(self._pool, settings, clock),
            gate=self.gate,
            decode=decode,
            leases=LeaseGuard(
                self._probe_pool,
                clock,
                lease_s=settings.lease_s,
                timeout_real_s=config.health.timeout_real_seconds,
            ),
            metrics=self.metrics,
            budget=RetryBudget(
                fraction=config.retries.budget_fraction,
                min_per_s=config.retries.min_per_second,
                now_s=clock.now_s(),
            ),
            max_retries=config.retries.max_per_request,
            estimator=estimator,
            clock=clock,
            is_alone=self._alone(),
            retry_after_s=config.admission.retry_after_seconds,
            exact=self._exact,
        )
        collector = RouterCollector(
            self.metrics,
            self.fleet,
            self._admin.queue_view,
            discovery_problem=self._discovery_problem,
            model=settings.model,
            now_s=clock.now_s,
            kv_events=self._kv_events,
        )
        return RouterApp(
            model=settings.model,
            context_tokens=settings.context_tokens,
            dispatcher=dispatcher,
            admin=self._admin,
            keys=KeyCheck(settings.api_keys),
            metrics=self.metrics,
            page=MetricsPage(collector),
            estimator=estimator,
            speed=settings.speed,
            access_log=self._access_log,
            session_header=config.session_header,
        )

    def _discovery_problem(self) -> str | None:
        return self._discovery.problem if self._discovery is not None else None

    def _alone(self) -> Callable[[str], bool]:
        def is_alone(name: str) -> bool:
            worker = self.fleet.get(name)
            if worker is None:
                return False
            routable = self.fleet.routable(worker.spec.role, self._clock.now_s())
            return all(each.name == name for each in routable)

        return is_alone


def _make_discovery(settings: RouterSettings) -> Discovery | None:
    if settings.statefile is not None:
        return StatefileDiscovery(settings.statefile)
    if settings.kubernetes is None:
        return None
    try:
        # An extra of the distribution; only a router in a cluster needs it.
        from penstock_router.discovery.kubernetes import KubernetesDiscovery  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--discovery kubernetes: {exc.name} is not installed; pip install 'penstock[kubernetes]'"
        ) from exc
    return KubernetesDiscovery(graph=settings.kubernetes.graph, namespace=settings.kubernetes.namespace)
