"""Assembles one router process and runs it until a signal stops it."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Final

from penstock.api import AdmissionConfig, AdmissionMode, TiersConfig
from penstock.api.manifests import load_graph
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ConfigError
from penstock.core.http.intake import Intake
from penstock.core.http.server import HttpServer, Request
from penstock.core.logs import get_logger
from penstock.core.tracing import Tracing
from penstock.kube.objects.names import GRAPH_SECRET_VARIABLE
from penstock.router.access_log import AccessLog
from penstock.router.admission import Admission, LiveCore, OwnPicker, Picker, log_worker_change
from penstock.router.context import RouterContext
from penstock.router.core.build import build_router
from penstock.router.core.worker import WorkerSize
from penstock.router.discovery.statefile import Discovery, StatefileDiscovery
from penstock.router.discovery.watch import WorkerWatch
from penstock.router.kv_listener import ENGINE_BLOCK_TOKENS, KvListener
from penstock.router.metrics_page import MetricsPage
from penstock.router.picker.group import PeerGroup
from penstock.router.picker.links import SILENT_TICKS
from penstock.router.picker.relay import RemotePicker
from penstock.router.policy.busy import busy_thresholds
from penstock.router.policy.routing_policy import AssignTime
from penstock.router.proxy.app import RouterApp
from penstock.router.proxy.auth import GraphSecret
from penstock.router.proxy.handler import CompletionHandler
from penstock.router.proxy.kv_transfer import KvTransfers
from penstock.router.proxy.prefix import ExactKeys, PromptReader, load_tokenizer
from penstock.router.proxy.routes import PATHS
from penstock.router.proxy.tiers import LiveTiers
from penstock.router.settings import RouterSettings
from penstock.router.thresholds import GraphThresholds
from penstock.router.ui.live_page import LivePage

log = get_logger(__name__)

TICK_REAL_S = 0.1
"""Interval of the tick in real seconds: discovery is polled, queue timeouts are checked, and the event loop's lag is measured."""

PAUSE_REAL_S: Final = SILENT_TICKS * TICK_REAL_S
"""Duration of a pause of this process, in real seconds, from which on it is logged: other routers take this one for gone then."""
_PAUSE_LOG_REAL_S: Final = 10.0
"""Minimum interval between two such warnings in real seconds. Chosen: often enough to be noticed, and rare enough for a log under
load."""

_FAILURE_LOG_REAL_S: Final = 10.0
"""Minimum interval between two log entries for a job of the tick that fails each time, in real seconds."""

_GRAPH_FILE_REAL_S: Final = 1.0
"""Interval in real seconds at which the graph's file is checked. Chosen: a check costs microseconds, and a kubelet takes up to a
minute anyway."""

STOP_REAL_S = 10.0
"""Maximum wait for discovery, checks and connections to end after the last request, in real seconds. Chosen: each takes
milliseconds, and the wait must be shorter than the pod's grace period."""


