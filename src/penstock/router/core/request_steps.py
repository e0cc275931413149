"""The steps that `penstock.router.core.request.RequestMachine` yields, and the results that the driver sends back. Pure."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.api import Role
from penstock.core.kv_transfers import TransferResult
from penstock.router.core.retries import Assignment, FailedTry, RefusalReason
from penstock.router.core.worker import Worker

# -- steps that ask for an answer ---------------------------------------------------------------------


class Choose(NamedTuple):
    """Step that the driver carries out: acquire a worker of a role. The result is its `Assignment`, or a `RefusalReason`.

    A refusal is the router's: it has no worker for the request, and says why.

    Attributes:
        role: Role of the worker.
        again: Whether the request was admitted before (a retry), so that no limit on new requests applies.
        is_admission: Whether the limits on new requests have to be checked here, because it is sent to a decode worker
            without a prefill worker before.
    """

    role: Role
    again: bool = False
    is_admission: bool = False


class Send(NamedTuple):
    """Step that the driver carries out: send the request to its assigned worker.

    The result is `PromptComputed` for a prefill, else `Began`; or a `Problem`, or a `FailedTry`, which the driver also
    reports to the worker's circuit breaker. If prefill and decode run concurrently, a prefill is only started and the
    result is None: its outcome is passed to `RequestMachine.prefill_ended`, and if it fails before decode's first token,
    the result of decode's step is `PrefillFailed`.

    Attributes:
        role: Role of the assigned worker.
        reads_kv: Whether the worker fetches the prompt's KV from a prefill worker; otherwise it computes the prompt.
    """

    role: Role
    reads_kv: bool


class Confirm(NamedTuple):
    """Step that the driver carries out: check whether the prefill worker held the prompt's KV blocks until decode had read them.

    The result is True or False.
    """


class Relay(NamedTuple):
    """Step that the driver carries out: relay the started stream to the client.

    The result is None at the stream's end, or a `FailedTry` if the stream breaks off.
    """


class AwaitPrefill(NamedTuple):
    """Step that the driver carries out: wait a short time for a concurrent prefill whose decode has ended already.

    The result is None.
    """


class AwaitOutage(NamedTuple):
    """Step that the driver carries out: wait until it is known whether ``worker``, which broke off the request, has died.

    The result is None.
    """

    worker: Worker


class ReadRest(NamedTuple):
    """Step that the driver carries out: build the request for the remaining part of a broken stream.

    The result is a `Rest`: whether there is a remaining part, and whether it can be requested.
    """


class Retry(NamedTuple):
    """Step that the driver carries out: pause before the request is retried, or before the rest of its stream is requested.

    The result is None.

    Attributes:
        reason: Reason of the failure, for metrics.
        pauses: Length of the pause, as a number of back-off pauses; 0 does not pause.
        is_rest: Whether the client has received the first part of the response, so that the stream is resumed.
    """

    reason: str
    pauses: int
    is_rest: bool


# -- steps without an answer --------------------------------------------------------------------------


class Computed(NamedTuple):
    """Notification: the assigned worker has computed the prompt.

    Attributes:
        cached_tokens: Prompt tokens that the worker found in its cache; None if unknown.
    """

    cached_tokens: int | None


class Deliver(NamedTuple):
    """Notification of the driver: the complete response has arrived, and the driver sends it to the client."""


class Release(NamedTuple):
    """Notification of the driver: the request has left its assigned worker, and the driver releases the worker's capacity."""


class PrefillComputed(NamedTuple):
    """Notification: the prefill worker that runs concurrently with decode has computed the prompt.

    Attributes:
        cached_tokens: Prompt tokens that the worker found in its cache; None if unknown.
    """

    cached_tokens: int | None


class LeavePrefill(NamedTuple):
    """Notification of the driver: it aborts the prefill that runs concurrently with decode, and releases the prefill worker."""


class RefusedAtCapacity(NamedTuple):
    """Notification of the driver: ``worker`` has refused the request for lack of capacity, and takes none for a moment."""

    worker: Worker


class CountTransfer(NamedTuple):
    """Notification: the transfer of the prompt's KV has ended, and the driver counts its outcome.

    Attributes:
        result: The outcome: done, none (there was no KV to transfer), or lost.
    """

    result: TransferResult


class ReleaseKv(NamedTuple):
    """Notification of the driver: no decode worker will fetch the prompt's KV blocks, and the driver frees them."""


