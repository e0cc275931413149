"""The thresholds above which workers are busy, the same at all routers of a graph, and ``/busy_threshold``, which sets them.

They begin as the graph's file says. What is set at one router, or follows a change of the file, has a higher version, is
sent with each heartbeat (`picker.group`), and replaces what is older elsewhere; of two changes that were made at once
every router takes the same one. So they last as long as one router of the graph does.

Source: NVIDIA Dynamo's document "Request Rejection", "Dynamic Configuration via API"; statuses as Dynamo 1.6.1 answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any, Final

import orjson

from penstock.router.admission import Admission
from penstock.router.policy.busy import BusyThresholds

MAX_PREFILL_TOKENS: Final = 2**53
"""Chosen: JSON numbers are exact up to here."""


class ThresholdError(Exception):
    """A change that cannot be made; nothing was changed.

    Attributes:
        status: 400 out of range or not JSON, 404 another model, 415 another content type, 422 wrong type or missing.
        message: Key, bound and value.
    """

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message
        super().__init__(message)

    def body(self) -> bytes:
        """Return ``{"error": message}``."""
        return orjson.dumps({"error": self.message})


class BusyThresholdApi:
    """Reads and changes a graph's thresholds."""

    def __init__(self, thresholds: GraphThresholds, *, model: str, batch_tokens: int | None) -> None:
        """Tie the parts.

        Args:
            thresholds: Of the graph.
            model: The one that the router serves.
            batch_tokens: Most tokens of one step of a worker; None: unknown, so no fraction of it can be a threshold.
        """
        self._thresholds = thresholds
        self._model = model
        self._batch_tokens = batch_tokens

    def listed(self) -> bytes:
        """Return ``{"thresholds": [...]}``, one entry for the model; null where a threshold is not set."""
        return orjson.dumps({"thresholds": [self._shown()]})

    def change(self, content_type: bytes | None, body: bytes) -> bytes:
        """Set the thresholds that a body names, unset those given as null, and return all of them.

        Raises:
            ThresholdError: nothing was changed.
        """
        asked = _read_object(content_type, body)
        model = asked.pop("model", None)
        if not isinstance(model, str):
            raise ThresholdError(422, "model: missing or no string; name the model that the router serves")
        if model != self._model:
            raise ThresholdError(
                404, f"model {model[:200]!r} is not served here; this router serves {self._model!r}"
            )
        changes: dict[str, Any] = {}
        for key, value in asked.items():
            if key not in _FIELDS:
                known = ", ".join(_FIELDS)
                raise ThresholdError(400, f"{key[:200]}: no such threshold; known are {known}")
            name, check = _FIELDS[key]
            if value is not None:
                check(key, value)
            changes[name] = value
        if changes.get("active_prefill_tokens_frac") is not None and self._batch_tokens is None:
            raise ThresholdError(
                400,
                "active_prefill_tokens_threshold_frac needs the workers' batch token limit, which the router does not"
                " know; set engine.maxBatchTokens, or active_prefill_tokens_threshold",
            )
        if changes:
            self._thresholds.set(replace(self._thresholds.now, **changes))
        return orjson.dumps(self._shown())

    def _shown(self) -> dict[str, Any]:
        now = self._thresholds.now
        return {"model": self._model, **{key: getattr(now, name) for key, (name, _) in _FIELDS.items()}}


def checked(values: object) -> BusyThresholds:
    """Return the thresholds that three values are, in the order of `BusyThresholds`.

    Raises:
        ThresholdError: they are not three, or one is out of its range.
    """
    if not isinstance(values, list) or len(values) != len(_FIELDS):
        raise ThresholdError(422, f"thresholds: must be {len(_FIELDS)} values, got {_short(values)}")
    for (key, (_, check)), value in zip(_FIELDS.items(), values, strict=True):
        if value is not None:
            check(key, value)
    return BusyThresholds(*values)


def _read_object(content_type: bytes | None, body: bytes) -> dict[str, Any]:
    kind = (content_type or b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ThresholdError(415, "content-type: send application/json")
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise ThresholdError(400, f"body: no JSON: {exc}") from exc
    if not isinstance(asked, dict):
        raise ThresholdError(422, 'body: must be an object such as {"model": "MODEL"}')
    return asked


def _fraction(key: str, value: object) -> None:
    if _number(key, value) > 1 or _number(key, value) < 0:
        raise ThresholdError(400, f"{key} must be between 0.0 and 1.0, got {value}")


def _tokens(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ThresholdError(422, f"{key} must be a whole number of tokens or null, got {_short(value)}")
    if not 0 <= value <= MAX_PREFILL_TOKENS:
        raise ThresholdError(400, f"{key} must be between 0 and {MAX_PREFILL_TOKENS}, got {value}")


def _multiple(key: str, value: object) -> None:
    if _number(key, value) < 0:
        raise ThresholdError(400, f"{key} must be at least 0, got {value}")


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ThresholdError(422, f"{key} must be a number or null, got {_short(value)}")
    return value


def _short(value: object) -> str:
    return orjson.dumps(value).decode()[:100]


_FIELDS: Final[dict[str, tuple[str, Callable[[str, object], None]]]] = {
    "active_decode_blocks_threshold": ("active_decode_blocks", _fraction),
    "active_prefill_tokens_threshold": ("active_prefill_tokens", _tokens),
    "active_prefill_tokens_threshold_frac": ("active_prefill_tokens_frac", _multiple),
}
"""By key of the API: the field of `BusyThresholds`, in its order, and what its value must be."""


SharedThresholds = tuple[int, list[int | float | None], list[int | float | None]]
"""A state as routers send it: its version, the file's thresholds and the current ones."""


@dataclass(frozen=True, slots=True)
class ThresholdState:
    """The state that all routers agree on.

    Attributes:
        version: Counts the changes, >= 0; 0: none was made.
        file: What the graph's file said at the last change.
        now: The current thresholds.
    """

    version: int
    file: BusyThresholds
    now: BusyThresholds

    def published(self) -> SharedThresholds:
        """Return what other routers receive."""
        return self.version, list(astuple(self.file)), list(astuple(self.now))


class GraphThresholds:
    """One router's copy.

    Attributes:
        state: The current one here.
    """

    def __init__(self, admission: Admission) -> None:
        """Start with the admission's thresholds, which the graph's file sets."""
        self._admission = admission
        core = admission.core
        file = core.busy[core.entry].thresholds
        self.state = ThresholdState(0, file, file)

    @property
    def now(self) -> BusyThresholds:
        """The current thresholds."""
        return self.state.now

    def set(self, thresholds: BusyThresholds) -> None:
        """Set the thresholds that a client sent to this router."""
        self._take(ThresholdState(self.state.version + 1, self.state.file, thresholds))

    def file_changed(self, thresholds: BusyThresholds) -> None:
        """Set what the graph's file says now, unless another router has read it before and sent it."""
        if thresholds != self.state.file:
            self._take(ThresholdState(self.state.version + 1, thresholds, thresholds))

    def published(self) -> SharedThresholds | None:
        """Return what other routers receive; None: nothing was changed."""
        return self.state.published() if self.state.version else None

    def received(self, published: SharedThresholds) -> None:
        """Adopt another router's state if it is newer and within range."""
        version, file, now = published
        own = self.state.published()
        if (version, str(file), str(now)) <= (own[0], str(own[1]), str(own[2])):
            return
        try:
            self._take(ThresholdState(version, checked(file), checked(now)))
        except ThresholdError:
            return

    def _take(self, state: ThresholdState) -> None:
        self.state = state
        self._admission.set_thresholds(state.now)