class RouterServer:
    """One router process. Call `start` and then `close`, or `serve`, which does both.

    Attributes:
        handler_type: Class that serves completion requests.
        core: State machine of the router.
        admission: Acquires workers for requests.
        context: Objects that the parts of the router share.
        metrics: Counters of the requests.
        thresholds: This router's copy of the graph's busy thresholds.
        intake: Limits on the number and size of incoming requests.
        app: HTTP application.
        tick_jobs: Jobs that are run every 0.1 real seconds (`TICK_REAL_S`), by name, in order; none depends on another one.
    """

    handler_type: ClassVar[type[CompletionHandler]] = CompletionHandler

    def __init__(
        self,
        settings: RouterSettings,
        tracing: Tracing | None = None,
        *,
        restrict_picker: Callable[[Picker, LiveCore], Picker] | None = None,
        inherited_socket: socket.socket | None = None,
    ) -> None:
        """Create all parts; nothing runs or listens yet.

        Args:
            settings: Settings of the router.
            tracing: Creates the requests' spans; None creates none.
            restrict_picker: Wraps the picker in one that chooses from fewer workers; None chooses from all workers.
            inherited_socket: Socket that already listens, from the process that started this one; None opens a new one.

        Raises:
            ConfigError: the settings contradict each other, or need a package that is not installed.
        """
        settings.check()
        clock = SimulatedClock(settings.speed)
        self.core = _build_core(settings)
        discovery = _discovery(settings)
        secret = GraphSecret(settings.graph_secret)
        own = OwnPicker(self.core, clock.now_s)
        # Without a secret no request is a router's: each picks for itself.
        remote = RemotePicker(own) if discovery.routers is not None and secret.headers else None
        picker: Picker = remote or own
        if restrict_picker is not None:
            picker = restrict_picker(picker, self.core)
        self.admission = Admission(self.core, clock.now_s, picker)
        context = self.context = RouterContext(settings, clock, self.admission, discovery)
        self._settings = settings
        self._inherited_socket = inherited_socket
        self._clock = clock
        self._discovery = discovery
        self.metrics = context.metrics
        self._tracing = tracing
        self._watch = WorkerWatch(context)
        self.thresholds = GraphThresholds(self.admission)
        self._group = None if remote is None else PeerGroup(context, remote, secret, self.thresholds)
        self._live_page = LivePage(context)
        reads_prompts = self.core.entry_queue.policy.assigns is AssignTime.ON_ARRIVAL
        self._reader = PromptReader(_exact_keys(settings)) if reads_prompts else None
        self._kv_events = self._make_listener() if reads_prompts else None
        self._graph_admission = settings.config.admission
        self._graph_tiers = settings.config.tiers.under(settings.slo)
        self._tiers = self._make_tiers()
        self._access_log = AccessLog.open(settings.access_log) if settings.access_log else None
        self._transfers = KvTransfers(context)
        self._handler = self.handler_type(context, self._transfers)
        self._graph_file_stamp: tuple[int, int, int] | None = None
        self.intake = Intake(settings.server_limits())
        self.app = self._make_app(secret)
        self._http = HttpServer(
            self.app.handle,
            intake=self.intake,
            is_vital=_is_vital,
            wants_body=self.app.wants_body,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._is_warned = False
        self._pauses = PauseLog()
        self.tick_jobs = self._make_jobs()
        self._jobs = TickJobs(self.tick_jobs, self.metrics.failed_jobs)

    def _make_jobs(self) -> dict[str, Callable[[], object]]:
        """Return the jobs of a tick, in order, by name."""
        jobs: dict[str, Callable[[], object]] = {
            "discovery": self._follow_discovery,
            "queues": self.admission.tick,
            "moves": self._handler.moves.tick,
        }
        if self._group is not None:
            jobs["routers"] = self._group.tick
        if self._access_log is not None:
            jobs["access log"] = self._access_log.flush
        return jobs

    @property
    def port(self) -> int:
        """Port on which the router listens."""
        return self._http.port

    async def start(self) -> None:
        """Find the workers, then listen.

        Raises:
            PortInUseError: the port is in use.
            ConfigError: discovery has no credentials.
        """
        try:
            await self._discovery.start()
            self._follow_discovery()
            if self._kv_events is not None:
                self._kv_events.start()
            if self._group is not None:
                # Settings of the graph, such as thresholds set at run time, must apply to the first request of this router.
                await self._group.start()
            await self._http.start(self._settings.host, self._settings.port, held=self._inherited_socket)
        except BaseException:
            await self._stop_background()
            raise
        self._tasks = [
            asyncio.create_task(self._tick(), name="router tick"),
            asyncio.create_task(self._live_page.follow(), name="live page"),
        ]
        if self._settings.graph_file is not None:
            follow = self._follow_graph_file(self._settings.graph_file)
            self._tasks.append(asyncio.create_task(follow, name="router settings"))
        log.info("router listening", host=self._settings.host, port=self.port, **self._settings.shown())

    async def close(self) -> None:
        """Stop accepting connections, wait for the present ones until they end or the grace period is over, and stop all parts."""
        self.app.is_stopping = True
        if self._group is not None:
            self._group.stop()
        grace_real_s = self._clock.to_real_s(self._settings.shutdown_grace_s)
        log.info("router stopping", connections=self._http.connections, grace_real_s=grace_real_s)
        await self._drain(grace_real_s)
        await self._stop_background()
        if self._access_log is not None:
            self._access_log.close()
        log.info("router stopped")

    async def _drain(self, grace_real_s: float) -> None:
        """Return when no client is connected any more, or the time is over."""
        await self._http.close(grace_s=grace_real_s)

    async def serve(self, stop: asyncio.Event) -> None:
        """Start, run until ``stop`` is set, and close."""
        await self.start()
        # The objects created so far live as long as the process; scanning them in every full garbage collection would only
        # delay streams, by about ten milliseconds each time.
        gc.collect()
        gc.freeze()
        try:
            await stop.wait()
        finally:
            await self.close()

    async def _stop_background(self) -> None:
        """Stop everything that runs alongside requests, also after a failed start; returns within `STOP_REAL_S`."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if self._reader is not None:
            self._reader.close()
        try:
            async with asyncio.timeout(STOP_REAL_S):
                await asyncio.gather(*tasks, return_exceptions=True)
                for part in (
                    self._group,
                    self._discovery,
                    self._kv_events,
                    self._transfers,
                    self._watch,
                    self.context.probes,
                    self.context.pool,
                    self._tracing,
                ):
                    if part is not None:
                        await part.close()
        except TimeoutError:
            log.error("background tasks given up", after_real_s=STOP_REAL_S)  # noqa: TRY400 - the place says nothing

    async def _tick(self) -> None:
        # The loop's own clock is coarse and cached; lateness is measured with the real one.
        due_s = time.monotonic()
        while True:
            due_s += TICK_REAL_S
            worked_s = time.thread_time()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            late_s = time.monotonic() - due_s
            self.metrics.lag.record(self._clock.to_simulated_s(late_s))
            self._pauses.add(late_s, due_s + late_s, worked_s=time.thread_time() - worked_s)
            if late_s > TICK_REAL_S:
                due_s = time.monotonic()
            self._jobs.run(late_s + due_s)

    def _follow_discovery(self) -> None:
        """Apply the changes that discovery has found since the last call."""
        workers = self._discovery.poll()
        if workers is not None:
            self.admission.set_workers(workers)
            self._watch.sync()
        if self._group is None and not self._is_warned and len(self._discovery.routers or ()) > 1:
            self._is_warned = True
            log.warning(
                "several routers and no secret: each picks for itself; set the same secret in all",
                variable=GRAPH_SECRET_VARIABLE,
            )

    def _make_app(self, secret: GraphSecret) -> RouterApp:
        return RouterApp(
            self.context,
            self._handler,
            MetricsPage(self.context, self._kv_events, self._tiers, self._group),
            self._live_page,
            self.thresholds,
            secret,
            self._group,
            self._reader,
            self._access_log,
            self._tiers,
            self._tracing,
            self.intake,
        )

    def _make_tiers(self) -> LiveTiers | None:
        settings = self._settings
        if self.core.tiers is None:
            return None
        return LiveTiers(self._graph_tiers, settings.tier_keys, self.admission, model=settings.model)

    def _make_listener(self) -> KvListener | None:
        port, tokens = self._settings.config.kv_events_port, _engine_block_tokens(self._settings)
        if port is None or tokens is None:
            return None
        return KvListener(
            self.admission, self.core.entry_queue.workers.index_of, port=port, engine_block_tokens=tokens
        )

    async def _follow_graph_file(self, file: Path) -> None:
        """Apply the admission and tiers sections of the graph's file when they change; all other sections are only read at the start.

        On Kubernetes the file is mounted from a ConfigMap, which the operator updates; locally it is the manifest itself.
        Settings made at run time, for example by ``POST /busy_threshold``, are kept until their section changes.
        """
        while True:
            try:
                await self._check_graph_file(file)
            except Exception:  # root of the task: one failure must not end the looks that follow
                log.exception("router settings not followed")
            await asyncio.sleep(_GRAPH_FILE_REAL_S)

    async def _check_graph_file(self, file: Path) -> None:
        """Check the file once; if it is missing or invalid, the settings do not change."""
        try:
            found = await asyncio.to_thread(file.stat)
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
            if stamp == self._graph_file_stamp:
                return
            self._graph_file_stamp = stamp
            spec = (await asyncio.to_thread(load_graph, file)).spec
        except (OSError, ConfigError) as exc:
            log.warning("router settings kept: the graph's file is not usable", problem=str(exc))
            return
        admission, tiers = spec.router.admission, spec.router.tiers.under(spec.slo)
        former, self._graph_admission = self._graph_admission, admission
        if admission != former:
            self._follow_admission(admission, former)
        before, self._graph_tiers = self._graph_tiers, tiers
        if tiers != before:
            self._set_tiers(tiers)

    def _follow_admission(self, section: AdmissionConfig, former: AdmissionConfig) -> None:
        now, before = self._settings.admission(section), self._settings.admission(former)
        thresholds = busy_thresholds(now)
        if thresholds == busy_thresholds(before) and now.retry_after_seconds == before.retry_after_seconds:
            is_off = now.mode is AdmissionMode.NONE
            remedy = "set mode: token-capacity" if is_off else "the router's flags go before the file"
            log.warning("router settings edited without effect", section="admission", remedy=remedy)
            return
        log.info("router settings changed", section="admission", settings=section.to_manifest())
        self.thresholds.file_changed(thresholds)
        self._handler.retry_after_s = now.retry_after_seconds

    def _set_tiers(self, tiers: TiersConfig) -> None:
        if tiers.enabled is not (self._tiers is not None):
            log.warning("tiers are switched at a router's start alone", wanted=tiers.enabled)
        elif self._tiers is None:
            log.warning("router settings edited without effect", section="tiers", remedy="set enabled: true")
        else:
            log.info("router settings changed", section="tiers", settings=tiers.to_manifest())
            self._tiers.configure(tiers)


class TickJobs:
    """The independent jobs that the router runs every 0.1 real seconds: a failed job is logged, and the others run nevertheless."""

    def __init__(self, jobs: Mapping[str, Callable[[], object]], failed: Counter[str]) -> None:
        """Store ``jobs``, the functions to call, by name, and ``failed``, in which their failures are counted by the same name."""
        self._jobs = jobs
        self._failed = failed
        self._logged_s = dict.fromkeys(jobs, -math.inf)

    def run(self, now_s: float) -> None:
        """Run all jobs in order, whether or not one fails; an exception of a job is counted and logged.

        A job that fails each time is logged every 10 real seconds; ``now_s`` is the present time of that clock.
        """
        for name, job in self._jobs.items():
            try:
                job()
            except Exception:  # root of the task: nothing else would run again
                self._failed[name] += 1
                if now_s - self._logged_s[name] >= _FAILURE_LOG_REAL_S:
                    self._logged_s[name] = now_s
                    log.exception("a job of the router's tick failed", job=name, failures=self._failed[name])


class PauseLog:
    """Logs that this process's event loop was blocked, because this explains late responses and elections.

    Other routers take a router that was blocked for gone, and elect another one as the picker, which chooses the workers.
    """

    def __init__(self) -> None:
        self._longest = (0.0, 0.0)
        self._logged_s = -math.inf

    def add(self, blocked_s: float, now_s: float, *, worked_s: float) -> None:
        """Record the delay of one tick. At most every 10 s one delay is logged, the longest since. All times are in real seconds.

        Args:
            blocked_s: Delay of the tick.
            now_s: Time of the tick.
            worked_s: CPU time of the event loop's thread since the previous tick. It shows whether the loop was blocked by its
                own work or had no CPU.
        """
        self._longest = max(self._longest, (blocked_s, worked_s))
        if self._longest[0] < PAUSE_REAL_S or now_s - self._logged_s < _PAUSE_LOG_REAL_S:
            return
        blocked_s, worked_s = self._longest
        durations = {"stood_s": round(blocked_s, 2), "worked_s": round(worked_s, 2)}
        if worked_s < blocked_s / 2:
            log.warning(
                "event loop was blocked by lack of CPU: give the router more CPU (resources.requests of its podTemplate)",
                **durations,
            )
        else:
            log.warning(
                "event loop was blocked by its own work: run more routers (replicas of the router's service)",
                **durations,
            )
        self._longest, self._logged_s = (0.0, 0.0), now_s


def _is_vital(request: Request) -> bool:
    """Return whether a request comes from a probe, a scraper or an administrator: every request that is not inference."""
    return not (request.path.startswith("/v1/") or request.path in PATHS)


def _build_core(settings: RouterSettings) -> LiveCore:
    admission = settings.admission(settings.config.admission)
    graph, size = settings.graph, WorkerSize()
    if graph is not None:
        size = WorkerSize(batch_tokens=graph.batch_tokens, requests=graph.engine.request_limit)
    core: LiveCore = build_router(
        settings.config.model_copy(update={"admission": admission}),
        dict.fromkeys(settings.roles, size),
        slo=settings.slo,
        lease_s=settings.lease_s,
        worker_wait_s=settings.worker_wait_s,
        is_supervised=settings.kubernetes is not None,
        record=log_worker_change,
    )
    core.speed = settings.speed
    return core


def _engine_block_tokens(settings: RouterSettings) -> int | None:
    """Return the number of tokens per KV block of a worker; None if KV events are not followed."""
    if settings.config.kv_events_port is None:
        return None
    known = None if settings.graph is None else settings.graph.engine.block_tokens
    return known or ENGINE_BLOCK_TOKENS


def _exact_keys(settings: RouterSettings) -> ExactKeys | None:
    path, tokens = settings.config.tokenizer, _engine_block_tokens(settings)
    if path is None and tokens is None:
        return None
    return ExactKeys(None if path is None else load_tokenizer(path), tokens)


def _discovery(settings: RouterSettings) -> Discovery:
    if settings.statefile is not None:
        return StatefileDiscovery(settings.statefile)
    if settings.kubernetes is None:
        return Discovery(settings.workers)
    try:
        # An extra of the distribution; only a router in a cluster needs it.
        from penstock.router.discovery.kubernetes import KubernetesDiscovery  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--discovery kubernetes: {exc.name} is not installed; pip install 'penstock[kubernetes]'"
        ) from exc
    scheme = "http" if settings.graph is None else settings.graph.worker_scheme
    return KubernetesDiscovery(
        graph=settings.kubernetes.graph, namespace=settings.kubernetes.namespace, scheme=scheme
    )
