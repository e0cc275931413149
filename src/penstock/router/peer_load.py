"""What a router of a graph tells the others, as text and back; what is told is bounded, and what is not understood is None. Pure."""

from __future__ import annotations

import binascii
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import isfinite
from typing import Any, Final

import orjson

from penstock.router.core.queue_sharing import PROMPTS, QueuedPrompt
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.busy import BusyThresholds
from penstock.router.policy.keys import KEY_BYTES, MAX_BLOCKS, SUB_BLOCK_KEYS
from penstock.router.policy.queue_owner import RouterState
from penstock.router.proxy.busy_threshold import ThresholdError, checked

_MAX_TOKENS: Final = 1 << 53
_MAX_CORES: Final = 1 << 16
_MAX_KEYS_BYTES: Final = (MAX_BLOCKS + SUB_BLOCK_KEYS) * KEY_BYTES
SESSION_BYTES: Final = 128
"""Chosen: of a session's name; what follows is not looked at, so that clients cannot fill the memory."""


@dataclass(frozen=True, slots=True)
class ThresholdState:
    """What all routers agree on.

    Attributes:
        version: Counts the changes, >= 0; 0: none was made.
        file: What the graph's file said at the last change.
        now: What holds.
    """

    version: int
    file: BusyThresholds
    now: BusyThresholds

    def told(self) -> dict[str, Any]:
        """Return what other routers are told."""
        return {"version": self.version, "file": astuple(self.file), "now": astuple(self.now)}

    def is_after(self, other: ThresholdState) -> bool:
        """Return whether this one replaces the other."""
        return (self.version, str(self.told())) > (other.version, str(other.told()))


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """One router's share.

    Attributes:
        instance: Unique name of its process.
        tokens: By worker, tokens >= 0; absent means none.
        heard_s: When it was told, simulated seconds.
        state: By which it may be chosen to keep queues; None: nothing is passed on to it.
        prompts: What it has queued since it was asked for it before.
        next_prompt: Number to ask from next, >= 0.
        thresholds: That hold for the graph by what it knows; None: as the graph's file says.
    """

    instance: str
    tokens: Mapping[str, int]
    heard_s: float
    state: RouterState | None = None
    prompts: Sequence[QueuedPrompt] = ()
    next_prompt: int = 0
    thresholds: ThresholdState | None = None


def told_prompts(next_number: int, prompts: Iterable[QueuedPrompt]) -> dict[str, Any]:
    """Return prompts as they are told: ``{"next": number, "queued": [[worker, keys, session]]}``, keys in base64."""
    queued = [
        [
            each.worker,
            binascii.b2a_base64(each.arrival.prefix.packed, newline=False).decode("ascii"),
            each.arrival.session,
        ]
        for each in prompts
    ]
    return {"next": next_number, "queued": queued}


def read_load(body: bytes, heard_s: float) -> PeerLoad | None:
    """Return what a router tells of its share; None if it is none: an older router, or something else."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(told, dict) or not isinstance(told.get("instance"), str):
        return None
    tokens: Any = told.get("tokens")
    if not isinstance(tokens, dict) or not all(_is_count(each) for each in tokens.values()):
        return None
    found = _read_prompts(told.get("prompts", {"next": 0, "queued": []}))
    if found is None:
        return None
    name = told["instance"]
    state, thresholds = _read_state(name, told.get("decides")), _read_thresholds(told.get("thresholds"))
    return PeerLoad(name, tokens, heard_s, state, *found, thresholds)


def _read_thresholds(told: object) -> ThresholdState | None:
    if not isinstance(told, dict):
        return None
    if not _is_count(told.get("version")):
        return None
    try:
        return ThresholdState(told["version"], checked(told.get("file")), checked(told.get("now")))
    except ThresholdError:
        return None


def _read_prompts(told: object) -> tuple[Sequence[QueuedPrompt], int] | None:
    if not isinstance(told, dict) or not _is_count(told.get("next")):
        return None
    queued = told.get("queued")
    if not isinstance(queued, list) or len(queued) > PROMPTS:
        return None
    prompts = [_read_prompt(each) for each in queued]
    found = [each for each in prompts if each is not None]
    return (found, told["next"]) if len(found) == len(prompts) else None


def _read_prompt(told: object) -> QueuedPrompt | None:
    if not isinstance(told, list) or len(told) != 3 or not all(isinstance(each, str) for each in told):
        return None
    worker, text, session = told
    try:
        packed = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return None
    if len(packed) % KEY_BYTES or len(packed) > _MAX_KEYS_BYTES or len(session) > SESSION_BYTES:
        return None
    return QueuedPrompt(worker, Arrival(tuple(array("Q", packed)), 0, session=session))


def _read_state(name: str, told: object) -> RouterState | None:
    if not isinstance(told, dict):
        return None
    since_s, cores = _number(told.get("since")), _number(told.get("busy_cores"))
    if since_s is None or cores is None or not 0 <= cores <= _MAX_CORES:
        return None
    return RouterState(name, since_s, cores)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isfinite(value) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKENS
