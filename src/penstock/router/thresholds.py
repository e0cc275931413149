"""The thresholds above which workers are busy, the same at all routers of a graph, and ``/busy_threshold``, which sets them.

Initially they are those of the graph's file. A change at one router, by the API or by a change of the file, gets a higher
version, is sent with each heartbeat (`picker.group`), and replaces older values at other routers, key by key. The API
responds once another router has the change. So the thresholds last as long as one router of the graph does.

Source: NVIDIA Dynamo's document "Request Rejection", "Dynamic Configuration via API"; statuses as in Dynamo 1.6.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import orjson
from msgspec import Meta

from penstock.router.admission import Admission
from penstock.router.policy.busy import BusyThresholds
from penstock.router.proxy.completion import RequestRefused

MAX_PREFILL_TOKENS: Final = 2**53
"""Maximum value of a prefill threshold. Chosen: JSON numbers are exact up to this value."""


def _refused(status: int, message: str) -> RequestRefused:
    """Return the rejection of a change; nothing was changed.

    The status is 400: out of range or not JSON, 404: another model, 415: another content type, 422: wrong type or missing.
    """
    body = orjson.dumps({"error": message})
    return RequestRefused(status, message, code="invalid_threshold", body=body)


def unconfirmed(limit_s: float) -> RequestRefused:
    """Return the response (503) to a change that is in effect at this router, but that no other confirmed in ``limit_s`` real seconds."""
    return _refused(
        503, f"set at this router, but no other one has confirmed it within {limit_s} s; send it again"
    )


class BusyThresholdApi:
    """The HTTP API by which an administrator reads and changes the thresholds above which a graph's workers are busy.

    A busy worker gets no new requests. ``thresholds`` is this router's copy of them, and ``model`` the model's name.
    """

    def __init__(self, thresholds: GraphThresholds, model: str) -> None:
        self._thresholds = thresholds
        self._model = model

    def listed(self) -> bytes:
        """Return ``{"thresholds": [...]}`` as JSON, with one entry, for the graph's model; thresholds that are not set are null."""
        return orjson.dumps({"thresholds": [self._shown()]})

    def change(self, content_type: bytes | None, body: bytes) -> bytes:
        """Apply the thresholds in a request body, and return all thresholds in effect as the JSON body of the response.

        A threshold that is null in the body is disabled; one that is missing does not change.

        Args:
            content_type: Value of the request's Content-Type header; None if there is none.
            body: JSON object with ``model``, the name of the model, and a key for each threshold to change.

        Raises:
            RequestRefused: the body is not valid, or another model is named; nothing was changed.
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
                raise _refused(400, f"{key[:200]}: no such threshold; known: {known}")
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
            self._thresholds.set(changes)
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
    """Limits of a field of `BusyThresholds`: values are from 0 to ``most``, and integers if ``is_whole``."""

    most: float
    is_whole: bool = False


_FIELDS: Final = dict(
    zip(
        BusyThresholds._fields,
        (_Field(1.0), _Field(MAX_PREFILL_TOKENS, is_whole=True), _Field(math.inf)),
        strict=True,
    )
)
"""Limits by key of the API."""


class ThresholdState(NamedTuple):
    """The thresholds above which workers are busy, as routers send them to each other.

    Attributes:
        version: Version of the newest change; 0 if there was none.
        file: Thresholds in the graph's file at the last change.
        now: Thresholds in effect.
    """

    version: Annotated[int, Meta(ge=0, le=1 << 53)]
    file: BusyThresholds
    now: BusyThresholds


KeyVersions = tuple[int, ...]
"""Versions of the file and of each threshold, in this order: two keys that are set at two routers at once are both kept."""


def versions_of(state: ThresholdState, sent: KeyVersions) -> KeyVersions:
    """Return the versions of a received state, in the order of `KeyVersions`.

    If ``sent`` has another length (it comes from an older build), all versions are `ThresholdState.version`.
    """
    expected = 1 + len(state.now)
    return sent if len(sent) == expected else (state.version,) * expected


class GraphThresholds:
    """One router's copy of the thresholds above which the graph's workers are busy.

    Each change gets a higher version, by which routers recognize newer values. ``admission`` applies the thresholds.

    Attributes:
        batch_tokens: Maximum number of tokens per engine step of a worker; None if unknown, so that no threshold can be a
            multiple of this number.
        state: Present thresholds and their newest version.
        versions: Versions of the file's thresholds and of each threshold, in the order of `KeyVersions`.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        core = admission.core
        busy = core.busy[core.entry]
        self.batch_tokens = busy.batch_tokens
        self.state = ThresholdState(0, busy.thresholds, busy.thresholds)
        self.versions = versions_of(self.state, ())

    @property
    def now(self) -> BusyThresholds:
        """The thresholds in effect."""
        return self.state.now

    def set(self, changes: Mapping[str, Any]) -> None:
        """Set the thresholds in ``changes`` (by field name of `BusyThresholds`; None disables one); the others do not change."""
        version = self.state.version + 1
        of_keys = [
            version if key in changes else old
            for key, old in zip(BusyThresholds._fields, self.versions[1:], strict=True)
        ]
        self._take(self.state.file, self.now._replace(**changes), (self.versions[0], *of_keys))

    def file_changed(self, thresholds: BusyThresholds) -> None:
        """Replace all thresholds by those of a changed graph file, with a new version that is sent to the other routers.

        Does nothing if the thresholds in the file are those of the last change of the file that this router knows: another
        router has then read it before, and has sent them.
        """
        if thresholds != self.state.file:
            versions = (self.state.version + 1,) * len(self.versions)
            self._take(thresholds, thresholds, versions)

    def published(self) -> tuple[ThresholdState | None, KeyVersions]:
        """Return what to send to the other routers: the thresholds with their newest version, and the version of each value.

        Returns (None, ()) if the thresholds were never changed since the routers started.
        """
        return (self.state, self.versions) if self.state.version else (None, ())

    def received(self, state: ThresholdState, sent: KeyVersions = ()) -> bool:
        """Adopt the newer values of another router's ``state``; return whether there were any.

        If two routers changed a value at once, all routers choose the same one. ``sent`` contains the versions of the state's
        values; it is empty from an older build.
        """
        mine: tuple[Any, ...] = (self.state.file, *self.now)
        theirs: tuple[Any, ...] = (state.file, *state.now)
        newest = [
            max((own, kept), (other, new), key=lambda each: (each[0], str(each[1])))
            for own, kept, other, new in zip(
                self.versions, mine, versions_of(state, sent), theirs, strict=True
            )
        ]
        versions, (file, *now) = tuple(version for version, _ in newest), [value for _, value in newest]
        if (file, *now) == mine and versions == self.versions:
            return False
        self._take(file, BusyThresholds(*now), versions)
        return True

    def are_known_to(self, state: ThresholdState | None, sent: KeyVersions) -> bool:
        """Return whether another router has all thresholds of this router, or newer ones.

        ``state`` contains the thresholds that the other router has sent (None if they were never changed there), and
        ``sent`` their versions.
        """
        if state is None:
            return not self.state.version
        return all(
            theirs >= mine for theirs, mine in zip(versions_of(state, sent), self.versions, strict=True)
        )

    def _take(self, file: BusyThresholds, now: BusyThresholds, versions: KeyVersions) -> None:
        self.state, self.versions = ThresholdState(max(versions), file, now), versions
        self._admission.set_thresholds(now)
