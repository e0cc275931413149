"""Settings of how the router watches its workers, and what it does when they fail or drain.

Seconds are simulated seconds unless the name says real.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.api.base import Fraction, Integer, Number, Seconds, SpecModel, WholeSeconds, entry
from penstock.api.enums import ContinueBy
from penstock.core.worker_metrics import ENGINE_STALL_REAL_S, STALL_REAL_S


class BreakerConfig(SpecModel):
    """When the router stops sending to a worker: after failures in a row, as Envoy ejects outliers."""

    consecutive_failures: Annotated[Integer, Field(ge=1, le=1000)] = entry(
        5, "Failures in a row that open the circuit."
    )
    open_seconds: WholeSeconds = entry(
        10,
        "Time without requests before one probe is let through, times the number of recent ejections; "
        "seconds.",
    )
    max_open_seconds: WholeSeconds = entry(
        300,
        "Maximum time for which an ejected worker gets no requests, however often it was ejected; seconds.",
    )
    max_ejected_fraction: Fraction = entry(
        0.5, "Largest share of a role's workers with open circuits at a time, 0 to 1; one may always be."
    )


class RetriesConfig(SpecModel):
    """Retries before the first byte, within a budget, and streams that continue elsewhere after it, outside of the budget."""

    max_per_request: Annotated[Integer, Field(ge=0, le=10)] = entry(
        2, "Maximum number of retries of one request."
    )
    max_continuations: Annotated[Integer, Field(ge=0, le=10)] = entry(
        3,
        "Maximum number of times a stream is resumed on another worker; 0 disables it.",
    )
    continuation_wait_seconds: WholeSeconds | None = entry(
        None,
        "Maximum time for which a stream whose worker died waits for another worker to continue it; no other limit but the request's "
        "own time bounds that wait; seconds. null: the longest startupTimeoutSeconds of the graph's workers, at most 600.",
    )
    continue_by: ContinueBy = entry(
        ContinueBy.TEXT,
        "What the next worker gets of a stream: its text, or the ids of its tokens, for which workers are then asked.",
    )
    budget_fraction: Fraction = entry(0.1, "Maximum retries, as a fraction of recent requests, 0 to 1.")
    min_per_second: Annotated[Number, Field(ge=0, le=1000)] = entry(
        1, "Retries per second allowed regardless of the fraction."
    )


class DrainConfig(SpecModel):
    """What becomes of the streams of a worker that drains."""

    migrate_after_seconds: WholeSeconds | None = entry(
        10,
        "Seconds after which streams of a draining worker move to another worker, if they can be resumed there (see "
        "retries.maxContinuations) and have more left than the prompt costs to recompute. "
        "null: never; the drain waits for them within terminationGracePeriodSeconds.",
    )


class HealthConfig(SpecModel):
    """How the router watches its workers."""

    interval_seconds: Seconds = entry(1, "Time between health checks and metric scrapes; real floor 0.1 s.")
    timeout_real_seconds: Seconds = entry(2, "Time for one check; real seconds.")
    unhealthy_after: Annotated[Integer, Field(ge=1, le=100)] = entry(
        3, "Failed checks in a row that make a worker unhealthy."
    )
    unreachable_real_seconds: WholeSeconds = entry(
        20,
        "Time without an answer to a health check and without a byte in any stream of a worker, as of one on a "
        "lost node, after which its requests are tried elsewhere or end with an error; real seconds.",
    )
    stall_real_seconds: WholeSeconds | None = entry(
        None,
        "Time in which a worker, or one of its data-parallel ranks, has requests and reports no token, after which it "
        "is unhealthy though its health check succeeds: its requests are tried elsewhere or end with an error, and the "
        f"local backend starts it again; real seconds, null: the runtime's own, {STALL_REAL_S:g} for simulated engines, "
        f"{ENGINE_STALL_REAL_S:g} for others.",
    )