class StreamLost(NamedTuple):
    """Notification: a stream whose first token has arrived ends without its remaining part.

    Attributes:
        why: Cause, from a fixed set of values, for metrics: the name of a limit, or what prevents a continuation.
        reason: Reason of the failure that broke the stream.
    """

    why: str
    reason: str


class QueryOfDeath(NamedTuple):
    """Notification: the request has crashed a worker on which it ran alone, after it was present when other workers died.

    The request ends, and the driver rejects repeats of it for 10 minutes.

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
        FAILED: The last try failed and is not retried; see `End.failure`.
        REFUSED: The router had no worker for the request, for example because its queue is full or no worker serves; the
            driver has the `RefusalReason`.
        ALL_BUSY: Every worker to which the request was sent refused it for lack of capacity.
        SATURATED: The router has as many connections to workers open as it may have.
        LEFT: The client has disconnected.
    """

    SERVED = auto()
    FAILED = auto()
    REFUSED = auto()
    """The router had no worker for the request; the newest `Choose` returned the `RefusalReason`."""
    ALL_BUSY = auto()
    """Every worker that was tried refused for lack of capacity."""
    SATURATED = auto()
    LEFT = auto()


class End(NamedTuple):
    """The last step of a request.

    Attributes:
        kind: How the request ended.
        failure: Failure of the last try; None if no try failed.
        role: Role of the stage whose workers have no capacity, for `EndKind.ALL_BUSY`; else None.
        failed_on: Names of the workers that failed the request, if there are several; the failure then counts against none of
            them. Empty otherwise.
    """

    kind: EndKind
    failure: FailedTry | None = None
    role: Role | None = None
    failed_on: tuple[str, ...] = ()


Asked: TypeAlias = Choose | Send | Confirm | Relay | AwaitPrefill | AwaitOutage | ReadRest | Retry
Notification: TypeAlias = (
    Computed
    | Deliver
    | Release
    | PrefillComputed
    | LeavePrefill
    | RefusedAtCapacity
    | CountTransfer
    | ReleaseKv
    | StreamLost
    | QueryOfDeath
)


# -- answers ------------------------------------------------------------------------------------------


class PromptComputed(NamedTuple):
    """Result of `Send` for a prefill: the worker has computed the prompt.

    Attributes:
        cached_tokens: Prompt tokens that the worker found in its cache; None if unknown.
        has_kv: Whether the worker keeps the prompt's KV blocks for a decode worker.
    """

    cached_tokens: int | None
    has_kv: bool


class Began(NamedTuple):
    """Result of `Send`: the first token of a stream has arrived, or a complete response (`COMPLETE`).

    Attributes:
        is_stream: Whether the response is a stream.
        can_resume: Whether another worker could resume the stream if it breaks off.
    """

    is_stream: bool
    can_resume: bool = False


COMPLETE: Final = Began(is_stream=False)
"""Result of `Send` for a non-streaming response that has arrived completely."""


class Problem(Enum):
    """Reason for which a worker did not answer that does not count against that worker alone.

    Attributes:
        AT_CAPACITY: The worker has no capacity for the request.
        KV_LOST: The prompt's KV did not arrive at the decode worker.
        SATURATED: The router has as many connections to workers open as it may have.
    """

    AT_CAPACITY = auto()
    KV_LOST = auto()
    SATURATED = auto()
    """The router has as many connections to workers open as it may have."""


PrefillEnd: TypeAlias = "PromptComputed | FailedTry | Problem"
"""Outcome of a prefill that runs concurrently with decode."""


class PrefillFailed(NamedTuple):
    """Result of `Send` for decode: the concurrent prefill failed before decode's first token.

    Attributes:
        failure: The prefill's failure.
    """

    failure: FailedTry | Problem


class Rest(Enum):
    """Result of `ReadRest`: whether the remaining part of a broken stream can be requested.

    Attributes:
        READY: The next try requests the remaining part.
        NOTHING: Nothing remains; the client has the complete response.
        UNKNOWN: The part that was sent cannot be continued.
    """

    READY = auto()
    """The next try requests the remaining part."""
    NOTHING = auto()
    """Nothing remains; the client has the complete response."""
    UNKNOWN = auto()
    """The part that was sent cannot be continued."""


Answer: TypeAlias = "Assignment[Any] | RefusalReason | PromptComputed | PrefillFailed | Began | Problem | FailedTry | Rest | bool | None"
