"""Messages between the routers of a graph, and their encoding: frames of MessagePack arrays. Pure.

One router is the graph's *picker*; a *relay* is another router, which asks the picker for the workers of its own clients'
requests. Prompts are not sent: a request is represented by its prefix keys and its numbers. Times are sent as durations,
because clocks differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec

from penstock.api import Role, Tier
from penstock.core.errors import PenstockError
from penstock.router.core.retries import RefusalReason, Verdict
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.prefixes import KEY_BYTES, MAX_BLOCKS, SUB_BLOCK_KEYS
from penstock.router.policy.slo_monitor import EndedRequest
from penstock.router.thresholds import ThresholdState

MAX_FRAME_BYTES: Final = 4 << 20
"""Maximum size of a frame. Chosen: 256 messages with the longest prompts take 1.1 MiB."""
MESSAGES_PER_FRAME: Final = 256
"""Maximum number of messages per frame. Chosen: such a frame takes a few milliseconds to process."""
SESSION_BYTES: Final = 128
"""Maximum length of a session's identifier. Chosen: the rest is ignored, so that clients cannot fill the memory."""
_LENGTH_BYTES: Final = 4

Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Keys = Annotated[bytes, msgspec.Meta(max_length=(MAX_BLOCKS + SUB_BLOCK_KEYS) * KEY_BYTES)]


class ProtocolError(PenstockError):
    """Received data are not a message of this protocol, or exceed a limit; the connection must be closed."""


class _Struct(msgspec.Struct, array_like=True):
    """A MessagePack array; its first item identifies the message type."""


class Prompt(_Struct):
    """A request as routing policies see it, in the form in which routers send it to each other.

    Attributes:
        keys: Prefix keys (one per block of the prompt, by which common prefixes are recognized), 8 bytes each.
        tokens: Number of prompt tokens, known or estimated.
        avoid: Names of workers that have failed the request or are busy; chosen only if there is no other worker.
        block_tokens: Number of prompt tokens per block.
        sub_block_keys: Number of keys that together represent a complete first block.
        session: Identifier by which the client groups requests into a session; empty if it gives none.
        is_non_streaming: Whether the response arrives in one piece.
        tier: Tier of the request.
        tenant: Identifier of the tenant; empty if there is none.
        is_continuation: Whether the request resumes a stream whose first part the client has received.
        alone_at: Roles on whose workers the request must run alone, because it is suspected of crashing workers.
    """

    keys: Keys
    tokens: Count
    avoid: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1024)]
    block_tokens: Annotated[float, msgspec.Meta(gt=0, le=1 << 20)]
    sub_block_keys: Annotated[int, msgspec.Meta(ge=1, le=64)]
    session: Annotated[str, msgspec.Meta(max_length=SESSION_BYTES)]
    is_non_streaming: bool
    tier: Tier
    tenant: Name
    is_continuation: bool = False
    alone_at: Annotated[tuple[Role, ...], msgspec.Meta(max_length=8)] = ()


def prompt_of(arrival: Arrival) -> Prompt:
    """Return the request ``arrival`` in the form in which routers send it to each other."""
    return Prompt(
        arrival.prefix.packed,
        arrival.tokens,
        tuple(arrival.avoid),
        arrival.block_tokens,
        arrival.sub_block_keys,
        arrival.session,
        arrival.is_non_streaming,
        arrival.tier,
        arrival.tenant,
        arrival.is_continuation,
        arrival.alone_at,
    )


def arrival_of(prompt: Prompt) -> Arrival:
    """Return the received request ``prompt`` as an `Arrival`.

    Raises:
        ProtocolError: the length of its keys is not a whole number of keys.
    """
    keys, tokens, avoid, *others = msgspec.structs.astuple(prompt)
    if len(keys) % KEY_BYTES:
        raise ProtocolError(f"keys: {len(keys)} bytes are not a whole number of keys of {KEY_BYTES}")
    fields = [tuple(array("Q", keys)), tokens, frozenset(avoid), *others, keys]
    return Arrival(*fields)


