"""The steps that `penstock.router.core.request.RequestMachine` yields, and the results that the driver sends back. Pure."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.api import Role
from penstock.core.kv_transfers import TransferResult
from penstock.router.core.retries import Assignment, FailedTry, RefusalReason
from penstock.router.core.worker import Worker

# -- steps that ask for an answer ---------------------------------------------------------------------


class AcquireWorker(NamedTuple):
    """Step: the state machine of a request asks the driver (the code that does the I/O for a request) to acquire a worker for it.

    The driver sends back the request's `Assignment`, or a `RefusalReason` if the router has no worker for the request.

    Attributes:
        role: Role of the worker.
        is_retry: Whether the request was admitted before (a retry), so that no limit on new requests applies.
        is_admission: Whether the limits on new requests have to be checked here, because the request is sent to a decode
            worker without a prefill worker before it.
        kv: Location of the prompt's KV that the worker should be able to fetch (`PromptComputed.kv`); None if there is none.
    """

    role: Role
    is_retry: bool = False
    is_admission: bool = False
    kv: Any = None


class SendRequest(NamedTuple):
    """Step: the state machine of a request asks the driver to send the request to its assigned worker.

    The driver is the code that does the I/O for a request. It sends back `PromptComputed` for a prefill, else `ResponseStarted` (the
    response has started); or a `Problem`, or a `FailedTry`, which the driver also reports to the worker's circuit breaker.
    If prefill and decode run concurrently, a prefill is only started and the driver sends back `PrefillStarted`: the outcome
    of the prefill comes as the event `ConcurrentPrefillEnded`, and if the prefill fails before decode's first token, the driver
    answers the step of decode with `PrefillFailed`.

    Attributes:
        role: Role of the stage: prefill, or that of the workers that generate the response.
        assignment: The request's assignment to the worker.
        kv: Location of the prompt's KV, which the worker fetches from a prefill worker (`PromptComputed.kv`); None if the
            worker computes the prompt.
        prefill: The concurrent prefill (`PrefillStarted.prefill`) on which the decode depends; None if there is none.
    """

    role: Role
    assignment: Assignment[Any]
    kv: Any = None
    prefill: Any = None


class ConfirmLease(NamedTuple):
    """Step: the state machine asks the driver whether the prefill worker held the prompt's KV blocks until decode had read them.

    The driver is the code that does the I/O for a request. It sends back True, or False if the blocks may have been freed
    too early, so that the prompt has to be computed again.

    Attributes:
        kv: Location of the prompt's KV (`PromptComputed.kv`).
    """

    kv: Any


class RelayStream(NamedTuple):
    """Step: the state machine of a request asks the driver to relay the started stream to the client.

    The driver is the code that does the I/O for a request. It sends back None at the stream's end, or a `FailedTry` if the
    stream breaks off.

    Attributes:
        assignment: The request's assignment to the worker.
        response: The worker's response (`ResponseStarted.response`).
    """

    assignment: Assignment[Any]
    response: Any


class AwaitPrefill(NamedTuple):
    """Step: the state machine asks the driver to wait a short time for a concurrent prefill whose decode has ended already.

    The driver is the code that does the I/O for a request. It sends back None, whether or not the prefill has ended by
    then.

    Attributes:
        prefill: The prefill (`PrefillStarted.prefill`).
    """

    prefill: Any


class AwaitOutage(NamedTuple):
    """Step: the state machine asks the driver to wait until it is known whether ``worker`` has died.

    The request ran alone on this worker, because it is suspected of crashing workers, and was broken off.

    The driver is the code that does the I/O for a request. It sends back None. If the worker has died by then, the request
    has crashed it; otherwise only the connection was broken off.
    """

    worker: Worker


class BuildContinuation(NamedTuple):
    """Step: the state machine asks the driver to build the request for the remaining part of a broken stream.

    The driver is the code that does the I/O for a request. It sends back a `Continuation`: whether the remaining part can be
    requested from another worker; or a `StreamEnding` if only the end of the stream is missing.
    """


class Retry(NamedTuple):
    """Step: the state machine asks the driver to pause before the request is retried, or before the rest of its stream is requested.

    The driver is the code that does the I/O for a request. It sends back None after the pause.

    Attributes:
        reason: Reason of the failure, for metrics.
        pauses: Length of the pause, as a number of back-off pauses; 0 does not pause.
        is_continuation: Whether the client has received the first part of the response, so that the stream is resumed.
    """

    reason: str
    pauses: int
    is_continuation: bool


# -- steps without an answer --------------------------------------------------------------------------


class PrefillFinished(NamedTuple):
    """Notification from the state machine of a request to the driver: the assigned worker has computed the prompt.

    The driver (the code that does the I/O for a request) then reports this to the router core, which counts the prompt as
    computed.

    Attributes:
        assignment: The request's assignment to the worker.
        cached_tokens: Prompt tokens that the worker found in its cache; None if unknown.
    """

    assignment: Assignment[Any]
    cached_tokens: int | None


class SendResponse(NamedTuple):
    """Notification from the state machine of a request to the driver: the complete response has arrived.

    The driver (the code that does the I/O for a request) then sends the response to the client.

    Attributes:
        response: The worker's response (`ResponseStarted.response`).
    """

    response: Any


class SendEnding(NamedTuple):
    """Notification from the state machine to the driver: of a broken stream, only the end is missing.

    The driver (the code that does the I/O for a request) then sends it to the client, which has the complete response then.

    Attributes:
        events: The missing events (`StreamEnding.events`).
    """

    events: bytes


class ReleaseWorker(NamedTuple):
    """Notification from the state machine of a request to the driver: the request has left its assigned worker.

    The driver (the code that does the I/O for a request) then ends the assignment, so that the router core can send other
    requests to the worker.

    Attributes:
        assignment: The request's assignment to the worker.
        response: The worker's response (`ResponseStarted.response`), which is aborted if it has not ended; None if it has
            not started.
    """

    assignment: Assignment[Any]
    response: Any


class ConcurrentPrefillFinished(NamedTuple):
    """Notification from the state machine to the driver: the prefill worker that runs concurrently with decode has computed the prompt.

    The driver (the code that does the I/O for a request) then reports this to the router core.

    Attributes:
        assignment: The request's assignment to the prefill worker.
        cached_tokens: Prompt tokens that the worker found in its cache; None if unknown.
    """

    assignment: Assignment[Any]
    cached_tokens: int | None


class ReleasePrefillWorker(NamedTuple):
    """Notification from the state machine of a request to the driver: the concurrent prefill is over, or is no longer needed.

    The driver (the code that does the I/O for a request) then aborts the prefill, if that still runs, and ends the
    request's assignment to the prefill worker, so that the router core can send other requests there.

    Attributes:
        assignment: The request's assignment to the prefill worker.
        prefill: The prefill (`PrefillStarted.prefill`); None if it was not started.
    """

    assignment: Assignment[Any]
    prefill: Any


class RefusedAtCapacity(NamedTuple):
    """Notification from the state machine to the driver: ``worker`` has refused the request for lack of capacity.

    The driver (the code that does the I/O for a request) then reports this to the router core, which sends the worker no
    requests for about one simulated second.
    """

    worker: Worker


class CountTransfer(NamedTuple):
    """Notification from the state machine of a request to the driver: the transfer of the prompt's KV has ended.

    The driver (the code that does the I/O for a request) then counts the outcome in the router's metrics.

    Attributes:
        result: The outcome: done, none (there was no KV to transfer), or lost.
    """

    result: TransferResult


class ReleaseKv(NamedTuple):
    """Notification from the state machine of a request to the driver: no decode worker will fetch the prompt's KV blocks.

    The driver (the code that does the I/O for a request) then tells the prefill worker to free the blocks.

    Attributes:
        kv: Location of the KV (`PromptComputed.kv`).
    """

    kv: Any


class StreamLost(NamedTuple):
    """Notification from the state machine to the driver: a stream whose first token has arrived ends without its remaining part.

    The driver (the code that does the I/O for a request) then counts and logs the stream as lost.

    Attributes:
        why: Why the stream is not resumed, from a fixed set of values, for metrics: the name of the limit that was reached,
            or what prevents another worker from resuming the stream.
        reason: Reason of the failure that broke the stream.
    """

    why: str
    reason: str


class QueryOfDeath(NamedTuple):
    """Notification from the state machine to the driver: the request has crashed a worker on which it ran alone.

    Before that, it ran on other workers when they died.

    The request ends, and the driver (the code that does the I/O for a request) rejects repeats of it for 10 minutes.

    Attributes:
        before: Names of the workers that died while the request ran there together with other requests.
        worker: Name of the worker on which the request ran alone, and which died then.
    """

    before: tuple[str, ...]
    worker: str


class EndKind(Enum):
    """How a request ends.

    Attributes:
        SERVED: The client has the complete response.
        FAILED: The last try failed and is not retried; `End.failure` contains the failure.
        REFUSED: The router had no worker for the request, for example because its queue is full or no worker serves; the
            driver (the code that does the I/O for a request) has got the `RefusalReason` from the router core.
        ALL_BUSY: Every worker to which the request was sent refused it for lack of capacity.
        SATURATED: The router has as many connections to workers open as it may have.
        CLIENT_DISCONNECTED: The client has disconnected.
    """

    SERVED = auto()
    FAILED = auto()
    REFUSED = auto()
    """The router had no worker for the request; the newest `AcquireWorker` returned the `RefusalReason`."""
    ALL_BUSY = auto()
    """Every worker that was tried refused for lack of capacity."""
    SATURATED = auto()
    CLIENT_DISCONNECTED = auto()


class End(NamedTuple):
    """The last step of a request.

    Attributes:
        kind: How the request ended.
        failure: Failure of the last try; None if no try failed.
        role: Role of the stage whose workers have no capacity, for `EndKind.ALL_BUSY`; else None.
        failed_on: Names of the workers that failed the request, if there are several; a request that fails on several
            workers is probably at fault itself, so that the failure counts against none of the workers. Empty otherwise.
    """

    kind: EndKind
    failure: FailedTry | None = None
    role: Role | None = None
    failed_on: tuple[str, ...] = ()


Step: TypeAlias = (
    AcquireWorker
    | SendRequest
    | ConfirmLease
    | RelayStream
    | AwaitPrefill
    | AwaitOutage
    | BuildContinuation
    | Retry
)
Notification: TypeAlias = (
    PrefillFinished
    | SendResponse
    | SendEnding
    | ReleaseWorker
    | ConcurrentPrefillFinished
    | ReleasePrefillWorker
    | RefusedAtCapacity
    | CountTransfer
    | ReleaseKv
    | StreamLost
    | QueryOfDeath
)


# -- answers ------------------------------------------------------------------------------------------


class PromptComputed(NamedTuple):
    """Answer of the driver to the state machine, after it has sent a request to a prefill worker: the prompt was computed.

    The driver is the code that does the I/O for a request.

    Attributes:
        cached_tokens: Prompt tokens that the worker found in its cache; None if unknown.
        kv: Location of the prompt's KV blocks, which the worker keeps for a decode worker, in a form that only the driver
            reads; None if it keeps none.
    """

    cached_tokens: int | None
    kv: Any


class PrefillStarted(NamedTuple):
    """Answer of the driver to the state machine: a prefill that runs concurrently with decode has started.

    Attributes:
        kv: Location at which the prompt's KV will be, in a form that only the driver reads.
        prefill: Identifies the prefill in later steps, in a form that only the driver reads.
    """

    kv: Any
    prefill: Any


class ResponseStarted(NamedTuple):
    """Answer of the driver to the state machine: the first token of a stream has arrived, or a complete response.

    The driver (the code that does the I/O for a request) has sent the request to the worker that generates the response.

    Attributes:
        is_stream: Whether the response is a stream.
        can_resume: Whether another worker could resume the stream if it breaks off.
        response: Identifies the response in later steps, in a form that only the driver reads.
    """

    is_stream: bool
    can_resume: bool = False
    response: Any = None


class Problem(Enum):
    """Why a worker has not served a request, if the reason does not count as a failure of that worker alone.

    Attributes:
        AT_CAPACITY: The worker has no capacity for the request.
        KV_LOST: The prompt's KV did not arrive at the decode worker.
        SATURATED: The router has as many connections to workers open as it may have.
    """

    AT_CAPACITY = auto()
    KV_LOST = auto()
    SATURATED = auto()
    """The router has as many connections to workers open as it may have."""


PrefillOutcome: TypeAlias = "PromptComputed | FailedTry | Problem"
"""Outcome of a prefill that runs concurrently with decode."""


class PrefillFailed(NamedTuple):
    """Answer of the driver to the state machine, for a decode: the concurrent prefill failed before decode's first token.

    The driver is the code that does the I/O for a request.

    Attributes:
        failure: The prefill's failure.
    """

    failure: FailedTry | Problem


class Continuation(Enum):
    """Answer of the driver to the state machine: whether the remaining part of a broken stream can be requested.

    The driver is the code that does the I/O for a request.

    Attributes:
        READY: The next try requests the remaining part.
        IMPOSSIBLE: The part that was sent cannot be continued.
    """

    READY = auto()
    """The next try requests the remaining part."""
    IMPOSSIBLE = auto()
    """The part that was sent cannot be continued."""


class StreamEnding(NamedTuple):
    """Answer of the driver to the state machine: the client has all tokens of a broken stream, only its end is missing.

    Attributes:
        events: The missing events.
    """

    events: bytes


StepResult: TypeAlias = "Assignment[Any] | RefusalReason | PromptComputed | PrefillStarted | PrefillFailed | ResponseStarted | Problem | FailedTry | Continuation | StreamEnding | bool | None"


class ClientDisconnection(Enum):
    """Event: the client has disconnected, whatever step is under way."""

    CLIENT_DISCONNECTED = auto()


CLIENT_DISCONNECTED: Final = ClientDisconnection.CLIENT_DISCONNECTED


class ConcurrentPrefillEnded(NamedTuple):
    """Event: a prefill that runs concurrently with decode has ended, whatever step is under way.

    Attributes:
        outcome: How the prefill ended.
    """

    outcome: PrefillOutcome


Event: TypeAlias = "StepResult | ClientDisconnection | ConcurrentPrefillEnded"
"""What `RequestMachine.advance` takes in."""
