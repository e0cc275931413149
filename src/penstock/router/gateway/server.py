"""The endpoint picker's server: a router whose completion requests Envoy relays, with gRPC for Envoy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from math import inf
from typing import Final

import grpc
import grpc.aio
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import add_ExternalProcessorServicer_to_server

from penstock.api import Role
from penstock.core.errors import PortInUseError, UpstreamError
from penstock.core.http.client import Timeouts
from penstock.core.http.messages import JSON, Request, Responder
from penstock.core.http.streaming import StreamingResponse
from penstock.core.logs import get_logger
from penstock.core.tracing import Tracing
from penstock.router.admission import AdmissionError, LiveAssignment, LiveCore, Picker
from penstock.router.core.request_steps import Problem
from penstock.router.core.retries import FailedTry, RefusalReason, RetryScope
from penstock.router.core.worker import Worker
from penstock.router.gateway import messages
from penstock.router.gateway.ext_proc_stream import SUBSET, GatewayResponder, GatewayStream
from penstock.router.gateway.ignored_keys import ignored_keys
from penstock.router.policy.arrival import Arrival
from penstock.router.proxy.call import CompletionCall
from penstock.router.proxy.completion import not_served
from penstock.router.proxy.failures import ErrorReply, TryFailure, failed_try
from penstock.router.proxy.handler import CompletionHandler
from penstock.router.proxy.worker_calls import WorkerCalls
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings

log = get_logger(__name__)

_BY_GATEWAY: Final = "gateway"
"""Reason of retries: Envoy sent a request to another worker than the one that was picked."""


class SubsetPicker:
    """Chooses only workers in the subset that the gateway names in a request; all workers if the gateway names no subset.

    The choice is made by the wrapped ``picker``, which is told to avoid the workers outside of the subset. Prefill workers
    are not restricted, because gateways do not know them.
    """

    def __init__(self, picker: Picker, core: LiveCore) -> None:
        self._picker = picker
        self._core = core
        self.cancel = picker.cancel
        self.release = picker.release
        self.prefilled = picker.prefilled
        self.refused_at_capacity = picker.refused_at_capacity
        self.record_tier_event = picker.record_tier_event

    def ask(
        self, waiter: asyncio.Future[LiveAssignment], role: Role, arrival: Arrival, *, is_retry: bool
    ) -> None:
        """Queue a request for a worker of the subset.

        The future ``waiter`` later receives the assignment to a worker of ``role``, or an `AdmissionError`. ``is_retry`` says
        that the request was admitted before (a retry).

        Raises:
            AdmissionError: the subset contains no known worker of the role.
        """
        subset = _subset(role)
        if subset is not None:
            workers = [each for each in self._core.pool if each.spec.role is role]
            outside = frozenset(each.name for each in workers if not _is_in(subset, each))
            if len(outside) == len(workers):
                raise _no_worker(subset)
            arrival = arrival.avoiding(outside)
        self._picker.ask(waiter, role, arrival, is_retry=is_retry)

    def dispatched(self, assignment: LiveAssignment, role: Role, arrival: Arrival) -> None:
        """Check that the worker of ``assignment`` is in the subset that the gateway allows, just before the request is sent there.

        The call is then passed on to the wrapped picker.

        Args:
            assignment: The request's assignment to the worker.
            role: Role for which the worker was requested.
            arrival: The request as routing policies see it.

        Raises:
            AdmissionError: the worker is not in the subset, because no worker in the subset could be chosen.
        """
        subset = _subset(role)
        if subset is not None and not _is_in(subset, assignment.worker):
            raise _no_worker(subset)
        self._picker.dispatched(assignment, role, arrival)


def _subset(role: Role) -> frozenset[str] | None:
    """Return the endpoints that the request's gateway names; None for all.

    Prefill workers are not restricted, because gateways do not know them.
    """
    return None if role is Role.PREFILL else SUBSET.get()


def _is_in(subset: frozenset[str], worker: Worker) -> bool:
    return messages.endpoint_of(worker.spec.url) in subset


def _no_worker(subset: frozenset[str]) -> AdmissionError:
    return AdmissionError(
        RefusalReason.NO_WORKER,
        f"{messages.SUBSET}: none of its {len(subset)} endpoints is a ready worker; name those of GET /workers",
    )


class GatewayWorkerCalls(WorkerCalls):
    """Calls workers for requests that come through a gateway.

    The worker that generates the response is called through Envoy, prefill workers are called directly.
    """

    async def _send_request(
        self, call: CompletionCall, assignment: LiveAssignment, body: bytes, timeouts: Timeouts
    ) -> StreamingResponse:
        responder = call.responder
        if not isinstance(responder, GatewayResponder) or assignment.role is Role.PREFILL:
            return await super()._send_request(call, assignment, body, timeouts)
        # If the worker has no capacity, the response is then 503 with Retry-After, without a second try.
        call.tries.avoid |= {assignment.worker.name}
        endpoint = messages.endpoint_of(assignment.worker.spec.url)
        try:
            response = await responder.stream.forward(endpoint, call.upstream_headers, body, timeouts)
            if _went_elsewhere(call, assignment):
                self._metrics.retries[_BY_GATEWAY] += 1
            return response
        finally:
            if responder.stream.is_forwarded:
                # Once Envoy has the request, it cannot be sent to another worker.
                call.machine.deadline_s = -inf

    def failed(
        self,
        call: CompletionCall,
        assignment: LiveAssignment,
        problem: ErrorReply | UpstreamError,
        *,
        reads_kv: bool = False,
    ) -> FailedTry | Problem:
        """Report a failed response to the worker's circuit breaker, and return what it means for the request.

        The result is a `FailedTry` (which says where the request may be retried), or a `Problem` that does not count
        against the worker alone. ``problem`` is the worker's error response, or the reason for which there is no complete
        response; ``reads_kv`` says that the worker was asked to fetch the prompt's KV.

        If Envoy sent the request to another worker than the one that was picked, the failure does not count against any
        worker.
        """
        if _went_elsewhere(call, assignment):
            # The picked worker has not received the request, or Envoy has tried another one after it: neither is proven to be
            # at fault.
            if isinstance(problem, UpstreamError):
                failure, response = failed_try(problem, assignment.worker)
            else:
                response, _ = problem.shown(call.request.path)
                failure = FailedTry(response.reason, RetryScope.NOWHERE)
            call.failure = TryFailure(problem, response)
            return replace(failure, workers=())
        # No other worker is tried that could show whose fault a 5xx is. So it counts at once, as in Envoy's own outlier
        # detection.
        failed = super().failed(call, assignment, problem, reads_kv=reads_kv)
        if (
            assignment.role is not Role.PREFILL
            and _is_forwarded(call)
            and isinstance(failed, FailedTry)
            and failed.unproven is not None
            and failed.reason == "upstream_5xx"
        ):
            assignment.confirm_failure(self._clock.now_s())
            return replace(failed, unproven=None)
        return failed


class GatewayHandler(CompletionHandler):
    """Serves the completion requests that Envoy relays from a gateway."""

    worker_calls_type = GatewayWorkerCalls

    def can_resume(self, call: CompletionCall) -> bool:
        """Return whether another worker could resume the stream of ``call`` if it breaks off.

        False if Envoy relays the stream from the worker to the client, because this router cannot add another worker's part.
        """
        return not _is_forwarded(call) and super().can_resume(call)

    def writes_stream(self, call: CompletionCall) -> bool:
        """Return whether this router writes the client's stream itself; False if Envoy relays the worker's stream."""
        return not isinstance(call.responder, GatewayResponder)


def _is_forwarded(call: CompletionCall) -> bool:
    responder = call.responder
    return isinstance(responder, GatewayResponder) and responder.stream.is_forwarded


def _went_elsewhere(call: CompletionCall, assignment: LiveAssignment) -> bool:
    """Return whether Envoy reports that it sent a request to another worker than the one that was picked."""
    responder = call.responder
    if not isinstance(responder, GatewayResponder) or assignment.role is Role.PREFILL:
        return False
    served = responder.stream.served
    return served is not None and served != messages.endpoint_of(assignment.worker.spec.url)


class GatewayPicker(RouterServer):
    """An endpoint picker: a router that chooses workers for Envoy, and serves its own HTTP interface as well.

    Envoy calls it by ext_proc (external processing, gRPC) on a port of its own.

    Attributes:
        ext_proc_port: Port for Envoy; after `start`, the port on which it listens.
    """

    handler_type = GatewayHandler

    def __init__(
        self,
        settings: RouterSettings,
        tracing: Tracing | None = None,
        *,
        ext_proc_port: int,
        credentials: grpc.ServerCredentials | None = None,
        inherited_socket: socket.socket | None = None,
    ) -> None:
        """Create the picker; nothing listens before `start`.

        Args:
            settings: Settings of the router.
            tracing: Creates the requests' spans; None creates none.
            ext_proc_port: Port for Envoy; 0 chooses a free one.
            credentials: TLS credentials from `penstock.router.gateway.certificate`; None for plain text.
            inherited_socket: Socket for HTTP that already listens; None opens a new one.
        """
        super().__init__(settings, tracing, restrict_picker=SubsetPicker, inherited_socket=inherited_socket)
        self.ext_proc_port = ext_proc_port
        self._credentials = credentials
        self._grpc: grpc.aio.Server | None = None
        self._streams = 0

    async def start(self) -> None:
        """Start the router, then listen for Envoy.

        Raises:
            PortInUseError: a port is in use.
            ConfigError: discovery has no credentials.
        """
        await super().start()
        server = self._grpc = grpc.aio.server(
            # Without this option two pickers could share a port, and each would get half of the requests.
            options=[("grpc.so_reuseport", 0)]
        )
        add_ExternalProcessorServicer_to_server(self, server)
        check = grpc.unary_unary_rpc_method_handler(self._check)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})]
        )
        host = self._settings.host
        address = f"{f'[{host}]' if ':' in host else host}:{self.ext_proc_port}"
        try:
            if self._credentials is None:
                self.ext_proc_port = server.add_insecure_port(address)
            else:
                self.ext_proc_port = server.add_secure_port(address, self._credentials)
        except RuntimeError as exc:
            await super().close()
            raise PortInUseError(f"--ext-proc {address}: cannot be listened on; choose another port") from exc
        await server.start()
        for key, words in ignored_keys(self._settings.config):
            log.warning("setting has no effect", key=key, problem=words)
        log.info(
            "endpoint picker listening",
            host=self._settings.host,
            port=self.ext_proc_port,
            tls=self._credentials is not None,
        )

    async def _drain(self, grace_real_s: float) -> None:
        """Let the requests of both interfaces finish within the same time."""
        async with asyncio.TaskGroup() as entrances:
            entrances.create_task(super()._drain(grace_real_s))
            if self._grpc is not None:
                entrances.create_task(self._grpc.stop(grace_real_s))

    async def Process(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[ProcessingResponse]:
        """Serve one request of a gateway: receive Envoy's messages about it, and yield the messages to Envoy.

        This is the method of Envoy's gRPC service ExternalProcessor, whose name it has.

        Args:
            request_iterator: Messages of Envoy: headers and body of the client's request, then those of the response.
            context: gRPC context of the call.
        """
        bound = self.intake.limits.max_connections
        if self._streams >= bound:
            # gRPC's own rejection is not used, because a gateway that fails open would then send the request to any worker.
            refusal = self.intake.full_refusal(bound)
            yield messages.immediate(refusal.status, refusal.body, JSON, refusal.headers)
            return
        self._streams += 1
        try:
            async for answer in self._serve(request_iterator, context):
                yield answer
        finally:
            self._streams -= 1

    async def _serve(
        self, request_iterator: AsyncIterator[ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[ProcessingResponse]:
        stream = GatewayStream(self.intake)
        task = asyncio.create_task(
            stream.run(request_iterator, self._handle, self.app.wants_body), name="gateway stream"
        )
        try:
            async for answer in stream.answers():
                yield answer
            if stream.is_broken:
                # After a normal end, Envoy would relay the response as if it were complete.
                await context.abort(grpc.StatusCode.ABORTED, "the answer is incomplete")
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _handle(self, request: Request, responder: Responder) -> None:
        """Serve only the OpenAI API; other paths are only available on the router's own port."""
        if request.path.startswith("/v1/"):
            await self.app.handle(request, responder)
            return
        refusal = not_served(request.path)
        responder.send(refusal.status, refusal.body)

    async def _check(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Answer gRPC's health check; the service ``liveness`` is healthy even if requests would not be served."""
        del context
        is_serving = request.endswith(b"liveness") or not self.admission.problems()
        return b"\x08\x01" if is_serving else b"\x08\x02"  # field 1, status: SERVING or NOT_SERVING