class Status(_Struct, tag=0):
    """Heartbeat that a router sends to every other one, ten times a second.

    Attributes:
        instance: Unique name of the router's process.
        since_s: Time at which the router started, Unix seconds: the oldest router becomes the next picker (the router that
            chooses the workers for all).
        term: Election term: that of the router's own claim if `is_leader`, else the highest term that the router has seen.
            Messages of a lower term are ignored.
        is_leader: Whether the router claims to be the picker of that term.
        is_active: Whether a majority of the routers accepts this router as the picker, so that it chooses workers.
        is_stopping: Whether the router is shutting down and must not become the picker.
        sees: Instances from which the router has recently received a heartbeat, its own included.
        successor: If the router is the picker, instance of the router that receives all prompts from it, so that it can
            take over as the picker; empty if there is none.
        thresholds: The router's thresholds above which workers are busy; None if they were never changed.
        leader: Instance of the picker that the router accepts; empty if there is none.
        threshold_versions: Version of each value of `thresholds`; empty if the router is an older build.
    """

    instance: Name
    since_s: float
    term: Count
    is_leader: bool
    is_active: bool
    is_stopping: bool
    sees: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1024)]
    successor: Name = ""
    thresholds: ThresholdState | None = None
    leader: Name = ""
    threshold_versions: Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)] = ()


class Follow(_Struct, tag=1):
    """Message to the picker: the sender accepts the receiver as the picker, the router that chooses the workers for all.

    The sender then sends an `InFlight` message for each of its running requests, and an `Ask` message for each of its
    waiting requests.

    Attributes:
        term: Election term, >= 1.
        instance: Instance name of the receiver's process.
        follower: Instance name of the sender's process.
        since_s: Time at which the sender started, Unix seconds.
    """

    term: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    instance: Name
    follower: Name
    since_s: float


class ComputedPrompt(_Struct, tag=2):
    """Message to a new or future picker: a recent prompt, and the name of the worker that computed it.

    The picker is the router that chooses the workers for all; the message tells it what the worker has cached.
    """

    worker: Name
    prompt: Prompt


class InFlight(_Struct, tag=3):
    """Message to the picker (the router that chooses workers for all): a request that the sender has in flight at a worker.

    Attributes:
        number: Number of the request, unique on the connection.
        role: Role for which the worker was chosen.
        worker: Name of the worker.
        prompt: The request.
        is_prefilled: Whether its prompt was computed.
        tokens: Prompt tokens plus the tokens generated so far.
    """

    number: Count
    role: Role
    worker: Name
    prompt: Prompt
    is_prefilled: bool
    tokens: Count


class Ask(_Struct, tag=4):
    """Message to the picker (the router that chooses workers for all): the sender needs a worker of a role for a request.

    Attributes:
        number: Number of the request, unique on the connection.
        role: Role of the worker.
        prompt: The request.
        is_retry: Whether the request was admitted before (a retry).
        waited_s: Simulated seconds since another picker admitted the request; None if none has.
    """

    number: Count
    role: Role
    prompt: Prompt
    is_retry: bool = False
    waited_s: Seconds | None = None


class Prefilled(_Struct, tag=6):
    """Message to the picker (the router that chooses workers for all): the prompt of one of the sender's requests was computed.

    Attributes:
        number: Number of the request.
        cached_tokens: Prompt tokens that the worker found in its cache; None if unknown.
        is_measured: Whether this is reported at the moment at which the prefill ended.
    """

    number: Count
    cached_tokens: Count | None
    is_measured: bool


class WorkerOutcome(_Struct, tag=7):
    """Message to the picker (the router that chooses workers for all): what a request of the sender says about its worker.

    Attributes:
        number: Number of the request.
        verdict: What the request says about the worker, for example that it failed without doubt.
        cause: Cause of a failure, for logs; empty if there was none.
        is_unreachable: Whether the worker counts as unhealthy at the sender, for example because it refused a connection.
    """

    number: Count
    verdict: Verdict
    cause: Text = ""
    is_unreachable: bool = False


class Release(_Struct, tag=8):
    """Message to the picker (the router that chooses workers for all): a request of the sender has left its worker.

    Also sent if a request that waited for a worker no longer needs one. ``number`` is the request's number.
    """

    number: Count


