"""The steps of a request's way, and the answers to them; `penstock.router.core.request` yields them. Pure."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.api import Role
from penstock.core.kv_transfers import TransferResult
from penstock.router.core.retries import Assignment, FailedTry, RefusalReason
from penstock.router.core.worker import Worker

# -- steps that ask for an answer ---------------------------------------------------------------------


class Choose(NamedTuple):
    """Ask for a worker of a role; the answer is its `Assignment`, or a `RefusalReason`.

    Attributes:
        again: It was admitted before.
        is_admission: It asks for no worker of the first stage, so it is admitted here.
    """

    role: Role
    again: bool = False
    is_admission: bool = False


class Send(NamedTuple):
    """Send the request to the assigned worker, which fetches the prompt's KV or computes the prompt.

    The answer of a prefill is `PromptComputed`, else `Began`; or a `Problem`, or a `FailedTry` whose verdict the worker has.
    Where decode meets it, a prefill is only begun, and its answer is None: what becomes of it goes to
    `RequestMachine.prefill_ended`, and before decode's first token a failure is decode's answer, too, as `PrefillFailed`.

    Attributes:
        role: The worker's.
    """

    role: Role
    reads_kv: bool


class Confirm(NamedTuple):
    """Ask whether the KV was held until it was read; the answer is whether it was."""


class Relay(NamedTuple):
    """Pass the stream on whose beginning has come; the answer is None at its end, or a `FailedTry` where it breaks off."""


class AwaitPrefill(NamedTuple):
    """Wait a moment for the prefill alongside a decode that has ended; the answer is None."""


class AwaitOutage(NamedTuple):
    """Wait until it is known whether a worker has died that broke a request off; the answer is None."""

    worker: Worker


class ReadRest(NamedTuple):
    """Make a request of what a broken stream lacks; the answer is a `Rest`."""


class Retry(NamedTuple):
    """Pause, before the request is tried again or the rest of its stream is asked for; the answer is None.

    Attributes:
        reason: Of the failure.
        pauses: How long, in pauses; 0: not at all.
        is_rest: The client has the beginning.
    """

    reason: str
    pauses: int
    is_rest: bool


# -- steps without an answer --------------------------------------------------------------------------


class Computed(NamedTuple):
    """The assigned worker has computed the prompt; ``cached_tokens`` were found in its cache, None: not known."""

    cached_tokens: int | None


class Deliver(NamedTuple):
    """Give the client the complete answer that has come."""


class Release(NamedTuple):
    """The request leaves its assigned worker."""


class ComputedBeside(NamedTuple):
    """The prefill worker that decode met has computed the prompt; ``cached_tokens`` as of `Computed`."""

    cached_tokens: int | None


class LeavePrefill(NamedTuple):
    """The request leaves the prefill worker alongside decode's, broken off if it still runs there."""


class TurnedAway(NamedTuple):
    """A worker has no room for the request."""

    worker: Worker


class CountTransfer(NamedTuple):
    """What became of the prompt's KV."""

    result: TransferResult


class ReleaseKv(NamedTuple):
    """Free the prompt's KV where it was computed: nothing fetches it."""


class Lost(NamedTuple):
    """A stream ends without its rest; ``why`` is a bounded word, ``reason`` that of the failure or of the end."""

    why: str
    reason: str


class QueryOfDeath(NamedTuple):
    """The request has killed a worker, so it ends, and is refused for a while.

    Attributes:
        before: Names of the workers that died while it ran there alongside others.
        worker: On which it ran alone and which died then.
    """

    before: tuple[str, ...]
    worker: str


class EndKind(Enum):
    """How a request ends."""

    SERVED = auto()
    FAILED = auto()
    REFUSED = auto()
    """By the newest `Choose`."""
    ALL_BUSY = auto()
    """By every worker that was asked, for lack of room."""
    SATURATED = auto()
    LEFT = auto()


class End(NamedTuple):
    """The last step.

    Attributes:
        failure: Of the last try.
        role: Of the stage whose workers have no room.
        failed_on: Names of several workers that failed the request, which counts against none of them.
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
    | ComputedBeside
    | LeavePrefill
    | TurnedAway
    | CountTransfer
    | ReleaseKv
    | Lost
    | QueryOfDeath
)


# -- answers ------------------------------------------------------------------------------------------


class PromptComputed(NamedTuple):
    """A prefill worker's answer; ``has_kv``: it keeps the prompt's blocks for decode."""

    cached_tokens: int | None
    has_kv: bool


class Began(NamedTuple):
    """The first token of a stream, or a complete answer (`COMPLETE`).

    Attributes:
        may_go_on: Another worker could take the stream up where this one breaks it off.
    """

    is_stream: bool
    may_go_on: bool = False


COMPLETE: Final = Began(is_stream=False)


class Problem(Enum):
    """What keeps a worker from answering that counts against no worker alone."""

    AT_CAPACITY = auto()
    KV_LOST = auto()
    SATURATED = auto()
    """This router has no connection left."""


PrefillEnd: TypeAlias = "PromptComputed | FailedTry | Problem"
"""What became of a prefill alongside its decode."""


class PrefillFailed(NamedTuple):
    """What became of the prefill alongside a decode that has shown no token."""

    came: FailedTry | Problem


class Rest(Enum):
    """What a broken stream lacks."""

    READY = auto()
    """The next try asks for it."""
    NOTHING = auto()
    """The client has all of it."""
    UNKNOWN = auto()
    """What was said cannot be continued."""


Answer: TypeAlias = "Assignment[Any] | RefusalReason | PromptComputed | PrefillFailed | Began | Problem | FailedTry | Rest | bool | None"
