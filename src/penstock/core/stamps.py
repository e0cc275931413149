"""Times as Kubernetes writes them: RFC 3339 in UTC, and seconds since the epoch."""

from __future__ import annotations

from datetime import UTC, datetime


def seconds(stamp: object) -> float | None:
    """Return an RFC 3339 time as seconds since the epoch; None for anything else."""
    if not isinstance(stamp, str):
        return None
    try:
        parsed = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def stamp(at_s: float) -> str:
    """Return ``at_s``, seconds since the epoch, with whole seconds: Kubernetes' Time."""
    return datetime.fromtimestamp(int(at_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp(at_s: float) -> str:
    """Return ``at_s``, seconds since the epoch, with microseconds: Kubernetes' MicroTime."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