class Progress(_Struct, tag=9):
    """Message to the picker (the router that chooses workers for all): changed token counts of the sender's requests in flight.

    It is also the sender's heartbeat.

    Attributes:
        numbers: Numbers of the requests whose token counts have changed.
        tokens: Prompt tokens plus generated tokens of each, in the same order.
    """

    numbers: tuple[Count, ...] = ()
    tokens: tuple[Count, ...] = ()


class AtCapacity(_Struct, tag=10):
    """Message to the picker (the router that chooses workers for all): ``worker`` has refused a request for lack of capacity."""

    worker: Name


class TierOutcome(_Struct, tag=11):
    """Message to the picker (the router that chooses workers for all): an event of a request of a tier.

    Attributes:
        tier: Tier of the request.
        ttft_s: Time from arrival to first token, in simulated seconds, if the first token has arrived; else None.
        ended: Latencies of the request, if it has ended; else None. If both are None, the request was rejected.
    """

    tier: Tier
    ttft_s: float | None = None
    ended: EndedRequest | None = None


class Assigned(_Struct, tag=12):
    """Message from the picker (the router that chooses workers for all): it has assigned the receiver's request to a worker.

    Attributes:
        term: Election term of the picker.
        number: Number of the request.
        worker: Name of the worker.
        queued_s: Time that the request waited, in simulated seconds.
        reason: Why the worker was chosen, for logs.
    """

    term: Count
    number: Count
    worker: Name
    queued_s: Seconds
    reason: Text


class Refused(_Struct, tag=13):
    """Message from the picker (the router that chooses workers for all): the receiver's request ``number`` is rejected.

    Attributes:
        term: Election term of the picker.
        number: Number of the request.
        role: Role of the stage that has no worker for it.
        reason: Why the request is rejected.
        message: Text for the client.
        retry_after_s: Time until capacity is expected, in simulated seconds from now; None if unknown.
    """

    term: Count
    number: Count
    role: Role
    reason: RefusalReason
    message: Text
    retry_after_s: float | None


class Loads(_Struct, tag=14):
    """Message from the picker: the load of all routers on each worker of the first stage (prefill or aggregated).

    Attributes:
        term: Election term of the picker.
        tokens: By worker name, the number of tokens that all routers together have queued for the worker or sent there and
            that are probably not computed yet, and the prefill throughput in tokens per simulated second (None if unknown).
    """

    term: Count
    tokens: dict[Name, tuple[Count, float | None]]


Message = (
    Status
    | Follow
    | ComputedPrompt
    | InFlight
    | Ask
    | Prefilled
    | WorkerOutcome
    | Release
    | Progress
    | AtCapacity
    | TierOutcome
    | Assigned
    | Refused
    | Loads
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[Message, ...]] = msgspec.msgpack.Decoder(tuple[Message, ...])


def frames(messages: Iterable[Message]) -> bytes:
    """Return ``messages`` as the bytes to send on a connection: frames of at most 256 messages (`MESSAGES_PER_FRAME`) each.

    A frame is its length, followed by the messages in MessagePack.
    """
    left, parts = list(messages), []
    for at in range(0, len(left), MESSAGES_PER_FRAME):
        content = _encoder.encode(left[at : at + MESSAGES_PER_FRAME])
        parts += [len(content).to_bytes(_LENGTH_BYTES, "big"), content]
    return b"".join(parts)


class FrameReader:
    """Splits the bytes received on one connection into frames (a length followed by messages), and decodes the messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take in the next received bytes, and yield the messages that are complete now; an incomplete frame waits for more bytes.

        Raises:
            ProtocolError: a frame is too long, or contains something other than messages.
        """
        held = self._data
        held += data
        while len(held) >= _LENGTH_BYTES:
            length = int.from_bytes(held[:_LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"frame: {length} bytes exceed {MAX_FRAME_BYTES}")
            if len(held) < _LENGTH_BYTES + length:
                return
            content = bytes(held[_LENGTH_BYTES : _LENGTH_BYTES + length])
            del held[: _LENGTH_BYTES + length]
            try:
                found = _decoder.decode(content)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
                raise ProtocolError(f"frame: {exc}") from exc
            yield from found
