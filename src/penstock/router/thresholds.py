"""The thresholds above which workers are busy, the same at all routers of a graph, and ``/busy_threshold``, which sets them.

They begin as the graph's file says. What is set at one router, or follows a change of the file, has a higher version, is
sent with each heartbeat (`picker.group`), and replaces what is older elsewhere; of two changes that were made at once
every router takes the same one. So they last as long as one router of the graph does.

Source: NVIDIA Dynamo's document "Request Rejection", "Dynamic Configuration via API"; statuses as Dynamo 1.6.1 answers.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, NamedTuple

import orjson
from msgspec import Meta

from penstock.router.admission import Admission
from penstock.router.policy.busy import BusyThresholds
from penstock.router.proxy.completion import RequestRefused

MAX_PREFILL_TOKENS: Final = 2**53
"""Chosen: JSON numbers are exact up to here."""


def _refused(status: int, message: str) -> RequestRefused:
    """Return why a change cannot be made; nothing was changed.

    The status is 400: out of range or not JSON, 404: another model, 415: another content type, 422: wrong type or missing.
    """
    body = orjson.dumps({"error": message})
    return RequestRefused(status, message, code="invalid_threshold", body=body)


class BusyThresholdApi:
    """Reads and changes a graph's thresholds."""

    def __init__(self, thresholds: GraphThresholds, model: str) -> None:
        self._thresholds = thresholds
        self._model = model

    def listed(self) -> bytes:
        """Return ``{"thresholds": [...]}``, one entry for the model; null where a threshold is not set."""
        return orjson.dumps({"thresholds": [self._shown()]})

    def change(self, content_type: bytes | None, body: bytes) -> bytes:
        """Set the thresholds that a body names, unset those given as null, and return all of them.

        Raises:
            RequestRefused: nothing was changed.
        """
        asked = _read_object(content_type, body)
        model = asked.pop("model", None)
        if not isinstance(model, str):
            raise _refused(422, "model: missing or no string; name the model that the router serves")
        if model != self._model:
            raise _refused(
                404, f"model {model[:200]!r} is not served here; this router serves {self._model!r}"
            )
        changes: dict[str, Any] = {}
        for key, value in asked.items():
            if key not in _FIELDS:
                known = ", ".join(_FIELDS)
                raise _refused(400, f"{key[:200]}: no such threshold; known are {known}")
            _check(key, value)
            changes[key] = value
        if (
            changes.get("active_prefill_tokens_threshold_frac") is not None
            and self._thresholds.batch_tokens is None
        ):
            raise _refused(
                400,
                "active_prefill_tokens_threshold_frac needs the workers' batch token limit, which the router does not"
                " know; set engine.maxBatchTokens, or active_prefill_tokens_threshold",
            )
        if changes:
            self._thresholds.set(self._thresholds.now._replace(**changes))
        return orjson.dumps(self._shown())

    def _shown(self) -> dict[str, Any]:
        return {"model": self._model, **self._thresholds.now._asdict()}


def _read_object(content_type: bytes | None, body: bytes) -> dict[str, Any]:
    kind = (content_type or b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise _refused(415, "content-type: send application/json")
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise _refused(400, f"body: no JSON: {exc}") from exc
    if not isinstance(asked, dict):
        raise _refused(422, 'body: must be an object such as {"model": "MODEL"}')
    return asked


def _check(key: str, value: object) -> None:
    if value is None:
        return
    field = _FIELDS[key]
    types = (int,) if field.is_whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, types) or not math.isfinite(value):
        kind = "a whole number of tokens" if field.is_whole else "a number"
        raise _refused(422, f"{key} must be {kind} or null, got {_short(value)}")
    if not 0 <= value <= field.most:
        bounds = "at least 0" if field.most == math.inf else f"between {field.most * 0} and {field.most}"
        raise _refused(400, f"{key} must be {bounds}, got {value}")


def _short(value: object) -> str:
    return orjson.dumps(value).decode()[:100]


class _Field(NamedTuple):
    """The bounds of a field of `BusyThresholds`: 0 and the largest value."""

    most: float
    is_whole: bool = False


_FIELDS: Final = dict(
    zip(
        BusyThresholds._fields,
        (_Field(1.0), _Field(MAX_PREFILL_TOKENS, is_whole=True), _Field(math.inf)),
        strict=True,
    )
)
"""By key of the API."""


class ThresholdState(NamedTuple):
    """The state that all routers agree on.

    Attributes:
        version: Counts the changes; 0: none was made.
        file: What the graph's file said at the last change.
        now: The current thresholds.
    """

    version: Annotated[int, Meta(ge=0, le=1 << 53)]
    file: BusyThresholds
    now: BusyThresholds

    @property
    def order(self) -> tuple[int, str, str]:
        """By which all routers take the same one of two states that were made at once."""
        return self.version, str(self.file), str(self.now)


class GraphThresholds:
    """One router's copy."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        core = admission.core
        busy = core.busy[core.entry]
        # Most tokens of one step of a worker; without them no fraction of it can be a threshold.
        self.batch_tokens = busy.batch_tokens
        self.state = ThresholdState(0, busy.thresholds, busy.thresholds)

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

    def published(self) -> ThresholdState | None:
        """Return what other routers receive; None: nothing was changed."""
        return self.state if self.state.version else None

    def received(self, state: ThresholdState) -> None:
        """Adopt another router's state if it is newer."""
        if state.order > self.state.order:
            self._take(state)

    def _take(self, state: ThresholdState) -> None:
        self.state = state
        self._admission.set_thresholds(state.now)
