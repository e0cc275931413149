"""Converts between Unix times and the times in Kubernetes objects (RFC 3339 in UTC)."""

from __future__ import annotations

from datetime import UTC, datetime


def seconds(stamp: object) -> float | None:
    """Return the Unix time in seconds of an RFC 3339 time; None for any other value."""
    if not isinstance(stamp, str):
        return None
    try:
        parsed = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def stamp(at_s: float) -> str:
    """Return a Unix time as RFC 3339 with whole seconds, Kubernetes' type Time."""
    return datetime.fromtimestamp(int(at_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp(at_s: float) -> str:
    """Return a Unix time as RFC 3339 with microseconds, Kubernetes' type MicroTime."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
