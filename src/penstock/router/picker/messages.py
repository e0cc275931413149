"""What routers of a graph say to each other, and its form on the wire: frames of MessagePack arrays. Pure.

A *relay* is a router that asks the graph's *picker*, another router, for the workers of its own clients' requests. No
prompt travels: a request is its prefix keys and its numbers. Times are durations, because clocks differ.
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
"""Chosen: 256 messages of the longest prompts take 1.1 MiB."""
MESSAGES_PER_FRAME: Final = 256
"""Chosen: a frame of this many is a few milliseconds' work."""
SESSION_BYTES: Final = 128
"""Chosen: of a session's name; what follows is not looked at, so that clients cannot fill the memory."""
_LENGTH_BYTES: Final = 4

Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Keys = Annotated[bytes, msgspec.Meta(max_length=(MAX_BLOCKS + SUB_BLOCK_KEYS) * KEY_BYTES)]


class ProtocolError(PenstockError):
    """What came is not a message of this protocol, or breaks a bound; the connection is of no more use."""


class _Struct(msgspec.Struct, array_like=True):
    """A MessagePack array; its first item tells which."""


class Prompt(_Struct):
    """A request as policies see it; the fields are `Arrival`'s, the keys packed."""

    keys: Keys
    tokens: Count
    avoid: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1024)]
    block_tokens: Annotated[float, msgspec.Meta(gt=0, le=1 << 20)]
    sub_block_keys: Annotated[int, msgspec.Meta(ge=1, le=64)]
    session: Annotated[str, msgspec.Meta(max_length=SESSION_BYTES)]
    is_non_streaming: bool
    tier: Tier
    tenant: Name
    is_rest: bool = False
    alone_at: Annotated[tuple[Role, ...], msgspec.Meta(max_length=8)] = ()


def prompt_of(arrival: Arrival) -> Prompt:
    """Return a request as it is sent."""
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
        arrival.is_rest,
        arrival.alone_at,
    )


def arrival_of(prompt: Prompt) -> Arrival:
    """Return a request that was received.

    Raises:
        ProtocolError: its keys are cut off.
    """
    keys, tokens, avoid, *others = msgspec.structs.astuple(prompt)
    if len(keys) % KEY_BYTES:
        raise ProtocolError(f"keys: {len(keys)} bytes are not a whole number of keys of {KEY_BYTES}")
    fields = [tuple(array("Q", keys)), tokens, frozenset(avoid), *others, keys]
    return Arrival(*fields)


class Status(_Struct, tag=0):
    """What a router sends to every other one, ten times a second: its heartbeat.

    Attributes:
        instance: Unique name of its process.
        since_s: When it began, Unix seconds, as in `Follow`: the oldest is the next picker.
        term: Of its own claim, or the highest fencing number that it has seen.
        is_leader: It has claimed to be the picker of that term.
        is_active: Enough routers follow it: it answers.
        sees: Instances that have reported in the last moments, its own among them.
        successor: While it picks, the router to which it sends all prompts; empty without one.
        thresholds: Those that hold at it; None: none was changed.
        leader: The picker that it believes in; empty: none.
        threshold_versions: Of ``thresholds``, key by key; empty: of an older build.
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
    """A relay, ``follower``, accepts the receiver as the picker; its requests in flight follow, then its waiting ones."""

    term: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    instance: Name
    follower: Name
    since_s: float


class ComputedPrompt(_Struct, tag=2):
    """A prompt of the last minutes, and the worker that computed it."""

    worker: Name
    prompt: Prompt


class InFlight(_Struct, tag=3):
    """A request that a relay has in flight at a worker."""

    number: Count
    role: Role
    worker: Name
    prompt: Prompt
    is_prefilled: bool
    tokens: Count


class Ask(_Struct, tag=4):
    """A request for a worker of a role, by a number that is unique on the connection; see `RouterCore.acquire`."""

    number: Count
    role: Role
    prompt: Prompt
    again: bool = False
    waited_s: Seconds | None = None


class Prefilled(_Struct, tag=6):
    """A prompt was computed; see `RouterCore.prefilled`."""

    number: Count
    cached_tokens: Count | None
    is_measured: bool


class WorkerOutcome(_Struct, tag=7):
    """What a request says of its worker."""

    number: Count
    verdict: Verdict
    cause: Text = ""
    is_unreachable: bool = False


class Release(_Struct, tag=8):
    """A request has left its worker, or waits for none any more."""

    number: Count


class Progress(_Struct, tag=9):
    """Requests in flight and the tokens that they hold now; a relay's heartbeat."""

    numbers: tuple[Count, ...] = ()
    tokens: tuple[Count, ...] = ()


class AtCapacity(_Struct, tag=10):
    """A worker has refused a request for lack of room."""

    worker: Name


class TierOutcome(_Struct, tag=11):
    """What became of a request of a tier; see `Admission.record_tier_event`."""

    tier: Tier
    ttft_s: float | None = None
    ended: EndedRequest | None = None


class Go(_Struct, tag=12):
    """A request goes to a worker now, by the word of the picker of a term."""

    term: Count
    number: Count
    worker: Name
    queued_s: Seconds
    reason: Text


class Refused(_Struct, tag=13):
    """A request gets no worker; the fields are those of `effects.Refuse`."""

    term: Count
    number: Count
    role: Role
    reason: RefusalReason
    message: Text
    retry_after_s: float | None


class Loads(_Struct, tag=14):
    """What all routers together have pending at each worker of the first stage: tokens, and its throughput in tokens/s."""

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
    | Go
    | Refused
    | Loads
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[Message, ...]] = msgspec.msgpack.Decoder(tuple[Message, ...])


def frames(messages: Iterable[Message]) -> bytes:
    """Return messages as they are sent, `MESSAGES_PER_FRAME` to a frame."""
    left, parts = list(messages), []
    for at in range(0, len(left), MESSAGES_PER_FRAME):
        content = _encoder.encode(left[at : at + MESSAGES_PER_FRAME])
        parts += [len(content).to_bytes(_LENGTH_BYTES, "big"), content]
    return b"".join(parts)


class FrameReader:
    """Splits received bytes into frames, and reads their messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are complete now.

        Raises:
            ProtocolError: a frame is too long, or holds something else.
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
